"""What was scored, as people see it: pictures, texts of a table's cells, and the page that shows them."""

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, UInt8
from torch import Tensor

import onefold
from onefold.core.batches import batch_slices, map_batch
from onefold.core.provenance import provenance
from onefold.detectors.base import Detector
from onefold.inputs import Column, Source, Table, select
from onefold.inputs.reader import Prepare, Reader
from onefold.report.score_page import PIXELS, ScorePage
from onefold.types import Batch, Scores

SHOWN = 10_000  # inputs on a page at most
CELLS = 500_000  # of a table on a page at most
SIDE = 96  # pixels of a picture at most
NEAREST = 6  # familiar pictures beside one that was scored
FAMILIAR = 20_000  # familiar scores that a page draws
REMARKABLE = 2.0  # standard deviations, or a category that one in a hundred has


class ShownInputs:
    """What the page shows of inputs: pictures with their nearest training samples, or the cells of a table.

    Args:
        detector: The detector that scored them; it says how raw batches are read.
        count: Number of inputs, or more; many pictures are drawn small.
    """

    def __init__(self, detector: Detector, count: int) -> None:
        self._reader, self._stored = detector.reader, detector.remembered
        self._side = min(SIDE, math.isqrt(PIXELS // max(1, count)))
        self._pictures: list[Any] = []
        self._nearest: list[Any] = []
        self._rows: list[Any] = []
        pictures = self._reader.has_pictures and self._stored is not None
        self._search = detector.neighbour_search(NEAREST) if pictures else None

    def add(self, raw: Batch) -> None:
        """Take in a raw batch."""
        if self._reader.has_pictures:
            self._pictures.append(pictures_of(self._reader, map_batch(Tensor.cpu, raw), self._side))
            if self._search is not None:
                self._nearest.append(self._search(raw))
        elif isinstance(self._reader.form, Table):
            assert isinstance(raw, Tensor)
            self._rows.append(raw.cpu().numpy())

    def fields(self) -> dict[str, Any]:
        """Return the fields of a ScorePage."""
        if self._pictures:
            fields: dict[str, Any] = {"pictures": np.concatenate(self._pictures)}
            if self._stored is not None:
                fields |= {
                    "familiar_pictures": pictures_of(self._reader, self._stored),
                    "nearest": np.concatenate(self._nearest),
                }
            return fields
        if self._rows and isinstance(self._reader.form, Table):
            codes = np.concatenate(self._rows)
            columns, values = texts_of(self._reader.form, codes)
            standout = self._reader.form.deviation(codes)
            return {"columns": columns, "values": values, "standout": np.where(standout >= REMARKABLE, standout, 0.0)}
        return {}


def most_shown(detector: Detector) -> int:
    """Return how many inputs a page shows at most."""
    table = detector.reader.form
    return min(SHOWN, max(100, CELLS // len(table.columns))) if isinstance(table, Table) else SHOWN


def page_of(
    detector: Detector,
    source: Source,
    names: list[str],
    scores: Scores,
    *,
    title: str,
    notes: list[str],
    inputs: ShownInputs | None = None,
) -> ScorePage:
    """Return the page of scored data: the inputs with the largest scores, and what is familiar beside them.

    Args:
        detector: The detector that scored the data.
        source: The data, read again for what the page shows if `inputs` is None.
        names: Name of each input.
        scores: Score of each input.
        title: Title of the page.
        notes: Lines under the title.
        inputs: All inputs as the page shows them, if they were collected while they were scored.
    """
    alarm, most = detector.alarm, most_shown(detector)
    order = np.sort(np.argsort(-scores, kind="stable")[:most])
    if len(order) < len(scores):
        notes = [*notes, f"the page shows the {len(order):,} strangest of {len(scores):,}"]
        inputs = None
    if inputs is None:
        inputs = ShownInputs(detector, len(order))
        for raw in detector.reader.batches(source if len(order) == len(scores) else select(source, order)):
            inputs.add(raw)
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
        **inputs.fields(),
    )


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
