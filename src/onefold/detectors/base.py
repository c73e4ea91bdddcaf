"""The base class of all detectors: scores, alarms, diagnosis and files."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.core import storage
from onefold.core.arguments import check_integer, check_path
from onefold.core.batches import concatenate, named
from onefold.detectors.alarm import Alarm, AnyAlarm, GroupAlarms, benjamini_hochberg, check_rate
from onefold.detectors.build import Spec, Summary
from onefold.detectors.diagnosis import Diagnosis, Finding, likeness, signal
from onefold.detectors.explain import PATCHES, Explanation, explain
from onefold.detectors.export import export
from onefold.detectors.raw_inputs import Inputs
from onefold.detectors.save import KIND, contents, probe
from onefold.detectors.state import DetectorState
from onefold.errors import InputError, NotFittedError
from onefold.inputs.reader import Reader
from onefold.inputs.reservoir import shuffle_values
from onefold.kernels.model import ModelFeatures
from onefold.types import ArrayLike, Batch, Kernel, Scores

AnyDetector = TypeVar("AnyDetector", bound="Detector")

DIAGNOSED = 500  # samples that a diagnosis scores
ENCODED = 64  # with a pretrained encoder, which takes longer


class Detector(ABC):
    """Detector of unfamiliar inputs: fit it on in-distribution data, then score any data.

    A subclass defines `spec_class`, `build` and `fit`. `fit` makes a spec, builds the scorer from it, trains it, and
    hands the state to `_set_state`. `load` builds the scorer from the stored spec in the same way. The constructor must
    store each argument as an attribute of the same name (`score` as `score_kind`).
    """

    spec_class: ClassVar[type[Spec]] = Spec
    """Specification of the scorer; its fields include the constructor's arguments except `kernel` and `device`."""
    summary_class: ClassVar[type[Summary]] = Summary
    """Numbers that `fit` measures."""
    kernel_class: ClassVar[type | None] = None
    """Kind of kernel that the constructor accepts, or None."""
    resolution: ClassVar[float] = 0.0
    """Smallest difference between scores that float32 resolves, in addition to the relative tolerance of `Alarm`."""

    seed: int
    device: torch.device
    kernel: Kernel | None = None
    _state: DetectorState | None = None
    _alarm: AnyAlarm | None = None

    @abstractmethod
    def build(self, spec: Any, *, meta: bool = False) -> nn.Module:
        """Return the scorer of a spec: initial weights drawn from its seed, or weights on the meta device.

        A scorer maps prepared samples to scores [N]. It may define `outputs(x)`, a dict of several numbers, `networks`,
        the networks that are trained, and `stored_features`, a number of stored samples.
        """

    @classmethod
    def from_spec(cls: type[AnyDetector], spec: Spec, kernel: Kernel | None, device: str) -> AnyDetector:
        """Return an unfitted detector with the settings in a spec."""
        settings = {name: getattr(spec, name) for name in _setting_names(cls)}
        make: Any = cls
        return make(**settings, device=device) if kernel is None else make(**settings, kernel=kernel, device=device)

    @property
    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, except `kernel` and `device`."""
        return {name: getattr(self, "score_kind" if name == "score" else name) for name in _setting_names(type(self))}

    def score(self, x: ArrayLike) -> Scores:
        """Return one score per input; a bigger score is more uncertain.

        Args:
            x: Inputs of the kind that `fit` received. A DataLoader that shuffles returns scores in its own order, with
                a warning.

        Returns:
            Scores [N], in the order of `x`.

        Raises:
            InputError: `x` does not have the layout of the training data, or a score is not finite.
            NotFittedError: Before `fit`.
        """
        return np.concatenate(list(map(self.state.evaluate, self.state.batches(x))))

    def score_batches(self, x: ArrayLike) -> Iterator[Scores]:
        """Yield scores batch by batch, for data larger than memory.

        Args:
            x: Inputs, as in `score`.

        Yields:
            Scores of the next inputs.
        """
        return map(self.state.evaluate, self.state.batches(x))

    def scored_batches(self, x: ArrayLike) -> Iterator[tuple[Batch, Scores]]:
        """Yield raw batches with their scores; every input is read once.

        Args:
            x: Inputs, as in `score`.

        Yields:
            Raw samples and their scores.
        """
        state = self.state
        for raw in state.batches(x):
            yield raw, state.evaluate(raw)

    def outputs(self, x: ArrayLike) -> dict[str, Scores]:
        """Return every number that the method computes for each input, in one pass.

        Args:
            x: Inputs, as in `score`.

        Returns:
            `score`, and for methods that estimate a variance also `variance` and `relative`.
        """
        return {"score": self.score(x)}

    def calibrate(self: AnyDetector, x_val: ArrayLike, fpr: float = 0.05, *, groups: Any = None) -> AnyDetector:
        """Set the threshold so that a share `fpr` of in-distribution inputs raises an alarm.

        The rate holds on average over calibration sets, for any distribution. After `fit` or `update`, calibrate again.

        Args:
            x_val: In-distribution data that was not in the fit, at least 1/fpr − 1 samples.
            fpr: False-alarm rate in (0, 1).
            groups: Group of each sample, as text or integers, such as the camera that it came from. Every group gets a
                threshold of its own, so the rate holds in each, and needs at least 1/fpr − 1 samples.

        Returns:
            This detector.

        Raises:
            InputError: `fpr` is out of range, or `x_val` or a group has too few samples.
            NotFittedError: Before `fit`.
        """
        check_rate(fpr)
        if groups is None:
            scores = self._unordered_scores(x_val)
            alarm: AnyAlarm = Alarm(scores, fpr, self.seed, self.resolution)
        else:
            scores = self.score(x_val)
            alarm = GroupAlarms.calibrate(scores, groups, fpr, self.seed, self.resolution)
        diagnosis = Diagnosis(tuple(self._likeness(self.state, scores)))
        self._alarm = alarm
        alarm.warn_of_ties()
        diagnosis.warn()
        return self

    def pvalue(self, x: ArrayLike, *, groups: Any = None) -> NDArray[np.float64]:
        """Return split-conformal p-values: how often an in-distribution input has a score at least as big.

        Args:
            x: Inputs, as in `score`.
            groups: Group of each input, for a detector that was calibrated in groups.

        Returns:
            p-values in (0, 1], [N]; small values are unfamiliar.

        Raises:
            InputError: `groups` is missing, was not expected, or has a group that was not in the calibration.
            NotFittedError: Before `calibrate`.
        """
        return self._apply_alarm(Alarm.pvalues, x, groups)

    def is_ood(
        self, x: ArrayLike, *, fpr: float | None = None, fdr: float | None = None, groups: Any = None
    ) -> NDArray[np.bool_]:
        """Return which inputs raise an alarm: those with a p-value of at most the calibrated false-alarm rate.

        Args:
            x: Inputs, as in `score`.
            fpr: Another false-alarm rate in (0, 1) than the calibrated one.
            fdr: False-discovery rate in (0, 1). The whole of `x` is then tested at once, and at most this share of the
                alarms is expected to be false (Benjamini–Hochberg).
            groups: Group of each input, for a detector that was calibrated in groups.

        Returns:
            One boolean per input.

        Raises:
            InputError: `fpr` is too small for the number of calibration samples, or both rates are set. `groups` is
                missing, was not expected, or has a group that was not in the calibration.
            NotFittedError: Before `calibrate`.
        """
        if fdr is None:
            return self._apply_alarm(partial(Alarm.exceeds, fpr=fpr), x, groups)
        if fpr is not None:
            raise InputError("excludes fdr", argument="fpr", hint="Set one of them.")
        return benjamini_hochberg(self._apply_alarm(Alarm.conservative_pvalues, x, groups), fdr)

    @property
    def threshold(self) -> float:
        """Score above which an input raises an alarm.

        Raises:
            InputError: The detector was calibrated in groups, each with a threshold of its own.
            NotFittedError: Before `calibrate`.
        """
        alarm = self._calibrated()
        if isinstance(alarm, GroupAlarms):
            raise InputError(
                "this detector has a threshold for each group. Use group_alarms[name].threshold, or calibrate it "
                "without groups."
            )
        return alarm.threshold

    @property
    def alarm(self) -> Alarm | None:
        """The calibration, or None before `calibrate` and after a calibration in groups."""
        return self._alarm if isinstance(self._alarm, Alarm) else None

    @property
    def group_alarms(self) -> dict[str, Alarm] | None:
        """The calibration of each group by its name, or None without a calibration in groups."""
        return dict(self._alarm.alarms) if isinstance(self._alarm, GroupAlarms) else None

    def diagnose(self, x_val: ArrayLike | None = None, *, show: bool = True) -> Diagnosis:
        """Return reasons to trust this detector or not, such as whether its training converged.

        Args:
            x_val: In-distribution data that was not in the fit, to compare with the stored samples.
            show: Print the diagnosis.

        Returns:
            The findings.

        Raises:
            NotFittedError: Before `fit`.
        """
        state = self.state
        findings = [*self._checks(state), *self._information(state)]
        if isinstance(self.kernel, ModelFeatures) and self.kernel.size:
            findings.append(Finding("features", self.kernel.size, None, self.kernel.description))
        if x_val is not None:
            findings += self._likeness(state, self._unordered_scores(x_val))
        diagnosis = Diagnosis(tuple(findings))
        if show:
            print(diagnosis)
        return diagnosis

    def explain(self, x: ArrayLike, *, patches: int = PATCHES) -> list[Explanation]:
        """Return why each input is unfamiliar: how much its score falls when one part of it has a typical value.

        Parts of images are patches, replaced by the mean of the stored training images. Parts of tables and vectors are
        columns, replaced by the median of the stored samples or by the most frequent category. An explanation scores
        each input once more for every part: 64 times for an image, C times for C columns. Each call also compares the
        inputs with the stored samples, to name the nearest ones.

        Args:
            x: Inputs, as in `score`; best a few with large scores.
            patches: Number of patches along each side of an image.

        Returns:
            One explanation per input.

        Raises:
            InputError: The inputs are no images, tables or vectors, or the detector was saved without samples. Tables
                need none: their means replace the medians.
            NotFittedError: Before `fit`.
        """
        search = None if self.remembered is None else self.neighbour_search()
        return explain(self.state, search, x, patches)

    def neighbours(self, x: ArrayLike, k: int = 5) -> NDArray[np.int64]:
        """Return the k stored training samples nearest to each input.

        Args:
            x: Inputs, as in `score`.
            k: Number of neighbours; at most the number of stored samples.

        Returns:
            Rows of `remembered`, [N, k], nearest first.

        Raises:
            InputError: The detector was saved without samples.
        """
        search = self.neighbour_search(k)
        return np.concatenate([search(raw) for raw in self.reader.batches(x, ordered=True)])

    def neighbour_search(self, k: int = 5) -> Callable[[Batch], NDArray[np.int64]]:
        """Return the function behind `neighbours`, for raw batches as `scored_batches` yields them.

        Args:
            k: Number of neighbours.

        Returns:
            Function from a raw batch to rows of `remembered`, [N, k].

        Raises:
            InputError: The detector was saved without samples.
        """
        state = self.state
        if state.reservoir.samples is None:
            raise InputError(
                "no training samples in this detector (saved with samples=False). Save it with samples=True to use "
                "neighbours()."
            )
        count = min(check_integer(k, "k"), len(state.reservoir))
        stored = torch.cat([_directions(state.scorer, batch) for batch in state.prepared(state.reservoir.samples)])

        def search(raw: Batch) -> NDArray[np.int64]:
            products = (_directions(state.scorer, batch) @ stored.T for batch in state.prepared(raw))
            return np.concatenate([part.topk(count, dim=1).indices.cpu().numpy() for part in products])

        return search

    @property
    def remembered(self) -> Batch | None:
        """Stored raw training samples, or None if the detector was saved without samples."""
        return self.state.reservoir.samples

    @property
    def reader(self) -> Reader:
        """Layout of the training data, by which later data is read and checked."""
        return self.state.reader

    @property
    def state(self) -> DetectorState:
        """Everything that the fit computed: scorer, reservoirs, number of samples seen, number of parameters.

        Raises:
            NotFittedError: Before `fit`.
        """
        if self._state is None:
            raise NotFittedError(f"this {type(self).__name__} is not fitted yet: call fit first")
        return self._state

    def merge(self: AnyDetector, other: "Detector") -> AnyDetector:
        """Add the training data of another detector, which was fitted on another part of the data.

        `LastLayerGP`, `LocalGP` and `KNN` can be merged. Both detectors must have the same settings and features: fit
        the first part alone, the others with `fit(x, like=first)`. Afterwards calibrate again.

        Args:
            other: Detector of the same method; it is not changed.

        Returns:
            This detector.

        Raises:
            InputError: The method cannot be merged, or the detectors differ in more than their data.
            NotFittedError: Before `fit`.
        """
        del other
        raise InputError(
            f"{type(self).__name__}: detectors of this method cannot be merged. Fit one on all data, or use "
            "LastLayerGP, LocalGP or KNN."
        )

    def save(self, path: str | Path, *, samples: bool = True) -> None:
        """Write the detector to one file, atomically: tensors in safetensors, everything else in a JSON header.

        A user's model is not part of the file; pass it to `load`.

        Args:
            path: File to write.
            samples: Include raw training samples (up to 5,000 in 32 MB), which `update`, `diagnose`, `neighbours` and
                reports need.

        Raises:
            NotFittedError: Before `fit`.
        """
        tensors, header = contents(self, samples=samples)
        if self.kernel is not None:
            tensors |= probe(self.state, self.kernel, samples=samples)
        storage.save(check_path(path), KIND, tensors, header)

    def restore_state(self, state: DetectorState, alarm: AnyAlarm | None) -> None:
        """Set the state of a detector from a file; raise ValueError if the state is inconsistent.

        Subclasses check here what the types of `Spec` and `Summary` do not.
        """
        self._state, self._alarm = state, alarm

    def _set_state(self, state: DetectorState) -> None:
        """Replace the state after a successful fit, and warn about what speaks against the new one."""
        diagnosis = Diagnosis(tuple(self._checks(state)))
        self._state, self._alarm = state, None
        diagnosis.warn()

    def _unordered_scores(self, x: ArrayLike) -> Scores:
        return np.concatenate(list(map(self.state.evaluate, self.state.batches(x, ordered=False))))

    def _likeness(self, state: DetectorState, scores: Scores) -> list[Finding]:
        """Compare scores of other in-distribution data with those of stored samples, if there are any."""
        reference = self._reference_scores(state)
        return [] if reference is None else [likeness(*reference, scores)]

    def _reference_scores(self, state: DetectorState) -> tuple[Scores, str, float] | None:
        """Return scores of stored samples, their name, and how much the AUROC of other data may exceed ½."""
        if state.held_out.samples is not None:
            return state.evaluate(state.held_out.samples), "those held out by the fit", 0.1
        if state.reservoir.samples is None:
            return None
        return state.evaluate(state.reservoir.samples), "train samples", 0.49  # the fit has seen them

    def _checks(self, state: DetectorState) -> list[Finding]:
        """Return findings that must hold: scores differ between stored samples and shuffled ones."""
        if state.reference.samples is None:
            return []
        few = state.reference.subsample(ENCODED if getattr(self.kernel, "pretrained", None) else DIAGNOSED)
        return [signal(state.evaluate(concatenate([few, shuffle_values(few, self.seed)]), self._measure(state)))]

    def _information(self, state: DetectorState) -> list[Finding]:
        """Return findings for information only."""
        del state
        return []

    @staticmethod
    def _measure(state: DetectorState) -> Callable[[Any], Tensor]:
        """Return the function that `_checks` examines: the relative variance if there is one, else the score."""
        return getattr(state.scorer, "relative", state.scorer)

    def _calibrated(self) -> AnyAlarm:
        _ = self.state  # raises the error about `fit` first
        if self._alarm is None:
            raise NotFittedError(
                f"this {type(self).__name__} has no threshold: call calibrate(x_val, fpr=0.05) with familiar data that "
                "was not in the fit (again after fit or update)"
            )
        return self._alarm

    def _apply_alarm(
        self, function: Callable[[Alarm, Scores], NDArray[Any]], x: ArrayLike, groups: Any
    ) -> NDArray[Any]:
        """Return a function of the alarm, or of the alarm of each input's group, and the scores of `x`."""
        alarm = self._calibrated()
        if isinstance(alarm, Alarm) and groups is not None:
            raise InputError(
                "the detector was calibrated without groups",
                argument="groups",
                hint="Pass groups to calibrate as well.",
            )
        if isinstance(alarm, GroupAlarms) and groups is None:
            raise InputError(
                "missing: the detector was calibrated in groups",
                argument="groups",
                hint="Pass the group of each input.",
            )
        scores = self.score(x)
        return function(alarm, scores) if isinstance(alarm, Alarm) else alarm.apply(function, scores, groups)


