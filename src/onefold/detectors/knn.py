"""Distance to the k-th nearest training sample in feature space (Sun et al., 2022)."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.core.arguments import check_integer
from onefold.core.batches import check_seed, pick_device
from onefold.detectors.alarm import Alarm
from onefold.detectors.base import Detector, ExportMixin
from onefold.detectors.build import Spec, Summary, check_kernel, feature_map, set_standardisation, streams
from onefold.detectors.state import DetectorState
from onefold.distil.fit import iterate_slices
from onefold.errors import InputError
from onefold.inputs.reservoir import Reservoir
from onefold.inputs.samples import read_train_data
from onefold.kernels import ModelFeatures
from onefold.kernels.feature_maps import FeatureMap
from onefold.nn.nets import finished
from onefold.types import ArrayLike, FeatureKernel

PRIOR_WIDTH = 2048


@dataclass(frozen=True, kw_only=True)
class KNNSpec(Spec):
    """Settings of `KNN`, and the shape of its bank of features."""

    k: int
    bank: int
    shape: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class KNNSummary(Summary):
    """State of the reservoir that selects the samples of the bank."""

    bank: dict[str, Any] = field(default_factory=dict)


class KNNScorer(nn.Module):
    """½‖z − z_k‖² between unit features, with z_k the k-th nearest in the bank."""

    bank: Tensor
    keys: Tensor

    def __init__(self, features: FeatureMap, k: int, bank: Tensor, keys: Tensor) -> None:
        super().__init__()
        self.map, self.k = features, k
        self.register_buffer("bank", bank)
        self.register_buffer("keys", keys)

    @property
    def stored_features(self) -> int:
        """Number of training samples in the bank."""
        return len(self.bank)

    def features(self, x: Any) -> Tensor:
        """Return the unit features of a batch."""
        return F.normalize(self.map.embed(x).float(), dim=1)

    def forward(self, x: Any) -> Tensor:
        z = self.features(x)
        nearest = (z @ self.bank.T).topk(self.k, dim=1).indices[:, -1]
        return 0.5 * (z - self.bank[nearest]).square().sum(1)  # 1 − cos would cancel in float32


class KNN(Detector, ExportMixin):
    """Distance to the k-th nearest training sample, between features of unit length.

    Args:
        kernel: Kernel with features; of kernels.from_model(model), the model's features without the random layer. By
            default the features of a random network.
        k: Which neighbour counts.
        bank: Maximal number of training samples whose features are stored, a random sample of all.
        seed: Seed of the random network and of the random sample.
        device: "auto", "cpu", "cuda" or "cuda:1".

    Raises:
        InputError: An argument is out of range, or `kernel` has no features.
    """

    spec_class = KNNSpec
    summary_class = KNNSummary
    kernel_class = FeatureKernel
    resolution = 1e-6  # neighbours are selected by cosines, which are close to 1

    def __init__(
        self,
        kernel: FeatureKernel | None = None,
        *,
        k: int = 5,
        bank: int = 50_000,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        check_kernel(kernel, FeatureKernel)
        self.kernel, self.bank = kernel, check_integer(bank, "bank")
        self.k = check_integer(k, "k", 1, self.bank)
        self.seed = check_seed(seed)
        self.device = pick_device(device)

    def fit(self, x: ArrayLike) -> "KNN":
        """Fit on in-distribution data without labels.

        Args:
            x: Training data, as in `CSD.fit`.

        Returns:
            This detector.

        Raises:
            InputError: The data cannot be used, or it has fewer than `k` samples.
        """
        data = read_train_data(x, self.device, self.seed, as_given=isinstance(self.kernel, ModelFeatures))
        if len(data.samples) < self.k:
            raise InputError(f"x has {len(data.samples)} samples, fewer than k = {self.k}")
        inputs = data.reader.sample_shape if self.kernel is None else ()
        spec = KNNSpec(**self.settings, inputs=inputs, shape=(0, 0))
        scorer = self.build(spec)
        set_standardisation(scorer, data.standardise)
        finished(scorer, self.device)
        bank = Reservoir(self.bank, self.seed)
        with torch.no_grad():
            for batch in iterate_slices(data.samples, self.device):
                bank.add(scorer.features(batch))
        state = DetectorState(
            reader=data.reader,
            prepare=data.prepare,
            scorer=scorer,
            spec=spec,
            device=self.device,
            reservoir=data.reservoir,
        )
        return self._finish(state, bank)

    @torch.no_grad()
    def update(self, x: ArrayLike, *, half_life: float | None = None) -> "KNN":
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
        state = replace(state, scorer=copy.deepcopy(state.scorer), reservoir=state.reservoir.copy())
        bank = _restore_bank(state)
        scorer = _knn_scorer(state)
        for raw in state.reader.batches(x):
            state.reservoir.add(raw, half_life)
            for batch in state.prepared(raw):
                bank.add(scorer.features(batch), half_life)
        return self._finish(state, bank)

    def build(self, spec: KNNSpec, *, meta: bool = False) -> KNNScorer:
        """Return the scorer: with an initial random network and an empty bank, or on the meta device."""
        features = feature_map(spec, self.kernel, PRIOR_WIDTH, streams(spec.seed, 1, meta=meta)[0])
        device = "meta" if meta else "cpu"
        bank = torch.zeros(spec.shape, dtype=torch.float32, device=device)
        return KNNScorer(features, spec.k, bank, torch.zeros(spec.shape[0], dtype=torch.float64, device=device))

    def restore_state(self, state: DetectorState, alarm: Alarm | None) -> None:
        """Set the state of a detector from a file."""
        bank = _restore_bank(state)
        if len(bank) < self.k or bank.capacity != self.bank:
            raise ValueError("the bank has fewer than k samples, or another capacity")
        super().restore_state(state, alarm)

    def _finish(self, state: DetectorState, bank: Reservoir) -> "KNN":
        """Move the bank to the scorer and replace the state."""
        samples = bank.samples
        assert isinstance(samples, Tensor)
        if not samples.isfinite().all() or not samples.any():
            raise InputError("the features of the train data are NaN, infinite, or all zero (is the data constant?)")
        scorer, spec = _knn_scorer(state), state.spec
        assert isinstance(spec, KNNSpec)
        scorer.bank, scorer.keys = samples.to(self.device), torch.from_numpy(bank.keys)
        spec = replace(spec, shape=(samples.shape[0], samples.shape[1]))
        self._set_state(replace(state, spec=spec, summary=KNNSummary(bank=bank.to_json())))
        return self


def _knn_scorer(state: DetectorState) -> KNNScorer:
    assert isinstance(state.scorer, KNNScorer)
    return state.scorer


def _restore_bank(state: DetectorState) -> Reservoir:
    """Return the reservoir of the bank, to add samples; raise ValueError if it is inconsistent."""
    scorer = _knn_scorer(state)
    assert isinstance(state.summary, KNNSummary)
    tensors = {"bank.keys": scorer.keys.cpu(), "bank.samples.x": scorer.bank.cpu()}
    return Reservoir.restore(state.summary.bank, tensors, "bank")
