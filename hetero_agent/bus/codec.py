"""D-Bus values to bytes and back (D-Bus Specification, "Marshaling"), by compiled signatures.

dbus-next's own marshaller has no bound on what a body may cost and takes several times as long
(docs/decisions/bus.md); the tests compare this one with it.

Python values: integers, ``float``, ``bool``, ``str`` (s, o, g), ``bytes`` (ay), lists (other
arrays and, decoded, structs), dicts, and `V` for a variant.  Anything of alignment 8 that is
encoded alone may be put at any offset divisible by 8, because no alignment is larger: that is
what makes the cached pieces of big replies possible.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

#: Values (basic ones, containers, variants) that one message body may decode to.
MAX_VALUES = 16_384

_PAD = tuple(b"\0" * n for n in range(8))
_PATH = re.compile(r"/|(/[A-Za-z0-9_]+)+")
_BASIC = "ybnqiuxtdsogh"
_ALIGN = {
    **dict.fromkeys("yvg", 1),
    **dict.fromkeys("nq", 2),
    **dict.fromkeys("biusoah", 4),
    **dict.fromkeys("xtd({", 8),
}
_FORMATS = {"n": "h", "q": "H", "i": "i", "u": "I", "h": "I", "x": "q", "t": "Q", "d": "d"}
_U32 = struct.Struct("<I")

#: Distinct signatures whose compiled form is kept, so that foreign ones can't grow the cache.
_KEPT = 512
#: The specification's bound on nesting (32 arrays and 32 structs), variants included.
_MAX_DEPTH = 64

Encode = Callable[[bytearray, Any], None]


class CodecError(ValueError):
    """Bytes that are no valid body of their signature, a bad signature, or too many values."""


class V(NamedTuple):
    """A variant: the signature of one complete type, and its value."""

    signature: str
    value: Any


# -- signatures -------------------------------------------------------------------------------
@lru_cache(maxsize=_KEPT)
def split(signature: str) -> tuple[str, ...]:
    """Return the complete types in SIGNATURE.  Raises CodecError."""
    if len(signature) > 255:
        raise CodecError("a signature has at most 255 characters")
    types = []
    position = 0
    while position < len(signature):
        end = _end_of_type(signature, position, 0)
        types.append(signature[position:end])
        position = end
    return tuple(types)


def _end_of_type(signature: str, position: int, depth: int) -> int:
    if position >= len(signature) or depth > _MAX_DEPTH:
        raise CodecError("not a signature")
    letter = signature[position]
    if letter in _BASIC or letter == "v":
        return position + 1
    if letter == "a":
        if signature[position + 1 : position + 2] == "{":
            if signature[position + 2 : position + 3] not in tuple(_BASIC):
                raise CodecError("not a signature")
            end = _end_of_type(signature, position + 3, depth + 1)
            if signature[end : end + 1] != "}":
                raise CodecError("not a signature")
            return end + 1
        return _end_of_type(signature, position + 1, depth + 1)
    if letter == "(":
        position += 1
        start = position
        while signature[position : position + 1] != ")":
            position = _end_of_type(signature, position, depth + 1)
        if position == start:
            raise CodecError("not a signature")
        return position + 1
    raise CodecError("not a signature")


@lru_cache(maxsize=_KEPT)
def _nesting(signature: str) -> int:
    """Return how many arrays and structs are inside one another at the deepest place of a valid
    SIGNATURE."""
    deepest = outside = arrays = 0
    opened: list[int] = []
    for letter in signature:
        if letter == "a":
            arrays += 1
            deepest = max(deepest, outside + arrays)
        elif letter in "({":
            opened.append(arrays + 1)
            outside += arrays + 1
            deepest = max(deepest, outside)
            arrays = 0
        else:
            if letter in ")}":
                outside -= opened.pop()
            arrays = 0
    return deepest


# -- encoding -----------------------------------------------------------------------------------
def encode(signature: str, values: Sequence[Any]) -> bytes:
    """Return the body of VALUES.  Raises CodecError for what the signature can't hold."""
    return bytes(encode_into(bytearray(), signature, values))


def encode_into(buffer: bytearray, signature: str, values: Sequence[Any]) -> bytearray:
    """Append VALUES to BUFFER, whose start is where alignment counts from."""
    writers = _writers(signature)
    if len(writers) != len(values):
        raise CodecError(f"{len(values)} values for signature {signature}")
    try:
        for write, value in zip(writers, values, strict=True):
            write(buffer, value)
    except (struct.error, TypeError, AttributeError, KeyError, IndexError) as error:
        raise CodecError(f"value does not fit {signature}: {error}") from error
    return buffer


def joined(pieces: Iterable[bytes]) -> bytes:
    """Return an array (the whole body) made of elements of alignment 8 encoded one by one."""
    return append_joined(b"", pieces)


