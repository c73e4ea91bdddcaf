"""NumPy's files: .npy read row by row, never as a whole; .npz read one checked member at a time."""

import io
import math
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onefold.core.batches import as_tensor
from onefold.core.memory import available, require
from onefold.errors import InputError
from onefold.inputs.arrays import ArraySource
from onefold.inputs.source import check_index, spans
from onefold.inputs.zip_files import ZIP_ERRORS, opened_member

USUAL_KEYS = ("x", "x_train")
LONGEST_HEADER = 10_000  # bytes of a .npy header: what NumPy itself reads of files that it does not trust
LENGTH_BYTES = {(1, 0): 2, (2, 0): 4}  # of the header's length; (3, 0) is for names of fields that are not Latin
MOST_AXES = 64  # of an array of NumPy
CHUNK = 2**20  # bytes that are inflated at once


class _Header(NamedTuple):
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype
    offset: int

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def file_bytes(self) -> int:
        return self.offset + self.shape[0] * self.row_bytes

    def memory_bytes(self, rows: int) -> int:
        """Memory that so many rows take, with the copy that `as_tensor` makes of types which torch does not have."""
        copied = (self.dtype.kind == "u" and self.dtype.itemsize > 1) or self.dtype.itemsize > 8
        return rows * (self.row_bytes + copied * 8 * math.prod(self.shape[1:]))


class NpyFile:
    """The rows of a .npy file, read from the disk as they are asked for, so that the file may exceed the memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._header = _read_header(file, str(path))
                size = file.seek(0, io.SEEK_END)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
        _check_size(self._header, size, str(path))
        if self._header.fortran:
            raise InputError(
                f"{path}: is in Fortran order, where samples cannot be read one by one: save it again with "
                "numpy.save(path, numpy.ascontiguousarray(x))"
            )

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return self._header.shape[1:]

    def __len__(self) -> int:
        return self._header.shape[0]

    def batches(self, size: int) -> Iterator[Tensor]:
        for index in spans(len(self), size):
            yield self._read([(int(index[0]), len(index))])

    def take(self, index: NDArray[np.int64]) -> Tensor:
        check_index(index, len(self))
        return self._read([(int(row), 1) for row in index])

    def _read(self, runs: list[tuple[int, int]]) -> Tensor:
        """The rows of each run (first row, number of rows), one run after the other."""
        shape, _, dtype, offset = self._header
        row_bytes = self._header.row_bytes
        count = sum(length for _, length in runs)
        require(
            self._header.memory_bytes(count),
            available(torch.device("cpu")),
            what=f"reading {count} samples of {self.path}",
            way_out="use a smaller batch size",
        )
        rows = np.empty((count, *shape[1:]), dtype)
        view = rows.reshape(-1).view(np.uint8).data
        try:
            with self.path.open("rb", buffering=0) as file:
                for first, length in runs:
                    file.seek(offset + first * row_bytes)
                    _fill(file, view[: length * row_bytes], self.path)
                    view = view[length * row_bytes :]
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror})") from None
        return as_tensor(rows, str(self.path))


def open_npz(path: Path, key: str | None = None) -> ArraySource:
    """One array of a .npz file: the one of this key, else the only one, else 'x', else 'x_train'."""
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.getinfo(f"{_pick(path, archive.namelist(), key)}.npy")
            label = f"{path}::{member.filename.removesuffix('.npy')}"
            with opened_member(archive, member, label) as file:
                header = _read_header(file, label)
                _check_size(header, member.file_size, label)
                way_out = "save it as .npy, which is read row by row"
                needed = header.memory_bytes(header.shape[0])
                require(needed, available(torch.device("cpu")), what=f"reading {label}", way_out=way_out)
                return ArraySource(_read_array(file, header), label)
    except InputError:
        raise
    except ZIP_ERRORS as error:
        raise InputError(f"{path}: is damaged, or not a .npz file ({error})") from None


def _pick(path: Path, members: list[str], key: str | None) -> str:
    keys = [name.removesuffix(".npy") for name in members if name.endswith(".npy")]
    if key is None and len(keys) == 1:
        return keys[0]
    for wanted in USUAL_KEYS if key is None else (key,):
        if wanted in keys:
            return wanted
    found = ", ".join(keys[:20]) or "none"
    lacks = f"no array {key!r}" if key is not None else "several arrays" if keys else "no array"
    raise InputError(f"{path}: has {lacks} (found: {found}): name one as {path.name}::KEY")


def _read_header(file: IO[bytes] | io.BufferedIOBase, name: str) -> _Header:
    """What a .npy file says of itself, refused unless it is plain numbers; its length is checked before it is read."""
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # headers of Python 2, which are read all the same
            version = np.lib.format.read_magic(file)
            length = file.read(LENGTH_BYTES[version])
            text = file.read(min(int.from_bytes(length, "little"), LONGEST_HEADER))
            shape, fortran, dtype = read[version](io.BytesIO(length + text))
    except Exception:  # a stranger's header fails in many ways: tokenize.TokenError, RecursionError, …
        raise InputError(f"{name}: is damaged, or not a .npy file of numbers") from None
    if dtype.kind not in "biuf" or dtype.shape:
        raise InputError(f"{name}: holds {dtype}, numbers are needed")
    if len(shape) > MOST_AXES or max(shape, default=0) >= 2**63:
        raise InputError(f"{name}: is damaged, no array has its shape")
    if not shape or min(shape) < 1:
        raise InputError(f"{name}: is empty, its shape is {shape}")
    offset = np.lib.format.MAGIC_LEN + len(length) + len(text)
    return _Header(shape, bool(fortran) and len(shape) > 1, dtype, offset)


def _read_array(file: IO[bytes] | io.BufferedIOBase, header: _Header) -> NDArray[np.generic]:
    """The array that follows the header, in one piece of memory; one more byte is read, which compares the checksum."""
    array = np.empty(header.shape, header.dtype, order="F" if header.fortran else "C")
    view = array.reshape(-1, order="A").view(np.uint8)
    done = 0
    while part := file.read(CHUNK):
        view[done : done + len(part)] = np.frombuffer(part, np.uint8)
        done += len(part)
    if done < len(view):
        raise EOFError(f"{len(view) - done:,} bytes are missing")
    return array


def _check_size(header: _Header, size: int, name: str) -> None:
    if size != header.file_bytes:
        raise InputError(
            f"{name}: is damaged: shape {header.shape} of {header.dtype} needs {header.file_bytes} bytes, it has {size}"
        )


def _fill(file: io.FileIO, view: memoryview, path: Path) -> None:
    """Fill the whole view: one read may give less than was asked for."""
    while len(view):
        count = file.readinto(view)
        if not count:
            raise InputError(f"{path}: has become shorter while it was read")
        view = view[count:]
