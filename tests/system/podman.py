"""A machine with podman and runc, and an image of no more than links to the machine's /usr."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.system import image
from tests.system.conftest import CONFIG
from tests.system.machine import Machine

IMAGE = "localhost/lab"

#: What a container of the image is made with beside the test's own options.
MADE_WITH = ("--network=none", "--volume=/usr:/usr:ro")

# The machine's own file system is an overlay, on which none can lie.
_STORAGE = """\
[storage]
driver = "vfs"
runroot = "/run/containers/storage"
graphroot = "/var/lib/containers"
"""
# Where crun of this version does not work (hierarchies of version 1 that are partly there), and systemd-nspawn
# lets nobody make a keyring.
_CONTAINERS = """\
[containers]
keyring = false
[engine]
runtime = "runc"
events_logger = "file"
"""


@contextmanager
def with_podman(layers: Sequence[Path], base: Path) -> Iterator[Machine]:
    """The machine, running, the product of LAYERS in it."""
    with Machine([layers[0], image.layer(base, "podman", "runc"), base]) as one:
        one.write("/etc/hetero-agent/hetero-agent.conf", CONFIG)
        one.write("/etc/containers/storage.conf", _STORAGE)
        one.write("/etc/containers/containers.conf", _CONTAINERS)
        one.boot()
        # of the hierarchies that are not the machine's own, runc would have the host's top groups
        one.shell(
            "for one in /sys/fs/cgroup/*; do"
            " if mountpoint -q $one && ! test -w $one/cgroup.procs; then umount $one; fi; done"
        )
        one.path("/run/image.tar").write_bytes(_image())
        one.run("podman", "import", "/run/image.tar", IMAGE, timeout=120)
        yield one


def _image() -> bytes:
    """The file system of an image that has nothing of its own."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name in ("usr", "proc", "sys", "dev", "etc", "run", "tmp"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for name in ("bin", "sbin", "lib", "lib64"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(entry)
        entry = tarfile.TarInfo("etc/passwd")
        data = b"root:x:0:0::/:/bin/sh\n"
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
    return made.getvalue()
