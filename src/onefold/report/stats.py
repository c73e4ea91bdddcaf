"""Statistics of results: means over seeds and paired differences."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean with its spread, and the number of values.

    The spread is the sample standard deviation of the values, or the standard error of a difference; None for fewer
    than two values.
    """

    mean: float
    spread: float | None
    n: int


def mean(values: Iterable[float]) -> float:
    """Return the mean of at least one value, summed exactly."""
    listed = list(values)
    return math.fsum(listed) / len(listed)


def estimate(values: Iterable[float]) -> Estimate | None:
    """Return the mean and sample standard deviation of values over seeds; None without values."""
    listed = list(values)
    return Estimate(mean(listed), _deviation(listed), len(listed)) if listed else None


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate | None:
    """Return the mean of the first values less that of the second.

    With at least two common seeds, differences are taken seed by seed and have a standard error.

    Args:
        first: Values by seed.
        second: Values by seed.

    Returns:
        The difference with its standard error and the number of common seeds; None if one side has no value.
    """
    if not first or not second:
        return None
    common = sorted(first.keys() & second.keys())
    deltas = [first[seed] - second[seed] for seed in common]
    deviation = _deviation(deltas)
    if deviation is None:
        return Estimate(mean(first.values()) - mean(second.values()), None, len(common))
    return Estimate(mean(deltas), deviation / math.sqrt(len(deltas)), len(deltas))


def _deviation(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))
