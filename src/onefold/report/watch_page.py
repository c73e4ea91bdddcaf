"""Page of a watched stream: the evidence over time, the least familiar inputs, and the columns that shifted most."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from torch import Tensor

import onefold
from onefold.core.batches import concatenate, map_batch
from onefold.core.provenance import provenance
from onefold.detectors.base import Detector
from onefold.errors import visible
from onefold.inputs import Table
from onefold.inputs.reservoir import Reservoir, capacity_for
from onefold.inputs.samples import RESERVOIR_BYTES, RESERVOIR_SIZE
from onefold.inputs.tables import UNSEEN
from onefold.monitor import Evidence
from onefold.report.figures import (
    INK,
    OUR_COLOURS,
    RIVAL_COLOURS,
    PageFigure,
    Panel,
    PanelFigure,
    page_figure,
    style_axes,
)
from onefold.report.html import render_page
from onefold.report.thumbnails import picture_uris, thumbnails
from onefold.types import Batch, Scores

LISTED_INPUTS = 10
LISTED_COLUMNS = 50
STANDING_OUT = 3  # columns that are named for each listed input
MOST_POINTS = 4096  # of the figure; of a longer stream, every second one is dropped
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)  # quantiles that are compared
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
LOWEST = -10.0  # log10 of the betting score at the bottom of the figure


class Shift(NamedTuple):
    """The largest change of a column.

    Args:
        column: Name of the column.
        statistic: What changed, such as "median".
        familiar: Its value among stored familiar samples.
        stream: Its value in the stream.
        spreads: The difference in standard deviations of the familiar samples; infinite for a constant column.
    """

    column: str
    statistic: str
    familiar: str
    stream: str
    spreads: float


class ListedInput(NamedTuple):
    """One of the least familiar inputs.

    Args:
        name: Name of the file, or number of the input from 1.
        pvalue: p-value.
        score: Score.
        picture: Thumbnail as a data URI, or None.
        standing_out: Columns whose values are the most unusual.
    """

    name: str
    pvalue: float
    score: float
    picture: str | None
    standing_out: str


class WatchRecord:
    """What a page shows of a stream, in bounded memory.

    Args:
        detector: Calibrated detector.
        before: Evidence before the first input.
    """

    def __init__(self, detector: Detector, before: Evidence) -> None:
        self.detector, self.first = detector, before.inputs
        self.evidence = [before]
        self._newest_is_kept, self._step, self._batches = True, 1, 0
        self._least: list[tuple[float, int, Batch]] = []  # score, number of the input in this run, raw sample
        self._count = 0
        self._sample: Reservoir | None = None

    def add(self, raw: Batch, scores: Scores, evidence: Evidence) -> None:
        """Add a batch of raw inputs, their scores, and the evidence after them."""
        if not self._newest_is_kept:
            self.evidence.pop()
        self.evidence.append(evidence)  # the newest is always in the figure
        self._batches += 1
        self._newest_is_kept = self._batches % self._step == 0
        if len(self.evidence) > MOST_POINTS:
            self.evidence, self._step = [*self.evidence[:-1:2], evidence], 2 * self._step
        raw = map_batch(Tensor.cpu, raw)
        for i in np.argsort(-scores, kind="stable")[:LISTED_INPUTS].tolist():
            entry = (float(scores[i]), self._count + i, map_batch(lambda t, i=i: t[i : i + 1].clone(), raw))
            self._least.append(entry)
        self._least = sorted(self._least, key=lambda entry: (-entry[0], entry[1]))[:LISTED_INPUTS]
        self._count += len(scores)
        if _has_columns(raw):
            capacity = capacity_for(raw, RESERVOIR_SIZE, RESERVOIR_BYTES)
            self._sample = (self._sample or Reservoir(capacity, 0)).add(raw)

    def listed_inputs(self, names: Callable[[int], str]) -> list[ListedInput]:
        """Return the inputs with the smallest p-values; among equal p-values, those with the largest scores."""
        detector = self.detector
        assert detector.alarm is not None
        if not self._least:
            return []
        raw = concatenate([sample for _, _, sample in self._least])
        pictures: list[str | None] = [None] * len(self._least)
        if detector.reader.has_pictures:
            pictures = list(picture_uris(thumbnails(detector.reader, raw)))
        standing_out = self._standing_out(raw)
        pvalues = detector.alarm.pvalues(np.array([score for score, _, _ in self._least]))
        return [
            ListedInput(names(number), pvalue, score, picture, columns)
            for (score, number, _), pvalue, picture, columns in zip(
                self._least, pvalues.tolist(), pictures, standing_out, strict=True
            )
        ]

    def _standing_out(self, raw: Batch) -> list[str]:
        """Return for each sample the columns with the most unusual values."""
        if not _has_columns(raw):
            return [""] * len(self._least)
        assert isinstance(raw, Tensor)
        codes, table = raw.double().numpy(), self.detector.reader.form
        if isinstance(table, Table):
            deviation, columns = table.deviation(codes), [column.name for column in table.columns]
        else:
            familiar = self._familiar()
            columns = [str(i) for i in range(codes.shape[1])]
            if familiar is None:
                return [""] * len(codes)
            spread = familiar.std(axis=0)
            deviation = np.abs(codes - familiar.mean(axis=0)) / np.where(spread > 0, spread, 1)
        order = np.argsort(-deviation, axis=1, kind="stable")[:, :STANDING_OUT]
        return [
            ", ".join(f"{columns[j]} = {_cell(table, j, row[j])}" for j in order[i].tolist())
            for i, row in enumerate(codes)
        ]

    def _familiar(self) -> Float64[np.ndarray, "n c"] | None:
        samples = self.detector.state.reference.samples
        return samples.double().numpy() if isinstance(samples, Tensor) and _has_columns(samples) else None

    def shifts(self) -> list[Shift] | None:
        """Return the largest shift of each column, the largest first; None without columns or familiar samples."""
        familiar = self._familiar()
        if familiar is None or self._sample is None or not isinstance(self._sample.samples, Tensor):
            return None
        return column_shifts(self.detector.reader.form, familiar, self._sample.samples.double().numpy())


def _has_columns(raw: Batch) -> bool:
    return isinstance(raw, Tensor) and raw.ndim == 2


def _cell(table: Any, column: int, value: float) -> str:
    if np.isnan(value):
        return "missing"
    if isinstance(table, Table) and table.columns[column].kind == "category":
        return table.columns[column].categories[int(value)] if value >= 0 else "(another)"
    return f"{value:.4g}"


def column_shifts(form: Any, familiar: Float64[np.ndarray, "n c"], stream: Float64[np.ndarray, "m c"]) -> list[Shift]:
    """Return the largest change of each column between familiar samples and a stream, the largest first.

    Numbers are compared by five quantiles, categories and missing values by their shares. The unit is the standard
    deviation of the familiar values; of a share p, that is √(p (1 − p)), with at least half a sample in n.

    Args:
        form: Table of the columns, or another form for plain vectors.
        familiar: Codes or numbers of familiar samples.
        stream: Codes or numbers of the stream.

    Returns:
        One shift per column.
    """
    shifts = []
    for i in range(familiar.shape[1]):
        column = form.columns[i] if isinstance(form, Table) else None
        name = str(i) if column is None else column.name
        old, new = familiar[:, i], stream[:, i]
        candidates = [_share_shift(name, "share missing", np.isnan(old), np.isnan(new))]
        if column is not None and column.kind == "category":
            labels = [*map(repr, column.categories), "other values"]
            for code, label in zip([*range(len(column.categories)), UNSEEN], labels, strict=True):
                candidates.append(_share_shift(name, f"share of {label}", old == code, new == code))
        else:
            candidates += _quantile_shifts(name, old[~np.isnan(old)], new[~np.isnan(new)])
        shifts.append(max(candidates, key=lambda shift: abs(shift.spreads)))
    return sorted(shifts, key=lambda shift: -abs(shift.spreads))


def _share_shift(name: str, statistic: str, old: np.ndarray, new: np.ndarray) -> Shift:
    before, after = float(old.mean()), float(new.mean())
    bounded = min(max(before, 0.5 / len(old)), 1 - 0.5 / len(old))
    return Shift(name, statistic, f"{before:.1%}", f"{after:.1%}", (after - before) / (bounded * (1 - bounded)) ** 0.5)


def _quantile_shifts(name: str, old: np.ndarray, new: np.ndarray) -> list[Shift]:
    if not len(old) or not len(new):
        return []
    spread, shifts = float(old.std()), []
    for level, before, after in zip(LEVELS, np.quantile(old, LEVELS), np.quantile(new, LEVELS), strict=True):
        statistic = "median" if level == 0.5 else f"{level:.0%} quantile"
        difference = float(after - before)
        spreads = difference / spread if spread > 0 else float(np.copysign(np.inf, difference)) if difference else 0.0
        shifts.append(Shift(name, statistic, f"{before:.4g}", f"{after:.4g}", spreads))
    return shifts


def evidence_figure(evidence: Sequence[Evidence]) -> PageFigure:
    """Return the figure of the betting score and of the alarms over the inputs."""
    inputs = np.array([e.inputs for e in evidence])
    scores = np.array([e.log10_score for e in evidence])
    last = evidence[-1]
    ours, usual = OUR_COLOURS[0], RIVAL_COLOURS[0]

    def draw_score(ax: Axes) -> None:
        ax.axhline(last.log10_limit, color=INK, lw=1.2, ls=(0, (5, 2)))
        ax.plot(inputs, scores, color=ours, lw=1.6)
        if last.crossed_at is not None and last.crossed_at >= inputs[0]:
            ax.axvline(last.crossed_at, color=INK, lw=1, ls=(0, (1.2, 1.6)))
        ax.set_ylim(max(LOWEST, min(scores.min(), 0.0)) - 0.5, max(scores.max(), last.log10_limit) + 0.7)
        style_axes(ax, "Betting score", "inputs", "log₁₀")

    def draw_alarms(ax: Axes) -> None:
        ax.plot(inputs, [e.expected for e in evidence], color=usual, lw=1.4, ls=(0, (5, 1.6)))
        ax.plot(inputs, [e.alarms for e in evidence], color=ours, lw=1.6)
        style_axes(ax, "Alarms", "inputs")

    legend: list[Any] = [
        Line2D([], [], color=ours, lw=1.6, label="this stream"),
        Line2D([], [], color=usual, lw=1.4, ls=(0, (5, 1.6)), label="expected of familiar inputs"),
        Line2D([], [], color=INK, lw=1.2, ls=(0, (5, 2)), label="limit of the betting score"),
    ]
    if last.crossed_at is not None:
        legend.append(Line2D([], [], color=INK, lw=1, ls=(0, (1.2, 1.6)), label="where it was first reached"))
    state = "reached its limit" if last.crossed else "did not reach its limit"
    alt = f"Betting score after {last.inputs:,} inputs: 10 to the power {last.log10_score:.1f}; it {state}."
    alarms = f"Alarms: {last.alarms:,}, expected {last.expected:,.0f}."
    caption = (
        "The betting score starts at 1 and may be looked at after any input. It falls while the inputs are familiar. "
        f"Values below {format_power(LOWEST)} are not drawn."
    )
    panels = [Panel(alt, draw_score), Panel(alarms, draw_alarms)]
    return page_figure(PanelFigure("evidence", "", "Evidence over time", caption, panels, legend))


def render(record: WatchRecord, *, title: str, alpha: float, names: Callable[[int], str]) -> str:
    """Return the page as HTML.

    Args:
        record: What the page shows.
        title: Name of the data.
        alpha: Level of the monitor.
        names: Function from the number of an input in this run, from 0, to its name.
    """
    detector, last, shifts = record.detector, record.evidence[-1], record.shifts()
    return render_page(
        "watch_page.html.j2",
        ["report.css", "watch_page.css"],
        visible=visible,
        title=visible(title),
        method=type(detector).__name__,
        evidence=last,
        first=record.first,
        alpha=f"{alpha:g}",
        score=format_power(last.log10_score),
        limit=f"{2 / alpha:,.0f}",
        figure=evidence_figure(record.evidence),
        inputs=record.listed_inputs(names),
        pvalue=_format_pvalue,
        shifts=None if shifts is None else shifts[:LISTED_COLUMNS],
        columns=len(shifts or ()),
        spreads=_format_spreads,
        about={
            "onefold": str(onefold.__version__),
            "date": str(provenance(detector.device)["date"]),
            "data": visible(title),
        },
    )


def format_power(log10: float) -> str:
    """Return a positive number, from its logarithm: plainly from 0.001 to a million, else as a power of ten."""
    return (
        f"{10**log10:,.3g}"
        if -3 <= log10 < 3
        else f"{10**log10:,.0f}"
        if 3 <= log10 < 6
        else f"10{f'{log10:.0f}'.translate(SUPERSCRIPTS)}"
    )


def _format_pvalue(pvalue: float) -> str:
    return f"{pvalue:.2g}"


def _format_spreads(spreads: float) -> str:
    return "was constant" if np.isinf(spreads) else f"{spreads:+.2f}"
