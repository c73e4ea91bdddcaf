"""MNIST's idx files, plain or gzipped, of unknown origin: read within bounds, or refused by name."""

import gzip
import io
import math
import os
import stat
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from onefold.core.memory import available, human, require
from onefold.errors import FileError

MOST_BYTES = 2**30  # 1.3 million images; MNIST's has 47 million bytes
LARGEST_RATIO = 1032  # deflate cannot pack more tightly
SLACK = 2**16  # bytes by which a gzipped file may exceed what is in it
CHUNK = 2**20
UNSIGNED_BYTE = 8  # idx's code for the only type that is used here


def read_images(path: Path) -> UInt8[np.ndarray, "n 28 28"]:
    """The images of an idx file."""
    images = _read(path, ndim=3)
    if images.shape[1:] != (28, 28):
        raise FileError(f"{path}: has images of {images.shape[1]} × {images.shape[2]} pixels, not of 28 × 28")
    return images


def read_labels(path: Path) -> UInt8[np.ndarray, " n"]:
    """The labels of an idx file."""
    return _read(path, ndim=1)


def _read(path: Path, ndim: int) -> UInt8[np.ndarray, "..."]:
    import torch

    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
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
    """What the header promises: two zeros, the type, the number of dimensions, then each as four bytes."""
    what = "images" if ndim == 3 else "labels"
    magic = content.read(4)
    if magic != bytes([0, 0, UNSIGNED_BYTE, ndim]):
        raise FileError(f"{path}: is not an idx file of {what} (it begins with {magic.hex(' ') or 'nothing'})")
    header = content.read(4 * ndim)
    if len(header) < 4 * ndim:
        raise FileError(f"{path}: damaged, it ends within its header")
    shape = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(0, 4 * ndim, 4))
    if min(shape) < 1:
        raise FileError(f"{path}: holds no {what}, its shape is {shape}")
    return shape


def _check_size(size: int, header: int, length: int, packed: bool, path: Path) -> None:
    """Refuse before anything is read what the file cannot hold, and what nobody would put into one."""
    if size > MOST_BYTES:
        raise FileError(f"{path}: its header promises {human(size)}, idx files have at most {human(MOST_BYTES)}")
    if packed:
        fits = size + header <= LARGEST_RATIO * length and length <= size + size // 1000 + SLACK
    else:
        fits = size + header == length
    if not fits:
        raise FileError(f"{path}: damaged, its header promises {size:,} bytes and it has {length:,}")


def _fill(content: io.BufferedIOBase, size: int, path: Path) -> UInt8[np.ndarray, " n"]:
    """So many bytes and no more: of what follows them, one byte is asked for."""
    array = np.empty(size, np.uint8)
    done = 0
    while done < size:
        part = content.read(min(CHUNK, size - done))
        if not part:
            raise FileError(f"{path}: damaged, {size - done:,} of {size:,} bytes are missing")
        array[done : done + len(part)] = np.frombuffer(part, np.uint8)
        done += len(part)
    if content.read(1):  # at its end gzip compares the checksum too
        raise FileError(f"{path}: damaged, it goes on after the {size:,} bytes that its header promises")
    return array


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
