"""Column types and statistics of a table, inferred from its rows; encodes later rows as numbers."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float64

from onefold.errors import InputError, warn
from onefold.inputs.cells import Chunk, NotANumberError, to_numbers, to_text, to_texts
from onefold.inputs.column_stats import MOST_CATEGORIES, CategoryCounts, NumberStatistics
from onefold.inputs.images import SUFFIXES

UNSEEN = -1.0
MAX_DEVIATION = 10.0
MOST_COLUMNS = 100_000


@dataclass(frozen=True)
class Column:
    """Column of numbers with centre and scale, or of categories with their shares of the train values.

    Categories are sorted by frequency. `missing` is True if a train value was missing. At most 64 categories are
    listed; if there were more, the frequencies add up to less than 1.
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
            raise InputError(f"column {self.name!r}: values are too large to be scaled. Divide them by a constant.")
        if len(self.categories) != len(self.frequencies) or len(set(self.categories)) != len(self.categories):
            raise InputError(f"column {self.name!r}: categories repeat or have no frequency. Use an undamaged file.")
        if not all(0 < share <= 1 for share in self.frequencies) or math.fsum(self.frequencies) > 1 + 1e-9:
            raise InputError(f"column {self.name!r}: frequencies are not shares of 1. Use an undamaged file.")
        if not (1 if self.kind == "category" else 0) <= len(self.categories) <= MOST_CATEGORIES:
            raise InputError(f"column {self.name!r}: {len(self.categories)} categories. Use an undamaged file.")
        if self.kind == "number" and self.categories:
            raise InputError(f"column {self.name!r}: numbers and categories. Use an undamaged file.")

    @property
    def unlisted_share(self) -> float:
        """Share of train values whose category is not listed."""
        rest = 1 - math.fsum(self.frequencies)
        return rest if self.kind == "category" and rest > 1e-9 else 0.0


@dataclass(frozen=True)
class Table:
    """Columns of the samples in order, and the names of the columns that are not used."""

    columns: tuple[Column, ...]
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [*(column.name for column in self.columns), *self.ignored]
        if not self.columns:
            raise InputError("table: no column. Pass at least one of numbers or categories.")
        if len(names) > MOST_COLUMNS:
            raise InputError(f"table: too many columns ({len(names):,}). Use at most {MOST_COLUMNS:,}.")
        if len(set(names)) != len(names):
            raise InputError("table: two columns have the same name. Give every column its own name.")

    @classmethod
    def infer(cls, chunks: Iterable[Chunk], name: str = "the table") -> "Table":
        """Return the table inferred from chunks of rows in one or two passes. `name` is for error messages.

        Pass an iterable that can be iterated again, such as a list or a source; memory is then bounded by one chunk.
        All chunks of an iterator are kept in memory.
        """
        if isinstance(chunks, Iterator):
            chunks = list(chunks)
        moments: dict[str, NumberStatistics] = {}
        rows = 0
        for chunk in chunks:
            rows += max(map(len, chunk.values()), default=0)
            moments = moments or {name: NumberStatistics() for name in chunk}
            _check_names(chunk, set(moments), optional=set())
            for column, values in chunk.items():
                moments[column].add(values)
        if not rows:
            raise InputError("no rows", argument=name, hint="Pass at least one.")
        tallies = {column: CategoryCounts() for column, moment in moments.items() if not moment.is_number}
        for chunk in chunks if tallies else ():
            for column, tally in tallies.items():
                _count_categories(tally, column, chunk[column])
        return cls._assemble(moments, tallies, name)

    @classmethod
    def _assemble(cls, moments: dict[str, NumberStatistics], tallies: dict[str, CategoryCounts], table: str) -> "Table":
        columns: list[Column] = []
        unused: dict[str, str] = {}
        for name, moment in moments.items():
            tally = tallies.get(name)
            if tally is None and moment.infinite:
                raise InputError(f"column {name!r}: infinite values. Replace or drop them.")
            if not (tally or moment).count:
                unused[name] = "no values"
            elif tally is None:
                columns.append(Column(name, "number", (), moment.centre, moment.scale, moment.missing))
            elif tally.is_identifier:
                unused[name] = "nearly every value is different"
            else:
                columns.append(_category_column(name, tally))
        reasons = "; ".join(f"{name!r} ({reason})" for name, reason in unused.items())
        if not columns:
            raise InputError(f"{table}: no usable column ({reasons}). Pass a column of numbers or categories.")
        if unused:
            warn(f"{table}: columns not used: {reasons}. Drop them to silence this warning.")
        if paths := [column.name for column in columns if _holds_image_paths(column)]:
            warn(
                f"{table}: column {_quote_names(paths)}: paths of images are treated as categories, and the images are "
                "not read. Pass the folder of the images, or drop the column."
            )
        return cls(tuple(columns), tuple(unused))

    def encode(self, chunk: Chunk, first_row: int = 1) -> Float64[np.ndarray, "n c"]:
        """Return rows as numbers: numbers unchanged, categories by index, −1 for an unlisted one, NaN for missing.

        Columns may be in any order, and columns not used in the fit may be absent. `first_row` is the number of the
        chunk's first row in error messages.
        """
        _check_names(chunk, {column.name for column in self.columns}, optional=set(self.ignored))
        return np.stack([_encode_column(column, chunk[column.name], first_row) for column in self.columns], axis=1)

    def deviation(self, codes: Float64[np.ndarray, "n c"]) -> Float64[np.ndarray, "n c"]:
        """Return how unusual each value is compared with the train values.

        Numbers: distance from the centre in standard deviations. Categories: −log₁₀ of the frequency, 10 if the
        category is new. Missing values: 10 if no train value was missing, else 0.
        """
        return np.stack([_column_deviation(column, codes[:, i]) for i, column in enumerate(self.columns)], axis=1)


