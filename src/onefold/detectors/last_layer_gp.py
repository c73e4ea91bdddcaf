"""Gaussian-process variance of the last layer, in closed form: the exact posterior in a feature space."""

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from onefold.core.arguments import check_choice, check_integer, check_number, check_sizes
from onefold.core.batches import check_seed, pick_device
from onefold.detectors.base import Detector, ExportMixin, VarianceMixin
from onefold.detectors.build import CHANNELS, Spec, check_kernel, data_format, feature_map, set_standardisation, streams
from onefold.detectors.merge import like_state, merge_states
from onefold.detectors.state import DetectorState
from onefold.detectors.variance_scorer import SCORES, Score, VarianceScorer
from onefold.distil.fit import iterate_slices
from onefold.errors import InputError
from onefold.exact.primal import PrimalGP
from onefold.inputs.samples import HELD_OUT, read_train_data
from onefold.kernels.feature_maps import FeatureMap
from onefold.kernels.model import MAX_WIDTH
from onefold.nn.nets import finished
from onefold.types import ArrayLike, FeatureKernel, Scores

WIDTH = 2048


@dataclass(frozen=True, kw_only=True)
class LastLayerGPSpec(Spec):
    """Settings of `LastLayerGP`, and the number of features D."""

    width: int | None
    channels: tuple[int, ...] | None
    noise: float
    score: Score
    features: int


