"""Validation of arguments: errors are one line that names the argument."""

import math
import numbers
import operator
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from onefold.errors import InputError

MAX_SIZE = 2**20
"""Most units or channels in a layer."""

Instance = TypeVar("Instance")


def check_integer(value: Any, name: str, low: int = 1, high: int | None = None) -> int:
    """Return `value` as an int from `low` to `high`. NumPy integers are accepted; booleans and text are not."""
    try:
        if isinstance(value, bool):
            raise TypeError
        integer = operator.index(value)
    except TypeError:
        integer = None
    if integer is None or integer < low or (high is not None and integer > high):
        bounds = f"of at least {low:,}" if high is None else f"from {low:,} to {high:,}"
        raise InputError(f"must be an integer {bounds}, not {_describe(value)}", argument=name)
    return integer


def check_number(
    value: Any,
    name: str,
    low: float = 0.0,
    high: float = math.inf,
    closed: Literal["neither", "left", "both"] = "neither",
) -> float:
    """Return `value` as a finite float between `low` and `high`; `closed` states which bounds are allowed values."""
    try:
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an integer of more than 308 digits
        number = math.inf
    inside = low < number < high or (closed != "neither" and number == low) or (closed == "both" and number == high)
    if not (inside and math.isfinite(number)):
        left, right = "(" if closed == "neither" else "[", "]" if closed == "both" else ")"
        bounds = (
            "positive number"
            if (low, high, closed) == (0, math.inf, "neither")
            else f"number in {left}{low:g}, {high:g}{right}"
        )
        raise InputError(f"must be a {bounds}, not {_describe(value)}", argument=name)
    return number


def check_sizes(value: Any, name: str) -> tuple[int, ...]:
    """Return the sizes of layers as a tuple: at most 64 integers from 1 to 2²⁰."""
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > 64:
        raise InputError(f"must be at most 64 layer sizes, as (256, 256), not {_describe(value)}", argument=name)
    sizes = []
    for i, size in enumerate(value):
        sizes.append(check_integer(size, f"{name}[{i}]", 1, MAX_SIZE))
    return tuple(sizes)


def check_choice(value: Any, name: str, choices: Collection[str]) -> Any:
    """Return `value` if it is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"must be one of {', '.join(choices)}, not {_describe(value)}", argument=name)
    return value


def check_instance(value: Any, name: str, cls: type[Instance]) -> Instance:
    """Return `value` if it is an instance of `cls`."""
    if not isinstance(value, cls):
        article = "an" if cls.__name__[0] in "AEIOU" else "a"
        raise InputError(f"must be {article} {cls.__name__}, not {_describe(value)}", argument=name)
    return value


def check_path(path: Any, name: str = "path") -> Path:
    """Return `path` as a Path."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"must be text or a path, not {_describe(path)}", argument=name)
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise InputError(f"must be the name of a file, not {_describe(text)}", argument=name)
    return Path(path)


def _describe(value: Any) -> str:
    """Return a short printable form of an invalid value; anything but text and numbers is described by its type."""
    if isinstance(value, str | int | float | None | numbers.Number):
        text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "an integer of more than 30 digits"
        return text if len(text) <= 60 else f"{text[:57]}…"
    return f"a {type(value).__name__}"
