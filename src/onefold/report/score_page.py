"""Page of scored inputs: one self-contained HTML file in which untrusted text cannot run."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Float64, Int, UInt8
from markupsafe import Markup
from torch import Tensor

import onefold
from onefold.core.batches import map_batch
from onefold.core.provenance import provenance
from onefold.detectors.base import Detector
from onefold.detectors.explain import Explanation
from onefold.errors import InputError, visible
from onefold.inputs import Source, Table, Text, select
from onefold.inputs.text import decode_texts
from onefold.kernels import ModelFeatures
from onefold.report.html import render_page
from onefold.report.thumbnails import MAX_PIXELS, MAX_SIDE, sprite_sheets, thumbnails
from onefold.types import Batch, Scores

MAX_INPUTS = 10_000  # on a page
MAX_CELLS = 500_000  # of a table on a page
MAX_HISTOGRAM = 20_000  # familiar scores on a page
MAX_COLUMNS = 24  # of a closed table row; an open row shows all columns
NEAREST = 6  # training images shown beside a scored one
MIN_DEVIATION = 2.0  # standard deviations of a highlighted cell, or a category with a share of 1 %
LOG_DECADES = 1.5  # scores that span more decades have a logarithmic axis
MAX_DECADES = 9.0  # of a logarithmic axis; smaller scores are drawn at its left end


@dataclass(frozen=True, kw_only=True)
class ScorePage:
    """Content of a page. An input is flagged when its score is greater than the threshold.

    Args:
        title: Title of the page.
        method: Name of the detector's class.
        familiar: Scores of the held-out familiar data.
        scores: Score of each input; larger is less familiar.
        names: Name of each input.
        pvalues: p-value of each input, if the detector is calibrated.
        threshold: Calibrated threshold.
        fpr: False-positive rate that the threshold was calibrated for.
        pictures: Thumbnail of each input.
        familiar_pictures: Thumbnails of training images.
        nearest: Indices of the training images nearest to each input.
        columns: Names of the columns of a table.
        values: Text of each cell.
        standout: Deviation of each cell from the training data; larger stands out more.
        explanations: Explanations of some inputs, by their index on the page.
        notes: Lines below the title.
        about: Facts at the end of the page.
    """

    title: str
    method: str
    familiar: Float[np.ndarray, " m"]
    scores: Float[np.ndarray, " n"]
    names: Sequence[str]
    pvalues: Float[np.ndarray, " n"] | None = None
    threshold: float | None = None
    fpr: float | None = None
    pictures: UInt8[np.ndarray, "n h w"] | UInt8[np.ndarray, "n h w 3"] | None = None
    familiar_pictures: UInt8[np.ndarray, "k fh fw"] | UInt8[np.ndarray, "k fh fw 3"] | None = None
    nearest: Int[np.ndarray, "n j"] | None = None
    columns: Sequence[str] | None = None
    values: Sequence[Sequence[str]] | None = None
    standout: Float[np.ndarray, "n c"] | None = None
    explanations: Mapping[int, Explanation] = field(default_factory=dict)
    notes: Sequence[str] = ()
    about: Mapping[str, str]


class PageInputs:
    """Inputs as a page shows them: thumbnails with the nearest training images, or the cells of a table.

    Args:
        detector: Detector that scores the inputs; its reader reads raw batches.
        count: Upper bound of the number of inputs; thumbnails of many inputs are smaller.
    """

    def __init__(self, detector: Detector, count: int) -> None:
        self._reader, self._training_data = detector.reader, detector.remembered
        self._side = min(MAX_SIDE, math.isqrt(MAX_PIXELS // max(1, count)))
        self._pictures: list[Any] = []
        self._nearest: list[Any] = []
        self._rows: list[Any] = []
        self._texts: list[str] = []
        has_training_images = self._reader.has_pictures and self._training_data is not None
        self._search = detector.neighbour_search(NEAREST) if has_training_images else None

    def add(self, raw: Batch) -> None:
        """Add a raw batch."""
        if self._reader.has_pictures:
            self._pictures.append(thumbnails(self._reader, map_batch(Tensor.cpu, raw), self._side))
            if self._search is not None:
                self._nearest.append(self._search(raw))
        elif isinstance(self._reader.form, Text):
            assert isinstance(raw, Tensor)
            self._texts += decode_texts(raw)
        elif isinstance(self._reader.form, Table):
            assert isinstance(raw, Tensor)
            self._rows.append(raw.cpu().numpy())

    def fields(self) -> dict[str, Any]:
        """Return the fields of a ScorePage that describe the inputs."""
        if self._pictures:
            fields: dict[str, Any] = {"pictures": np.concatenate(self._pictures)}
            if self._training_data is not None:
                fields |= {
                    "familiar_pictures": thumbnails(self._reader, self._training_data),
                    "nearest": np.concatenate(self._nearest),
                }
            return fields
        if self._texts and isinstance(self._reader.form, Text):
            values = [[text] for text in self._texts]
            return {
                "columns": [self._reader.form.column or "text"],
                "values": values,
                "standout": np.zeros((len(values), 1)),
            }
        if self._rows and isinstance(self._reader.form, Table):
            codes = np.concatenate(self._rows)
            columns, values = cell_texts(self._reader.form, codes)
            deviation = self._reader.form.deviation(codes)
            standout = np.where(deviation >= MIN_DEVIATION, deviation, 0.0)
            return {"columns": columns, "values": values, "standout": standout}
        return {}


def max_inputs(detector: Detector) -> int:
    """Return the largest number of inputs on a page."""
    table = detector.reader.form
    return min(MAX_INPUTS, max(100, MAX_CELLS // len(table.columns))) if isinstance(table, Table) else MAX_INPUTS


def score_page(
    detector: Detector,
    source: Source,
    names: list[str],
    scores: Scores,
    *,
    title: str,
    notes: list[str],
    inputs: PageInputs | None = None,
    explanations: Mapping[int, Explanation] | None = None,
) -> ScorePage:
    """Return the page of scored data: the inputs with the largest scores and the familiar scores.

    Args:
        detector: Detector that scored the data.
        source: Scored data; read again if `inputs` is None.
        names: Name of each input.
        scores: Score of each input.
        title: Title of the page.
        notes: Lines below the title.
        inputs: All inputs, if they were collected while they were scored.
        explanations: Explanations of some inputs, by their position in the data.
    """
    alarm, limit, shown = detector.alarm, max_inputs(detector), explanations or {}
    order = np.sort(np.argsort(-scores, kind="stable")[:limit])
    if len(order) < len(scores):
        notes = [*notes, f"the page shows the {len(order):,} least familiar of {len(scores):,}"]
        inputs = None
    if inputs is None:
        inputs = PageInputs(detector, len(order))
        for raw in detector.reader.batches(source if len(order) == len(scores) else select(source, order)):
            inputs.add(raw)
    return ScorePage(
        title=title,
        method=type(detector).__name__,
        familiar=np.zeros(0) if alarm is None else _thin_out(alarm.scores),
        scores=scores[order],
        names=[names[i] for i in order],
        pvalues=None if alarm is None else alarm.pvalues(scores[order]),
        threshold=None if alarm is None else detector.threshold,
        fpr=None if alarm is None else alarm.fpr,
        explanations={i: shown[position] for i, position in enumerate(order.tolist()) if position in shown},
        notes=notes,
        about={
            "onefold": str(onefold.__version__),
            "date": str(provenance(detector.device)["date"]),
            "data": title,
            **({"features": kernel.description} if isinstance(kernel := detector.kernel, ModelFeatures) else {}),
        },
        **inputs.fields(),
    )


def _thin_out(ordered: Scores) -> Scores:
    """Return evenly spaced quantiles of sorted scores, which have the same histogram."""
    if len(ordered) <= MAX_HISTOGRAM:
        return ordered
    return ordered[np.linspace(0, len(ordered) - 1, MAX_HISTOGRAM).round().astype(np.int64)]


def cell_texts(table: Table, codes: Float64[np.ndarray, "n c"]) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns and the text of each cell, row by row."""
    columns = [[column.text(code) for code in codes[:, i].tolist()] for i, column in enumerate(table.columns)]
    return [column.name for column in table.columns], [list(row) for row in zip(*columns, strict=True)]


