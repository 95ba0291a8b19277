"""An ACL entry on a node for the owner of a lease: given, taken back, nobody else's rights touched.

A node is never opened, since to open a device can mean something.  A descriptor with O_PATH names
the inode, reached without following a symlink that anybody but root could have made; its kind and
number are compared with what was granted; then its ACL is read and set through /proc/self/fd, so
that no swap of the path leads elsewhere.

The rights of all but the owner and the others (acl(5): the file group class) are bounded by the
ACL's mask, and the mask is what chmod(2) sets and ls(1) shows as the group's bits.  Who raises it
for one entry raises it for all; so what the mask held back is taken out of those entries first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple

import posix1e

from hetero_agent.access.grant import GrantedNode
from hetero_agent.access.manifest import AccessError
from hetero_agent.text import printable

_FORMATS: Final = {"char": stat.S_IFCHR, "block": stat.S_IFBLK, "file": stat.S_IFREG}
_KINDS: Final = {form: kind for kind, form in _FORMATS.items()}

_ONLY_PATH: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
#: What the walk of a path ends with where the node is not; anything else says nothing of it.
_NOT_THERE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
#: As many as the kernel follows (path_resolution(7)).
_LINKS_MAX: Final = 40

_READ, _WRITE, _EXECUTE = posix1e.ACL_READ, posix1e.ACL_WRITE, posix1e.ACL_EXECUTE
_READ_WRITE: Final = _READ | _WRITE
#: The file group class.
_GROUP_CLASS: Final = frozenset({posix1e.ACL_USER, posix1e.ACL_GROUP_OBJ, posix1e.ACL_GROUP})
_NAMED: Final = frozenset({posix1e.ACL_USER, posix1e.ACL_GROUP})


class _ElsewhereError(AccessError):
    """A path does not lead to the node that was granted."""


def give(node: GrantedNode, uid: int) -> bool:
    """Make UID able to open NODE for reading and writing, and nobody else who was not.

    Return whether an entry was made.  False: there was no need, since the node is UID's own or
    everybody's, or UID has an entry with these rights already, somebody else's or ours: a False
    on renewal says nothing about an earlier True.  An entry of UID's with fewer rights is raised,
    counts as made, and goes with `take`.  Raises AccessError.
    """
    with _reached(node) as path:
        if _may(path, uid):
            return False
        acl = _acl(path)
        mask = _mask(acl)
        if mask is not None and _bits(mask) & _READ_WRITE != _READ_WRITE:
            _hold_to(acl, _bits(mask))
        entry = _entry(acl, uid)
        if entry is None:
            entry = acl.append()
            entry.tag_type = posix1e.ACL_USER
            entry.qualifier = uid
        _set_bits(entry, _bits(entry) | _READ_WRITE)
        if mask is None:
            acl.calc_mask()
        else:
            _set_bits(mask, _bits(mask) | _READ_WRITE)
        acl.applyto(path)
        return True


def needs(node: GrantedNode, uid: int) -> bool:
    """Return whether `give` would make an entry now.  Raises AccessError."""
    with _reached(node) as path:
        return not _may(path, uid)


def take(node: GrantedNode, uid: int) -> None:
    """Remove UID's entry from NODE; without it the effective rights of all others are what they
    were, and without any other entry there is no ACL left and the mode is the plain one.

    Fine if the entry is gone, or the node, or if another one is in its place: that one has none
    of ours.  A file that has got more names since is still the file: whoever may write it may link
    it (proc(5), protected_hardlinks).  Raises AccessError if the entry is there and can't be removed.
    """
    try:
        with _reached(node, linked=True) as path:
            acl = _acl(path)
            mask = _mask(acl)
            if mask is None:
                return
            entry = _entry(acl, uid)
            others = any(one.tag_type in _NAMED for one in acl if one is not entry and not _is(one, uid))
            if entry is None and others:
                return
            _hold_to(acl, _bits(mask))
            if entry is not None:
                acl.delete_entry(entry)
            if others:
                acl.calc_mask()
            else:
                # udev's uaccess takes the entries and leaves the mask
                acl.delete_entry(mask)
            acl.applyto(path)
    except _ElsewhereError:
        return


def entries(node: GrantedNode) -> Mapping[int, str]:
    """Return what each uid with an entry of its own may do with NODE, as ``rw-``, the mask
    applied.  Raises AccessError."""
    return look(node).entries


class Rights(NamedTuple):
    """Who may do what with a node.  MODE has the owning group's own rights as the group's bits,
    which stat(2) shows only where there is no ACL; ENTRIES are those of `entries`."""

    mode: int
    uid: int
    gid: int
    entries: Mapping[int, str]


def look(node: GrantedNode) -> Rights:
    """Return who may do what with NODE.  Raises AccessError."""
    with _reached(node) as path:
        found = os.stat(path)  # noqa: PTH116 (a descriptor's path)
        acl = _acl(path)
        mask = _mask(acl)
        bound = _bits(mask) if mask is not None else 7
        users = {one.qualifier: _bits(one) & bound for one in acl if one.tag_type == posix1e.ACL_USER}
        group = next(_bits(one) & bound for one in acl if one.tag_type == posix1e.ACL_GROUP_OBJ)
    mode = stat.S_IMODE(found.st_mode) & ~0o070 | group << 3
    return Rights(
        mode, found.st_uid, found.st_gid, {uid: _letters(bits) for uid, bits in sorted(users.items())}
    )


@contextlib.contextmanager
def _reached(node: GrantedNode, *, linked: bool = False) -> Iterator[str]:
    """Yield a path of NODE's inode that is good while this lasts.  Raises _ElsewhereError if NODE's
    own path leads to anything else, or to a file that has other names, too, unless it may be LINKED;
    and AccessError for what fails inside."""
    where = f"node {printable(node.path)}"
    try:
        inode = _walk(node.path)
    except OSError as error:
        failure = _ElsewhereError if error.errno in _NOT_THERE else AccessError
        raise failure(f"{where}: {error.strerror}") from error
    try:
        found = os.fstat(inode)
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "")
        number = (os.major(found.st_rdev), os.minor(found.st_rdev)) if kind in ("char", "block") else (0, 0)
        if (kind, *number) != (node.kind, node.major, node.minor):
            raise _ElsewhereError(
                f"{where}: expected {node.kind} {node.major}:{node.minor}, found"
                f" {kind or stat.filemode(found.st_mode)} {number[0]}:{number[1]}"
            )
        if kind == "file" and found.st_nlink > 1 and not linked:
            # whoever may name a file in the directory may have linked one of somebody else's
            raise _ElsewhereError(f"{where}: the file has {found.st_nlink} names")
        yield f"/proc/self/fd/{inode}"
    except OSError as error:
        raise AccessError(f"{where}: its ACL: {error.strerror}") from error
    finally:
        os.close(inode)


def _walk(path: str) -> int:
    """Return a descriptor (O_PATH) of what is at PATH, a symlink itself if that is one.  Raises
    OSError; ELOOP if the way there leads over a symlink that others than root can change."""
    here = os.open("/", _ONLY_PATH)
    ahead = list(reversed(PurePosixPath(path).parts[1:]))
    links = 0
    try:
        while ahead:
            above, here = here, os.open(ahead.pop(), _ONLY_PATH, dir_fd=here)
            try:
                if ahead and stat.S_ISLNK(os.fstat(here).st_mode):
                    links += 1
                    if links > _LINKS_MAX or not (_roots_alone(above) and os.fstat(here).st_uid == 0):
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                    target = PurePosixPath(os.readlink("", dir_fd=here))
                    ahead += reversed(target.parts[1:] if target.is_absolute() else target.parts)
                    start = os.open("/" if target.is_absolute() else ".", _ONLY_PATH, dir_fd=above)
                    os.close(here)
                    here = start
            finally:
                os.close(above)
    except OSError:
        os.close(here)
        raise
    return here


def _roots_alone(directory: int) -> bool:
    """Whether nobody but root can put something of root's name into DIRECTORY, or move it there."""
    found = os.fstat(directory)
    return found.st_uid == 0 and (not found.st_mode & 0o022 or bool(found.st_mode & stat.S_ISVTX))


