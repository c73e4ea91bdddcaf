"""Columns of a table: types and statistics inferred from its rows, and later rows encoded as numbers."""

import datetime
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor, nn

from onefold.core.moments import Moments
from onefold.errors import InputError, warn
from onefold.inputs.images import SUFFIXES

Chunk: TypeAlias = Mapping[str, Any]
"""Rows of a table: for each column a list or an array of its values."""

MISSING = frozenset({"", "nan", "NaN", "NAN", "NA", "N/A", "n/a", "null", "NULL"})
LONGEST_TEXT = 256
DAY = 86400.0


class NotANumberError(ValueError):
    """Error for a value that is not a number, with its position in the list."""

    def __init__(self, position: int) -> None:
        super().__init__(f"value {position} is not a number")
        self.position = position


def to_numbers(values: Sequence[Any] | np.ndarray) -> Float64[np.ndarray, " n"]:
    """Return values as floats, NaN where missing; dates, times and durations in seconds."""
    if isinstance(values, np.ndarray):
        if values.dtype.kind in "biuf":
            return values.astype(np.float64)
        if values.dtype.kind == "M":
            return (values - np.datetime64(0, "s")) / np.timedelta64(1, "s")
        if values.dtype.kind == "m":
            return values / np.timedelta64(1, "s")
    cells: Sequence[Any] = values.tolist() if isinstance(values, np.ndarray) else values
    return _parse_texts(cells) if cells and isinstance(cells[0], str) else _convert_each(cells)


def _parse_texts(values: Sequence[Any]) -> Float64[np.ndarray, " n"]:
    """Return texts as floats; fast for a CSV column without missing values."""
    try:
        if max(map(len, values)) <= LONGEST_TEXT and "_" not in "".join(values):
            return np.fromiter(map(float, values), np.float64, len(values))
    except (TypeError, ValueError):
        pass
    return _convert_each(values)


def _convert_each(values: Sequence[Any]) -> Float64[np.ndarray, " n"]:
    numbers: list[float] = []
    try:
        for value in values:
            numbers.append(to_number(value))  # noqa: PERF401 (the length gives the position of a failure)
    except ValueError:
        raise NotANumberError(len(numbers)) from None
    return np.array(numbers, np.float64)


def to_texts(values: Sequence[Any] | np.ndarray) -> list[str | None]:
    """Return values as category names, None where missing."""
    return [to_text(value) for value in (values.tolist() if isinstance(values, np.ndarray) else values)]


def to_number(value: Any) -> float:
    """Return one value as a float, NaN if missing; raise ValueError if it is not a number."""
    if isinstance(value, str):
        text = value.strip()
        if text in MISSING:
            return math.nan
        if "_" in text or len(text) > LONGEST_TEXT:
            raise ValueError("not a number: Python reads 1_000 as one, but in data it is a name")
        return float(text)
    if isinstance(value, bytes):
        return to_number(_decode(value))
    if value is None or _is_pandas_missing(value):
        return math.nan
    if isinstance(value, bool | int | float | Decimal | np.bool_ | np.integer | np.floating):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return _to_seconds(value)


def to_text(value: Any) -> str | None:
    """Return one value as a category name of at most 256 characters; None if missing."""
    if isinstance(value, bytes):
        value = _decode(value)
    if isinstance(value, str):
        text = value.strip()
        return None if text in MISSING else text[:LONGEST_TEXT]
    if value is None or _is_pandas_missing(value) or is_nan(value):
        return None
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))  # missing values turn integer columns into floats
    if isinstance(value, list | tuple | set | dict | np.ndarray):
        raise TypeError(f"a {type(value).__name__} is not a single value")
    return str(value).strip()[:LONGEST_TEXT]


def shorten(value: Any) -> Any:
    """Return a long text or bytes cut to more than any number or category name needs."""
    return value.strip()[: 4 * LONGEST_TEXT] if isinstance(value, str | bytes) and len(value) > LONGEST_TEXT else value


def is_nan(value: Any) -> bool:
    """Return True if the value is a float or decimal NaN."""
    if isinstance(value, Decimal):
        return value.is_nan()
    return isinstance(value, float | np.floating) and math.isnan(value)