def append_joined(before: bytes, pieces: Iterable[bytes]) -> bytes:
    """Return the body BEFORE with such an array after it."""
    buffer = bytearray(before)
    buffer += _PAD[-len(buffer) & 3]
    at = len(buffer)
    buffer += _PAD[4]
    buffer += _PAD[-len(buffer) & 7]
    start = end = len(buffer)
    for piece in pieces:
        buffer += _PAD[-end & 7]
        buffer += piece
        end = len(buffer)
    _U32.pack_into(buffer, at, end - start)
    return bytes(buffer)


@lru_cache(maxsize=_KEPT)
def _writers(signature: str) -> tuple[Encode, ...]:
    return tuple(_writer(one) for one in split(signature))


@lru_cache(maxsize=_KEPT)
def _writer(signature: str) -> Encode:
    letter = signature[0]
    if letter in _FORMATS:
        return _write_number(_FORMATS[letter], _ALIGN[letter] - 1)
    if letter == "a":
        if signature == "ay":
            return _write_bytes
        if signature[1] == "{":
            return _write_dict(_writer(signature[2]), _writer(signature[3:-1]))
        return _write_array(_writer(signature[1:]), _ALIGN[signature[1]] - 1)
    if letter == "(":
        return _write_struct(_writers(signature[1:-1]))
    return {"s": _write_text, "o": _write_path, "g": _write_signature, "v": _write_variant}.get(
        letter, _write_byte if letter == "y" else _write_bool
    )


def _write_number(form: str, mask: int) -> Encode:
    pack = struct.Struct("<" + form).pack

    def write(buffer: bytearray, value: Any) -> None:
        buffer += _PAD[-len(buffer) & mask]
        buffer += pack(value)

    return write


def _write_byte(buffer: bytearray, value: Any) -> None:
    buffer += struct.pack("B", value)


def _write_bool(buffer: bytearray, value: Any) -> None:
    buffer += _PAD[-len(buffer) & 3]
    buffer += b"\1\0\0\0" if value else b"\0\0\0\0"


def _write_text(buffer: bytearray, value: Any) -> None:
    raw = value.encode("utf-8", "replace")
    if b"\0" in raw:
        # the bus disconnects who sends a NUL inside a string
        raw = raw.replace(b"\0", b"\xef\xbf\xbd")
    buffer += b"%b%b%b\0" % (_PAD[-len(buffer) & 3], _U32.pack(len(raw)), raw)


def _write_path(buffer: bytearray, value: Any) -> None:
    if not _PATH.fullmatch(value):
        raise CodecError("not an object path")
    _write_text(buffer, value)


def _write_signature(buffer: bytearray, value: Any) -> None:
    split(value)
    raw = value.encode("ascii")
    buffer.append(len(raw))
    buffer += raw
    buffer += b"\0"


def _write_variant(buffer: bytearray, value: Any) -> None:
    signature, inner = value
    writers = _writers(signature)
    if len(writers) != 1:
        raise CodecError("a variant holds one complete type")
    buffer += b"%c%b\0" % (len(signature), signature.encode("ascii"))
    writers[0](buffer, inner)


def _write_bytes(buffer: bytearray, value: Any) -> None:
    buffer += _PAD[-len(buffer) & 3]
    buffer += _U32.pack(len(value))
    buffer += value


def _write_array(write_one: Encode, mask: int) -> Encode:
    def write(buffer: bytearray, value: Any) -> None:
        buffer += _PAD[-len(buffer) & 3]
        at = len(buffer)
        buffer += _PAD[4]
        buffer += _PAD[-len(buffer) & mask]
        start = len(buffer)
        for one in value:
            write_one(buffer, one)
        _U32.pack_into(buffer, at, len(buffer) - start)

    return write


def _write_dict(write_key: Encode, write_value: Encode) -> Encode:
    def write(buffer: bytearray, value: Any) -> None:
        buffer += _PAD[-len(buffer) & 3]
        at = len(buffer)
        buffer += _PAD[4]
        buffer += _PAD[-len(buffer) & 7]
        start = len(buffer)
        for key, item in value.items():
            buffer += _PAD[-len(buffer) & 7]
            write_key(buffer, key)
            write_value(buffer, item)
        _U32.pack_into(buffer, at, len(buffer) - start)

    return write


def _write_struct(writers: tuple[Encode, ...]) -> Encode:
    def write(buffer: bytearray, value: Any) -> None:
        buffer += _PAD[-len(buffer) & 7]
        for write_one, one in zip(writers, value, strict=True):
            write_one(buffer, one)

    return write


# -- decoding -----------------------------------------------------------------------------------
class _Input:
    """The bytes being read, where, and how many values may still come."""

    __slots__ = ("data", "depth", "left", "little", "position")

    def __init__(self, data: bytes, little: bool, left: int, position: int = 0) -> None:
        self.data = data
        self.position = position
        self.left = left
        self.depth = 0
        self.little = little

    def take(self, count: int, mask: int) -> int:
        """Align by MASK, pass COUNT bytes, return where they begin."""
        start = self.position + (-self.position & mask)
        self.position = start + count
        if self.position > len(self.data):
            raise CodecError("the body ends too early")
        self.left -= 1
        if self.left < 0:
            raise CodecError("too many values in one message")
        return start


