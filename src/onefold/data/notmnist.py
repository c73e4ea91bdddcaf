"""NotMNIST's archives, letters A–J as small PNGs: read without unpacking them, and made into one .npz."""

import gzip
import hashlib
import io
import re
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, UInt8

from onefold.core.storage import write_bytes
from onefold.data.download import Watch
from onefold.errors import FileError, InputError
from onefold.inputs.decode import ignore_pillow_warnings, to_bytes
from onefold.inputs.zip_files import ZIP_ERRORS, open_member

CLASSES = "ABCDEFGHIJ"
MEMBER = re.compile(r"(?:.*/)?([A-J])/(?!\.)[^/]+\.png")
SIDE = 28
LARGEST_IMAGE = 2**16  # bytes of a PNG of 28 × 28 pixels: they have some hundred
MOST_IMAGES = 2**20
MOST_INFLATED = 2**31  # bytes of a .tar: that of the large archive has less than half of them
READ_AT_ONCE = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip
ONE_IN = 7  # goes into the test set


class Letters(NamedTuple):
    """Different images in an order that depends on their pixels alone, and how many files were left out, and why."""

    images: UInt8[np.ndarray, "n 28 28"]
    labels: Int64[np.ndarray, " n"]
    unreadable: int
    repeated: int
    disputed: int

    @property
    def is_test(self) -> Bool[np.ndarray, " n"]:
        """Every seventh image of each class."""
        chosen = np.zeros(len(self.labels), bool)
        for label in range(len(CLASSES)):
            chosen[np.flatnonzero(self.labels == label)[ONE_IN - 1 :: ONE_IN]] = True
        return chosen


def read_letters(path: Path, watch: Watch) -> Letters:
    """The images of an archive, .zip or .tar.gz; one found twice is kept once, one in two classes not at all."""
    pixels_of: dict[bytes, bytes] = {}
    labels_of: dict[bytes, list[int]] = {}
    unreadable = 0
    with ignore_pillow_warnings():
        for i, (label, content) in enumerate(_members(path)):
            if i == MOST_IMAGES:
                raise FileError(f"{path}: has more than {MOST_IMAGES:,} images")
            if i % 100 == 0:
                watch(f"reading {path.name}", i, None)
            pixels = None if content is None else _pixels(content)
            if pixels is None:
                unreadable += 1
                continue
            key = hashlib.blake2b(pixels, digest_size=16).digest()
            pixels_of[key] = pixels
            labels_of.setdefault(key, []).append(label)
    kept = [key for key in sorted(labels_of) if len(set(labels_of[key])) == 1]
    repeated = sum(len(labels_of[key]) - 1 for key in kept)
    disputed = sum(map(len, labels_of.values())) - repeated - len(kept)
    missing = set(range(len(CLASSES))) - {labels_of[key][0] for key in kept}
    if missing:
        raise FileError(f"{path}: has no readable images of {', '.join(CLASSES[i] for i in sorted(missing))}")
    images = np.frombuffer(b"".join(pixels_of[key] for key in kept), np.uint8).reshape(-1, SIDE, SIDE)
    labels = np.array([labels_of[key][0] for key in kept], np.int64)
    return Letters(images, labels, unreadable, repeated, disputed)


def write_npz(path: Path, letters: Letters) -> None:
    """The letters in the layout of the other sets, whole or not at all."""
    test = letters.is_test
    arrays = {
        "x_train": letters.images[~test],
        "y_train": letters.labels[~test].astype(np.uint8),
        "x_test": letters.images[test],
        "y_test": letters.labels[test].astype(np.uint8),
    }
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write_bytes(path, content.getvalue())


def _members(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """The class and the content of each image file; None where it is too long, or no plain file."""
    try:
        yield from _of_zip(path) if path.suffix == ".zip" else _of_tar(path)
    except InputError as error:
        raise FileError(str(error)) from None
    except FileError:
        raise
    except (*ZIP_ERRORS, tarfile.TarError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise FileError(f"{path}: is damaged, or not an archive ({reason})") from None


def _of_zip(path: Path) -> Iterator[tuple[int, bytes | None]]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if found := MEMBER.fullmatch(member.filename):
                label = CLASSES.index(found[1])
                if member.file_size > LARGEST_IMAGE or member.flag_bits & 1:  # 1: encrypted
                    yield label, None
                else:
                    with open_member(archive, member, f"{path}: {member.filename[:200]!r}") as file:
                        yield label, file.read(LARGEST_IMAGE)


def _of_tar(path: Path) -> Iterator[tuple[int, bytes | None]]:
    with (
        gzip.open(path) as inflated,
        tarfile.open(fileobj=_Bounded(inflated, path), mode="r|", tarinfo=_Member) as archive,
    ):
        for member in archive:
            if found := MEMBER.fullmatch(member.name):
                label = CLASSES.index(found[1])
                plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.size <= LARGEST_IMAGE
                file = archive.extractfile(member) if plain else None
                yield label, None if file is None else file.read()


class _Member(tarfile.TarInfo):
    """A header whose extended attributes and long names, which tarfile reads into memory, have a bounded size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Member":
        member = super().frombuf(buf, encoding, errors)
        if member.type in READ_AT_ONCE and member.size > LARGEST_IMAGE:
            raise tarfile.ReadError(f"a header of {member.size:,} bytes")
        return member


class _Bounded(io.RawIOBase):
    """A stream that ends in an error after too many bytes, whatever its headers say."""

    def __init__(self, stream: gzip.GzipFile, path: Path) -> None:
        self._stream, self._path, self._left = stream, path, MOST_INFLATED

    def read(self, size: int = -1, /) -> bytes:
        content = self._stream.read(self._left + 1 if size < 0 else min(size, self._left + 1))
        self._left -= len(content)
        if self._left < 0:
            raise FileError(f"{self._path}: inflates to more than {MOST_INFLATED:,} bytes")
        return content


def _pixels(content: bytes) -> bytes | None:
    """The pixels of a grey PNG of 28 × 28; None if it is anything else."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
            if image.size != (SIDE, SIDE):  # known before anything is decoded, so a bomb stays packed
                return None
            image.load()
            return to_bytes(image, 1).tobytes()
    except Exception:  # a stranger's file may fail in any way, and must not take the others with it
        return None
