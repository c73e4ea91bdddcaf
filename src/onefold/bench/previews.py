"""Pictures of what a benchmark is about: for each familiar set a few of its test images and of the strange ones."""

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from onefold.bench.sets import Data, familiar, label, strange_sets
from onefold.bench.units import Preset
from onefold.core.storage import write_bytes

COLUMNS, SIDE, GAP, NAMES = 12, 56, 4, 190  # images of a row, pixels of one, between two, and for a row's name
PAPER, INK = 255, 30
LONGEST = 24  # letters of a name


def preview(data: Data, preset: Preset, folder: Path) -> None:
    """One PNG for each familiar set, a row for each set; those that are there stay."""
    for name in data.ids:
        path = folder / f"{label(name)}.png"
        if not path.exists():
            rows = {f"{label(name)}, familiar": familiar(data, name, preset).x_test, **strange_sets(data, name, preset)}
            content = io.BytesIO()
            drawn(rows).save(content, "PNG")
            write_bytes(path, content.getvalue())


def drawn(rows: dict[str, np.ndarray]) -> Image.Image:
    """The first images of each set beside its name; what is outside 0 … 1 is shown as black or white."""
    step = SIDE + GAP
    picture = Image.new("L", (NAMES + COLUMNS * step + GAP, len(rows) * step + GAP), PAPER)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
    for i, (name, images) in enumerate(rows.items()):
        top = GAP + i * step
        short = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
        draw.text((NAMES - 2 * GAP, top + SIDE // 2), short, INK, font, "rm")
        for j, image in enumerate(images[:COLUMNS]):
            grey = Image.fromarray((255 * np.clip(image, 0, 1)).round().astype(np.uint8))
            picture.paste(grey.resize((SIDE, SIDE), Image.Resampling.NEAREST), (NAMES + j * step, top))
    return picture