def render(page: ScorePage) -> str:
    """Return the page as HTML."""
    _check_lengths(page)
    return render_page(
        "score_page.html.j2",
        ["score_page.css"],
        ["score_page.js", "score_page_list.js"],
        title=visible(page.title),
        method=visible(page.method),
        notes=[visible(note) for note in page.notes],
        about={visible(key): visible(value) for key, value in page.about.items()},
        count=len(page.scores),
        calibrated=page.threshold is not None and not np.isnan(page.threshold),
        data=Markup(_inert_json(_script_data(page))),
    )


def _check_lengths(page: ScorePage) -> None:
    n = len(page.scores)
    parts = {"names": page.names, "p-values": page.pvalues, "pictures": page.pictures, "nearest": page.nearest}
    parts |= {"rows": page.values, "standout": page.standout}
    for what, part in parts.items():
        if part is not None and len(part) != n:
            raise InputError(f"page: {n} scores but {len(part)} {what}. Pass one for each score.")
    if (page.columns is None) != (page.values is None):
        raise InputError("page: columns without values, or values without columns. Pass both or neither.")
    width = len(page.columns or ())
    if any(len(row) != width for row in page.values or ()):
        raise InputError(f"page: {width} columns, but a row has another number of values. Pass one for each column.")
    if page.standout is not None and page.standout.shape[1] != width:
        raise InputError(f"page: {width} columns, but standout for {page.standout.shape[1]}. Pass one for each column.")
    if page.nearest is not None and page.nearest.size:
        count = 0 if page.familiar_pictures is None else len(page.familiar_pictures)
        if page.nearest.min() < 0 or page.nearest.max() >= count:
            raise InputError(f"page: nearest has indices outside the {count} familiar pictures. Count from 0.")
    if outside := [i for i in page.explanations if not 0 <= i < n]:
        raise InputError(f"page: explanation of input {outside[0]}, but there are {n} inputs. Count from 0.")