def _decode(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")


def _to_seconds(value: Any) -> float:
    if isinstance(value, datetime.datetime):
        zone = value.tzinfo and datetime.UTC
        return (value - datetime.datetime(1970, 1, 1, tzinfo=zone)).total_seconds()
    if isinstance(value, datetime.date):
        return (value - datetime.date(1970, 1, 1)).days * DAY
    if isinstance(value, datetime.time):
        return value.hour * 3600 + value.minute * 60 + value.second + value.microsecond / 1e6
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    raise ValueError(f"a {type(value).__name__} is not a number")


def _is_pandas_missing(value: Any) -> bool:
    """Return True for pandas' NA and NaT; checked by class name, so pandas need not be installed."""
    return type(value).__name__ in ("NAType", "NaTType")


MOST_CATEGORIES = 64
MOST_COUNTED = 16384


class NumberStatistics:
    """Mean, spread and range of a column, until a value is not a number."""

    def __init__(self) -> None:
        self.is_number = True
        self.missing = False
        self.infinite = False
        self._moments: Moments | None = None
        self._low = math.inf
        self._high = -math.inf

    def add(self, values: Sequence[Any] | np.ndarray) -> None:
        """Add a batch of values."""
        if not self.is_number:
            return
        try:
            numbers = to_numbers(values)
        except NotANumberError:
            self.is_number = False
            return
        present = numbers[~np.isnan(numbers)]
        self.missing |= len(present) < len(numbers)
        self.infinite |= bool(np.isinf(present).any())
        if len(present) and not self.infinite:
            moments = Moments.of(torch.from_numpy(present))
            self._moments = moments if self._moments is None else self._moments.merge(moments)
            self._low = min(self._low, float(present.min()))
            self._high = max(self._high, float(present.max()))

    @property
    def count(self) -> int:
        return 0 if self._moments is None else self._moments.count

    @property
    def centre(self) -> float:
        assert self._moments is not None
        return self._low if self._low == self._high else float(self._moments.mean)

    @property
    def scale(self) -> float:
        """Standard deviation; 1 for a constant column, non-finite if the numbers overflow."""
        assert self._moments is not None
        spread = math.sqrt(float(self._moments.variance))
        return 1.0 if self._low == self._high or spread == 0 else spread


class CategoryCounts:
    """Counts of the texts in a column.

    Counts are exact up to 16,384 different texts. Beyond that, the rarer half is dropped whenever the limit is
    reached. The number of different texts is estimated from a sample of their hashes, to about 2 %.
    """

    def __init__(self) -> None:
        self.missing = False
        self.count = 0
        self._counts: Counter[str] = Counter()
        self._hashes: set[int] = set()
        self._mask = 0

    def add(self, values: Sequence[Any] | np.ndarray) -> None:
        batch = Counter(to_texts(values))
        self.missing |= batch.pop(None, 0) > 0
        texts = {text: count for text, count in batch.items() if text is not None}
        self.count += sum(texts.values())
        self._counts.update(texts)
        self._sample(texts)
        if len(self._counts) > MOST_COUNTED:
            self._counts = Counter(dict(self.most_common(MOST_COUNTED // 2)))

    def _sample(self, texts: Iterable[str]) -> None:
        hashes = (hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts)
        self._hashes |= {number for h in hashes if not (number := int.from_bytes(h, "little")) & self._mask}
        while len(self._hashes) > MOST_COUNTED:
            self._mask = 2 * self._mask + 1
            self._hashes = {number for number in self._hashes if not number & self._mask}

    def most_common(self, most: int = MOST_CATEGORIES) -> list[tuple[str, int]]:
        """Return the most frequent texts and their counts, ties sorted by text."""
        return sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))[:most]

    @property
    def distinct(self) -> int:
        """Number of different texts, estimated beyond 16,384."""
        return len(self._hashes) * (self._mask + 1)

    @property
    def is_identifier(self) -> bool:
        """Whether nearly every value is different, as in an identifier column."""
        return self.distinct > max(MOST_CATEGORIES, self.count / 2)


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

    def text(self, code: float) -> str:
        """Return an encoded value as people read it."""
        if math.isnan(code):
            return "missing"
        if self.kind == "number":
            return f"{code:.6g}"
        return self.categories[int(code)] if code >= 0 else "(another)"


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


FAR = 10.0
LARGEST = 1e6


class TableEncoder(nn.Module):
    """Map from codes [n, C] to floats [n, D].

    The floats are the scaled numbers, then one-hot categories, then one missing-value flag per column. Each category
    column has one more entry, for unlisted categories. An entry that is always 0 in training has the value FAR
    instead of 1 when it is set, because a network gives little weight to such an entry. Numbers are clipped to
    ±LARGEST, since the largest float64 values are infinite as float32.
    """

    centre: Tensor
    scale: Tensor
    numbers: Tensor
    owner: Tensor
    category: Tensor
    worth: Tensor
    missing_worth: Tensor

    def __init__(self, table: Table) -> None:
        super().__init__()
        columns = list(enumerate(table.columns))
        numbers = [(i, column) for i, column in columns if column.kind == "number"]
        slots: list[tuple[int, float, float]] = []
        for i, column in columns:
            if column.kind == "category":
                slots += [(i, float(code), 1.0) for code in range(len(column.categories))]
                slots.append((i, UNSEEN, 1.0 if column.unlisted_share else FAR))
        self._register("numbers", [i for i, _ in numbers], torch.int64)
        self._register("centre", [column.centre for _, column in numbers])
        self._register("scale", [column.scale for _, column in numbers])
        self._register("owner", [i for i, _, _ in slots], torch.int64)
        self._register("category", [code for _, code, _ in slots])
        self._register("worth", [worth for _, _, worth in slots])
        self._register("missing_worth", [1.0 if column.missing else FAR for _, column in columns])
        self.width = len(numbers) + len(slots) + len(columns)

    def forward(self, codes: Float64[Tensor, "n c"]) -> Float32[Tensor, "n d"]:
        parts = []
        if len(self.numbers):
            scaled = (codes.index_select(1, self.numbers) - self.centre) / self.scale
            parts.append(torch.where(scaled.isnan(), 0.0, scaled).clamp(-LARGEST, LARGEST))
        if len(self.owner):
            lit = codes.index_select(1, self.owner) == self.category
            parts.append(torch.where(lit, self.worth, 0.0))
        parts.append(torch.where(codes.isnan(), self.missing_worth, 0.0))
        return torch.cat(parts, 1).float()

    def _register(self, name: str, values: list[float] | list[int], dtype: torch.dtype = torch.float64) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=dtype))