def _may(path: str, uid: int) -> bool:
    """Whether UID may open PATH without a new entry, as far as that needs no group's name: by the
    algorithm of acl(5)."""
    if uid == 0:
        return True
    if uid == os.stat(path).st_uid:  # noqa: PTH116 (a descriptor's path)
        # an entry would not count for the owner, and the owner may change the mode
        return True
    acl = _acl(path)
    mask = _mask(acl)
    bound = _bits(mask) if mask is not None else _READ_WRITE
    entry = _entry(acl, uid)
    if entry is not None:
        return bool(_bits(entry) & bound & _READ_WRITE == _READ_WRITE)
    # the others' rights are for those whom no group's entry fits
    rest = (
        _bits(one) & (bound if one.tag_type in _GROUP_CLASS else _READ_WRITE) for one in acl if _shared(one)
    )
    return all(bits & _READ_WRITE == _READ_WRITE for bits in rest)


def _shared(entry: Any) -> bool:
    return entry.tag_type in (posix1e.ACL_GROUP_OBJ, posix1e.ACL_GROUP, posix1e.ACL_OTHER)


def _acl(path: str) -> Any:
    return posix1e.ACL(file=path)


def _entry(acl: Any, uid: int) -> Any:
    """The entry of UID, None if there is none."""
    return next((one for one in acl if _is(one, uid)), None)


def _is(entry: Any, uid: int) -> bool:
    return bool(entry.tag_type == posix1e.ACL_USER and entry.qualifier == uid)


def _mask(acl: Any) -> Any:
    """The mask, None if there is none: then there are no named entries either."""
    return next((one for one in acl if one.tag_type == posix1e.ACL_MASK), None)


def _hold_to(acl: Any, bound: int) -> None:
    """Take out of the file group class's entries what a mask of BOUND holds back."""
    for entry in acl:
        if entry.tag_type in _GROUP_CLASS:
            _set_bits(entry, _bits(entry) & bound)


def _letters(bits: int) -> str:
    return "".join(
        letter if bits & bit else "-" for bit, letter in ((_READ, "r"), (_WRITE, "w"), (_EXECUTE, "x"))
    )


def _bits(entry: Any) -> int:
    permissions = entry.permset
    return sum(bit for bit in (_READ, _WRITE, _EXECUTE) if permissions.test(bit))


def _set_bits(entry: Any, bits: int) -> None:
    permissions = entry.permset
    permissions.clear()
    for bit in (_READ, _WRITE, _EXECUTE):
        if bits & bit:
            permissions.add(bit)
