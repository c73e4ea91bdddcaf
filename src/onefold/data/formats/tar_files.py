"""Bounded reading of gzipped tar archives from an untrusted source, without unpacking them to disk."""

import contextlib
import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from onefold.errors import FileError

CHUNK = 2**16
LARGEST_HEADER = 2**16  # bytes of a long name or of extended attributes
READ_AT_ONCE = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip
TAR_ERRORS = (tarfile.TarError, zlib.error, OSError, EOFError, ValueError, RuntimeError)


@contextlib.contextmanager
def open_tar(path: Path, most_inflated: int) -> Iterator[tarfile.TarFile]:
    """Open a .tar.gz for reading in order; raise FileError once it inflates to more than `most_inflated` bytes."""
    with gzip.open(path) as inflated:
        stream = _BoundedStream(inflated, path, most_inflated)
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive:
            yield archive
        while stream.read(CHUNK):  # gzip compares its checksum at the end
            pass


def is_plain_file(member: tarfile.TarInfo) -> bool:
    """Return True if the member is neither a link, a folder nor a device."""
    return member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)


def damaged_archive(path: Path, error: Exception) -> FileError:
    """Return the error for an archive that cannot be read."""
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return FileError(f"{path}: damaged, or not an archive ({reason}). Delete it and download it again.")


class _Member(tarfile.TarInfo):
    """Header whose extended attributes and long names, which tarfile reads into memory, have a bounded size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Member":
        member = super().frombuf(buf, encoding, errors)
        if member.type in READ_AT_ONCE and member.size > LARGEST_HEADER:
            raise tarfile.ReadError(f"a header of {member.size:,} bytes")
        return member


class _BoundedStream(io.RawIOBase):
    """Stream that raises an error after too many bytes, whatever its headers claim."""

    def __init__(self, stream: gzip.GzipFile, path: Path, most: int) -> None:
        self._stream, self._path, self._most, self._left = stream, path, most, most

    def read(self, size: int = -1, /) -> bytes:
        content = self._stream.read(self._left + 1 if size < 0 else min(size, self._left + 1))
        self._left -= len(content)
        if self._left < 0:
            raise FileError(f"{self._path}: inflates to more than {self._most:,} bytes. Delete it.")
        return content
