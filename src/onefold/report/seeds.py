"""Means, spreads and paired differences over seeds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Stat(NamedTuple):
    """Over seeds; the standard deviation is that of a sample, None for a single seed."""

    mean: float
    sd: float | None
    n: int


class Difference(NamedTuple):
    """Of two means, paired over the `n` seeds that both have; with fewer than 2 it has no standard error."""

    mean: float
    se: float | None
    n: int


def stat(values: Iterable[float]) -> Stat | None:
    found = list(values)
    return Stat(mean(found), _sd(found), len(found)) if found else None


def difference(ours: Mapping[int, float], rival: Mapping[int, float]) -> Difference | None:
    """Ours less the rival's, seed by seed where at least two are common, else of the means."""
    if not ours or not rival:
        return None
    common = sorted(ours.keys() & rival.keys())
    deltas = [ours[seed] - rival[seed] for seed in common]
    spread = _sd(deltas)
    if spread is None:
        return Difference(mean(ours.values()) - mean(rival.values()), None, len(common))
    return Difference(mean(deltas), spread / math.sqrt(len(deltas)), len(deltas))


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found)


def _sd(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))
