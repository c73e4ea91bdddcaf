"""One image file of unknown origin to one array of bytes, or a reason why not. Pillow's warnings are kept quiet."""

import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from onefold.errors import InputError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
MOST_PIXELS = 64_000_000
LONGEST_SIDE = 4096
ORIENTATION_TAG = 0x0112
# EXIF orientation to the number of Pillow's Transpose that undoes it
UPRIGHT = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
GREY_MODES = ("1", "L", "I", "F", "LA")
PILLOW_SAYS: Any = ("ignore", None, Warning, re.compile(r"PIL\."), 0)


@dataclass(frozen=True)
class Picture:
    """The size and the number of channels (1 grey, 3 colour) that every image of a folder is brought to."""

    height: int
    width: int
    channels: int

    def __post_init__(self) -> None:
        if not (1 <= self.height <= LONGEST_SIDE and 1 <= self.width <= LONGEST_SIDE):
            raise InputError(f"pictures of {self.height} × {self.width}: sides are 1 to {LONGEST_SIDE} pixels")
        if self.channels not in (1, 3):
            raise InputError(f"pictures of {self.channels} channels: 1 (grey) or 3 (colour) are understood")


@contextlib.contextmanager
def pillow_quiet() -> Iterator[None]:
    """Ignore warnings that Pillow's modules raise, in all threads.

    `warnings.catch_warnings` would do too much: it swaps the filters of every thread, and a generator that holds it
    would change its consumer's. This adds one filter for Pillow alone, and takes it away again.
    """
    current: Any = warnings.filters
    current.insert(0, PILLOW_SAYS)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # someone has cleared the filters meanwhile
            current.remove(PILLOW_SAYS)


def look(path: Path) -> tuple[bool, int, int] | None:
    """Whether an image is grey, its height and its width as its header says; None if it cannot be read."""
    try:
        with _open(path) as image:
            height, width = image.height, image.width
            if image.format != "TIFF" and _orientation(image) >= 5:
                height, width = width, height
            return image.mode in GREY_MODES or image.mode.startswith("I;16"), height, width
    except Exception:  # a stranger's file may fail in any way; decoding it will say how
        return None


def decode(path: Path, picture: Picture) -> UInt8[np.ndarray, "c h w"]:
    """The first frame of an image file, upright, scaled to cover the picture and cropped about its centre."""
    from PIL import Image, ImageOps

    with _open(path) as image:
        side = 2 * max(picture.height, picture.width)  # twice: the rest of the way down is filtered properly
        image.draft(None, (side, side))
        image.load()
        turn = UPRIGHT.get(_orientation(image))
        upright = image if turn is None else image.transpose(Image.Transpose(turn))
        size = (picture.width, picture.height)
        return to_bytes(ImageOps.fit(_plain(upright), size, Image.Resampling.BILINEAR), picture.channels)


def to_bytes(image: "Image.Image", channels: int | None = None) -> UInt8[np.ndarray, "c h w"]:
    """A Pillow image as [C, H, W], transparency on black; without `channels`, grey stays grey."""
    from PIL import Image

    plain = _plain(image)
    if plain.mode == "RGBA":
        black = Image.new("RGBA", plain.size, (0, 0, 0, 255))
        plain = Image.alpha_composite(black, plain).convert("RGB")
        if channels is None and image.mode in GREY_MODES:
            plain = plain.convert("L")
    if channels is not None:
        plain = plain.convert("L" if channels == 1 else "RGB")
    pixels = np.array(plain, np.uint8)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(np.moveaxis(pixels, 2, 0))


def reason(error: Exception) -> str:
    """Why an image could not be read, on one short line that names no machine's folders."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "not an image, or damaged"
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {MOST_PIXELS:,} pixels"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__


def _open(path: Path) -> "Image.Image":
    """An image whose pixels have not been decoded, refused if they are too many."""
    from PIL import Image

    image = Image.open(path, formats=FORMATS)
    if not 0 < image.width * image.height <= MOST_PIXELS:
        image.close()
        raise InputError(f"more than {MOST_PIXELS:,} pixels" if image.width * image.height else "no pixels")
    return image


def _orientation(image: "Image.Image") -> int:
    """The EXIF orientation; 1, upright, where there is none or it is damaged."""
    try:
        return int(image.getexif().get(ORIENTATION_TAG, 1))
    except Exception:  # damaged EXIF is no reason to lose the image
        return 1


def _plain(image: "Image.Image") -> "Image.Image":
    """The image in mode L, RGB or RGBA."""
    if image.mode in ("L", "RGB") and "transparency" not in image.info:
        return image
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _eight_bits(image)
    if image.mode in ("RGBA", "RGBa", "LA", "PA") or "transparency" in image.info:
        return image.convert("RGBA")
    return image.convert("L" if image.mode == "1" else "RGB")


def _eight_bits(image: "Image.Image") -> "Image.Image":
    """Deep grey as 8 bits: whole numbers are taken as 0 … 65535, fractions as 0 … 1, or 0 … 255 where some exceed 1."""
    from PIL import Image

    deep = np.asarray(image)
    if image.mode == "F":
        if not np.isfinite(deep).all():
            raise InputError("has pixels that are NaN or infinite")
        grey = np.clip(np.rint(deep * 255 if deep.max() <= 1 else deep), 0, 255)
    else:
        grey = (np.clip(deep, 0, 65535).astype(np.uint32) + 128) // 257
    return Image.fromarray(grey.astype(np.uint8))
