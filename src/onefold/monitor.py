"""Monitoring of a stream: is the share of unfamiliar inputs still what it was? The answer is valid at any time.

This module does not import torch, so a server with an exported detector can use it.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy.typing import ArrayLike, NDArray

from onefold.core.arguments import check_instance, check_number, check_path
from onefold.core.files import read_json, write_json
from onefold.core.schema import from_json, to_json
from onefold.errors import FileError, InputError, NotFittedError

TOLERANCE = 1e-4
"""Scores closer than this, relative to their size and to the median size, are ties."""
TAILS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Shares of the largest calibration scores on whose exceedance a monitor bets."""
BETS = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Stakes λ: the share of its capital that a bet risks on each input."""
CHUNK = 4096  # scores that are processed at once
LARGEST_STATE = 2**16  # bytes of a state file
FORMAT = 1


@runtime_checkable
class CalibratedDetector(Protocol):
    """What a monitor needs of a detector."""

    @property
    def alarm(self) -> Any: ...

    @property
    def group_alarms(self) -> Any: ...

    def score_batches(self, x: Any, /) -> Iterator[NDArray[np.float64]]: ...


def tie_tolerance(scores: Float64[np.ndarray, " n"], resolution: float = 0.0) -> Float64[np.ndarray, " n"]:
    """Return how far another score may be from each of these and still count as equal to it.

    Args:
        scores: Calibration scores.
        resolution: Absolute tolerance that is added.

    Returns:
        Tolerances, 10⁻⁴ (|c| + the median of all |c|) + `resolution`.
    """
    return TOLERANCE * (np.abs(scores) + np.median(np.abs(scores))) + resolution


def tail_ranks(samples: int) -> tuple[int, ...]:
    """Return the ranks k, counted from the largest of `samples` calibration scores, that a monitor bets on."""
    return tuple(sorted({max(1, round(tail * samples)) for tail in TAILS}))


def score_limits(
    scores: Float64[np.ndarray, " n"], ranks: tuple[int, ...], resolution: float = 0.0
) -> Float64[np.ndarray, " j"]:
    """Return the k-th largest scores with their tolerance: larger scores exceed them and are not tied with them."""
    ordered = np.sort(scores)
    return (ordered + tie_tolerance(ordered, resolution))[len(ordered) - np.array(ranks)]


def upper_limits(samples: int, ranks: tuple[int, ...], alpha: float) -> Float64[np.ndarray, " j"]:
    """Return upper limits U of P(S > k-th largest calibration score), which hold at once with probability 1 − alpha/2.

    Over calibration sets of n independent scores without ties, this probability has the law Beta(k, n − k + 1); ties
    only lower it. U is the 1 − alpha/2J quantile for each of J ranks.

    Args:
        samples: Number n of calibration scores.
        ranks: Ranks k.
        alpha: Level of the monitor.

    Returns:
        U for each rank.
    """
    from scipy.special import betainccinv

    k = np.array(ranks, np.float64)
    return betainccinv(k, samples - k + 1, alpha / (2 * len(ranks)))


def betting_score(
    hits: Int64[np.ndarray, "*m j"], inputs: Int64[np.ndarray, "*m"], limits: Float64[np.ndarray, " j"]
) -> Float64[np.ndarray, "*m"]:
    """Return the logarithm of the betting score E.

    E is the mean of Π (1 + λ (1{S > t} / U − 1)) over all limits t and stakes λ; the product is over the inputs. If
    P(S > t) ≤ U for all t, E is a supermartingale that starts at 1, so P(sup E ≥ c) ≤ 1/c (Ville).

    Args:
        hits: Number of inputs that exceeded each limit.
        inputs: Number of inputs.
        limits: Upper limits U of the probabilities.

    Returns:
        log E.
    """
    stakes = np.array(BETS)[:, None]
    gain, loss = np.log1p(stakes * (1 / limits - 1)), np.log1p(-stakes)  # of an input that exceeds, and of another one
    counts = hits[..., None, :]
    capital = counts * gain + (inputs[..., None, None] - counts) * loss
    logs = capital.reshape(*capital.shape[:-2], -1)
    largest = logs.max(axis=-1)
    return np.asarray(largest + np.log(np.exp(logs - largest[..., None]).mean(axis=-1)))


@dataclass(frozen=True)
class Calibration:
    """What a monitor keeps of a calibration set of independent familiar samples.

    Args:
        samples: Number of calibration scores.
        ranks: Ranks of a few of them, counted from the largest, ascending.
        limits: The scores with these ranks, each with the tolerance for ties.
        threshold: Score above which an input is an alarm.
        fpr: Share of familiar inputs that are alarms.
    """

    samples: int
    ranks: tuple[int, ...]
    limits: tuple[float, ...]
    threshold: float
    fpr: float

    def __post_init__(self) -> None:
        valid = (
            0 < len(self.ranks) == len(self.limits) <= len(TAILS)
            and list(self.ranks) == sorted(set(self.ranks))
            and self.ranks[0] >= 1
            and self.ranks[-1] <= self.samples
            and all(map(math.isfinite, (*self.limits, self.threshold)))
            and 0 < self.fpr < 1
        )
        if not valid:
            raise InputError("calibration: ranks, limits, threshold and rate do not match. Use an undamaged file.")

    @classmethod
    def from_scores(
        cls, scores: ArrayLike, *, fpr: float = 0.05, threshold: float | None = None, resolution: float = 0.0
    ) -> "Calibration":
        """Return what a monitor keeps of these scores.

        Args:
            scores: Scores of familiar samples that were not in the fit.
            fpr: Share of familiar inputs that are alarms.
            threshold: Score above which an input is an alarm; by default the lowest that keeps the rate `fpr`.
            resolution: Absolute tolerance for ties.

        Returns:
            The calibration.

        Raises:
            InputError: The scores are not finite or not one per sample, or are too few for `fpr`.
        """
        check_number(fpr, "fpr", 0, 1)
        values = _as_scores(scores)
        if not len(values) or not np.isfinite(values).all():
            raise InputError("need a finite score for each of at least one sample", argument="scores")
        if threshold is None:
            rank = math.floor(fpr * (len(values) + 1) + 1e-9)  # 1e-9 absorbs rounding of the product
            if rank < 1:
                raise InputError(
                    f"{len(values)} are too few for a false-alarm rate of {fpr:g}",
                    argument="scores",
                    hint=f"Pass at least {math.ceil(1 / fpr - 1e-9) - 1}.",
                )
            threshold = float(score_limits(values, (min(rank, len(values)),), resolution)[0])
        ranks = tail_ranks(len(values))
        limits = tuple(score_limits(values, ranks, resolution).tolist())
        return cls(len(values), ranks, limits, max(float(threshold), -sys.float_info.max), fpr)


@dataclass(frozen=True)
class Evidence:
    """Evidence of a monitor, valid after any number of inputs.

    Args:
        inputs: Number of inputs.
        alarms: Number of inputs above the threshold of the alarm.
        expected: Number of alarms expected of as many familiar inputs.
        log10_score: Logarithm to base 10 of the betting score; it starts at 0.
        log10_limit: Logarithm to base 10 of the limit of the betting score.
        crossed_at: Number of inputs after which the betting score first reached the limit, or None.
    """

    inputs: int
    alarms: int
    expected: float
    log10_score: float
    log10_limit: float
    crossed_at: int | None

    @property
    def crossed(self) -> bool:
        """True if the betting score has reached its limit: the stream is no longer like the calibration data."""
        return self.crossed_at is not None


@dataclass(frozen=True)
class _State:
    """Content of a state file."""

    format: int
    alpha: float
    calibration: Calibration
    inputs: int
    alarms: int
    hits: tuple[int, ...]
    crossed_at: int | None


class Monitor:
    """Monitor of a stream of inputs: a betting score that may be looked at after every input.

    A monitor counts the inputs that score above a few calibration scores, and bets that there are more of them than
    among familiar inputs. The betting score reaches its limit 2/`alpha` with probability at most `alpha` if all inputs
    are familiar, however long the stream is and however often it is looked at. The probability is over the calibration
    set and the stream, whose samples must be independent. The bounds account for the calibration set being fixed.

    Args:
        detector: Calibrated detector.
        alpha: Probability of a false alarm about the whole stream.

    Raises:
        InputError: `alpha` is not in (0, 1), or `detector` is not a detector or is calibrated in groups.
        NotFittedError: The detector is not calibrated.
    """

    def __init__(self, detector: CalibratedDetector, alpha: float = 1e-3) -> None:
        check_instance(detector, "detector", CalibratedDetector)
        if detector.group_alarms is not None:
            raise InputError(
                "is calibrated in groups",
                argument="detector",
                hint="Make a monitor for each: Monitor.from_calibration(detector.group_alarms[name].calibration).",
            )
        if detector.alarm is None:
            raise NotFittedError("this detector has no threshold: call calibrate(x_val, fpr=0.05) first")
        self._start(detector.alarm.calibration, alpha)
        self._detector = detector

    @classmethod
    def from_scores(
        cls,
        scores: ArrayLike,
        alpha: float = 1e-3,
        *,
        fpr: float = 0.05,
        threshold: float | None = None,
        resolution: float = 0.0,
    ) -> "Monitor":
        """Return a monitor of scores, from stored calibration scores.

        Args:
            scores: Scores of familiar samples that were not in the fit.
            alpha: Probability of a false alarm about the whole stream.
            fpr: Share of familiar inputs that are alarms.
            threshold: Score above which an input is an alarm; by default the lowest that keeps the rate `fpr`.
            resolution: Absolute tolerance for ties.

        Returns:
            A monitor for `update_scores`.

        Raises:
            InputError: The scores are not finite or not one per sample, or are too few for `fpr`.
        """
        return cls.from_calibration(
            Calibration.from_scores(scores, fpr=fpr, threshold=threshold, resolution=resolution), alpha
        )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], alpha: float = 1e-3) -> "Monitor":
        """Return a monitor of scores, from the metadata of an exported detector.

        Args:
            metadata: Content of the metadata entry `onefold` of an .onnx file, parsed from JSON.
            alpha: Probability of a false alarm about the whole stream.

        Returns:
            A monitor for `update_scores`.

        Raises:
            InputError: The exported detector was not calibrated, or the metadata are damaged.
        """
        content = metadata.get("calibration") if isinstance(metadata, Mapping) else None
        if content is None:
            raise InputError("no calibration", argument="metadata", hint="Calibrate the detector and export it again.")
        return cls.from_calibration(from_json(Calibration, content, "calibration"), alpha)

    @classmethod
    def from_calibration(cls, calibration: Calibration, alpha: float = 1e-3) -> "Monitor":
        """Return a monitor of scores.

        Args:
            calibration: Calibration of the detector whose scores will come.
            alpha: Probability of a false alarm about the whole stream.

        Returns:
            A monitor for `update_scores`.

        Raises:
            InputError: `alpha` is not in (0, 1).
        """
        monitor = cls.__new__(cls)
        monitor._start(calibration, alpha)
        return monitor

    def _start(self, calibration: Calibration, alpha: float) -> None:
        self._detector: CalibratedDetector | None = None
        self.calibration = calibration
        self.alpha = check_number(alpha, "alpha", 0, 1)
        self._score_limits = np.array(calibration.limits)
        self._upper_limits = upper_limits(calibration.samples, calibration.ranks, self.alpha)
        self._log_limit = math.log(2 / self.alpha)
        self._inputs, self._alarms = 0, 0
        self._hits = np.zeros(len(calibration.ranks), np.int64)
        self._crossed_at: int | None = None

    def update(self, x: Any) -> Evidence:
        """Score inputs and add them to the evidence; if one cannot be scored, none is added.

        Args:
            x: Inputs of the kind that the detector was fitted on.

        Returns:
            The evidence of all inputs so far.

        Raises:
            InputError: `x` does not have the layout of the training data, or this monitor has no detector.
        """
        if self._detector is None:
            raise InputError("this monitor has no detector. Use update_scores.")
        return self.update_scores(np.concatenate(list(self._detector.score_batches(x))))

    def update_scores(self, scores: ArrayLike) -> Evidence:
        """Add the scores of inputs to the evidence, in their order.

        Args:
            scores: Scores of the detector that was calibrated. A NaN counts as a score above all limits, as in an
                exported detector.

        Returns:
            The evidence of all inputs so far.

        Raises:
            InputError: There is not one number per input.
        """
        values = _as_scores(scores)
        for start in range(0, len(values), CHUNK):
            self._add(values[start : start + CHUNK])
        return self.evidence

    def _add(self, scores: Float64[np.ndarray, " m"]) -> None:
        exceeds: Bool[np.ndarray, "m j"] = ~(scores[:, None] <= self._score_limits)  # True for NaN
        hits = self._hits + exceeds.cumsum(axis=0)
        inputs = self._inputs + np.arange(1, len(scores) + 1)
        if self._crossed_at is None:
            crossed = betting_score(hits, inputs, self._upper_limits) >= self._log_limit
            if crossed.any():
                self._crossed_at = int(inputs[crossed.argmax()])
        self._hits, self._inputs = hits[-1], int(inputs[-1])
        self._alarms += int((~(scores <= self.calibration.threshold)).sum())

    @property
    def evidence(self) -> Evidence:
        """The evidence of all inputs so far."""
        score = float(betting_score(self._hits[None], np.array([self._inputs]), self._upper_limits)[0])
        return Evidence(
            inputs=self._inputs,
            alarms=self._alarms,
            expected=self.calibration.fpr * self._inputs,
            log10_score=score / math.log(10),
            log10_limit=self._log_limit / math.log(10),
            crossed_at=self._crossed_at,
        )

    def save(self, path: str | Path) -> None:
        """Write the state to a small JSON file, atomically.

        Args:
            path: File to write.
        """
        hits = tuple(self._hits.tolist())
        state = _State(FORMAT, self.alpha, self.calibration, self._inputs, self._alarms, hits, self._crossed_at)
        write_json(check_path(path), to_json(state))

    def load(self, path: str | Path) -> "Monitor":
        """Resume from a state that `save` wrote; the result equals that of a monitor that was never stopped.

        Args:
            path: File to read.

        Returns:
            This monitor.

        Raises:
            FileError: The file is damaged, or is of a monitor with another calibration or `alpha`.
        """
        path = check_path(path)
        try:
            state = from_json(_State, read_json(path, LARGEST_STATE))
            self._check(state)
        except InputError as error:
            raise FileError(f"{path}: damaged, or not the state of a monitor ({error})") from None
        if state.calibration != self.calibration:
            raise FileError(
                f"{path}: is of a monitor with another calibration. Use the detector of that monitor, or another file."
            )
        if state.alpha != self.alpha:
            raise FileError(f"{path}: is of a monitor with alpha={state.alpha:g}. Use that, or another file.")
        self._inputs, self._alarms, self._crossed_at = state.inputs, state.alarms, state.crossed_at
        self._hits = np.array(state.hits, np.int64)
        return self

    @staticmethod
    def _check(state: _State) -> None:
        """Raise InputError if the counts of a state contradict each other."""
        crossed_at = state.inputs if state.crossed_at is None else state.crossed_at
        valid = (
            state.format == FORMAT
            and len(state.hits) == len(state.calibration.ranks)
            and list(state.hits) == sorted(state.hits)
            and state.hits[0] >= 0
            and state.hits[-1] <= state.inputs
            and 0 <= state.alarms <= state.inputs
            and (0 < crossed_at <= state.inputs or state.crossed_at is None)
        )
        if not valid:
            raise InputError("its counts contradict each other")


def _as_scores(scores: ArrayLike) -> Float64[np.ndarray, " n"]:
    try:
        values = np.asarray(scores, np.float64)
    except (TypeError, ValueError):
        values = None
    if values is None or values.ndim != 1:
        raise InputError("must be one number per input, [N]", argument="scores")
    return values
