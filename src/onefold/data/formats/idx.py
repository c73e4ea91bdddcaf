"""The idx files of MNIST, plain or gzipped."""

import gzip
import io
import math
import os
import stat
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from onefold.core.runtime import available, human, require
from onefold.errors import FileError

MOST_BYTES = 2**30  # of one file; that of MNIST's train images has 47 million
LARGEST_RATIO = 1032  # deflate cannot compress more than this
SLACK = 2**16  # bytes by which a gzipped file may exceed its content
CHUNK = 2**20
UNSIGNED_BYTE = 8  # the code of the only type that is supported


def read_images(path: Path) -> UInt8[np.ndarray, "n h w"]:
    """Return the images of an idx file."""
    return _read(path, ndim=3)


def read_labels(path: Path) -> UInt8[np.ndarray, " n"]:
    """Return the labels of an idx file."""
    return _read(path, ndim=1)


def _read(path: Path, ndim: int) -> UInt8[np.ndarray, "..."]:
    import torch

    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
            raise FileError(f"{path}: cannot be read (not a file)")
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            with gzip.GzipFile(fileobj=file) if packed else file as content:
                shape = _shape(content, ndim, path)
                size = math.prod(shape)
                _check_size(size, 4 + 4 * ndim, length, packed, path)
                require(size, available(torch.device("cpu")), what=f"reading {path}", way_out="use a larger machine")
                return _fill(content, size, path).reshape(shape)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FileError(f"{path}: damaged ({_one_line(error)})") from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror or _one_line(error)})") from None


def _shape(content: io.BufferedIOBase, ndim: int, path: Path) -> tuple[int, ...]:
    """Return the shape in the header: two zeros, the type, the number of dimensions, then each as four bytes."""
    what = "images" if ndim == 3 else "labels"
    magic = content.read(4)
    if magic != bytes([0, 0, UNSIGNED_BYTE, ndim]):
        raise FileError(f"{path}: not an idx file of {what} (it begins with {magic.hex(' ') or 'nothing'})")
    header = content.read(4 * ndim)
    if len(header) < 4 * ndim:
        raise FileError(f"{path}: damaged, it ends within its header")
    shape = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(0, 4 * ndim, 4))
    if min(shape) < 1:
        raise FileError(f"{path}: no {what}, its shape is {shape}")
    return shape


def _check_size(size: int, header: int, length: int, packed: bool, path: Path) -> None:
    """Refuse, before the content is read, a size that the file cannot have or that is over the limit."""
    if size > MOST_BYTES:
        raise FileError(f"{path}: its header claims {human(size)}, idx files have at most {human(MOST_BYTES)}")
    if packed:
        fits = size + header <= LARGEST_RATIO * length and length <= size + size // 1000 + SLACK
    else:
        fits = size + header == length
    if not fits:
        raise FileError(f"{path}: damaged, its header claims {size:,} bytes and it has {length:,}")


def _fill(content: io.BufferedIOBase, size: int, path: Path) -> UInt8[np.ndarray, " n"]:
    """Return so many bytes of the content; raise FileError if there are fewer or more."""
    array = np.empty(size, np.uint8)
    done = 0
    while done < size:
        part = content.read(min(CHUNK, size - done))
        if not part:
            raise FileError(f"{path}: damaged, {size - done:,} of {size:,} bytes are missing")
        array[done : done + len(part)] = np.frombuffer(part, np.uint8)
        done += len(part)
    if content.read(1):  # at the end gzip also compares the checksum
        raise FileError(f"{path}: damaged, it continues after the {size:,} bytes that its header claims")
    return array


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
