"""Statistics of runs: curves on one grid, Student's t, interquartile means, probabilities of improvement.

The last two are as in Agarwal et al. (2021, "Deep RL at the edge of the statistical precipice"): the runs of a world
are a stratum, and a bootstrap draws runs within strata.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float64
from scipy.special import stdtrit

Runs: TypeAlias = Float64[np.ndarray, " _"]
"""A figure of each run of an agent in one world."""

DRAWS = 2000  # of a bootstrap
SEED = 0


class Interval(NamedTuple):
    low: float
    high: float


def on_grid(
    frames: Float64[np.ndarray, " n"],
    values: Float64[np.ndarray, " n"],
    edges: Float64[np.ndarray, " e"],
    until: float,
) -> Float64[np.ndarray, " b"]:
    """The mean of the values in each bin (edgesᵢ, edgesᵢ₊₁], [b = e − 1]; a bin without any repeats the one before.

    NaN before the first value, and in bins that end after `until`, where the run is not yet or no longer.
    """
    known = np.isfinite(values)
    bins = len(edges) - 1
    place = np.clip(np.searchsorted(edges, frames[known], side="left") - 1, 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    sums = np.bincount(place, weights=values[known], minlength=bins)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    last = np.maximum.accumulate(np.where(counts > 0, np.arange(bins), -1))
    return np.where((last >= 0) & (edges[1:] <= until * (1 + 1e-9)), means[last], np.nan)


def t_half(values: Float64[np.ndarray, "n *b"], level: float = 0.9) -> Float64[np.ndarray, "*b"]:
    """Half the width of Student's interval for the mean of n ≥ 2 runs: t₍ₙ₋₁₎((1 + level) / 2) · s / √n."""
    n = len(values)
    return stdtrit(n - 1, (1 + level) / 2) * values.std(0, ddof=1) / np.sqrt(n)


def iqm(values: Float64[np.ndarray, "*r n"]) -> Float64[np.ndarray, "*r"]:
    """The mean of what is left when ⌊n / 4⌋ values are cut off at either end: along the last axis."""
    n = values.shape[-1]
    return np.asarray(np.sort(values, axis=-1)[..., n // 4 : n - n // 4].mean(-1))


def iqm_interval(strata: Sequence[Runs]) -> Interval | None:
    """95 % of the bootstrap's interquartile means over all runs of all strata; None if a stratum has one run only."""
    if min(map(len, strata)) < 2:
        return None
    chance = np.random.default_rng(SEED)
    return _middle(iqm(np.concatenate([_drawn(runs, chance) for runs in strata], axis=1)))


def wins(x: Float64[np.ndarray, "*r n"], y: Float64[np.ndarray, "*r m"]) -> Float64[np.ndarray, "*r"]:
    """P(X > Y) + P(X = Y) / 2 over all pairs of runs: Mann and Whitney's U / (n m)."""
    a, b = x[..., :, None], y[..., None, :]
    return np.asarray(((a > b) + 0.5 * (a == b)).mean((-2, -1)))


def improvement(pairs: Sequence[tuple[Runs, Runs]]) -> float:
    """The probability that a run of X beats one of Y in the same world: the mean over worlds."""
    return float(np.mean([wins(x, y) for x, y in pairs]))


def improvement_interval(pairs: Sequence[tuple[Runs, Runs]]) -> Interval | None:
    """95 % of the bootstrap's probabilities; None if anybody has one run only, which is always drawn."""
    if min(len(runs) for pair in pairs for runs in pair) < 2:
        return None
    chance = np.random.default_rng(SEED)
    return _middle(np.mean([wins(_drawn(x, chance), _drawn(y, chance)) for x, y in pairs], axis=0))


def _drawn(runs: Runs, chance: np.random.Generator) -> Float64[np.ndarray, "r n"]:
    return runs[chance.integers(len(runs), size=(DRAWS, len(runs)))]


def _middle(draws: Float64[np.ndarray, " r"]) -> Interval:
    low, high = np.percentile(draws, [2.5, 97.5])
    return Interval(float(low), float(high))
