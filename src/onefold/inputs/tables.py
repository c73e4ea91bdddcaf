"""What a table's columns hold, learned once; later rows are turned into numbers by it, or refused."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float64

from onefold.errors import InputError, warn
from onefold.inputs.cells import Chunk, NotANumberError, to_numbers, to_text, to_texts
from onefold.inputs.column_stats import MOST_CATEGORIES, Moments, Tally
from onefold.inputs.images import SUFFIXES

UNSEEN = -1.0
FARTHEST = 10.0
MOST_COLUMNS = 100_000


@dataclass(frozen=True)
class Column:
    """One column: numbers about a centre, or categories, most frequent first, with their shares of the train values.

    `missing` says that some train value was missing. Only 64 categories are told apart; where there were more, the
    frequencies add up to less than 1.
    """

    name: str
    kind: Literal["number", "category"]
    categories: tuple[str, ...] = ()
    centre: float = 0.0
    scale: float = 1.0
    missing: bool = False
    frequencies: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.centre) and math.isfinite(self.scale) and self.scale > 0):
            raise InputError(f"column {self.name!r} has values too large to be scaled: divide them by a constant")
        if len(self.categories) != len(self.frequencies) or len(set(self.categories)) != len(self.categories):
            raise InputError(f"column {self.name!r} needs different categories, each with its frequency")
        if not all(0 < share <= 1 for share in self.frequencies) or math.fsum(self.frequencies) > 1 + 1e-9:
            raise InputError(f"column {self.name!r} has frequencies that are not shares of a whole")
        if not (1 if self.kind == "category" else 0) <= len(self.categories) <= MOST_CATEGORIES:
            raise InputError(f"column {self.name!r} has {len(self.categories)} categories")
        if self.kind == "number" and self.categories:
            raise InputError(f"column {self.name!r} has numbers and categories")

    @property
    def unlisted(self) -> float:
        """The share of train values whose category is not among those told apart."""
        rest = 1 - math.fsum(self.frequencies)
        return rest if self.kind == "category" and rest > 1e-9 else 0.0


@dataclass(frozen=True)
class Table:
    """The columns that samples are made of, in order, and the names of those that were left out."""

    columns: tuple[Column, ...]
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [*(column.name for column in self.columns), *self.ignored]
        if not self.columns:
            raise InputError("a table needs at least one column of numbers or categories")
        if len(names) > MOST_COLUMNS:
            raise InputError(f"the table has {len(names):,} columns: at most {MOST_COLUMNS:,} are understood")
        if len(set(names)) != len(names):
            raise InputError("the table has two columns of the same name")

    @classmethod
    def learn(cls, chunks: Iterable[Chunk], name: str = "the table") -> "Table":
        """Learn the columns from chunks of rows, which are gone through once or twice. `name` is for error messages.

        Memory is bounded by one chunk, so hand in something that can be iterated again, as a list or a source; the
        chunks of a mere iterator are all kept.
        """
        if isinstance(chunks, Iterator):
            chunks = list(chunks)
        moments: dict[str, Moments] = {}
        rows = 0
        for chunk in chunks:
            rows += max(map(len, chunk.values()), default=0)
            moments = moments or {name: Moments() for name in chunk}
            _check_names(chunk, set(moments), optional=set())
            for column, values in chunk.items():
                moments[column].add(values)
        if not rows:
            raise InputError(f"{name}: has no rows")
        tallies = {column: Tally() for column, moment in moments.items() if not moment.is_number}
        for chunk in chunks if tallies else ():
            for column, tally in tallies.items():
                _tally(tally, column, chunk[column])
        return cls._assemble(moments, tallies, name)

    @classmethod
    def _assemble(cls, moments: dict[str, Moments], tallies: dict[str, Tally], table: str) -> "Table":
        columns: list[Column] = []
        left_out: dict[str, str] = {}
        for name, moment in moments.items():
            tally = tallies.get(name)
            if tally is None and moment.infinite:
                raise InputError(f"column {name!r} has infinite values: replace or drop them first")
            if not (tally or moment).count:
                left_out[name] = "no values"
            elif tally is None:
                columns.append(Column(name, "number", (), moment.centre, moment.scale, moment.missing))
            elif tally.is_identifier:
                left_out[name] = "nearly every value is different"
            else:
                columns.append(_category_column(name, tally))
        about = "; ".join(f"{name!r} ({why})" for name, why in left_out.items())
        if not columns:
            raise InputError(f"{table}: has no column that can be used: {about}")
        if left_out:
            warn(f"{table}: columns left out: {about}")
        if paths := [column.name for column in columns if _names_images(column)]:
            warn(
                f"{table}: column {_listed(paths)}: paths of images are learned as categories, and the images are not "
                "read. Pass the folder of the images, or drop the column."
            )
        return cls(tuple(columns), tuple(left_out))

    def codes(self, chunk: Chunk, first_row: int = 1) -> Float64[np.ndarray, "n c"]:
        """Rows as numbers: numbers as they are, categories by their place, −1 for one never seen, NaN for missing.

        The order of the columns is free, and those left out at the fit may be there or not. `first_row` is the number
        of the chunk's first row in error messages.
        """
        _check_names(chunk, {column.name for column in self.columns}, optional=set(self.ignored))
        return np.stack([_code(column, chunk[column.name], first_row) for column in self.columns], axis=1)

    def standout(self, codes: Float64[np.ndarray, "n c"]) -> Float64[np.ndarray, "n c"]:
        """How far each value stands out from the train values, to name the columns that make a row strange.

        For numbers the distance from the centre in standard deviations; for categories −log₁₀ of how frequent it was,
        and 10 if it was never seen; for missing values 10 if none was missing before, else 0.
        """
        return np.stack([_stands_out(column, codes[:, i]) for i, column in enumerate(self.columns)], axis=1)


def _check_names(chunk: Chunk, expected: set[str], optional: set[str]) -> None:
    absent = [name for name in sorted(expected) if name not in chunk]
    extra = [name for name in chunk if name not in expected and name not in optional]
    if absent or extra:
        parts = [f"no column {_listed(absent)}"] * bool(absent) + [f"unknown columns: {_listed(extra)}"] * bool(extra)
        raise InputError(f"the table has other columns than the one that was learned: {', and '.join(parts)}")
    if len({len(values) for values in chunk.values()}) > 1:
        raise InputError("the columns of the table have different lengths")


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:10])) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _tally(tally: Tally, name: str, values: Any) -> None:
    try:
        tally.add(values)
    except TypeError as error:
        raise InputError(f"column {name!r} has nested values ({error}): flatten or drop it") from None


def _category_column(name: str, tally: Tally) -> Column:
    common = tally.commonest()
    texts, shares = tuple(text for text, _ in common), tuple(count / tally.count for _, count in common)
    return Column(name, "category", texts, missing=tally.missing, frequencies=shares)


def _names_images(column: Column) -> bool:
    """Whether most values of a column are names of image files."""
    shares = zip(column.categories, column.frequencies, strict=True)
    images = math.fsum(share for text, share in shares if text.lower().endswith(tuple(SUFFIXES)))
    return images > 0.5 * math.fsum(column.frequencies)


def _code(column: Column, values: Any, first_row: int) -> Float64[np.ndarray, " n"]:
    if column.kind == "number":
        return _numbers(column, values, first_row)
    places = {text: float(i) for i, text in enumerate(column.categories)}
    try:
        texts = to_texts(values)
    except TypeError as error:
        raise InputError(f"column {column.name!r} has nested values ({error}): flatten or drop it") from None
    return np.array([math.nan if text is None else places.get(text, UNSEEN) for text in texts], np.float64)


def _numbers(column: Column, values: Any, first_row: int) -> Float64[np.ndarray, " n"]:
    try:
        numbers = to_numbers(values)
        infinite = np.flatnonzero(np.isinf(numbers))
        if not len(infinite):
            return numbers
        bad = int(infinite[0])
    except NotANumberError as error:
        bad = error.position
    shown = repr(to_text(str(values[bad])) or "")
    shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
    raise InputError(f"column {column.name!r}, row {first_row + bad}: {shown} is not a finite number")


def _stands_out(column: Column, codes: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    missing = np.isnan(codes)
    if column.kind == "number":
        with np.errstate(over="ignore"):
            known = np.abs(codes - column.centre) / column.scale
    else:
        shares = np.array([*column.frequencies, column.unlisted or 10.0**-FARTHEST])
        known = -np.log10(shares[np.where(missing, 0, codes).astype(np.int64)])  # −1 is the last: the unlisted
    return np.where(missing, 0.0 if column.missing else FARTHEST, np.abs(known))  # no −0 for a share of 1
