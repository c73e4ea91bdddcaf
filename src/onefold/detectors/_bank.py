"""Base of detectors that compare an input with stored features of training samples."""

import copy
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.detectors.alarm import AnyAlarm
from onefold.detectors.base import Detector
from onefold.detectors.build import Spec, Summary, data_format, feature_map, set_standardisation, streams
from onefold.detectors.merge import like_state, merge_states
from onefold.detectors.state import DetectorState
from onefold.distil.fit import iterate_slices
from onefold.errors import InputError
from onefold.inputs.reservoir import Reservoir
from onefold.inputs.samples import read_train_data
from onefold.kernels.feature_maps import FeatureMap
from onefold.nn.nets import finished
from onefold.types import ArrayLike, FeatureKernel

PRIOR_WIDTH = 2048
LARGEST_BANK = 50_000

AnyBankDetector = TypeVar("AnyBankDetector", bound="BankDetector")


@dataclass(frozen=True, kw_only=True)
class BankSpec(Spec):
    """Capacity of a bank, and its shape: number of stored samples and of features."""

    bank: int
    shape: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class BankSummary(Summary):
    """State of the reservoir that selects the samples of the bank."""

    bank: dict[str, Any] = field(default_factory=dict)


class BankScorer(nn.Module):
    """Base of scorers with unit features of training samples in `bank`; `keys` are those of their reservoir."""

    bank: Tensor
    keys: Tensor

    def __init__(self, features: FeatureMap, shape: tuple[int, int], *, device: str) -> None:
        super().__init__()
        self.map = features
        self.register_buffer("bank", torch.zeros(shape, dtype=torch.float32, device=device))
        self.register_buffer("keys", torch.zeros(shape[0], dtype=torch.float64, device=device))

    @property
    def stored_features(self) -> int:
        """Number of training samples in the bank."""
        return len(self.bank)

    def features(self, x: Any) -> Float[Tensor, "n d"]:
        """Return the unit features of a batch."""
        return F.normalize(self.map.embed(x).float(), dim=1)

    def set_bank(self, samples: Float[Tensor, "n d"], keys: Float[Tensor, " n"]) -> None:
        """Replace the stored features."""
        self.bank, self.keys = samples, keys


