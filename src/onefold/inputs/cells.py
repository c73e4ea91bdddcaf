"""Conversion of single table cells to numbers and category names."""

import datetime
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float64

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