class VarianceMixin:
    """Methods of detectors that estimate the variance of an infinite ensemble."""

    def variance(self, x: ArrayLike) -> Scores:
        """Return the variance in the scale of the features (Eq. 12; Eq. 27 for a normalised g).

        Args:
            x: Inputs, as in `score`.

        Returns:
            Variances [N], never negative.
        """
        return self.outputs(x)["variance"]

    def relative(self, x: ArrayLike) -> Scores:
        """Return the variance divided by the prior variance, which does not depend on the scale of the features.

        Args:
            x: Inputs, as in `score`.

        Returns:
            Relative variances [N], never negative.
        """
        return self.outputs(x)["relative"]

    def outputs(self, x: ArrayLike) -> dict[str, Scores]:
        """Return score, variance and relative variance of each input, from one pass of the networks.

        Args:
            x: Inputs, as in `score`.

        Returns:
            `score`, `variance` and `relative`, [N] each.
        """
        assert isinstance(self, Detector)
        state = self.state
        function: Any = state.scorer.outputs
        parts = [state.evaluate_all(raw, function) for raw in state.batches(x)]
        names = ("score", "variance", "relative")
        return {name: np.concatenate(values) for name, values in zip(names, zip(*parts, strict=True), strict=True)}


class ExportMixin:
    """Export of detectors with a scorer that is a plain network."""

    def export(self, path: str | Path, *, inputs: Inputs = "auto") -> None:
        """Write the detector as a model that needs no onefold, with preparation, score and threshold inside.

        Its outputs are `score`, and `pvalue` and `is_ood` if the detector is calibrated without groups. An .onnx file
        has the optional input `threshold`, which replaces the calibrated one.

        Args:
            path: File to write: .onnx, or .pt2 for `torch.export`.
            inputs: What the model takes. "image": one image uint8 [H, W, 3] of any size, .onnx only. "batch": samples
                as `score` takes them, any number. "auto": "image" if the detector was fitted on image files, the
                columns by name if it was fitted on a table, else "batch". A .pt2 file takes batches.

        Raises:
            InputError: Another suffix, a user's model that cannot be exported, or `inputs` that it cannot take.
            MissingExtraError: .onnx without the packages that it needs.
            NotFittedError: Before `fit`.
        """
        assert isinstance(self, Detector)
        state = self.state
        export(check_path(path), state.reader, state.scorer, self.alarm, {"method": type(self).__name__}, inputs)


def _setting_names(cls: type[Detector]) -> list[str]:
    return [name for name in inspect.signature(cls).parameters if name not in ("kernel", "device")]


@torch.no_grad()
def _directions(scorer: Any, batch: Any) -> Tensor:
    """Return unit vectors to compare samples by: features of the scorer if it has any, else the samples themselves."""
    features = getattr(scorer, "map", None)
    if features is not None and features.has_features:
        batch = features.features(features.encode(batch))
    parts = [t.flatten(1).float() for t in named(batch).values()]
    return F.normalize(torch.cat(parts, dim=1), dim=1)
