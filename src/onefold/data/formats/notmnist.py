"""The archives of NotMNIST: letters A–J as small PNG files in a .zip or .tar.gz, read without unpacking them."""

import hashlib
import io
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, UInt8

from onefold.data.formats.tar_files import TAR_ERRORS, damaged_archive, is_plain_file, open_tar
from onefold.decode import ignore_pillow_warnings, to_bytes
from onefold.errors import FileError, InputError
from onefold.inputs.arrays import ZIP_ERRORS, open_member

CLASSES = "ABCDEFGHIJ"
MEMBER = re.compile(r"(?:.*/)?([A-J])/(?!\.)[^/]+\.png")
SIDE = 28
LARGEST_IMAGE = 2**16  # bytes of a PNG of 28 × 28 pixels; most have a few hundred
MOST_IMAGES = 2**20
MOST_INFLATED = 2**31  # bytes of a .tar; that of the large archive has less than half of them
TEST_STRIDE = 7  # every seventh image of a class is a test image


class Letters(NamedTuple):
    """Different images in an order that depends on their pixels only, and the numbers of files that were dropped."""

    images: UInt8[np.ndarray, "n 28 28"]
    labels: Int64[np.ndarray, " n"]
    unreadable: int
    repeated: int
    ambiguous: int

    @property
    def is_test(self) -> Bool[np.ndarray, " n"]:
        """Whether an image belongs to the test set: every seventh of each class."""
        chosen = np.zeros(len(self.labels), bool)
        for label in range(len(CLASSES)):
            chosen[np.flatnonzero(self.labels == label)[TEST_STRIDE - 1 :: TEST_STRIDE]] = True
        return chosen

    def arrays(self) -> dict[str, UInt8[np.ndarray, "..."]]:
        """Return x_train, y_train, x_test and y_test."""
        test, labels = self.is_test, self.labels.astype(np.uint8)
        return {
            "x_train": self.images[~test],
            "y_train": labels[~test],
            "x_test": self.images[test],
            "y_test": labels[test],
        }


def read_letters(path: Path, report: Callable[[str, int, int | None], None]) -> Letters:
    """Return the images of a .zip or .tar.gz; of repeated images one is kept, of those in two classes none.

    `report` is called now and then with a description, the number of files read, and None for their unknown total.
    """
    pixels_of: dict[bytes, bytes] = {}
    labels_of: dict[bytes, list[int]] = {}
    unreadable = 0
    with ignore_pillow_warnings():
        for i, (label, content) in enumerate(_members(path)):
            if i == MOST_IMAGES:
                raise FileError(f"{path}: more than {MOST_IMAGES:,} images")
            if i % 100 == 0:
                report(f"reading {path.name}", i, None)
            pixels = None if content is None else _pixels(content)
            if pixels is None:
                unreadable += 1
                continue
            key = hashlib.blake2b(pixels, digest_size=16).digest()
            pixels_of[key] = pixels
            labels_of.setdefault(key, []).append(label)
    kept = [key for key in sorted(labels_of) if len(set(labels_of[key])) == 1]
    repeated = sum(len(labels_of[key]) - 1 for key in kept)
    ambiguous = sum(map(len, labels_of.values())) - repeated - len(kept)
    missing = set(range(len(CLASSES))) - {labels_of[key][0] for key in kept}
    if missing:
        raise FileError(f"{path}: no readable images of {', '.join(CLASSES[i] for i in sorted(missing))}")
    images = np.frombuffer(b"".join(pixels_of[key] for key in kept), np.uint8).reshape(-1, SIDE, SIDE)
    labels = np.array([labels_of[key][0] for key in kept], np.int64)
    return Letters(images, labels, unreadable, repeated, ambiguous)


def _members(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield the class and the content of each image; None if it is too long, or not a plain file."""
    try:
        yield from _zip_members(path) if path.suffix == ".zip" else _tar_members(path)
    except InputError as error:
        raise FileError(str(error)) from None
    except FileError:
        raise
    except (*ZIP_ERRORS, *TAR_ERRORS) as error:
        raise damaged_archive(path, error) from None


def _zip_members(path: Path) -> Iterator[tuple[int, bytes | None]]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if match := MEMBER.fullmatch(member.filename):
                label = CLASSES.index(match[1])
                if member.file_size > LARGEST_IMAGE or member.flag_bits & 1:  # 1: encrypted
                    yield label, None
                else:
                    with open_member(archive, member, f"{path}: {member.filename[:200]!r}") as file:
                        yield label, file.read(LARGEST_IMAGE)


def _tar_members(path: Path) -> Iterator[tuple[int, bytes | None]]:
    with open_tar(path, MOST_INFLATED) as archive:
        for member in archive:
            if match := MEMBER.fullmatch(member.name):
                label = CLASSES.index(match[1])
                readable = is_plain_file(member) and member.size <= LARGEST_IMAGE
                file = archive.extractfile(member) if readable else None
                yield label, None if file is None else file.read()


def _pixels(content: bytes) -> bytes | None:
    """Return the pixels of a PNG of 28 × 28 as grey bytes; None for any other content."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
            if image.size != (SIDE, SIDE):  # read from the header, before anything is decoded
                return None
            image.load()
            return to_bytes(image, 1).tobytes()
    except Exception:  # a damaged file may fail in any way; the other files are still read
        return None