def _script_data(page: ScorePage) -> dict[str, Any]:
    """Return the data of the page's script. `originals` are the names that differ from the displayed ones."""
    names = [visible(name) for name in page.names]
    return {
        "axis": score_axis(np.concatenate([page.familiar, page.scores]), page.threshold),
        "familiar": _json_numbers(page.familiar),
        "scores": _json_numbers(page.scores),
        "pvalues": None if page.pvalues is None else _json_numbers(page.pvalues),
        "threshold": _json_number(page.threshold),
        "fpr": _json_number(page.fpr),
        "names": names,
        "originals": {i: name for i, name in enumerate(page.names) if name != names[i]},
        "pictures": sprite_sheets(page.pictures),
        "familiarPictures": sprite_sheets(page.familiar_pictures),
        "nearest": None if page.nearest is None else page.nearest.tolist(),
        "columns": None if page.columns is None else [visible(name) for name in page.columns],
        "shown": _visible_columns(page),
        "values": None if page.values is None else [[visible(value) for value in row] for row in page.values],
        "standout": None if page.standout is None else [_json_numbers(row, digits=4) for row in page.standout],
        "explanations": {i: _explanation_data(explanation) for i, explanation in page.explanations.items()},
    }


def _explanation_data(explanation: Explanation) -> dict[str, Any]:
    """Return all effects and edges of patches, or the columns with the largest effects, with their texts."""
    patches = explanation.kind == "patches"
    shown = np.arange(len(explanation.parts)) if patches else explanation.order[:MAX_COLUMNS]
    texts = {"values": explanation.values, "typical": explanation.typical, "nearest": explanation.nearest_values}
    return {
        "kind": explanation.kind,
        "count": len(explanation.parts),
        "edges": explanation.edges,
        "effects": _json_numbers(explanation.effects[shown], digits=4),
        "parts": [visible(explanation.parts[i]) for i in shown],
        **{name: [visible(text[i]) for i in shown] if text else None for name, text in texts.items()},
    }


def _json_numbers(values: Float[np.ndarray, " n"], digits: int = 17) -> list[float | str | None]:
    return [_json_number(value, digits) for value in values.tolist()]


def _json_number(value: float | None, digits: int = 17) -> float | str | None:
    """Return a number for JSON: null for NaN, and infinities as text that JavaScript's Number() parses."""
    if value is None or np.isnan(value):
        return None
    if np.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(f"{value:.{digits}g}")


def score_axis(values: Float[np.ndarray, " n"], threshold: float | None = None) -> dict[str, Any]:
    """Return the axis of a histogram of scores and of its slider, with a margin beyond the values.

    The axis is logarithmic (`log`; `lo` and `hi` are exponents) if no score is negative and the scores span more than
    LOG_DECADES.
    """
    everything = np.append(values, [] if threshold is None else [threshold]).astype(np.float64)
    finite = everything[np.isfinite(everything)]
    if not len(finite):
        return {"log": False, "lo": 0.0, "hi": 1.0}
    positive = finite[finite > 0]
    if finite.min() >= 0 and len(positive) and np.ptp(np.log10(np.quantile(positive, [0.01, 1]))) > LOG_DECADES:
        hi = np.log10(positive.max())
        lo = max(np.log10(positive.min()), hi - MAX_DECADES)
        margin = 0.02 * (hi - lo)
        return {"log": True, "lo": float(lo - margin), "hi": float(min(hi + margin, 308.0))}
    lo, hi = float(finite.min()), float(finite.max())
    margin = 0.02 * (hi - lo) or max(abs(hi), 1.0) * 0.02
    return {"log": False, "lo": lo - margin, "hi": hi + margin}


def _visible_columns(page: ScorePage) -> list[int]:
    """Return the columns of closed table rows: those that stand out most over all rows, in table order."""
    if page.columns is None or len(page.columns) <= MAX_COLUMNS or page.standout is None:
        return list(range(min(MAX_COLUMNS, len(page.columns or ()))))
    weight = np.nan_to_num(page.standout.astype(np.float64), posinf=0, neginf=0).mean(0)
    return sorted(np.argsort(-weight, kind="stable")[:MAX_COLUMNS].tolist())


def _inert_json(content: Mapping[str, Any]) -> str:
    """Return ASCII JSON in which no HTML tag can begin or end."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