class GPScorer(VarianceScorer):
    """S = Φ̄ᵀΦ̄ over the training samples, with decay if updates have a half-life, and C with CCᵀ = λ(S + λI)⁻¹.

    Files contain the lower triangle of S, row by row. C is computed from it, in a fit and after loading.

    Args:
        features: Feature map.
        width: Number of features D.
        noise: Noise λ for one training sample per feature.
        kind: Kind of score.
    """

    triangle: Tensor
    root: Tensor
    count: Tensor

    def __init__(self, features: FeatureMap, width: int, noise: float, kind: Score, *, device: str) -> None:
        super().__init__(features, kind)
        self.relative_noise = noise
        for name, shape in (("triangle", (width * (width + 1) // 2,)), ("root", (width, width)), ("count", ())):
            zeros = torch.zeros(shape, dtype=torch.float64, device=device)
            self.register_buffer(name, zeros, persistent=name != "root")
        self.register_load_state_dict_post_hook(_factorise)

    @property
    def gram(self) -> Float64[Tensor, "d d"]:
        """S, both triangles."""
        return symmetric(self.triangle)

    @property
    def noise(self) -> float:
        """λ = noise · N/D."""
        return self.relative_noise * float(self.count) / len(self.root)

    def set_gram(self, gram: Float64[Tensor, "d d"]) -> None:
        """Replace S and compute C from it."""
        self.triangle.copy_(gram[_lower(len(gram), gram.device)])
        self.factorise()

    def factorise(self) -> None:
        """Compute C from S."""
        self.root = PrimalGP.of(self.gram, self.noise).root.contiguous()

    def features(self, x: Any) -> Tensor:
        """Return the features of a batch, [N, D]."""
        return self.map.features(self.map.encode(x))

    def parts(self, x: Any) -> tuple[Tensor, Tensor]:
        """Return the share of the prior variance that remains after the training data, and the prior variance."""
        z = self.features(x)
        share = (F.normalize(z, dim=1).double() @ self.root).square().sum(1)
        return torch.where(z.any(1), share, 1.0), z.square().sum(1)  # features of zero carry no information


def _factorise(scorer: "GPScorer", _: Any) -> None:
    """Compute C after weights were loaded; a function of the module, so that scorers can be pickled."""
    scorer.factorise()


def symmetric(triangle: Float64[Tensor, " t"]) -> Float64[Tensor, "d d"]:
    """Return the symmetric matrix with this lower triangle, row by row."""
    width = (math.isqrt(8 * triangle.numel() + 1) - 1) // 2
    lower = torch.zeros(width, width, dtype=triangle.dtype, device=triangle.device)
    lower[_lower(width, triangle.device)] = triangle
    return lower + lower.tril(-1).T


def _lower(width: int, device: torch.device) -> Tensor:
    return torch.ones(width, width, dtype=torch.bool, device=device).tril()


class LastLayerGP(VarianceMixin, Detector, ExportMixin):
    """Variance of a Gaussian process on features of unit length: λ φ̄ᵀ(Φ̄ᵀΦ̄ + λI)⁻¹φ̄ with λ = noise · N/D.

    This is Eq. 7 with the kernel of Eq. 14 and a little noise; without noise, the variance of more samples than
    features would be zero everywhere. A fit is one pass over the data and one factorisation. Memory and file grow with
    the square of the number of features; the file has 17 MB for 2,048.

    Args:
        kernel: Kernel with features, such as kernels.from_model(model). By default that of a random network.
        width: Number of features of the random network, by default 2,048; only without `kernel`.
        channels: Channels of the random network's convolutional stages, by default (32,); for images, and only without
            `kernel`. More stages make a smaller file.
        noise: Noise variance for one training sample per feature.
        score: What `score(x)` returns: "variance" in the scale of the features, "relative" in [0, 1], or "combined", as
            in `CSD`, with leave-one-out values instead of held-out samples.
        seed: Seed of the random network.
        device: "auto", "cpu", "cuda" or "cuda:1".

    Raises:
        InputError: An argument is out of range, or `kernel` has no features.
    """

    spec_class = LastLayerGPSpec
    kernel_class = FeatureKernel

    def __init__(
        self,
        kernel: FeatureKernel | None = None,
        *,
        width: int | None = None,
        channels: tuple[int, ...] | None = None,
        noise: float = 1e-3,
        score: Score = "combined",
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        check_kernel(kernel, FeatureKernel)
        self.kernel, self.noise = kernel, check_number(noise, "noise")
        if kernel is not None and width is not None:
            raise InputError(
                "width is the width of the built-in random network, and a kernel was passed. Leave it out; for the "
                "features of a model use from_model(model, width=…)."
            )
        self.width = (
            None if kernel is not None else check_integer(WIDTH if width is None else width, "width", 1, MAX_WIDTH)
        )
        if kernel is not None and channels is not None:
            raise InputError("a kernel has no random network", argument="channels", hint="Leave it out.")
        self.channels = None if kernel is not None else check_sizes(channels or CHANNELS, "channels")
        self.score_kind: Score = check_choice(score, "score", SCORES)
        self.seed = check_seed(seed)
        self.device = pick_device(device)

    def fit(self, x: ArrayLike, *, like: "LastLayerGP | None" = None) -> "LastLayerGP":
        """Fit on in-distribution data without labels.

        Args:
            x: Training data, as in `CSD.fit`.
            like: Fitted detector whose layout, standardisation and features are used, so that the two can be merged.

        Returns:
            This detector.

        Raises:
            InputError: The data cannot be used, its features are all zero or not finite, or `like` has other settings.
        """
        if like is not None:
            return self._add(like_state(self, like, like.state.spec, x)[0], x)
        data = read_train_data(x, self.device, self.seed, **data_format(self.kernel))
        if isinstance(self.kernel, FeatureKernel):
            inputs, width = (), self.kernel.features(data.samples[torch.arange(2, device=self.device)]).shape[1]
        else:
            inputs, width = data.reader.sample_shape, self.width or WIDTH
        spec = LastLayerGPSpec(**self.settings, inputs=inputs, features=width)
        scorer = self.build(spec)
        set_standardisation(scorer, data.standardise)
        finished(scorer, self.device)
        gram = torch.zeros_like(scorer.root)
        for batch in iterate_slices(data.samples, self.device):
            _add_samples(scorer, gram, batch, None)
        return self._finish(DetectorState.from_data(data, scorer, spec, self.device), gram)

    def update(self, x: ArrayLike, *, half_life: float | None = None) -> "LastLayerGP":
        """Add new in-distribution data: the scores become those of one fit on all data.

        Standardisation and features stay those of the fit. Afterwards calibrate again.

        Args:
            x: New data.
            half_life: Number of samples after which the weight of a sample has halved. By default all samples have the
                same weight.

        Returns:
            This detector.

        Raises:
            InputError: The data does not have the layout of the training data.
        """
        return self._add(replace(self.state, reservoir=self.state.reservoir.copy()), x, half_life)

    @torch.no_grad()
    def merge(self, other: Detector) -> "LastLayerGP":
        """Add the training data of another detector; exact, because S is a sum over samples. See `Detector.merge`.

        Args:
            other: Detector with the same settings and features; it is not changed.

        Returns:
            This detector.

        Raises:
            InputError: The detectors differ in more than their data.
        """
        state = merge_states(self, other)
        state = replace(state, scorer=copy.deepcopy(state.scorer))
        scorer, added = _gp_scorer(state), _gp_scorer(other.state)
        scorer.count += added.count.to(self.device)
        return self._finish(state, scorer.gram + added.gram.to(self.device))

    def _add(self, state: DetectorState, x: ArrayLike, half_life: float | None = None) -> "LastLayerGP":
        """Add data to S and to the reservoir of `state`, and replace the state."""
        state = replace(state, scorer=copy.deepcopy(state.scorer))
        scorer = _gp_scorer(state)
        gram = scorer.gram
        for raw in state.reader.batches(x):
            state.reservoir.add(raw, half_life)
            for batch in state.prepared(raw):
                _add_samples(scorer, gram, batch, half_life)
        return self._finish(state, gram)

    def build(self, spec: LastLayerGPSpec, *, meta: bool = False) -> GPScorer:
        """Return the scorer: with an initial random network and S = 0, or on the meta device."""
        stream = streams(spec.seed, 1, meta=meta)[0]
        features = feature_map(spec, self.kernel, spec.features, stream, channels=spec.channels or CHANNELS)
        return GPScorer(features, spec.features, spec.noise, spec.score, device="meta" if meta else "cpu")

    @torch.no_grad()
    def _finish(self, state: DetectorState, gram: Tensor) -> "LastLayerGP":
        """Factorise, set the statistics of the combined score, and replace the state."""
        if not gram.any():
            raise InputError("the kernel's features of the train data are all zero (is the data constant?)")
        scorer = _gp_scorer(state)
        scorer.set_gram(gram)
        if state.reservoir.samples is not None:
            scorer.combine.set_statistics(*self.leave_one_out(state))
        self._set_state(state)
        return self

    @torch.no_grad()
    def leave_one_out(self, state: DetectorState) -> tuple[Tensor, Tensor]:
        """Return the relative variance and the scale of stored training samples, each with S as if without it.

        The relative variance of a sample with leverage h becomes h/(1 − h).
        """
        scorer = _gp_scorer(state)
        share, scale = state.evaluate_all(state.reservoir.subsample(HELD_OUT), scorer.parts)
        leverage = (share / scorer.noise).clip(max=1 - 1e-6)
        relative = (share / (1 - leverage)).clip(max=1)
        return torch.from_numpy(relative).to(self.device), torch.from_numpy(scale).to(self.device)

    def _reference_scores(self, state: DetectorState) -> tuple[Scores, str, float] | None:
        if state.reservoir.samples is None:
            return None
        scores = _gp_scorer(state).score(*self.leave_one_out(state))
        return scores.cpu().double().numpy(), "train samples left out", 0.1


def _gp_scorer(state: DetectorState) -> GPScorer:
    assert isinstance(state.scorer, GPScorer)
    return state.scorer


@torch.no_grad()
def _add_samples(scorer: GPScorer, gram: Tensor, batch: Any, half_life: float | None) -> None:
    """Set S ← Σ 2^(−age/half-life) φ̄φ̄ᵀ in place, with age 0 for the newest sample."""
    z = F.normalize(scorer.features(batch), dim=1).double()
    ages = torch.arange(len(z) - 1, -1, -1, device=z.device, dtype=torch.float64)
    weights = torch.ones_like(ages) if half_life is None else torch.exp2(-ages / half_life)
    decay = 1.0 if half_life is None else 2.0 ** (-len(z) / half_life)
    if not z.isfinite().all():
        raise InputError("the kernel's features of the train data are NaN or infinite")
    gram.mul_(decay).add_(z.T @ (weights[:, None] * z))
    scorer.count.mul_(decay).add_(weights.sum())
