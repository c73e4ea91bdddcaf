"""Samples as people see them: pictures, and texts of a table's cells."""

import numpy as np
import torch
from jaxtyping import Float64, UInt8
from torch import Tensor

from onefold.reader import Prepare, Reader
from onefold.sources import Column, Table
from onefold.types import Batch

SIDE = 96  # pixels of a picture at most


@torch.no_grad()
def pictures_of(reader: Reader, raw: Batch) -> UInt8[np.ndarray, "n h w"] | UInt8[np.ndarray, "n h w 3"]:
    """Images as grey [N, H, W] or coloured [N, H, W, 3] bytes, from the darkest to the brightest train value."""
    x = Prepare(reader)(raw)
    assert isinstance(x, Tensor)
    span = reader.high - reader.low
    x = ((x - reader.low) / (span if span > 0 else 1)).clamp(0, 1)
    x = x[:, :3] if x.shape[1] >= 3 else x[:, :1]
    if max(x.shape[2:]) > SIDE:
        scale = SIDE / max(x.shape[2:])
        size = [max(1, round(scale * n)) for n in x.shape[2:]]
        x = torch.nn.functional.interpolate(x, size, mode="bilinear", antialias=True)
    pixels = (255 * x).round().to(torch.uint8).numpy()
    return np.ascontiguousarray(np.moveaxis(pixels, 1, -1)) if x.shape[1] == 3 else pixels[:, 0]


def texts_of(table: Table, codes: Float64[np.ndarray, "n c"]) -> tuple[list[str], list[list[str]]]:
    """The names of the columns, and every row's cells as texts."""
    columns = [[_text(column, code) for code in codes[:, i]] for i, column in enumerate(table.columns)]
    return [column.name for column in table.columns], [list(row) for row in zip(*columns, strict=True)]


def _text(column: Column, code: float) -> str:
    if np.isnan(code):
        return "missing"
    if column.kind == "number":
        return f"{code:.6g}"
    return column.categories[int(code)] if code >= 0 else "(another)"
