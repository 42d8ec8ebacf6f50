"""The headers of a tar file, and how its members form samples (the WebDataset convention).

Members whose names agree up to the first dot of the last path component are the fields of one sample:
`a/17.jpg` and `a/17.cap.txt` are the fields `jpg` and `cap.txt` of the sample with the key `a/17`.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from meshwright.data.records import RecordError

BLOCK = 512
_HEADER = struct.Struct("100s24x12s12x8ss100x8s80x155s12x")
_EMPTY = bytes(BLOCK)
_REGULAR, _LONG_NAME, _PAX, _PAX_GLOBAL = (b"0", b"\0", b"7"), b"L", b"x", b"g"
_SAMPLE_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
# Members such as `__meta__/...` describe the archive; they belong to no sample.
_ABOUT_THE_ARCHIVE = re.compile(r"__[^/]*__($|/)")
_MAX_EXTENDED_BYTES = 1 << 20


class Sliced(Protocol):
    """Bytes that are sliced without reading the rest: `bytes`, a memory map, or a file."""

    def __getitem__(self, part: slice, /) -> bytes: ...


class Member(NamedTuple):
    """One file in a tar archive."""

    offset: int
    """First byte of its headers, extended ones included."""
    name: str
    start: int
    """First byte of the content."""
    num_bytes: int
    is_regular: bool

    @property
    def end(self) -> int:
        """First byte after the content and its padding."""
        return -(-(self.start + self.num_bytes) // BLOCK) * BLOCK


class Part(NamedTuple):
    """One field of a sample."""

    field: str
    start: int
    num_bytes: int

    @property
    def range(self) -> tuple[int, int]:
        """First byte of the content, and the first after it."""
        return self.start, self.start + self.num_bytes


@dataclass
class TarSample:
    """Consecutive members with one key."""

    key: str
    offset: int
    parts: list[Part]


class TarEnd(NamedTuple):
    """Where the last member ends, and whether the archive was closed."""

    offset: int
    is_marked: bool
    """False where the block of zeros that ends an archive is missing: a writer that was killed."""


def members(content: Sliced, num_bytes: int, *, file: str, start: int = 0) -> Iterator[Member | TarEnd]:
    """The members from `start` on, then the end; RecordError at a damaged header or a truncated member."""
    offset = first = start
    name: str | None = None
    size: int | None = None
    while offset + BLOCK <= num_bytes and (header := content[offset : offset + BLOCK]) != _EMPTY:
        raw, kind = _header(header, file=file, offset=offset)
        at = offset + BLOCK
        if kind in (_LONG_NAME, _PAX, _PAX_GLOBAL):
            extended = content[at : at + min(raw.num_bytes, _MAX_EXTENDED_BYTES)]
            if kind == _LONG_NAME:
                name = _text(extended)
            elif kind == _PAX:
                name, size = _pax(extended, name, size)
            offset = -(-(at + raw.num_bytes) // BLOCK) * BLOCK
            continue
        member = Member(
            first, name or raw.name, at, raw.num_bytes if size is None else size, kind in _REGULAR
        )
        if member.start + member.num_bytes > num_bytes:
            fact = f"the archive is truncated: {member.name} ends after the file's {num_bytes} bytes"
            raise RecordError(fact, file=file, offset=first, key=member.name)
        yield member
        offset = first = member.end
        name = size = None
    if offset < num_bytes < offset + BLOCK:
        raise RecordError("the archive is truncated in the middle of a header", file=file, offset=offset)
    yield TarEnd(first, is_marked=offset + BLOCK <= num_bytes)


def samples(content: Sliced, num_bytes: int, *, file: str) -> Iterator[TarSample | TarEnd]:
    """The samples of an archive, then its end; members that belong to no sample are skipped."""
    sample: TarSample | None = None
    for member in members(content, num_bytes, file=file):
        if isinstance(member, TarEnd):
            if sample is not None:
                yield sample
            yield member
            return
        parts = sample_name(member)
        if parts is None:
            continue
        key, field = parts
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = TarSample(key, member.offset, [])
        sample.parts.append(Part(field, member.start, member.num_bytes))


def sample_name(member: Member) -> tuple[str, str] | None:
    """Key and field of a member; None where it belongs to no sample."""
    if not member.is_regular or _ABOUT_THE_ARCHIVE.match(member.name):
        return None
    match = _SAMPLE_NAME.match(member.name)
    return (match[1], match[2]) if match else None


class _Raw(NamedTuple):
    name: str
    num_bytes: int


def _header(header: bytes, *, file: str, offset: int) -> tuple[_Raw, bytes]:
    name, size, checksum, kind, magic, prefix = _HEADER.unpack(header)
    try:
        is_valid = int(checksum.strip(b"\0 "), 8) == sum(header) - sum(checksum) + 8 * ord(" ")
        num_bytes = int.from_bytes(size[1:], "big") if size[0] & 0x80 else int(size.strip(b"\0 ") or b"0", 8)
    except ValueError:
        is_valid, num_bytes = False, 0
    if not is_valid:
        hint = "the file is no tar archive, was changed in place, or is compressed"
        raise RecordError("there is no valid tar header here", file=file, offset=offset, hint=hint)
    # GNU archives keep other things in the place of the prefix.
    folder = _text(prefix) if magic.startswith(b"ustar\0") else ""
    return _Raw(f"{folder}/{_text(name)}" if folder else _text(name), num_bytes), kind


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode("utf-8", errors="surrogateescape")


def _pax(records: bytes, name: str | None, size: int | None) -> tuple[str | None, int | None]:
    """Name and size in the records of an extended header: `length key=value\\n` each."""
    at = 0
    while at < len(records) and records[at : at + 1].isdigit():
        length, _, _ = records[at : at + 20].partition(b" ")
        if not length.isdigit() or not int(length):
            break
        keyword, _, value = records[at + len(length) + 1 : at + int(length) - 1].partition(b"=")
        if keyword == b"path":
            name = value.decode("utf-8", errors="surrogateescape")
        elif keyword == b"size" and value.isdigit():
            size = int(value)
        at += int(length)
    return name, size
