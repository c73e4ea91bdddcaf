"""Distance to the k-th nearest training sample in feature space (Sun et al., 2022)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onefold.core.arguments import check_integer
from onefold.core.batches import check_seed, pick_device
from onefold.detectors._bank import LARGEST_BANK, BankDetector, BankScorer, BankSpec
from onefold.detectors.base import ExportMixin
from onefold.detectors.build import check_kernel
from onefold.errors import InputError
from onefold.kernels.feature_maps import FeatureMap
from onefold.types import FeatureKernel


@dataclass(frozen=True, kw_only=True)
class KNNSpec(BankSpec):
    """Settings of `KNN`, and the shape of its bank of features."""

    k: int


class KNNScorer(BankScorer):
    """½‖z − z_k‖² between unit features, with z_k the k-th nearest in the bank."""

    def __init__(self, features: FeatureMap, k: int, shape: tuple[int, int], *, device: str) -> None:
        super().__init__(features, shape, device=device)
        self.k = k

    def forward(self, x: Any) -> Tensor:
        z = self.features(x)
        nearest = (z @ self.bank.T).topk(self.k, dim=1).indices[:, -1]
        return 0.5 * (z - self.bank[nearest]).square().sum(1)  # 1 − cos would cancel in float32


class KNN(BankDetector, ExportMixin):
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
    resolution = 1e-6  # neighbours are selected by cosines, which are close to 1

    def __init__(
        self,
        kernel: FeatureKernel | None = None,
        *,
        k: int = 5,
        bank: int = LARGEST_BANK,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        check_kernel(kernel, FeatureKernel)
        self.kernel, self.bank = kernel, check_integer(bank, "bank")
        self.k = self.least_samples = check_integer(k, "k", 1, self.bank)
        self.seed = check_seed(seed)
        self.device = pick_device(device)

    def make_scorer(self, spec: KNNSpec, features: FeatureMap, *, device: str) -> KNNScorer:
        """Return a scorer with an empty bank."""
        return KNNScorer(features, spec.k, spec.shape, device=device)

    def _check_count(self, count: int) -> None:
        if count < self.k:
            raise InputError(f"x has {count} samples, fewer than k = {self.k}")