Decode = Callable[[_Input], Any]


def decode(signature: str, data: bytes, little: bool = True, most: int = MAX_VALUES) -> list[Any]:
    """Return the values in DATA.  Raises CodecError (also for more than MOST values)."""
    source = _Input(data, little, most)
    return [read(source) for read in _readers(signature, little)]


def decode_at(signature: str, data: bytes, position: int, little: bool) -> tuple[Any, int]:
    """Return the value of one complete type at POSITION and the position after it."""
    source = _Input(data, little, MAX_VALUES, position)
    return _reader(signature, little)(source), source.position


@lru_cache(maxsize=_KEPT)
def _readers(signature: str, little: bool) -> tuple[Decode, ...]:
    return tuple(_reader(one, little) for one in split(signature))


@lru_cache(maxsize=_KEPT)
def _reader(signature: str, little: bool) -> Decode:
    letter = signature[0]
    if letter in _FORMATS:
        return _read_number(("<" if little else ">") + _FORMATS[letter], _ALIGN[letter])
    if letter == "a":
        if signature == "ay":
            return _read_bytes(little)
        mask = _ALIGN[signature[1]] - 1
        if signature[1] == "{":
            return _read_dict(_reader(signature[2], little), _reader(signature[3:-1], little), little)
        return _read_array(_reader(signature[1:], little), mask, little)
    if letter == "(":
        return _read_struct(_readers(signature[1:-1], little))
    if letter in "so":
        return _read_text(little)
    return {"g": _read_signature, "v": _read_variant, "y": _read_byte}.get(letter) or _read_bool(little)


def _u32(little: bool) -> Callable[[bytes, int], tuple[int]]:
    return struct.Struct("<I" if little else ">I").unpack_from


def _read_number(form: str, size: int) -> Decode:
    unpack = struct.Struct(form).unpack_from
    mask = size - 1

    def read(source: _Input) -> Any:
        return unpack(source.data, source.take(size, mask))[0]

    return read


def _read_byte(source: _Input) -> Any:
    return source.data[source.take(1, 0)]


def _read_bool(little: bool) -> Decode:
    unpack = _u32(little)

    def read(source: _Input) -> Any:
        value = unpack(source.data, source.take(4, 3))[0]
        if value > 1:
            raise CodecError("a truth value is 0 or 1")
        return value == 1

    return read


def _read_text(little: bool) -> Decode:
    unpack = _u32(little)

    def read(source: _Input) -> Any:
        length = unpack(source.data, source.take(4, 3))[0]
        start = source.position
        source.position = start + length + 1
        if source.position > len(source.data):
            raise CodecError("the body ends too early")
        try:
            return source.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise CodecError("text is not UTF-8") from error

    return read


def _read_signature(source: _Input) -> Any:
    length = source.data[source.take(1, 0)]
    start = source.position
    source.position = start + length + 1
    if source.position > len(source.data):
        raise CodecError("the body ends too early")
    return source.data[start : start + length].decode("ascii", "replace")


def _read_variant(source: _Input) -> Any:
    signature = _read_signature(source)
    if len(split(signature)) != 1:
        raise CodecError("a variant holds one complete type")
    levels = 1 + _nesting(signature)
    source.depth += levels
    if source.depth > _MAX_DEPTH:
        raise CodecError("nested too deeply")
    value = _reader(signature, source.little)(source)
    source.depth -= levels
    return V(signature, value)


def _read_bytes(little: bool) -> Decode:
    unpack = _u32(little)

    def read(source: _Input) -> Any:
        length = unpack(source.data, source.take(4, 3))[0]
        start = source.take(length, 0)
        return source.data[start : start + length]

    return read


def _read_array(read_one: Decode, mask: int, little: bool) -> Decode:
    unpack = _u32(little)

    def read(source: _Input) -> Any:
        length = unpack(source.data, source.take(4, 3))[0]
        end = source.take(0, mask) + length
        values = []
        while source.position < end:
            values.append(read_one(source))
        if source.position != end:
            raise CodecError("an array has another length than it says")
        return values

    return read


def _read_dict(read_key: Decode, read_value: Decode, little: bool) -> Decode:
    unpack = _u32(little)

    def read(source: _Input) -> Any:
        length = unpack(source.data, source.take(4, 3))[0]
        end = source.take(0, 7) + length
        values: dict[Any, Any] = {}
        while source.position < end:
            source.take(0, 7)
            key = read_key(source)
            if key in values:
                raise CodecError("a key is given twice")
            values[key] = read_value(source)
        if source.position != end:
            raise CodecError("an array has another length than it says")
        return values

    return read


def _read_struct(readers: tuple[Decode, ...]) -> Decode:
    def read(source: _Input) -> Any:
        source.take(0, 7)
        return [read_one(source) for read_one in readers]

    return read


def plain(value: Any) -> Any:
    """Return VALUE with every variant in it replaced by what it holds."""
    if isinstance(value, V):
        return plain(value.value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value
