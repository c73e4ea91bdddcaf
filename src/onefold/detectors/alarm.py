"""When to raise an alarm: split-conformal p-values, a threshold for a chosen false-alarm rate, many tests at once.

Nothing is assumed of the scores but that calibration data and new familiar data come from the same source in random
order (Vovk et al., 2005).
"""

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from onefold.core.arguments import check_number
from onefold.errors import InputError, warn
from onefold.monitor import Calibration, tie_tolerance
from onefold.types import Scores


@dataclass(frozen=True)
class Alarm:
    """The scores of n held-out familiar samples, and the false-alarm rate that `threshold` stands for.

    With G calibration scores above s and E equal to it, p(s) = (G + E + u) / (n + 1), and u is uniform on (0, 1].
    Without ties, p is exactly uniform on familiar data, so P(p ≤ fpr) = fpr over calibration draws. With ties,
    P(p ≤ fpr) ≤ fpr: tied scores are all flagged or none are, whichever keeps the rate at most `fpr`.
    u is drawn once for each calibration, from its scores, so the same input gets the same p in any batch, and p ≤ fpr
    is the same as score > threshold.

    Scores are computed in float32, and the last digits depend on the size of the batch. A score s is therefore equal to
    a calibration score c if |s − c| ≤ 10⁻⁴ (|c| + the median of all |c|) + `resolution`. Repeated inputs then get the
    same answer in any batch, and in an exported model.

    Args:
        scores: Scores of held-out familiar samples.
        fpr: False-alarm rate.
        seed: Seed of u.
        resolution: Absolute tolerance for ties.
    """

    scores: Scores
    fpr: float
    seed: int = 0
    resolution: float = 0.0
    u: float = field(init=False)
    _low: Scores = field(init=False, repr=False)
    _high: Scores = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_rate(self.fpr)
        needed = min_calibration_samples(self.fpr)
        if len(self.scores) < needed:
            raise InputError(
                f"{len(self.scores)} calibration samples are too few for a false-alarm rate of {self.fpr:g}: "
                f"{needed} are needed"
            )
        if np.ndim(self.scores) != 1 or not np.isfinite(self.scores).all():
            raise InputError("calibration needs a finite score for each sample")
        ordered = np.sort(np.asarray(self.scores, np.float64)) + 0.0  # −0 becomes 0
        tolerance = tie_tolerance(ordered, self.resolution)
        for name, value in (("scores", ordered), ("_low", ordered - tolerance), ("_high", ordered + tolerance)):
            object.__setattr__(self, name, value)
        entropy = [self.seed, len(ordered), zlib.crc32(ordered.tobytes())]
        object.__setattr__(self, "u", float(1 - np.random.default_rng(entropy).random()))

    def pvalues(self, scores: Scores) -> NDArray[np.float64]:
        """Return p(s) as above, in (0, 1]; small means unfamiliar."""
        above, equal = self._counts(scores)
        return (above + equal + self.u) / (len(self.scores) + 1)

    def conservative_pvalues(self, scores: Scores) -> NDArray[np.float64]:
        """Return p(s) with u = 1, for which guarantees about many tests at once are proved; never smaller than p(s)."""
        above, equal = self._counts(scores)
        return (above + equal + 1) / (len(self.scores) + 1)

    @cached_property
    def threshold(self) -> float:
        """Scores above it have p ≤ fpr, and no others."""
        candidates = np.unique(np.concatenate([[-np.inf], np.nextafter(self._low, -np.inf), self._high]))
        flagged = self.pvalues(np.nextafter(candidates, np.inf)) <= self.fpr
        # The first candidate above which p ≤ fpr; above the largest score this always holds.
        return float(candidates[np.argmax(flagged)])

    @property
    def pvalue_limits(self) -> Scores:
        """Sorted limits L such that p(s) = (number of L ≥ s + u) / (n + 1)."""
        return self._high

    @property
    def flagged_share(self) -> float:
        """Share of the calibration scores above the threshold: about `fpr`, or less if many scores are equal."""
        return float((self.scores > self.threshold).mean())

    @property
    def calibration(self) -> Calibration:
        """The few numbers of this calibration that a monitor needs."""
        return Calibration.from_scores(self.scores, fpr=self.fpr, threshold=self.threshold, resolution=self.resolution)

    def exceeds(self, scores: Scores, fpr: float | None = None) -> NDArray[np.bool_]:
        """Return which scores raise an alarm, at the calibrated rate or at `fpr`."""
        return scores > (self if fpr is None else replace(self, fpr=fpr)).threshold

    def warn_of_ties(self, name: str = "calibration") -> None:
        """Warn if equal scores make the false-alarm rate less than half of `fpr`."""
        n = len(self.scores)
        if self.fpr * (n + 1) < 2:  # fewer than two expected alarms: nothing to compare
            return
        if self.flagged_share >= self.fpr / 2:
            return
        highest = self.scores[self.scores <= self.threshold].max()
        equal = int(self._counts(np.array([highest]))[1][0])
        if equal > 1:
            warn(
                f"{name}: {equal} of {n} scores are equal, so the false-alarm rate is about "
                f"{self.flagged_share:.2%} instead of {self.fpr:g}. Check for repeated or constant inputs."
            )

    def _counts(self, scores: Scores) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return how many calibration scores are above each score, and how many are equal to it."""
        above = len(self.scores) - np.searchsorted(self._low, scores, side="right")
        at_least = len(self.scores) - np.searchsorted(self._high, scores, side="left")
        return above, at_least - above


@dataclass(frozen=True)
class GroupAlarms:
    """One alarm for each group of inputs (Mondrian conformal prediction; Vovk et al., 2005).

    The false-alarm rate holds within each group.

    Args:
        alarms: Alarm of each group, by its name. All have the same rate.
    """

    alarms: dict[str, Alarm]

    @classmethod
    def calibrate(
        cls, scores: Scores, groups: Any, fpr: float, seed: int = 0, resolution: float = 0.0
    ) -> "GroupAlarms":
        """Return the alarms of held-out familiar samples with these scores and groups.

        Raises:
            InputError: A group has too few samples for `fpr`, or there is not one group per score.
        """
        check_rate(fpr)
        names = group_names(groups, len(scores))
        needed = min_calibration_samples(fpr)
        sizes = {str(name): int(count) for name, count in zip(*np.unique(names, return_counts=True), strict=True)}
        short = {name: count for name, count in sizes.items() if count < needed}
        if short:
            shown = ", ".join(f"{name!r} has {count:,}" for name, count in list(short.items())[:10])
            raise InputError(
                f"too few calibration samples for a false-alarm rate of {fpr:g} in each group ({shown})",
                argument="groups",
                hint=f"Each group needs {needed:,}: add samples, join groups, or use a larger fpr.",
            )
        return cls({name: Alarm(scores[names == name], fpr, seed, resolution) for name in sizes})

    def apply(self, function: Callable[[Alarm, Scores], NDArray[Any]], scores: Scores, groups: Any) -> NDArray[Any]:
        """Return `function` of the alarm of each score's group and the score."""
        names = group_names(groups, len(scores))
        if unknown := sorted(set(names.tolist()) - set(self.alarms)):
            raise InputError(
                f"{unknown[0]!r} was not in the calibration",
                argument="groups",
                hint=f"Use {', '.join(map(repr, list(self.alarms)[:10]))}, or calibrate again with that group.",
            )
        rows = {name: np.flatnonzero(names == name) for name in dict.fromkeys(names.tolist())}
        parts = [function(self.alarms[name], scores[index]) for name, index in rows.items()]
        return np.concatenate(parts)[np.argsort(np.concatenate(list(rows.values())))]

    def warn_of_ties(self) -> None:
        """Warn about each group in which equal scores make the false-alarm rate less than half of `fpr`."""
        for name, alarm in self.alarms.items():
            alarm.warn_of_ties(f"calibration of group {name!r}")


