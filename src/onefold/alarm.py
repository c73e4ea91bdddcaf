"""When to raise an alarm: split-conformal p-values, a threshold for a chosen false-alarm rate, many tests at once.

Nothing is assumed of the scores but that calibration data and new familiar data come from the same source in random
order (Vovk et al., 2005).
"""

import math
import zlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onefold.errors import InputError
from onefold.types import Scores


@dataclass(frozen=True)
class Alarm:
    """The scores of n held-out familiar samples, and the false-alarm rate that `threshold` stands for.

    With G calibration scores above s and E equal to it, p(s) = (G + u · (1 + E)) / (n + 1). A u drawn uniformly makes p
    exactly uniform on familiar data, ties or not, so that P(p ≤ fpr) = fpr over calibration draws. u is drawn once for
    each calibration, from its scores: the same detector then gives the same input the same p, in whatever batch, and
    p ≤ fpr is the same as score > threshold.
    """

    scores: Scores
    fpr: float
    seed: int = 0
    u: float = field(init=False)

    def __post_init__(self) -> None:
        check_rate(self.fpr)
        needed = math.ceil(1 / self.fpr - 1e-9) - 1
        if len(self.scores) < needed:
            raise InputError(
                f"{len(self.scores)} calibration samples are too few for a false-alarm rate of {self.fpr:g}: "
                f"{needed} are needed"
            )
        if np.ndim(self.scores) != 1 or not np.isfinite(self.scores).all():
            raise InputError("calibration needs a finite score for each sample")
        ordered = np.sort(np.asarray(self.scores, np.float64)) + 0.0  # −0 becomes 0
        object.__setattr__(self, "scores", ordered)
        entropy = [self.seed, len(ordered), zlib.crc32(ordered.tobytes())]
        object.__setattr__(self, "u", float(1 - np.random.default_rng(entropy).random()))

    def pvalues(self, scores: Scores) -> NDArray[np.float64]:
        """p(s) as above, in (0, 1]: small is strange."""
        above, equal = self._counts(scores)
        return (above + self.u * (1 + equal)) / (len(self.scores) + 1)

    def conservative(self, scores: Scores) -> NDArray[np.float64]:
        """p(s) with u = 1: at least as large, and what guarantees about many tests at once are proved for."""
        above, equal = self._counts(scores)
        return (above + 1 + equal) / (len(self.scores) + 1)

    @property
    def threshold(self) -> float:
        """Scores above it have p ≤ fpr, and no others."""
        values, total = np.unique(self.scores), len(self.scores)
        above = (np.append(total, self._counts(values)[0]) + self.u) / (total + 1)  # p just above −∞ and every value
        first = int(np.argmax(above <= self.fpr))
        if first == 0:
            return -math.inf
        value = values[first - 1]
        whole_tie = self.pvalues(values[first - 1 : first])[0] <= self.fpr
        return float(np.nextafter(value, -np.inf) if whole_tie else value)

    def _counts(self, scores: Scores) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        upper = np.searchsorted(self.scores, scores, side="right")
        lower = np.searchsorted(self.scores, scores, side="left")
        return len(self.scores) - upper, upper - lower


def check_rate(fpr: float) -> None:
    """Refuse what is no rate."""
    if not 0 < fpr < 1:
        raise InputError(f"the false-alarm rate must be between 0 and 1, not {fpr}")


def benjamini_hochberg(pvalues: NDArray[np.float64], fdr: float) -> NDArray[np.bool_]:
    """Which of many tests to reject so that at most a share `fdr` of the rejections is expected to be false.

    Reject the k smallest with k the largest such that p₍ₖ₎ ≤ fdr · k/m (Benjamini & Hochberg, 1995). Conformal p-values
    of one calibration set depend on each other in a way that keeps the guarantee (Bates et al., 2023).
    """
    if not 0 < fdr < 1:
        raise InputError(f"the false-discovery rate must be between 0 and 1, not {fdr}")
    ordered = np.sort(pvalues)
    below = np.flatnonzero(ordered <= fdr * np.arange(1, len(ordered) + 1) / len(ordered))
    return pvalues <= (ordered[below[-1]] if len(below) else -1.0)
