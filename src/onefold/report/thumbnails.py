"""Thumbnails of images, and sprite sheets that hold thousands of them in a page."""

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from onefold.core.batches import batch_slices
from onefold.inputs.reader import Prepare, Reader
from onefold.types import Batch

MAX_SIDE = 96  # pixels of a thumbnail
SHEET_SIDE = 2048  # pixels of a sheet; phones decode no larger ones
MAX_PIXELS = 16_000_000  # in all sheets of a page's scored or familiar images; larger thumbnails are shrunk to fit
MAX_PNG_BYTES = 8_000_000  # larger sheets are stored as JPEG
BLOCK = 8  # pixels of a JPEG block; cells of whole blocks do not bleed into their neighbours


def thumbnails(
    reader: Reader, raw: Batch, side: int = MAX_SIDE
) -> UInt8[np.ndarray, "n h w"] | UInt8[np.ndarray, "n h w 3"]:
    """Return images as grey or coloured bytes, from the smallest to the largest training value.

    Args:
        reader: Reader of the detector, with the range of the training values.
        raw: Batch of images as the source yields it.
        side: Largest height and width; larger images are shrunk.
    """
    prepare = Prepare(reader)
    return np.concatenate([_to_bytes(reader, prepare(part), side) for part in batch_slices(raw, reader.batch_size)])


@torch.no_grad()
def _to_bytes(reader: Reader, x: Tensor, side: int) -> UInt8[np.ndarray, "n h w"] | UInt8[np.ndarray, "n h w 3"]:
    span = reader.high - reader.low
    x = ((x - reader.low) / (span if span > 0 else 1)).clamp(0, 1)
    x = x[:, :3] if x.shape[1] >= 3 else x[:, :1]
    if max(x.shape[2:]) > side:
        scale = side / max(x.shape[2:])
        size = [max(1, round(scale * n)) for n in x.shape[2:]]
        x = torch.nn.functional.interpolate(x, size, mode="bilinear", antialias=True)
    pixels = (255 * x).round().to(torch.uint8).numpy()
    return np.ascontiguousarray(np.moveaxis(pixels, 1, -1)) if x.shape[1] == 3 else pixels[:, 0]


def sprite_sheets(images: UInt8[np.ndarray, "n h w *rgb"] | None) -> dict[str, Any] | None:
    """Return a few large sheets of thumbnails as data URIs, with their layout; None without images."""
    if images is None or not len(images):
        return None
    images = _shrink(images)
    height, width = images.shape[1:3]
    cell_height, cell_width = (-(-side // BLOCK) * BLOCK for side in (height, width))
    across, down = (max(1, SHEET_SIDE // side) for side in (cell_width, cell_height))
    border = [(0, 0), (0, cell_height - height), (0, cell_width - width)] + [(0, 0)] * (images.ndim - 3)
    cells = np.pad(images, border, mode="edge")
    sheets = [_sheet(cells[start : start + across * down], across) for start in range(0, len(cells), across * down)]
    return {
        "width": width, "height": height, "cellWidth": cell_width, "cellHeight": cell_height,
        "across": across, "perSheet": across * down, "sheets": _encode_sheets(sheets),
    }  # fmt: skip


def picture_uris(images: UInt8[np.ndarray, "n h w *rgb"]) -> list[str]:
    """Return each thumbnail as a data URI."""
    return [_encode_sheets([image])[0] for image in images]


def _shrink(images: UInt8[np.ndarray, "n h w *rgb"]) -> np.ndarray:
    """Return the images, reduced by an integer factor if together they have more than MAX_PIXELS."""
    from PIL import Image

    factor = int(np.ceil(np.sqrt(len(images) * images.shape[1] * images.shape[2] / MAX_PIXELS)))
    if factor <= 1:
        return images
    return np.stack([np.asarray(Image.fromarray(image).reduce(factor)) for image in images])


def _sheet(cells: UInt8[np.ndarray, "n h w *rgb"], across: int) -> np.ndarray:
    """Return the cells side by side, row by row."""
    n, height, width, *rgb = cells.shape
    across = min(across, n)
    rows = -(-n // across)
    grid = np.zeros((rows * across, height, width, *rgb), np.uint8)
    grid[:n] = cells
    return grid.reshape(rows, across, height, width, *rgb).swapaxes(1, 2).reshape(rows * height, across * width, *rgb)


def _encode_sheets(sheets: Sequence[np.ndarray]) -> list[str]:
    """Return the sheets as data URIs: PNG, or JPEG where that would be too large."""
    pngs = [_encode(sheet, "PNG") for sheet in sheets]
    if sum(map(len, pngs)) <= MAX_PNG_BYTES:
        return ["data:image/png;base64," + base64.b64encode(file).decode() for file in pngs]
    jpegs = [_encode(sheet, "JPEG", quality=85, subsampling=0) for sheet in sheets]
    return ["data:image/jpeg;base64," + base64.b64encode(file).decode() for file in jpegs]


def _encode(sheet: np.ndarray, kind: str, **options: int) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(sheet).save(buffer, kind, **options)
    return buffer.getvalue()