def _check_names(chunk: Chunk, expected: set[str], optional: set[str]) -> None:
    absent = [name for name in sorted(expected) if name not in chunk]
    extra = [name for name in chunk if name not in expected and name not in optional]
    if absent or extra:
        problems = [f"no column {_quote_names(absent)}"] * bool(absent)
        problems += [f"unknown columns: {_quote_names(extra)}"] * bool(extra)
        raise InputError(f"table: other columns than in the fit ({', and '.join(problems)}). Pass the same columns.")
    if len({len(values) for values in chunk.values()}) > 1:
        raise InputError("table: columns have different lengths. Pass columns of one length.")


def _quote_names(names: list[str]) -> str:
    return ", ".join(map(repr, names[:10])) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _count_categories(tally: CategoryCounts, name: str, values: Any) -> None:
    try:
        tally.add(values)
    except TypeError as error:
        raise InputError(f"column {name!r}: nested values ({error}). Flatten or drop it.") from None


def _category_column(name: str, tally: CategoryCounts) -> Column:
    common = tally.most_common()
    texts, shares = tuple(text for text, _ in common), tuple(count / tally.count for _, count in common)
    return Column(name, "category", texts, missing=tally.missing, frequencies=shares)


def _holds_image_paths(column: Column) -> bool:
    """Return True if most values of a column are names of image files."""
    shares = zip(column.categories, column.frequencies, strict=True)
    images = math.fsum(share for text, share in shares if text.lower().endswith(tuple(SUFFIXES)))
    return images > 0.5 * math.fsum(column.frequencies)


def _encode_column(column: Column, values: Any, first_row: int) -> Float64[np.ndarray, " n"]:
    if column.kind == "number":
        return _parse_numbers(column, values, first_row)
    codes = {text: float(i) for i, text in enumerate(column.categories)}
    try:
        texts = to_texts(values)
    except TypeError as error:
        raise InputError(f"column {column.name!r}: nested values ({error}). Flatten or drop it.") from None
    return np.array([math.nan if text is None else codes.get(text, UNSEEN) for text in texts], np.float64)


def _parse_numbers(column: Column, values: Any, first_row: int) -> Float64[np.ndarray, " n"]:
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
    raise InputError(
        f"column {column.name!r}, row {first_row + bad}: {shown} is not a finite number. Correct or drop it."
    )


def _column_deviation(column: Column, codes: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    missing = np.isnan(codes)
    if column.kind == "number":
        with np.errstate(over="ignore"):
            deviation = np.abs(codes - column.centre) / column.scale
    else:
        shares = np.array([*column.frequencies, column.unlisted_share or 10.0**-MAX_DEVIATION])
        deviation = -np.log10(shares[np.where(missing, 0, codes).astype(np.int64)])  # −1 indexes the unlisted share
    return np.where(missing, 0.0 if column.missing else MAX_DEVIATION, np.abs(deviation))  # abs: no −0 for a share of 1
