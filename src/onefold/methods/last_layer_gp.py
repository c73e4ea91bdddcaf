"""The exact answer in a feature space: Gaussian-process variance of the last layer, in closed form."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from onefold.errors import InputError
from onefold.exact.primal import PrimalGP
from onefold.inputs import Reader, check_seed, in_batches, pick_device
from onefold.methods.csd import Score
from onefold.methods.prior import check_kernel, fitted, generators, prior_kernel, random_network
from onefold.nets import Standardise
from onefold.types import ArrayLike, FeatureKernel, Scores

SLICE = 4096


class _Fitted(NamedTuple):
    reader: Reader
    kernel: FeatureKernel
    gp: PrimalGP

    def relative(self, x: Tensor) -> Tensor:
        return self._share_left(self.kernel.features(x))

    def variance(self, x: Tensor) -> Tensor:
        z = self.kernel.features(x)
        return z.square().sum(1) * self._share_left(z)

    def _share_left(self, z: Tensor) -> Tensor:
        """The share of the prior variance that the data has left; features of zero tell nothing, so all of it."""
        return torch.where(z.any(1), self.gp.variance(F.normalize(z, dim=1)), 1.0)


class LastLayerGP:
    """λ φ̄ᵀ(Φ̄ᵀΦ̄ + λI)⁻¹φ̄ with features of unit length and λ = `noise` · N/D: one pass over the data, one factorisation.

    It is Eq. 7 with the kernel of Eq. 14 and a little noise, without which the variance of more points than features
    would be zero everywhere. `variance` is in the scale of the features, `relative` is the number above, in [0, 1].
    """

    def __init__(
        self,
        kernel: FeatureKernel | None = None,
        *,
        width: int = 2048,
        noise: float = 1e-3,
        score: Score = "variance",
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        if width < 1 or not 0 < noise < float("inf"):
            raise InputError(f"width and noise must be positive, they are {width} and {noise}")
        if score not in ("variance", "relative"):
            raise InputError(f"score is 'variance' or 'relative', not {score!r}")
        check_kernel(kernel, FeatureKernel)
        check_seed(seed)
        self.kernel, self.width, self.noise, self.seed = kernel, width, noise, seed
        self.score_kind: Score = score
        self.device = pick_device(device)
        self._state: _Fitted | None = None

    def fit(self, x: ArrayLike) -> "LastLayerGP":
        """Learn what is familiar from `x`, unlabelled."""
        reader, data = Reader.learn(x)
        kernel = self._prior(reader, data) if self.kernel is None else self.kernel
        dimension = kernel.features(data[:1].to(self.device)).shape[1]
        self._state = self._grown(_Fitted(reader, kernel, PrimalGP(dimension, device=self.device)), data)
        return self

    def update(self, x: ArrayLike) -> "LastLayerGP":
        """Take in more data; the scores become those of one fit on all of it (same standardisation and features)."""
        state = fitted(self._state, "LastLayerGP")
        self._state = self._grown(state, state.reader.read(x))
        return self

    def variance(self, x: ArrayLike) -> Scores:
        """The variance in the scale of the features; never negative."""
        state = fitted(self._state, "LastLayerGP")
        return in_batches(state.variance, state.reader.read(x), self.device)

    def relative(self, x: ArrayLike) -> Scores:
        """The variance as a share of its prior, in [0, 1]."""
        state = fitted(self._state, "LastLayerGP")
        return in_batches(state.relative, state.reader.read(x), self.device)

    def score(self, x: ArrayLike) -> Scores:
        """What inputs are ranked by; bigger is stranger."""
        return self.variance(x) if self.score_kind == "variance" else self.relative(x)

    def _prior(self, reader: Reader, data: Tensor) -> FeatureKernel:
        stream = generators(self.seed, 1)[0]
        net = random_network(reader.sample_shape, stream, channels=(32,), hidden=(self.width,))
        return prior_kernel(Standardise(data).to(self.device), net.to(self.device))

    @torch.no_grad()
    def _grown(self, state: _Fitted, data: Tensor) -> _Fitted:
        parts = (F.normalize(state.kernel.features(part.to(self.device)), dim=1) for part in data.split(SLICE))
        noise = self.noise * (state.gp.count + len(data)) / len(state.gp.gram)
        grown = state.gp.grown(parts, noise)
        if not grown.gram.any():
            raise InputError("the kernel's features of the train data are all zero (is the data constant?)")
        return state._replace(gp=grown.factorised())