class BankDetector(Detector):
    """Base of detectors whose fit stores features of a random sample of the training data.

    A subclass defines `make_scorer` and the settings in its `spec_class`, a `BankSpec`.
    """

    summary_class = BankSummary
    kernel_class = FeatureKernel
    least_samples: int = 1
    """Number of training samples that scores need."""
    bank: int

    @abstractmethod
    def make_scorer(self, spec: Any, features: FeatureMap, *, device: str) -> BankScorer:
        """Return a scorer with an empty bank."""

    def fit(self: AnyBankDetector, x: ArrayLike, *, like: AnyBankDetector | None = None) -> AnyBankDetector:
        """Fit on in-distribution data without labels.

        Args:
            x: Training data, as in `CSD.fit`.
            like: Fitted detector whose layout, standardisation and features are used, so that the two can be merged.

        Returns:
            This detector.

        Raises:
            InputError: The data cannot be used, it has too few samples, or `like` has other settings.
        """
        if like is not None:
            spec = like.state.spec
            assert isinstance(spec, BankSpec)
            state, salt = like_state(self, like, replace(spec, shape=(0, 0)), x)
            return self._add(state, Reservoir(self.bank, self.seed, salt), x)
        data = read_train_data(x, self.device, self.seed, **data_format(self.kernel))
        self._check_count(len(data.samples))
        inputs = data.reader.sample_shape if self.kernel is None else ()
        make_spec: Any = self.spec_class
        spec = make_spec(**self.settings, inputs=inputs, shape=(0, 0))
        scorer = self.build(spec)
        set_standardisation(scorer, data.standardise)
        finished(scorer, self.device)
        bank = Reservoir(self.bank, self.seed)
        with torch.no_grad():
            for batch in iterate_slices(data.samples, self.device):
                bank.add(scorer.features(batch))
        return self._finish(DetectorState.from_data(data, scorer, spec, self.device), bank)

    def update(self: AnyBankDetector, x: ArrayLike, *, half_life: float | None = None) -> AnyBankDetector:
        """Add new in-distribution data; afterwards calibrate again.

        Args:
            x: New data.
            half_life: Number of samples after which a sample is half as likely to be stored. By default samples of all
                ages are stored with equal probability.

        Returns:
            This detector.

        Raises:
            InputError: The data does not have the layout of the training data.
        """
        state = self.state
        return self._add(replace(state, reservoir=state.reservoir.copy()), _restore_bank(state), x, half_life)

    def merge(self: AnyBankDetector, other: Detector) -> AnyBankDetector:
        """Add the training data of another detector: its bank is a random sample of both. See `Detector.merge`.

        Args:
            other: Detector with the same settings and features; it is not changed.

        Returns:
            This detector.

        Raises:
            InputError: The detectors differ in more than their data.
        """
        state = merge_states(self, other)
        state = replace(state, scorer=copy.deepcopy(state.scorer))
        return self._finish(state, _restore_bank(state).merge(_restore_bank(other.state)))

    @torch.no_grad()
    def _add(
        self: AnyBankDetector, state: DetectorState, bank: Reservoir, x: ArrayLike, half_life: float | None = None
    ) -> AnyBankDetector:
        """Add data to the bank and to the reservoir of `state`, and replace the state."""
        state = replace(state, scorer=copy.deepcopy(state.scorer))
        scorer = _bank_scorer(state)
        for raw in state.reader.batches(x):
            state.reservoir.add(raw, half_life)
            for batch in state.prepared(raw):
                bank.add(scorer.features(batch), half_life)
        self._check_count(len(bank))
        return self._finish(state, bank)

    def build(self, spec: Any, *, meta: bool = False) -> BankScorer:
        """Return the scorer: with an initial random network and an empty bank, or on the meta device."""
        features = feature_map(spec, self.kernel, PRIOR_WIDTH, streams(spec.seed, 1, meta=meta)[0])
        return self.make_scorer(spec, features, device="meta" if meta else "cpu")

    def restore_state(self, state: DetectorState, alarm: AnyAlarm | None) -> None:
        """Set the state of a detector from a file."""
        bank = _restore_bank(state)
        if len(bank) < self.least_samples or bank.capacity != self.bank:
            raise ValueError("the bank has too few samples, or another capacity")
        super().restore_state(state, alarm)

    def _check_count(self, count: int) -> None:
        """Raise InputError if there are too few training samples."""
        if count < self.least_samples:
            raise InputError(f"x has {count} samples, fewer than {self.least_samples}")

    def _finish(self: AnyBankDetector, state: DetectorState, bank: Reservoir) -> AnyBankDetector:
        """Move the bank to the scorer and replace the state."""
        samples = bank.samples
        assert isinstance(samples, Tensor)
        if not samples.isfinite().all() or not samples.any():
            raise InputError("the features of the train data are NaN, infinite, or all zero (is the data constant?)")
        _bank_scorer(state).set_bank(samples.to(self.device), torch.from_numpy(bank.keys))
        spec = state.spec
        assert isinstance(spec, BankSpec)
        spec = replace(spec, shape=(samples.shape[0], samples.shape[1]))
        self._set_state(replace(state, spec=spec, summary=BankSummary(bank=bank.to_json())))
        return self


def _bank_scorer(state: DetectorState) -> BankScorer:
    assert isinstance(state.scorer, BankScorer)
    return state.scorer


def _restore_bank(state: DetectorState) -> Reservoir:
    """Return the reservoir of the bank, to add samples; raise ValueError if it is inconsistent."""
    scorer = _bank_scorer(state)
    assert isinstance(state.summary, BankSummary)
    tensors = {"bank.keys": scorer.keys.cpu(), "bank.samples.x": scorer.bank.cpu()}
    return Reservoir.restore(state.summary.bank, tensors, "bank")
