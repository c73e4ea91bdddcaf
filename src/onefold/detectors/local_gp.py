"""Variance of a Gaussian process on a query's nearest training points: Eq. 7 in closed form, without training."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from onefold.core.arguments import check_integer, check_number
from onefold.core.batches import check_seed, pick_device
from onefold.detectors._bank import LARGEST_BANK, BankDetector, BankScorer, BankSpec
from onefold.detectors.base import ExportMixin, VarianceMixin
from onefold.detectors.build import check_kernel
from onefold.detectors.state import DetectorState
from onefold.exact.local import NEIGHBOURS, RIDGE, local_bandwidth, local_variance
from onefold.kernels.feature_maps import FeatureMap
from onefold.types import FeatureKernel

LARGEST_K = 500  # each costs one step of elimination
AT_ONCE = 2**25  # features of neighbours in memory at once: 128 MB


@dataclass(frozen=True, kw_only=True)
class LocalGPSpec(BankSpec):
    """Settings of `LocalGP`, and the shape of its bank of features."""

    k: int
    ridge: float


class LocalGPScorer(BankScorer):
    """The local variance of Eq. 7 with the kernel exp((uᵀv − 1)/τ) on unit features; see `exact.local_variance`."""

    bandwidth: Tensor

    def __init__(self, features: FeatureMap, k: int, ridge: float, shape: tuple[int, int], *, device: str) -> None:
        super().__init__(features, shape, device=device)
        self.k, self.ridge = k, ridge
        self.register_buffer("bandwidth", torch.ones((), device=device))

    def set_bank(self, samples: Float[Tensor, "n d"], keys: Float[Tensor, " n"]) -> None:
        """Replace the stored features and compute τ from them."""
        super().set_bank(samples, keys)
        tau = local_bandwidth(samples.double().mean(0), len(samples))
        self.bandwidth = torch.tensor(tau, dtype=torch.float32, device=samples.device)

    def forward(self, x: Any) -> Float[Tensor, " n"]:
        u = self.features(x)
        if torch.compiler.is_exporting():
            return self._variance(u)
        parts = u.split(max(1, AT_ONCE // (min(self.k, len(self.bank)) * u.shape[1])))
        return torch.cat([self._variance(part) for part in parts])

    def outputs(self, x: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return score, variance and relative variance: all the same, as the prior variance is 1."""
        variance = self(x)
        return variance, variance, variance

    def _variance(self, u: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        return local_variance(u, self.bank, self.bandwidth, neighbours=self.k, ridge=self.ridge)


class LocalGP(VarianceMixin, BankDetector, ExportMixin):
    """Variance of a Gaussian process (Eq. 7) on the nearest training points of each input, between unit features.

    The kernel is exp((cos − 1)/τ), with τ half of the mean of 1 − cos over pairs of training samples. Nothing is
    trained: a fit encodes the data and stores the features. It suits embeddings of pretrained encoders. Unlike the
    distance to a neighbour, the variance also depends on how many neighbours are near and how alike they are.

    Args:
        kernel: Kernel with features; of kernels.from_model(model), the model's features without the random layer. By
            default the features of a random network.
        k: Number of nearest training points, at most 500; all of them if there are fewer.
        ridge: Noise variance in the Gaussian process, where the prior variance is 1.
        bank: Maximal number of training samples whose features are stored, a random sample of all.
        seed: Seed of the random network and of the random sample.
        device: "auto", "cpu", "cuda" or "cuda:1".

    Raises:
        InputError: An argument is out of range, or `kernel` has no features.
    """

    spec_class = LocalGPSpec
    least_samples = 2
    resolution = 1e-5  # the variance is a difference from 1, in float32

    def __init__(
        self,
        kernel: FeatureKernel | None = None,
        *,
        k: int = NEIGHBOURS,
        ridge: float = RIDGE,
        bank: int = LARGEST_BANK,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        check_kernel(kernel, FeatureKernel)
        self.kernel, self.bank = kernel, check_integer(bank, "bank", 2)
        self.k, self.ridge = check_integer(k, "k", 1, LARGEST_K), check_number(ridge, "ridge")
        self.seed = check_seed(seed)
        self.device = pick_device(device)

    def make_scorer(self, spec: LocalGPSpec, features: FeatureMap, *, device: str) -> LocalGPScorer:
        """Return a scorer with an empty bank."""
        return LocalGPScorer(features, spec.k, spec.ridge, spec.shape, device=device)

    def _reference_scores(self, state: DetectorState) -> None:
        """Return None: the stored samples are those of the bank, so their scores are near 0 by construction."""
        del state
