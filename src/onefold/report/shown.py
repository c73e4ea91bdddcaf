"""What was scored, as people see it: pictures, texts of a table's cells, and the page that shows them."""

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, UInt8
from torch import Tensor

import onefold
from onefold.detector import Detector
from onefold.inputs import batch_slices
from onefold.provenance import provenance
from onefold.reader import Prepare, Reader
from onefold.report.score_page import PIXELS, ScorePage
from onefold.sources import Column, Source, Table, picked
from onefold.types import Batch, Scores

SHOWN = 10_000  # inputs on a page at most
CELLS = 500_000  # of a table on a page at most
SIDE = 96  # pixels of a picture at most
NEAREST = 6  # familiar pictures beside one that was scored
FAMILIAR = 20_000  # familiar scores that a page draws
REMARKABLE = 2.0  # standard deviations, or a category that one in a hundred has


def page_of(
    detector: Detector, source: Source, names: list[str], scores: Scores, *, title: str, notes: list[str]
) -> ScorePage:
    """What the page shows: the strangest inputs, what they look like, and what is familiar beside them."""
    alarm, table = detector.alarm, detector.reader.form
    most = min(SHOWN, max(100, CELLS // len(table.columns))) if isinstance(table, Table) else SHOWN
    order = np.sort(np.argsort(-scores, kind="stable")[:most])
    if len(order) < len(scores):
        notes = [*notes, f"the page shows the {len(order):,} strangest of {len(scores):,}"]
    rows = source if len(order) == len(scores) else picked(source, order)
    return ScorePage(
        title=title,
        method=type(detector).__name__,
        familiar=np.zeros(0) if alarm is None else _thinned(alarm.scores),
        scores=scores[order],
        names=[names[i] for i in order],
        pvalues=None if alarm is None else alarm.pvalues(scores[order]),
        threshold=None if alarm is None else detector.threshold,
        fpr=None if alarm is None else alarm.fpr,
        notes=notes,
        about={
            "onefold": str(onefold.__version__),
            "date": str(provenance(detector.device)["date"]),
            "data": title,
        },
        **_looks(detector, rows, len(order)),
    )


def _looks(detector: Detector, rows: Source, count: int) -> dict[str, Any]:
    """Pictures of images with their nearest familiar ones, or the cells of a table."""
    reader, remembered = detector.reader, detector.remembered
    if reader.has_pictures:
        side = min(SIDE, math.isqrt(PIXELS // count))
        looks: dict[str, Any] = {
            "pictures": np.concatenate([pictures_of(reader, raw, side) for raw in reader.batches(rows)])
        }
        if remembered is not None:
            looks["familiar_pictures"] = pictures_of(reader, remembered)
            looks["nearest"] = detector.neighbours(rows, NEAREST)
        return looks
    if isinstance(reader.form, Table):
        codes = np.concatenate([np.asarray(raw) for raw in reader.batches(rows)])
        columns, values = texts_of(reader.form, codes)
        standout = reader.form.standout(codes)
        return {"columns": columns, "values": values, "standout": np.where(standout >= REMARKABLE, standout, 0.0)}
    return {}


def _thinned(ordered: Scores) -> Scores:
    """Evenly spaced quantiles of many scores: a histogram of them looks the same."""
    if len(ordered) <= FAMILIAR:
        return ordered
    return ordered[np.linspace(0, len(ordered) - 1, FAMILIAR).round().astype(np.int64)]


def pictures_of(
    reader: Reader, raw: Batch, side: int = SIDE
) -> UInt8[np.ndarray, "n h w"] | UInt8[np.ndarray, "n h w 3"]:
    """Images as grey [N, H, W] or coloured [N, H, W, 3] bytes, from the darkest to the brightest train value."""
    prepare = Prepare(reader)
    return np.concatenate([_pixels(reader, prepare(part), side) for part in batch_slices(raw, reader.batch_size)])


@torch.no_grad()
def _pixels(reader: Reader, x: Tensor, side: int) -> UInt8[np.ndarray, "n h w"] | UInt8[np.ndarray, "n h w 3"]:
    span = reader.high - reader.low
    x = ((x - reader.low) / (span if span > 0 else 1)).clamp(0, 1)
    x = x[:, :3] if x.shape[1] >= 3 else x[:, :1]
    if max(x.shape[2:]) > side:
        scale = side / max(x.shape[2:])
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
