"""Decoding of untrusted image files to arrays of bytes, without Pillow's warnings. It does not import torch."""

import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
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
TRANSPOSE_OF = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
GREY_MODES = ("1", "L", "I", "F", "LA")
PILLOW_FILTER: Any = ("ignore", None, Warning, re.compile(r"PIL\."), 0)


@dataclass(frozen=True)
class Picture:
    """Size and number of channels (1 grey, 3 colour) to which every image of a folder is converted."""

    height: int
    width: int
    channels: int

    def __post_init__(self) -> None:
        if not (1 <= self.height <= LONGEST_SIDE and 1 <= self.width <= LONGEST_SIDE):
            raise InputError(
                f"picture: size {self.height} × {self.width} is not supported. Use 1 to {LONGEST_SIDE} pixels."
            )
        if self.channels not in (1, 3):
            raise InputError(f"picture: {self.channels} channels are not supported. Use 1 (grey) or 3 (colour).")

    def crop(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return top, left, height and width of the largest central part of an image with this aspect ratio.

        In whole pixels, so that an exported model can do the same; see `detectors.raw_inputs`.
        """
        cropped_height = min(height, max(1, (width * self.height + self.width // 2) // self.width))
        cropped_width = min(width, max(1, (height * self.width + self.height // 2) // self.height))
        return (height - cropped_height) // 2, (width - cropped_width) // 2, cropped_height, cropped_width


@contextlib.contextmanager
def ignore_pillow_warnings() -> Iterator[None]:
    """Ignore warnings from Pillow's modules, in all threads.

    `warnings.catch_warnings` replaces the filters of every thread. Inside a generator it would also change those of
    the consumer. This context adds one filter for Pillow and removes it again.
    """
    current: Any = warnings.filters
    current.insert(0, PILLOW_FILTER)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # other code has reset the filters
            current.remove(PILLOW_FILTER)


def read_image_header(path: Path) -> tuple[bool, int, int] | None:
    """Return whether an image is grey, its height and its width from the header; None if unreadable."""
    try:
        with _open(path) as image:
            height, width = image.height, image.width
            if image.format != "TIFF" and _read_orientation(image) >= 5:
                height, width = width, height
            return image.mode in GREY_MODES or image.mode.startswith("I;16"), height, width
    except Exception:  # untrusted files fail in many ways; `decode` raises the reason
        return None


def decode(path: Path, picture: Picture) -> UInt8[np.ndarray, "c h w"]:
    """Return the first frame of an image file, upright, cropped at the centre and scaled to `picture`."""
    from PIL import Image

    with _open(path) as image:
        upright = _read_upright(image, picture)
        top, left, height, width = picture.crop(upright.height, upright.width)
        cropped = upright.crop((left, top, left + width, top + height))
        size = (picture.width, picture.height)
        return to_bytes(cropped.resize(size, Image.Resampling.BILINEAR), picture.channels)


def decode_pixels(file: Path | BytesIO, picture: Picture) -> UInt8[np.ndarray, "h w 3"]:
    """Return the first frame of an image file, upright, as the input of an exported model, which crops and scales it.

    A JPEG file that is more than four times larger than `picture` is reduced while it is decoded, as in `decode`.
    """
    with _open(file) as image:
        return np.ascontiguousarray(np.moveaxis(to_bytes(_read_upright(image, picture), 3), 0, 2))


def _read_upright(image: "Image.Image", picture: Picture) -> "Image.Image":
    """Return the decoded image in a plain mode, turned as its EXIF data asks."""
    from PIL import Image

    side = 2 * max(picture.height, picture.width)  # twice the size: the second half of the reduction is filtered
    image.draft(None, (side, side))
    image.load()
    transpose = TRANSPOSE_OF.get(_read_orientation(image))
    return _to_plain_mode(image if transpose is None else image.transpose(Image.Transpose(transpose)))


def to_bytes(image: "Image.Image", channels: int | None = None) -> UInt8[np.ndarray, "c h w"]:
    """Return a Pillow image as [C, H, W], transparency on black; without `channels`, grey stays grey."""
    from PIL import Image

    plain = _to_plain_mode(image)
    if plain.mode == "RGBA":
        black = Image.new("RGBA", plain.size, (0, 0, 0, 255))
        plain = Image.alpha_composite(black, plain).convert("RGB")
        if channels is None and image.mode in GREY_MODES:
            plain = plain.convert("L")
    if channels is not None:
        plain = plain.convert("L" if channels == 1 else "RGB")
    pixels = np.array(plain, np.uint8)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(np.moveaxis(pixels, 2, 0))


def describe_error(error: Exception) -> str:
    """Return in one short line, without paths, why an image could not be read."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "not an image, or damaged"
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {MOST_PIXELS:,} pixels"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__


def _open(path: Path | BytesIO) -> "Image.Image":
    """Open an image without decoding it; raise InputError if it has too many pixels."""
    from PIL import Image

    image = Image.open(path, formats=FORMATS)
    if not 0 < image.width * image.height <= MOST_PIXELS:
        image.close()
        raise InputError(f"more than {MOST_PIXELS:,} pixels" if image.width * image.height else "no pixels")
    return image


def _read_orientation(image: "Image.Image") -> int:
    """Return the EXIF orientation; 1 (upright) if absent or damaged."""
    try:
        return int(image.getexif().get(ORIENTATION_TAG, 1))
    except Exception:  # an image with damaged EXIF data is still usable
        return 1


def _to_plain_mode(image: "Image.Image") -> "Image.Image":
    """Return the image in mode L, RGB or RGBA."""
    if image.mode in ("L", "RGB") and "transparency" not in image.info:
        return image
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _to_eight_bits(image)
    if image.mode in ("RGBA", "RGBa", "LA", "PA") or "transparency" in image.info:
        return image.convert("RGBA")
    return image.convert("L" if image.mode == "1" else "RGB")


def _to_eight_bits(image: "Image.Image") -> "Image.Image":
    """Return deep grey as 8 bits from integers 0 … 65535, floats 0 … 1, or floats 0 … 255 if any exceeds 1."""
    from PIL import Image

    deep = np.asarray(image)
    if image.mode == "F":
        if not np.isfinite(deep).all():
            raise InputError("pixels are NaN or infinite")
        grey = np.clip(np.rint(deep * 255 if deep.max() <= 1 else deep), 0, 255)
    else:
        grey = (np.clip(deep, 0, 65535).astype(np.uint32) + 128) // 257
    return Image.fromarray(grey.astype(np.uint8))
