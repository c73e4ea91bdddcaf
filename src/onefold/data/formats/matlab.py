"""Numeric arrays of MATLAB 5 files from an untrusted source.

A reader of our own, because SciPy's allocates what a header claims before it reads. Cells, structures, objects, sparse
and complex arrays are not supported. The format is described in "MAT-File Format" by The MathWorks.
"""

import math
import os
import stat
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
import torch

from onefold.core.runtime import available, human, require
from onefold.errors import FileError

HEADER = 128  # bytes
MATRIX, COMPRESSED = 14, 15
INT8, INT32, UINT32 = 1, 5, 6
DTYPES = {1: "<i1", 2: "<u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
NUMERIC_CLASSES = range(6, 16)  # of arrays: double, single and integers
COMPLEX = 0x0800
MOST_BYTES = 2**30  # of one array
MOST_ELEMENTS = 64  # in one file
MOST_AXES, LONGEST_NAME = 4, 64
LARGEST_RATIO = 1032  # deflate cannot compress more than this
CHUNK = 2**16


def read_mat(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the arrays of these names from a little-endian MATLAB 5 file.

    Raises:
        FileError: If the file is damaged, claims more than it holds, or lacks a name.
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
            raise FileError(f"{path}: cannot be read (not a file)")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(HEADER)
            if header[124:128] != b"\x00\x01IM":
                raise FileError(f"{path}: not a MATLAB 5 file")
            for _ in range(MOST_ELEMENTS):
                if file.tell() >= size or all(name in arrays for name in names):
                    break
                name, array = _read_element(file, size, path)
                arrays[name] = array
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror})") from None
    except zlib.error:
        raise _damaged(path) from None
    if missing := [name for name in names if name not in arrays]:
        raise FileError(f"{path}: has no array {missing[0]!r}")
    return {name: arrays[name] for name in names}


class _Reader:
    """Bytes of one element, inflated piece by piece if it is compressed; never more than were asked for."""

    def __init__(self, file: IO[bytes], length: int, path: Path, *, compressed: bool) -> None:
        self.path, self.length = path, length
        self.most = length * (LARGEST_RATIO if compressed else 1)
        self._file, self._left = file, length
        self._inflate = zlib.decompressobj() if compressed else None

    def read(self, count: int) -> bytearray:
        """Return so many bytes; raise FileError if the element ends before."""
        content = bytearray()
        while len(content) < count:
            part = self._read_some(count - len(content))
            if not part:
                raise _damaged(self.path)
            content += part
        return content

    def check_end(self) -> None:
        """Raise FileError if bytes are left or, where the element is compressed, its checksum is wrong."""
        if self._read_some(1) or (self._inflate is not None and not self._inflate.eof):
            raise _damaged(self.path)

    def _read_some(self, most: int) -> bytes:
        if self._inflate is None:
            return self._read_file(most)
        while not self._inflate.eof:
            packed = self._inflate.unconsumed_tail or self._read_file(CHUNK)
            part = self._inflate.decompress(packed, min(most, CHUNK))
            if part or not packed:
                return part
        return b""

    def _read_file(self, most: int) -> bytes:
        part = self._file.read(min(most, CHUNK, self._left))
        self._left -= len(part)
        return part


def _read_element(file: IO[bytes], size: int, path: Path) -> tuple[str, np.ndarray]:
    """Return the name and the content of the array at the file's position."""
    tag = file.read(8)
    if len(tag) < 8:
        raise _damaged(path)
    kind, length = struct.unpack("<II", tag)
    start = file.tell()
    if kind not in (MATRIX, COMPRESSED) or not 0 < length <= size - start:
        raise _damaged(path)
    reader = _Reader(file, length, path, compressed=kind == COMPRESSED)
    if kind == COMPRESSED and struct.unpack("<II", reader.read(8))[0] != MATRIX:
        raise _damaged(path)
    name, array = _read_matrix(reader)
    reader.check_end()
    file.seek(start + length)
    return name, array


def _read_matrix(reader: _Reader) -> tuple[str, np.ndarray]:
    """Return the name and the content of a matrix: flags, dimensions, name, and the numbers, columns first."""
    flags = struct.unpack("<I", _read_part(reader, UINT32, 8)[:4])[0]
    if flags & 0xFF not in NUMERIC_CLASSES or flags & COMPLEX:
        raise FileError(f"{reader.path}: holds an array that is not of real numbers")
    shape = np.frombuffer(_read_part(reader, INT32, 4 * MOST_AXES), "<i4").tolist()
    name = _read_part(reader, INT8, LONGEST_NAME).decode("latin-1")
    kind, length, inline = _read_tag(reader)
    dtype = np.dtype(DTYPES.get(kind, "V1"))
    claimed = math.prod(shape) * dtype.itemsize
    if kind not in DTYPES or min(shape, default=0) < 1 or length != claimed or length > reader.most:
        raise _damaged(reader.path)
    if length > MOST_BYTES:
        raise FileError(f"{reader.path}: an array of {human(length)} is not supported. At most {human(MOST_BYTES)} is.")
    require(2 * length, available(torch.device("cpu")), what=f"reading {reader.path}", way_out="use a larger machine")
    content = inline if inline is not None else reader.read(length)
    _skip_padding(reader, length, inline)
    return name, np.frombuffer(memoryview(content)[:length], dtype).reshape(shape, order="F")


def _read_part(reader: _Reader, expected: int, most: int) -> bytes:
    """Return the bytes of a short part of a matrix."""
    kind, length, inline = _read_tag(reader)
    if kind != expected or length > most:
        raise _damaged(reader.path)
    content = inline if inline is not None else reader.read(length)
    _skip_padding(reader, length, inline)
    return bytes(content[:length])


def _read_tag(reader: _Reader) -> tuple[int, int, bytes | None]:
    """Return type, length and, in the short form of at most four bytes, the content that follows in the tag itself."""
    tag = bytes(reader.read(8))
    kind, length = struct.unpack("<HH", tag[:4])
    if length:
        if length > 4:
            raise _damaged(reader.path)
        return kind, length, tag[4:]
    kind, length = struct.unpack("<II", tag)
    return kind, length, None


def _skip_padding(reader: _Reader, length: int, inline: bytes | None) -> None:
    """Skip the zeros after a part; parts start at multiples of eight bytes."""
    if inline is None:
        reader.read(-length % 8)


def _damaged(path: Path) -> FileError:
    return FileError(f"{path}: damaged, its content does not match its headers. Delete it and download it again.")
