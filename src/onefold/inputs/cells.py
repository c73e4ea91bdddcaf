"""Single cells of tables: which are missing, which are numbers, and how the others are written."""

import datetime
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float64

Chunk: TypeAlias = Mapping[str, Any]
"""Some rows of a table: for each column a list or an array of its values."""

MISSING = frozenset({"", "nan", "NaN", "NAN", "NA", "N/A", "n/a", "null", "NULL"})
LONGEST_TEXT = 256
DAY = 86400.0


class NotANumberError(ValueError):
    """A value that is not a number, at some place of a list."""

    def __init__(self, position: int) -> None:
        super().__init__(f"value {position} is not a number")
        self.position = position


def to_numbers(values: Sequence[Any] | np.ndarray) -> Float64[np.ndarray, " n"]:
    """Values as floats, NaN where missing; dates, times and spans of time in seconds."""
    if isinstance(values, np.ndarray):
        if values.dtype.kind in "biuf":
            return values.astype(np.float64)
        if values.dtype.kind == "M":
            return (values - np.datetime64(0, "s")) / np.timedelta64(1, "s")
        if values.dtype.kind == "m":
            return values / np.timedelta64(1, "s")
    cells: Sequence[Any] = values.tolist() if isinstance(values, np.ndarray) else values
    return _plain_texts(cells) if cells and isinstance(cells[0], str) else _one_by_one(cells)


def _plain_texts(values: Sequence[Any]) -> Float64[np.ndarray, " n"]:
    """The quick way for a column of a CSV file without missing values."""
    try:
        if max(map(len, values)) <= LONGEST_TEXT and "_" not in "".join(values):
            return np.fromiter(map(float, values), np.float64, len(values))
    except (TypeError, ValueError):
        pass
    return _one_by_one(values)


def _one_by_one(values: Sequence[Any]) -> Float64[np.ndarray, " n"]:
    numbers: list[float] = []
    try:
        for value in values:
            numbers.append(to_number(value))  # noqa: PERF401 (how many there are says where it failed)
    except ValueError:
        raise NotANumberError(len(numbers)) from None
    return np.array(numbers, np.float64)


def to_texts(values: Sequence[Any] | np.ndarray) -> list[str | None]:
    """Values as the names of categories, None where missing."""
    return [to_text(value) for value in (values.tolist() if isinstance(values, np.ndarray) else values)]


def to_number(value: Any) -> float:
    """One value as a float, NaN if missing; a ValueError if it is not a number."""
    if isinstance(value, str):
        text = value.strip()
        if text in MISSING:
            return math.nan
        if "_" in text or len(text) > LONGEST_TEXT:
            raise ValueError("Python reads 1_000 as a number, people write it for a name; and none is so long")
        return float(text)
    if isinstance(value, bytes):
        return to_number(_decoded(value))
    if value is None or _is_pandas_missing(value):
        return math.nan
    if isinstance(value, bool | int | float | Decimal | np.bool_ | np.integer | np.floating):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return _to_seconds(value)


def to_text(value: Any) -> str | None:
    """One value as the name of a category, at most 256 characters of it; None if missing."""
    if isinstance(value, bytes):
        value = _decoded(value)
    if isinstance(value, str):
        text = value.strip()
        return None if text in MISSING else text[:LONGEST_TEXT]
    if value is None or _is_pandas_missing(value) or value_is_nan(value):
        return None
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))  # tables with missing values turn whole numbers into floats
    if isinstance(value, list | tuple | set | dict | np.ndarray):
        raise TypeError(f"a {type(value).__name__} is not a single value")
    return str(value).strip()[:LONGEST_TEXT]


def shortened(value: Any) -> Any:
    """A long text or bytes cut to what is read of it: neither a number nor the name of a category is so long."""
    return value.strip()[: 4 * LONGEST_TEXT] if isinstance(value, str | bytes) and len(value) > LONGEST_TEXT else value


def value_is_nan(value: Any) -> bool:
    """NaN as a float or a decimal."""
    if isinstance(value, Decimal):
        return value.is_nan()
    return isinstance(value, float | np.floating) and math.isnan(value)


def _decoded(value: bytes) -> str:
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
    """pandas' NA and NaT, told by name so that pandas need not be there."""
    return type(value).__name__ in ("NAType", "NaTType")
