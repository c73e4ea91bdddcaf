"""Arrays in memory, and .npy and .npz files, which are untrusted and read within bounds."""

import io
import lzma
import math
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onefold.core.batches import as_tensor
from onefold.core.runtime import available, require
from onefold.errors import InputError
from onefold.inputs.source import check_batch_size, check_index, split_range
from onefold.types import ArrayLike


class ArraySource:
    """NumPy array, tensor or nested lists of numbers; the first axis counts samples."""

    def __init__(self, x: ArrayLike, name: str = "x") -> None:
        self.tensor = as_tensor(x, name)

    def __len__(self) -> int:
        return len(self.tensor)

    def batches(self, size: int) -> Iterator[Tensor]:
        check_batch_size(size)
        yield from self.tensor.split(size)

    def take(self, index: NDArray[np.int64]) -> Tensor:
        check_index(index, len(self))
        return self.tensor[torch.from_numpy(index).to(self.tensor.device)]


class NamedSource:
    """Named arrays of one length, such as the token ids and the mask of a text model."""

    def __init__(self, x: Mapping[Any, ArrayLike], name: str = "x") -> None:
        self.tensors = named_tensors(x, name)
        self._length = len(next(iter(self.tensors.values())))

    def __len__(self) -> int:
        return self._length

    def batches(self, size: int) -> Iterator[dict[str, Tensor]]:
        for index in split_range(len(self), size):
            yield {key: tensor[index[0] : index[-1] + 1] for key, tensor in self.tensors.items()}

    def take(self, index: NDArray[np.int64]) -> dict[str, Tensor]:
        check_index(index, len(self))
        rows = torch.from_numpy(index)
        return {key: tensor[rows.to(tensor.device)] for key, tensor in self.tensors.items()}


def named_tensors(x: Mapping[Any, Any], name: str) -> dict[str, Tensor]:
    """Return named arrays as tensors of one length: integers as int64; uint8 and bool stay as they are."""
    if not x:
        raise InputError("empty dict", argument=name, hint="Pass at least one named array.")
    if odd := [key for key in x if not isinstance(key, str)]:
        raise InputError(f"key {odd[0]!r} is not a string", argument=name, hint="Name arrays by strings.")
    tensors = {key: _to_named_tensor(value, f"{name}[{key!r}]") for key, value in x.items()}
    lengths = {key: len(tensor) for key, tensor in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(
            f"arrays have different numbers of samples ({lengths})", argument=name, hint="Pass arrays of one length."
        )
    return tensors


def _to_named_tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, np.ndarray) and value.dtype.kind == "u" and value.dtype != np.uint8:
        if value.size and value.max() > np.iinfo(np.int64).max:
            raise InputError(f"value {value.max()} does not fit int64", argument=name, hint="Pass smaller integers.")
        value = value.astype(np.int64)  # as_tensor would turn token ids into floats
    tensor = as_tensor(value, name)
    if tensor.dtype in (torch.bool, torch.uint8):  # masks; pixels are scaled to [0, 1] later
        return tensor
    return tensor.float() if tensor.is_floating_point() else tensor.long()


USUAL_KEYS = ("x", "x_train")
LONGEST_HEADER = 10_000  # bytes of a .npy header: NumPy's own limit for untrusted files
LENGTH_BYTES = {(1, 0): 2, (2, 0): 4}  # of the header's length; (3, 0) is for field names outside Latin-1
MOST_AXES = 64  # of a NumPy array
CHUNK = 2**20  # bytes inflated at once


class _Header(NamedTuple):
    """Shape, order and dtype of a .npy file, and the offset of its first row."""

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
        """Return the bytes that `rows` rows need, with the copy that `as_tensor` makes of dtypes that torch lacks."""
        copied = (self.dtype.kind == "u" and self.dtype.itemsize > 1) or self.dtype.itemsize > 8
        return rows * (self.row_bytes + copied * 8 * math.prod(self.shape[1:]))


