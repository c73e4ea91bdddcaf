"""Distance to the nearest familiar samples (Sun et al., 2022)."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.core.arguments import check_integer
from onefold.core.batches import check_seed, pick_device
from onefold.core.rng import generators
from onefold.detectors._random_features import FeatureMap, check_kernel, empty_map, feature_map
from onefold.detectors.base import Detector, ExportMixin
from onefold.detectors.export import copied
from onefold.detectors.state import DetectorState
from onefold.distil.fit import iterate_slices
from onefold.errors import InputError
from onefold.inputs.reader import Reader
from onefold.inputs.reservoir import Reservoir
from onefold.inputs.samples import read_train_data
from onefold.kernels import ModelFeatures
from onefold.nn.nets import finished
from onefold.types import ArrayLike, FeatureKernel

PRIOR_WIDTH = 2048


class KNNScorer(nn.Module):
    """½‖z − z_k‖² of unit features, z_k being the k-th nearest of the bank."""

    bank: Tensor
    keys: Tensor

    def __init__(self, features: FeatureMap, k: int) -> None:
        super().__init__()
        self.map, self.k = features, k
        self.register_buffer("bank", torch.zeros(0, 0))
        self.register_buffer("keys", torch.zeros(0, dtype=torch.float64))

    @property
    def stored_features(self) -> int:
        """Number of training samples in the bank."""
        return len(self.bank)

    def features(self, x: Any) -> Tensor:
        z = self.map.encode(x)
        return F.normalize(
            (z if isinstance(self.map.handed_in, ModelFeatures) else self.map.features(z)).float(), dim=1
        )

    def forward(self, x: Any) -> Tensor:
        z = self.features(x)
        nearest = (z @ self.bank.T).topk(self.k, dim=1).indices[:, -1]
        return 0.5 * (z - self.bank[nearest]).square().sum(1)  # 1 − cos would cancel in float32


class KNN(Detector, ExportMixin):
    """How far the k-th nearest of the train samples is, between unit features.

    The features are those of the kernel, of a trained model if it is kernels.from_model(model) (without its random
    layer), by default of a random network. At most `bank` samples are kept, a fair part of them.
    """

    about_like: ClassVar[dict[str, Any]] = {"bank": Reservoir(1, 0).to_json()}
    resolution = 1e-6  # neighbours are found by cosines, which are close to 1

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
        """Learn what is familiar from `x`, unlabelled."""
        learned = read_train_data(x, self.device, self.seed, as_given=isinstance(self.kernel, ModelFeatures))
        if len(learned.samples) < self.k:
            raise InputError(f"x has {len(learned.samples)} samples, fewer than k = {self.k}")
        features = feature_map(learned, self.kernel, generators(self.seed, 1)[0], PRIOR_WIDTH)
        scorer = KNNScorer(features, self.k)
        finished(scorer, self.device)
        bank = Reservoir(self.bank, self.seed)
        with torch.no_grad():
            for batch in iterate_slices(learned.samples, self.device):
                bank.add(scorer.features(batch))
        state = DetectorState(
            reader=learned.reader, prepare=learned.prepare, scorer=scorer, reservoir=learned.reservoir
        )
        return self._settled(state, bank)

    @torch.no_grad()
    def update(self, x: ArrayLike, *, half_life: float | None = None) -> "KNN":
        """Take in more data; with `half_life`, a sample that came so many samples ago is half as likely to stay."""
        state = self._fitted()
        state = replace(state, scorer=copied(state.scorer), reservoir=state.reservoir.copy(), about={**state.about})
        scorer = state.scorer
        assert isinstance(scorer, KNNScorer)
        bank = Reservoir.restore(state.about["bank"], _bank_tensors(scorer.keys, scorer.bank), "bank")
        for raw in state.reader.batches(x):
            state.reservoir.add(raw, half_life)
            for batch in self._prepared(state, raw):
                bank.add(scorer.features(batch), half_life)
        return self._settled(state, bank)

    def _settled(self, state: DetectorState, bank: Reservoir) -> "KNN":
        scorer = state.scorer
        assert isinstance(scorer, KNNScorer)
        assert isinstance(bank.samples, Tensor)
        if not bank.samples.isfinite().all() or not bank.samples.any():
            raise InputError("the features of the train data are NaN, infinite, or all zero (is the data constant?)")
        scorer.bank, scorer.keys = bank.samples.to(self.device), torch.from_numpy(bank.keys)
        state.about["bank"] = bank.to_json()
        self._became(state)
        return self

    def _settings(self) -> dict[str, Any]:
        return {"k": self.k, "bank": self.bank, "seed": self.seed}

    def _empty(self, reader: Reader, about: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
        scorer = KNNScorer(empty_map(reader, self.kernel, PRIOR_WIDTH), self.k)
        bank = Reservoir.restore(about["bank"], _bank_tensors(weights["keys"], weights["bank"]), "bank")
        if weights["bank"].ndim != 2 or len(bank) < self.k or bank.capacity != self.bank:
            raise ValueError("no bank of samples like this")
        scorer.bank = torch.empty(weights["bank"].shape, dtype=torch.float32, device="meta")
        scorer.keys = torch.empty(len(bank), dtype=torch.float64, device="meta")
        return scorer


def _bank_tensors(keys: Tensor, samples: Tensor) -> dict[str, Tensor]:
    """The tensors of a reservoir that is called bank."""
    return {"bank.keys": keys.cpu(), "bank.samples.x": samples.cpu()}
