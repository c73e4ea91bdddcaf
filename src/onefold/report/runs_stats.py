"""Statistics of training runs: binned curves, Student's t, interquartile means and probabilities of improvement.

Interquartile means and probabilities of improvement follow Agarwal et al. (2021, "Deep RL at the edge of the
statistical precipice"): the runs of an environment are a stratum, and the bootstrap samples runs within strata.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float64
from scipy.special import stdtrit

Finals: TypeAlias = Float64[np.ndarray, " _"]
"""A final figure of each run of an agent in one environment."""

SAMPLES = 2000  # of a bootstrap
SEED = 0


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


def bin_means(
    frames: Float64[np.ndarray, " n"],
    values: Float64[np.ndarray, " n"],
    edges: Float64[np.ndarray, " e"],
    until: float,
) -> Float64[np.ndarray, " b"]:
    """Return the mean of the finite values in each bin (edgesᵢ, edgesᵢ₊₁], [b = e − 1].

    An empty bin repeats the bin before it. Bins before the first value and bins that end after `until` are NaN.
    """
    finite = np.isfinite(values)
    bins = len(edges) - 1
    index = np.clip(np.searchsorted(edges, frames[finite], side="left") - 1, 0, bins - 1)
    counts = np.bincount(index, minlength=bins)
    sums = np.bincount(index, weights=values[finite], minlength=bins)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    last = np.maximum.accumulate(np.where(counts > 0, np.arange(bins), -1))
    return np.where((last >= 0) & (edges[1:] <= until * (1 + 1e-9)), means[last], np.nan)


def t_half_width(values: Float64[np.ndarray, "n *b"], level: float = 0.9) -> Float64[np.ndarray, "*b"]:
    """Return half the width of Student's interval for the mean of n ≥ 2 runs: t₍ₙ₋₁₎((1 + level) / 2) · s / √n."""
    n = len(values)
    return stdtrit(n - 1, (1 + level) / 2) * values.std(0, ddof=1) / np.sqrt(n)


def iqm(values: Float64[np.ndarray, "*r n"]) -> Float64[np.ndarray, "*r"]:
    """Return the mean along the last axis without the ⌊n / 4⌋ smallest and the ⌊n / 4⌋ largest values."""
    n = values.shape[-1]
    return np.asarray(np.sort(values, axis=-1)[..., n // 4 : n - n // 4].mean(-1))


def iqm_interval(strata: Sequence[Finals]) -> Interval | None:
    """Return the 95 % bootstrap interval of the interquartile mean over all runs; None if a stratum has one run."""
    if min(map(len, strata)) < 2:
        return None
    rng = np.random.default_rng(SEED)
    return _percentile_interval(iqm(np.concatenate([_resample(runs, rng) for runs in strata], axis=1)))


def win_probability(x: Float64[np.ndarray, "*r n"], y: Float64[np.ndarray, "*r m"]) -> Float64[np.ndarray, "*r"]:
    """Return P(X > Y) + P(X = Y) / 2 over all pairs of runs: Mann and Whitney's U / (n m)."""
    a, b = x[..., :, None], y[..., None, :]
    return np.asarray(((a > b) + 0.5 * (a == b)).mean((-2, -1)))


def improvement(pairs: Sequence[tuple[Finals, Finals]]) -> float:
    """Return the probability that a run of X beats a run of Y in the same environment, averaged over environments."""
    return float(np.mean([win_probability(x, y) for x, y in pairs]))


def improvement_interval(pairs: Sequence[tuple[Finals, Finals]]) -> Interval | None:
    """Return the 95 % bootstrap interval of `improvement`; None if an agent has one run, which has no spread."""
    if min(len(runs) for pair in pairs for runs in pair) < 2:
        return None
    rng = np.random.default_rng(SEED)
    samples = [win_probability(_resample(x, rng), _resample(y, rng)) for x, y in pairs]
    return _percentile_interval(np.mean(samples, axis=0))


def _resample(runs: Finals, rng: np.random.Generator) -> Float64[np.ndarray, "r n"]:
    return runs[rng.integers(len(runs), size=(SAMPLES, len(runs)))]


def _percentile_interval(samples: Float64[np.ndarray, " r"]) -> Interval:
    low, high = np.percentile(samples, [2.5, 97.5])
    return Interval(float(low), float(high))
