"""Explanations: how much an input's score falls when one part of it is replaced by a typical value."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from onefold.core.arguments import check_integer
from onefold.core.batches import batch_slices, map_batch
from onefold.detectors.state import DetectorState
from onefold.errors import InputError, visible
from onefold.inputs.reader import Reader
from onefold.inputs.tables import Table
from onefold.types import ArrayLike, Batch, Scores

PATCHES = 8  # along each side of an image
LISTED = 10  # parts in the text of an explanation
SHADES = " ░▒▓█"

Kind: TypeAlias = Literal["patches", "columns", "values"]
Edges: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
Search: TypeAlias = Callable[[Batch], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Explanation:
    """Why one input is unfamiliar: how much its score falls when each part alone has a typical value.

    As text: the parts with the largest effects, and the nearest training samples.

    Args:
        kind: "patches" of an image, "columns" of a table, or "values" of a vector.
        score: Score of the input.
        parts: Name of each part.
        effects: How much the score falls when the part is replaced, [P]; negative if it rises.
        values: Text of each part; empty for patches.
        typical: Text of what replaces each part; empty for patches.
        edges: Rows and columns of pixels at which patches begin, and the height and the width; empty for other kinds.
        nearest: Rows of the detector's `remembered` that are nearest to the input; empty if no samples are stored.
        nearest_values: Text of each part in the nearest training sample; empty for patches and without samples.
    """

    kind: Kind
    score: float
    parts: tuple[str, ...]
    effects: Float64[np.ndarray, " p"]
    values: tuple[str, ...] = ()
    typical: tuple[str, ...] = ()
    edges: Edges = ((), ())
    nearest: Int64[np.ndarray, " k"]
    nearest_values: tuple[str, ...] = ()

    @property
    def order(self) -> Int64[np.ndarray, " p"]:
        """Parts in the order of their effects, the largest first."""
        return np.argsort(-self.effects, kind="stable")

    @property
    def heat_map(self) -> Float64[np.ndarray, "h w"]:
        """The effect of each pixel's patch, [H, W]; for images only."""
        if self.kind != "patches":
            raise InputError(f"explanation: {self.kind} have no heat map. Use effects.")
        rows, columns = map(np.diff, self.edges)
        return self.effects.reshape(len(rows), len(columns)).repeat(rows, 0).repeat(columns, 1)

    def __str__(self) -> str:
        one = f"one of {len(self.parts):,} {self.kind}"
        lines = [f"score {self.score:.4g}; with {one} replaced by a typical value, it falls by:"]
        lines += self._picture() if self.kind == "patches" else self._table()
        if len(self.nearest):
            lines.append("nearest training samples: " + ", ".join(map(str, self.nearest)))
        return "\n".join(lines)

    def _picture(self) -> list[str]:
        """Return the largest effects beside a coarse heat map."""
        rows, columns = (len(edges) - 1 for edges in self.edges)
        shades = np.clip(self.effects / max(self.effects.max(), 1e-300), 0, 1) * (len(SHADES) - 1)
        cells = [2 * SHADES[shade] for shade in shades.round().astype(int)]
        drawn = ["".join(cells[i * columns : (i + 1) * columns]) for i in range(rows)]
        listed = [f"{self.effects[i]:+10.3g}  {self.parts[i]}" for i in self.order[:rows]]
        listed += [""] * (rows - len(listed))
        return [f"|{left}| {right}".rstrip() for left, right in zip(drawn, listed, strict=True)]

    def _table(self) -> list[str]:
        header = (
            "fall",
            "column" if self.kind == "columns" else "entry",
            "value",
            "typical",
            *["nearest"] * bool(self.nearest_values),
        )
        rows = [
            (f"{self.effects[i]:+.3g}", self.parts[i], self.values[i], self.typical[i], *self.nearest_values[i:][:1])
            for i in self.order[:LISTED]
        ]
        cells = [[_shorten(cell) for cell in row] for row in (header, *rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        texts = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
        lines = ["  ".join(row).rstrip() for row in texts]
        return [*lines, *[f"and {len(self.parts) - LISTED:,} more"] * (len(self.parts) > LISTED)]


def _shorten(text: str, most: int = 32) -> str:
    text = visible(text)
    return text if len(text) <= most else text[: most - 1] + "…"


@runtime_checkable
class Parts(Protocol):
    """The parts of one kind of inputs, and what replaces them. Another kind of inputs needs one such class."""

    kind: Kind
    edges: Edges

    def names(self, sample: Batch) -> tuple[str, ...]:
        """Return the names of the parts of a raw sample."""
        ...

    def texts(self, sample: Batch) -> tuple[str, ...]:
        """Return the text of each part of a raw sample; empty if parts have no text."""
        ...

    def typical_texts(self) -> tuple[str, ...]:
        """Return the text of what replaces each part; empty if parts have no text."""
        ...

    def replace(self, sample: Batch, parts: range) -> Batch:
        """Return one copy of a raw sample for each of these parts, in which only that part is replaced."""
        ...


class Patches:
    """Patches of images, each replaced by the mean of the stored training images."""

    kind: Kind = "patches"

    def __init__(self, reader: Reader, samples: Tensor, patches: int) -> None:
        grey, last = samples.ndim == 3, reader.channels_last
        self.before, shape = (0, samples.shape[1:3]) if grey or last else (1, samples.shape[2:])
        self.edges: Edges = (_edges(shape[0], patches), _edges(shape[1], patches))
        mean = samples.double().mean(0)
        self.mean = (mean if samples.is_floating_point() else mean.round()).to(samples.dtype)
        self.boxes = [(row, column) for row in pairwise(self.edges[0]) for column in pairwise(self.edges[1])]

    def names(self, sample: Batch) -> tuple[str, ...]:
        del sample
        return tuple(f"{_span('row', *row)}, {_span('column', *column)}" for row, column in self.boxes)

    def texts(self, sample: Batch) -> tuple[str, ...]:
        del sample
        return ()

    def typical_texts(self) -> tuple[str, ...]:
        return ()

    def replace(self, sample: Batch, parts: range) -> Batch:
        assert isinstance(sample, Tensor)
        copies = sample.repeat(len(parts), *[1] * (sample.ndim - 1))
        mean = self.mean.to(sample.device)
        for copy, part in zip(copies, parts, strict=True):
            box = (slice(None),) * self.before + tuple(slice(*edges) for edges in self.boxes[part])
            copy[box] = mean[box]
        return copies


class Values:
    """Columns of a table or entries of vectors, each replaced by its median or its most frequent category."""

    edges: Edges = ((), ())

    def __init__(self, table: Table | None, typical: Tensor) -> None:
        self.table, self.typical = table, typical
        self.kind: Kind = "values" if table is None else "columns"

    def names(self, sample: Batch) -> tuple[str, ...]:
        del sample
        if self.table is not None:
            return tuple(column.name for column in self.table.columns)
        return tuple(f"x[{i}]" for i in range(len(self.typical)))

    def texts(self, sample: Batch) -> tuple[str, ...]:
        assert isinstance(sample, Tensor)
        numbers = sample.reshape(-1).tolist()
        if self.table is None:
            return tuple(f"{number:.6g}" for number in numbers)
        return tuple(column.text(number) for column, number in zip(self.table.columns, numbers, strict=True))

    def typical_texts(self) -> tuple[str, ...]:
        return self.texts(self.typical)

    def replace(self, sample: Batch, parts: range) -> Batch:
        assert isinstance(sample, Tensor)
        copies, index = sample.repeat(len(parts), 1), torch.tensor(parts, device=sample.device)
        copies[torch.arange(len(parts), device=sample.device), index] = self.typical.to(sample.device)[index]
        return copies


def explain(state: DetectorState, search: Search | None, x: ArrayLike, patches: int = PATCHES) -> list[Explanation]:
    """Return why each input is unfamiliar; see `Detector.explain`.

    Args:
        state: State of the detector.
        search: Function from raw samples to their nearest stored samples; None if none are stored.
        x: Inputs.
        patches: Number of patches along each side of an image.
    """
    parts = parts_of(state.reader, state.reservoir.samples, check_integer(patches, "patches"))
    explanations: list[Explanation] = []
    for raw in state.batches(x):
        scores = state.evaluate(raw)
        rows = np.zeros((len(scores), 0), np.int64) if search is None else search(raw)
        samples = zip(batch_slices(raw, 1), scores, rows, strict=True)
        explanations += [_explain_sample(state, parts, *values) for values in samples]
    return explanations


def _explain_sample(
    state: DetectorState, parts: Parts, sample: Batch, score: float, nearest: NDArray[np.int64]
) -> Explanation:
    names = parts.names(sample)
    stored = state.reservoir.samples
    return Explanation(
        kind=parts.kind,
        score=float(score),
        parts=names,
        effects=score - _scores_without(state, parts, sample, len(names)),
        values=parts.texts(sample),
        typical=parts.typical_texts(),
        edges=parts.edges,
        nearest=nearest,
        nearest_values=()
        if stored is None or not len(nearest)
        else parts.texts(map_batch(lambda t: t[nearest[:1]], stored)),
    )


def _scores_without(state: DetectorState, parts: Parts, sample: Batch, count: int) -> Scores:
    """Return the scores of a sample with each of its parts replaced."""
    starts = range(0, count, state.batch_size)
    blocks = [range(start, min(start + state.batch_size, count)) for start in starts]
    return np.concatenate([state.evaluate(parts.replace(sample, block)) for block in blocks])


def parts_of(reader: Reader, samples: Batch | None, patches: int) -> Parts:
    """Return the parts of the inputs that a reader reads, with typical values from stored training samples.

    Raises:
        InputError: Inputs that have no such parts, or no stored samples where they are needed.
    """
    shape, dtype = reader.shapes.get("x", ()), reader.dtypes.get("x", "")
    if reader.kind == "named" or dtype in ("int64", "bool") or not 1 <= len(shape) <= 3:
        raise InputError(
            "explain() supports images, tables and vectors, and this detector was fitted on other inputs "
            f"({reader.kind}, {', '.join(f'{name} {dtype}' for name, dtype in reader.dtypes.items())})"
        )
    if isinstance(reader.form, Table):
        assert samples is None or isinstance(samples, Tensor)
        return Values(reader.form, _typical_row(reader.form, samples))
    if samples is None:
        raise InputError(
            "no training samples in this detector (saved with samples=False). Save it with samples=True to use "
            "explain()."
        )
    assert isinstance(samples, Tensor)
    return Values(None, samples.median(0).values) if len(shape) == 1 else Patches(reader, samples, patches)


def _typical_row(table: Table, samples: Tensor | None) -> Tensor:
    """Return each number's median, or its mean if no samples are stored, and the most frequent categories."""
    typical = [0.0 if column.kind == "category" else column.centre for column in table.columns]
    if samples is None:
        return torch.tensor(typical, dtype=torch.float64)
    medians = samples.nanmedian(0).values.tolist()
    numbers = [column.kind == "number" and not math.isnan(m) for column, m in zip(table.columns, medians, strict=True)]
    values: list[Any] = [m if number else t for number, m, t in zip(numbers, medians, typical, strict=True)]
    return torch.tensor(values, dtype=samples.dtype)


def _span(noun: str, start: int, end: int) -> str:
    return f"{noun} {start}" if end - start == 1 else f"{noun}s {start}–{end - 1}"


def _edges(length: int, patches: int) -> tuple[int, ...]:
    """Return where patches of about equal size begin, and the length."""
    return tuple(np.linspace(0, length, min(length, patches) + 1).round().astype(int).tolist())
