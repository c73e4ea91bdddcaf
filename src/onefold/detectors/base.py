"""What every method is besides its mathematics: scores of any data, alarms, one file, one exported model."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.core import storage
from onefold.core.arguments import check_integer, check_path
from onefold.core.batches import batch_slices, concatenate, map_batch, named
from onefold.detectors.alarm import Alarm, benjamini_hochberg, check_rate
from onefold.detectors.diagnosis import Diagnosis, Finding, likeness, signal
from onefold.detectors.export import export
from onefold.detectors.state import DetectorState
from onefold.errors import InputError, NotFittedError
from onefold.inputs.reader import Reader
from onefold.inputs.reservoir import shuffle_values
from onefold.nn.cudnn import exact_float32
from onefold.nn.train import Recipe
from onefold.types import ArrayLike, Batch, Kernel, Scores

AnyDetector = TypeVar("AnyDetector", bound="Detector")

KIND = "detector"
PROBES = 4  # samples that a kernel must find as similar as it did in the fit
EXAMINED = 500  # samples that a diagnosis looks at


class Detector(ABC):
    """Fit on familiar data, then score any: bigger is stranger. Methods are its final subclasses."""

    seed: int
    device: torch.device
    kernel: Kernel | None
    about_like: ClassVar[dict[str, Any]] = {}
    """The form of `DetectorState.about`, for a file to be checked by."""
    resolution: ClassVar[float] = 0.0
    """Smallest difference between scores that float32 resolves, beside the relative tolerance of `Alarm`."""
    _state: DetectorState | None = None
    _alarm: Alarm | None = None

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """The constructor's arguments, but for kernel and device, as JSON can hold them."""

    @classmethod
    def _from_settings(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """The constructor's arguments from what `_settings` gave: JSON has neither tuples nor recipes."""
        sizes = {name: tuple(value) for name, value in settings.items() if isinstance(value, list)}
        recipe = {"recipe": Recipe(**settings["recipe"])} if "recipe" in settings else {}
        return {**settings, **sizes, **recipe}

    @abstractmethod
    def _empty(self, reader: Reader, about: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
        """A scorer without weights, for the weights of a file."""

    def score(self, x: ArrayLike) -> Scores:
        """What inputs are ranked by, one number each; bigger is stranger.

        Scores are in the order of `x`; a DataLoader that shuffles gives its own order, with a warning.
        """
        return np.concatenate(list(self.score_batches(x)))

    def score_batches(self, x: ArrayLike) -> Iterator[Scores]:
        """Yield the scores batch by batch, for data that does not fit into memory."""
        for _, scores in self.scored_batches(x):
            yield scores

    def scored_batches(self, x: ArrayLike) -> Iterator[tuple[Batch, Scores]]:
        """Yield raw batches with their scores; every input is read once."""
        state = self._fitted()
        for raw in state.reader.batches(x, size=self._at_once(state), device=self.device, ordered=True):
            yield raw, self._over(state, _score, raw)

    def calibrate(self: AnyDetector, x_val: ArrayLike, fpr: float = 0.05) -> AnyDetector:
        """Set the threshold so that a share `fpr` of familiar inputs raises an alarm.

        `x_val` is familiar data that was not in the fit. The rate holds on average over calibration sets, whatever the
        distribution; it needs at least 1/fpr − 1 samples.
        """
        check_rate(fpr)
        scores = self._gathered(_score, x_val, ordered=False)
        alarm = Alarm(scores, fpr, self.seed, self.resolution)
        diagnosis = Diagnosis(tuple(self._likeness(self._fitted(), scores)))
        self._alarm = alarm
        alarm.warn_of_ties()
        diagnosis.warn()
        return self

    def pvalue(self, x: ArrayLike) -> NDArray[np.float64]:
        """How likely a familiar input is to look at least as strange: a split-conformal p-value in (0, 1]."""
        return self._calibrated().pvalues(self.score(x))

    def is_ood(self, x: ArrayLike, *, fdr: float | None = None) -> NDArray[np.bool_]:
        """Which inputs to raise an alarm for: those whose p-value is at most the calibrated false-alarm rate.

        With `fdr`, the batch is judged as a whole: at most that share of the alarms is expected to be false
        (Benjamini–Hochberg).
        """
        alarm = self._calibrated()
        scores = self.score(x)
        if fdr is not None:
            return benjamini_hochberg(alarm.conservative(scores), fdr)
        return scores > alarm.threshold

    @property
    def threshold(self) -> float:
        """Scores above it raise an alarm."""
        return self._calibrated().threshold

    @property
    def alarm(self) -> Alarm | None:
        """The calibration, if there is one."""
        return self._alarm

    def diagnose(self, x_val: ArrayLike | None = None, *, show: bool = True) -> Diagnosis:
        """What speaks for and against trusting this detector; printed too, unless show=False.

        `x_val` is familiar data that was not in the fit, to be compared with what the detector remembers.
        """
        state = self._fitted()
        findings = [*self._checks(state), *self._information(state)]
        if x_val is not None:
            findings += self._likeness(state, self._gathered(_score, x_val, ordered=False))
        diagnosis = Diagnosis(tuple(findings))
        if show:
            print(diagnosis)
        return diagnosis

    def neighbours(self, x: ArrayLike, k: int = 5) -> NDArray[np.int64]:
        """Return the k stored training samples nearest to each input, [N, k] rows of `remembered`, nearest first."""
        search = self.neighbour_search(k)
        return np.concatenate([search(raw) for raw in self._fitted().reader.batches(x, ordered=True)])

    def neighbour_search(self, k: int = 5) -> Callable[[Batch], NDArray[np.int64]]:
        """Return the function behind `neighbours` for raw batches, as `scored_batches` yields them."""
        state = self._fitted()
        if state.reservoir.samples is None:
            raise InputError(
                "no training samples in this detector (saved with samples=False). Save it with samples=True to use "
                "neighbours()."
            )
        count = min(check_integer(k, "k"), len(state.reservoir))
        stored = torch.cat([_unit(state.scorer, batch) for batch in self._prepared(state, state.reservoir.samples)])

        def search(raw: Batch) -> NDArray[np.int64]:
            products = (_unit(state.scorer, batch) @ stored.T for batch in self._prepared(state, raw))
            return np.concatenate([part.topk(count, dim=1).indices.cpu().numpy() for part in products])

        return search

    @property
    def remembered(self) -> Batch | None:
        """Raw train samples that go with the detector, if it was not saved without them."""
        return self._fitted().reservoir.samples

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
        return self._fitted()

    def outputs(self, x: ArrayLike) -> dict[str, Scores]:
        """Return every number that the method computes for each input, in one pass.

        Args:
            x: Inputs, as in `score`.

        Returns:
            `score`, and `variance` and `relative` if the method estimates a variance.
        """
        return {"score": self.score(x)}

    def save(self, path: str | Path, *, samples: bool = True) -> None:
        """Write one file, whole or not at all: tensors in safetensors, settings in its JSON header.

        The file remembers some of the train samples (up to 5,000 in 32 MB), for `update`, `diagnose` and reports; with
        samples=False it does not. A model of the user's own is not in it: hand its kernel to `load`.
        """
        state = self._fitted()
        tensors, header = self._content(samples=samples)
        if self.kernel is not None:
            tensors |= self._known_by(state, self.kernel, samples=samples)
        storage.save(check_path(path), KIND, tensors, header)

    def _content(self, *, samples: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors and the header of a file, but for what a kernel is known by."""
        state = self._fitted()
        tensors = {f"scorer.{name}": t for name, t in state.scorer.state_dict().items()}
        header: dict[str, Any] = {
            "method": type(self).__name__,
            "settings": self._settings(),
            "reader": state.reader.to_json(),
            "about": state.about,
            "alarm": None if self._alarm is None else {"fpr": self._alarm.fpr},
            "reservoirs": None,
            "kernel": None if self.kernel is None else getattr(self.kernel, "settings", {}),
        }
        if self._alarm is not None:
            tensors["alarm"] = torch.from_numpy(self._alarm.scores)
        if samples:
            header["reservoirs"] = {name: memory.to_json() for name, memory in state.memories.items()}
            for name, memory in state.memories.items():
                tensors |= memory.tensors(name)
        return tensors, header

    def _known_by(self, state: DetectorState, kernel: Kernel, *, samples: bool) -> dict[str, Tensor]:
        """A few samples and how similar the kernel finds them, to know it by when it is handed in again.

        Where the file is to hold no samples they are random numbers; a model that cannot take those goes unchecked.
        """
        if samples and state.reservoir.samples is not None:
            probe = map_batch(lambda t: t[:PROBES], state.reservoir.samples)
            similarity = self._similarity(state, kernel, probe)
        else:
            probe, similarity = state.reader.random(PROBES), torch.tensor(torch.nan)
            with contextlib.suppress(Exception):  # the model is the user's, and random numbers are not its data
                similarity = similarity if probe is None else self._similarity(state, kernel, probe)
            if probe is None or not similarity.isfinite().all():
                return {}
        return {"similarity": similarity, **{f"probe.{key}": t for key, t in named(probe).items()}}

    def _similarity(self, state: DetectorState, kernel: Kernel, raw: Batch) -> Tensor:
        batch = state.prepare(map_batch(lambda t: t.to(self.device), raw))
        with exact_float32():  # the same numbers on every device
            return kernel(batch, batch).detach().double().cpu()

    def _likeness(self, state: DetectorState, scores: Scores) -> list[Finding]:
        """Whether other familiar data looks like what is remembered, if anything is."""
        reference = self._reference(state)
        return [] if reference is None else [likeness(*reference, scores)]

    def _reference(self, state: DetectorState) -> tuple[Scores, str, float] | None:
        """Scores that familiar samples should have, what they are scores of, and how much stranger others may look."""
        if state.held.samples is not None:
            return self._over(state, _score, state.held.samples), "those held out by the fit", 0.1
        if state.reservoir.samples is None:
            return None
        return self._over(state, _score, state.reservoir.samples), "train samples", 0.49  # fitted to, so more familiar

    def _became(self, state: DetectorState) -> None:
        """Replace what was there, once everything about the new state is known to be computable."""
        diagnosis = Diagnosis(tuple(self._checks(state)))
        self._state, self._alarm = state, None
        diagnosis.warn()

    def _checks(self, state: DetectorState) -> list[Finding]:
        """What must hold: here, that the scores tell familiar samples from scrambled ones, or from each other."""
        memory = state.familiar
        if memory.samples is None:
            return []
        few = memory.subsample(EXAMINED)
        return [signal(self._over(state, self._measure, concatenate([few, shuffle_values(few, self.seed)])))]

    def _information(self, state: DetectorState) -> list[Finding]:
        """What is good to know besides."""
        del state
        return []

    @staticmethod
    def _measure(scorer: Any, batch: Any) -> Tensor:
        """The number whose spread is looked at: where there is one, the relative variance."""
        return scorer.relative(batch) if hasattr(scorer, "relative") else scorer(batch)

    def _over(self, state: DetectorState, function: Callable[[Any, Any], Tensor], raw: Batch) -> Scores:
        """function(scorer, prepared batch) over raw samples in memory."""
        with exact_float32():
            return np.concatenate([_finite(function(state.scorer, batch)) for batch in self._prepared(state, raw)])

    def _over_all(
        self, state: DetectorState, function: Callable[[Any, Any], tuple[Tensor, ...]], raw: Batch
    ) -> list[Scores]:
        """function(scorer, prepared batch) over raw samples in memory, for a function that gives several numbers."""
        with exact_float32():
            parts = [function(state.scorer, batch) for batch in self._prepared(state, raw)]
        return [np.concatenate([_finite(part) for part in side]) for side in zip(*parts, strict=True)]

    def _prepared(self, state: DetectorState, raw: Batch) -> Iterator[Any]:
        for part in batch_slices(raw, self._at_once(state)):
            with torch.no_grad():
                yield state.prepare(map_batch(lambda t: t.to(self.device), part))

    def _gathered(self, function: Callable[[Any, Any], Tensor], x: ArrayLike, *, ordered: bool = True) -> Scores:
        return np.concatenate(list(self._computed(function, x, ordered=ordered)))

    def _computed(
        self, function: Callable[[Any, Any], Tensor], x: ArrayLike, *, ordered: bool = True
    ) -> Iterator[Scores]:
        """function(scorer, prepared batch) over all of `x`, on the detector's device, without gradients."""
        state = self._fitted()
        for raw in state.reader.batches(x, size=self._at_once(state), device=self.device, ordered=ordered):
            yield self._over(state, function, raw)

    def _at_once(self, state: DetectorState) -> int:
        """How many samples to score at once: a GPU wants more."""
        return state.reader.batch_size * (8 if self.device.type == "cuda" else 1)

    def _fitted(self) -> DetectorState:
        if self._state is None:
            raise NotFittedError(f"this {type(self).__name__} is not fitted yet: call fit first")
        return self._state

    def _calibrated(self) -> Alarm:
        self._fitted()
        if self._alarm is None:
            raise NotFittedError(
                f"this {type(self).__name__} has no threshold: call calibrate(x_val, fpr=0.05) with familiar data that "
                "was not in the fit (again after fit or update)"
            )
        return self._alarm


class VarianceMixin:
    """Methods that estimate the variance of an infinite ensemble; their scorers compute all numbers in one pass."""

    def variance(self, x: ArrayLike) -> Scores:
        """Return the variance in the scale of the features (Eq. 12; Eq. 27 for a normalised g); never negative."""
        return self.outputs(x)["variance"]

    def relative(self, x: ArrayLike) -> Scores:
        """Return the variance as a share of its prior, free of the scale of the features; never negative."""
        return self.outputs(x)["relative"]

    def outputs(self, x: ArrayLike) -> dict[str, Scores]:
        """Return `score`, `variance` and `relative` of each input, from one pass of the networks."""
        assert isinstance(self, Detector)
        state = self._fitted()
        batches = state.reader.batches(x, size=self._at_once(state), device=self.device, ordered=True)
        parts = [self._over_all(state, _outputs, raw) for raw in batches]
        score, variance, relative = (np.concatenate(side) for side in zip(*parts, strict=True))
        return {"score": score, "variance": variance, "relative": relative}


class ExportMixin:
    """Methods whose scorer is a plain network can leave Python."""

    def export(self, path: str | Path) -> None:
        """Write the whole detector as .onnx or .pt2: raw data in, `score` out, and `is_ood` where it is calibrated.

        Preparation, score and threshold are inside, and the number of samples in a batch is free.
        """
        assert isinstance(self, Detector)
        state = self._fitted()
        threshold = None if self.alarm is None else self.threshold
        about = {"method": type(self).__name__, "fpr": None if self.alarm is None else self.alarm.fpr}
        export(check_path(path), state.reader, state.scorer, threshold, about)


def _score(scorer: Any, batch: Any) -> Tensor:
    return scorer(batch)


def _outputs(scorer: Any, batch: Any) -> tuple[Tensor, ...]:
    return scorer.outputs(batch)


def parts(scorer: Any, batch: Any) -> tuple[Tensor, ...]:
    """Return relative variance and scale of a batch."""
    return scorer.parts(batch)


def _finite(scores: Tensor) -> Scores:
    if not scores.isfinite().all():
        bad = int((~scores.isfinite()).sum())
        raise InputError(f"{bad} of {len(scores)} inputs have no finite score: their features overflow or are NaN")
    return scores.double().cpu().numpy()


@torch.no_grad()
def _unit(scorer: Any, batch: Any) -> Tensor:
    """Unit vectors to compare samples by: the features that the detector ranks by, or else the samples themselves."""
    features = getattr(scorer, "map", None)
    if features is not None and features.has_features:
        batch = features.features(features.encode(batch))
    parts = [t.flatten(1).float() for t in named(batch).values()]
    return F.normalize(torch.cat(parts, dim=1), dim=1)
