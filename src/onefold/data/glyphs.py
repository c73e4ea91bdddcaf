"""Letters drawn in the fonts of matplotlib: an unfamiliar set for the digits that needs no download."""

import functools
from pathlib import Path

import numpy as np
from jaxtyping import Float32
from PIL import Image, ImageDraw, ImageFont

from onefold.errors import InputError

LETTERS = "ABCDEFGHIJabcdefghij"
# All are in matplotlib 3.9 and later, byte for byte. cmmi10 occurs twice: it replaced cmti10, which only 3.11 has. The
# list kept its length, so that the letters in the other faces stayed the same.
FACES = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *(f"cm{style}10" for style in ("b", "mi", "r", "ss", "mi", "tt")),
)
CANVAS = 32  # side of the bitmaps, as for the digits of scikit-learn


def letters(count: int, seed: int = 0, size: int = 8) -> Float32[np.ndarray, "n size size"]:
    """Return letters A–J and a–j in 21 faces, rotated, slanted and scaled at random.

    They are made like the digits: from a black-and-white bitmap, by the share of ink in blocks of equal size.

    Args:
        count: Number of images.
        seed: Seed of the random numbers.
        size: Side of an image in pixels; a divisor of 32.

    Returns:
        Grey images [count, size, size] with values in [0, 1].

    Raises:
        InputError: If 32 is not a multiple of the size.
    """
    if not 1 <= size <= CANVAS or CANVAS % size:
        raise InputError(f"size: {size} is not a divisor of {CANVAS}. Use 1, 2, 4, 8, 16 or 32.")
    rng = np.random.default_rng(seed)
    images = [_letter(rng) for _ in range(count)]
    blocks = np.stack(images).reshape(count, size, CANVAS // size, size, CANVAS // size)
    return blocks.mean((2, 4), dtype=np.float32)


def _letter(rng: np.random.Generator) -> np.ndarray:
    """Return a letter as a bitmap [32, 32] of zeros and ones that fills most of its height."""
    large = Image.new("L", (192, 192))
    font = _font(str(rng.choice(FACES)))
    ImageDraw.Draw(large).text((96, 96), str(rng.choice(list(LETTERS))), fill=255, font=font, anchor="mm")
    large = large.rotate(rng.uniform(-12, 12), Image.Resampling.BILINEAR)
    slant = rng.uniform(-0.2, 0.2)
    large = large.transform(
        large.size, Image.Transform.AFFINE, (1, slant, -96 * slant, 0, 1, 0), Image.Resampling.BILINEAR
    )
    box = large.getbbox()
    assert box is not None, "every face has every letter"
    ink = large.crop(box)
    height = int(rng.integers(26, 33))
    width = min(CANVAS, max(4, round(ink.width / ink.height * height * rng.uniform(0.8, 1.1))))
    canvas = Image.new("L", (CANVAS, CANVAS))
    left = (CANVAS - width) // 2 + int(rng.integers(-2, 3))
    canvas.paste(ink.resize((width, height), Image.Resampling.BILINEAR), (left, (CANVAS - height) // 2))
    return (np.asarray(canvas) > 110).astype(np.float32)


@functools.cache
def _font(face: str) -> ImageFont.FreeTypeFont:
    import matplotlib  # takes a third of a second to load

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"), 96)