class NpyFile:
    """Rows of a .npy file, read from disk on demand; the file may be larger than memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._header = _read_header(file, str(path))
                size = file.seek(0, io.SEEK_END)
        except OSError as error:
            raise InputError(
                f"{path}: cannot be read ({error.strerror}). Check the path and its permissions."
            ) from None
        _check_size(self._header, size, str(path))
        if self._header.fortran:
            raise InputError(
                f"{path}: Fortran order is not supported, its rows are not contiguous. Save it again with "
                "numpy.save(path, numpy.ascontiguousarray(x))."
            )

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return self._header.shape[1:]

    def __len__(self) -> int:
        return self._header.shape[0]

    def batches(self, size: int) -> Iterator[Tensor]:
        for index in split_range(len(self), size):
            yield self._read([(int(index[0]), len(index))])

    def take(self, index: NDArray[np.int64]) -> Tensor:
        check_index(index, len(self))
        return self._read([(int(row), 1) for row in index])

    def _read(self, runs: list[tuple[int, int]]) -> Tensor:
        """Return the rows of all runs (first row, number of rows), in this order."""
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
                    _fill_view(file, view[: length * row_bytes], self.path)
                    view = view[length * row_bytes :]
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror})") from None
        return as_tensor(rows, str(self.path))


def open_npz(path: Path, key: str | None = None) -> ArraySource:
    """Return one array of a .npz file: that of `key`, else the only one, else 'x', else 'x_train'."""
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.getinfo(f"{_pick_key(path, archive.namelist(), key)}.npy")
            label = f"{path}::{member.filename.removesuffix('.npy')}"
            with open_member(archive, member, label) as file:
                header = _read_header(file, label)
                _check_size(header, member.file_size, label)
                way_out = "save it as .npy, which is read row by row"
                needed = header.memory_bytes(header.shape[0])
                require(needed, available(torch.device("cpu")), what=f"reading {label}", way_out=way_out)
                return ArraySource(_read_array(file, header), label)
    except InputError:
        raise
    except ZIP_ERRORS as error:
        raise InputError(f"{path}: damaged, or not a .npz file ({error}). Save it again with numpy.savez.") from None


def _pick_key(path: Path, members: list[str], key: str | None) -> str:
    keys = [name.removesuffix(".npy") for name in members if name.endswith(".npy")]
    if key is None and len(keys) == 1:
        return keys[0]
    for wanted in USUAL_KEYS if key is None else (key,):
        if wanted in keys:
            return wanted
    available_keys = ", ".join(keys[:20]) or "none"
    problem = f"no array {key!r}" if key is not None else "several arrays" if keys else "no array"
    raise InputError(f"{path}: {problem} (found: {available_keys}). Name one as {path.name}::KEY.")


def _read_header(file: IO[bytes] | io.BufferedIOBase, name: str) -> _Header:
    """Return the header of a .npy file of plain numbers; its length is checked before it is read."""
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy warns of headers written by Python 2
            version = np.lib.format.read_magic(file)
            length = file.read(LENGTH_BYTES[version])
            text = file.read(min(int.from_bytes(length, "little"), LONGEST_HEADER))
            shape, fortran, dtype = read[version](io.BytesIO(length + text))
    except Exception:  # untrusted headers fail in many ways: tokenize.TokenError, RecursionError, …
        raise InputError(f"{name}: damaged, or not a .npy file of numbers. Save it again with numpy.save.") from None
    if dtype.kind not in "biuf" or dtype.shape:
        raise InputError(f"{name}: dtype {dtype} is not supported. Save numbers or booleans.")
    if len(shape) > MOST_AXES or max(shape, default=0) >= 2**63:
        raise InputError(f"{name}: damaged, its shape is impossible. Save it again with numpy.save.")
    if not shape or min(shape) < 1:
        raise InputError(f"{name}: empty (shape {shape}). At least one sample is needed.")
    offset = np.lib.format.MAGIC_LEN + len(length) + len(text)
    return _Header(shape, bool(fortran) and len(shape) > 1, dtype, offset)


def _read_array(file: IO[bytes] | io.BufferedIOBase, header: _Header) -> NDArray[np.generic]:
    """Return the array after the header. Reading to the end of the member verifies its checksum."""
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
            f"{name}: damaged, shape {header.shape} of {header.dtype} needs {header.file_bytes} bytes, it has {size}. "
            "Save it again."
        )


def _fill_view(file: io.FileIO, view: memoryview, path: Path) -> None:
    """Fill the whole view; a single read may return less."""
    while len(view):
        count = file.readinto(view)
        if not count:
            raise InputError(f"{path}: the file became shorter during reading. Do not change it during a fit.")
        view = view[count:]


ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, RuntimeError)
LARGEST_RATIO = 1032  # deflate cannot compress more than this
SLACK = 2**10  # bytes for the headers of deflate blocks


@contextmanager
def open_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> Iterator[IO[bytes]]:
    """Open a member for reading; read to its end, where its CRC is checked.

    Raise InputError for sizes that the archive cannot hold, and for compression methods other than "stored" and
    "deflated", which Python inflates without a limit.
    """
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InputError(f"{name}: compression method {member.compress_type} is not supported. Save it with deflate.")
    ratio = 1 if member.compress_type == zipfile.ZIP_STORED else LARGEST_RATIO
    archive_bytes = Path(str(archive.filename)).stat().st_size
    if member.compress_size > archive_bytes or member.file_size > ratio * member.compress_size + SLACK:
        raise InputError(
            f"{name}: damaged, it claims {member.file_size:,} bytes, compressed to {member.compress_size:,}, in a "
            f"file of {archive_bytes:,}. Save it again."
        )
    with archive.open(member) as file:
        yield file