AnyAlarm: TypeAlias = Alarm | GroupAlarms
"""A calibration: one alarm, or one for each group."""


def group_names(groups: Any, count: int) -> NDArray[Any]:
    """Return the name of the group of each of `count` inputs; integers become text."""
    labels = np.array(list(groups) if isinstance(groups, Iterable) else groups, object)
    if labels.ndim != 1 or len(labels) != count:
        raise InputError(
            f"shape {labels.shape} does not match {count:,} inputs", argument="groups", hint="Pass one for each input."
        )
    if not all(isinstance(label, str | int | np.integer) for label in labels):
        raise InputError("must be text or integers", argument="groups", hint="Convert them to text.")
    return labels.astype(np.str_)


def check_rate(fpr: float) -> None:
    """Raise InputError unless 0 < fpr < 1."""
    check_number(fpr, "fpr", 0, 1)


def min_calibration_samples(fpr: float) -> int:
    """Return the smallest n for which a p-value of n calibration scores can be at most `fpr`: 1 / (n + 1) ≤ fpr."""
    return math.ceil(1 / fpr - 1e-9) - 1  # 1e-9 absorbs rounding of 1 / fpr


def benjamini_hochberg(pvalues: NDArray[np.float64], fdr: float) -> NDArray[np.bool_]:
    """Return a mask of rejected tests with expected false-discovery rate at most `fdr`.

    Reject the k smallest with k the largest such that p₍ₖ₎ ≤ fdr · k/m (Benjamini & Hochberg, 1995). Conformal p-values
    of one calibration set depend on each other in a way that keeps the guarantee (Bates et al., 2023).
    """
    check_number(fdr, "fdr", 0, 1)
    ordered = np.sort(pvalues)
    below = np.flatnonzero(ordered <= fdr * np.arange(1, len(ordered) + 1) / len(ordered))
    return pvalues <= (ordered[below[-1]] if len(below) else -1.0)
