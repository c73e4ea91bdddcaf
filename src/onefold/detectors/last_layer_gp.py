"""The exact answer in a feature space: Gaussian-process variance of the last layer, in closed form."""

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.core.arguments import check_choice, check_integer, check_number
from onefold.core.batches import check_seed, pick_device
from onefold.core.rng import generators
from onefold.detectors._combined_score import SCORES, Combine, Score, scored
from onefold.detectors._random_features import FeatureMap, check_kernel, empty_map, feature_map
from onefold.detectors.base import Detector, ExportMixin, VarianceMixin, parts
from onefold.detectors.export import copied
from onefold.detectors.state import DetectorState
from onefold.distil.fit import iterate_slices
from onefold.errors import InputError
from onefold.exact.primal import PrimalGP
from onefold.inputs.reader import Reader
from onefold.inputs.samples import HELD_OUT, read_train_data
from onefold.kernels import ModelFeatures
from onefold.kernels.feature_maps import MAX_WIDTH
from onefold.nn.nets import finished
from onefold.types import ArrayLike, FeatureKernel, Scores

WIDTH = 2048


class GPScorer(nn.Module):
    """S = Φ̄ᵀΦ̄ over the (perhaps fading) train samples, and C with CCᵀ = λ(S + λI)⁻¹.

    Files hold the lower triangle of S, row by row; C is computed from it, in the fit and when a file is loaded.
    """

    triangle: Tensor
    root: Tensor
    count: Tensor

    def __init__(self, features: FeatureMap, width: int, kind: Score) -> None:
        super().__init__()
        self.map, self.combine = features, Combine()
        self.kind: Score = kind
        for name, shape in (("triangle", (width * (width + 1) // 2,)), ("root", (width, width)), ("count", ())):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64), persistent=name != "root")

    @property
    def gram(self) -> Float64[Tensor, "d d"]:
        """S, both triangles."""
        return symmetric(self.triangle)

    def settle(self, gram: Float64[Tensor, "d d"], noise: float) -> None:
        """Replace S, and C with it."""
        self.triangle.copy_(gram[_lower(len(gram), gram.device)])
        self.root.copy_(PrimalGP.of(self.gram, noise).root)

    def features(self, x: Any) -> Tensor:
        return self.map.features(self.map.encode(x))

    def parts(self, x: Any) -> tuple[Tensor, Tensor]:
        """The share of the prior variance that the data has left, and the prior variance."""
        z = self.features(x)
        share = (F.normalize(z, dim=1).double() @ self.root).square().sum(1)
        return torch.where(z.any(1), share, 1.0), z.square().sum(1)  # features of zero tell nothing

    def relative(self, x: Any) -> Tensor:
        return self.parts(x)[0]

    def outputs(self, x: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return score, variance and relative variance, from one pass."""
        relative, scale = self.parts(x)
        return scored(self.kind, self.combine, relative, scale), relative * scale, relative

    def forward(self, x: Any) -> Tensor:
        return scored(self.kind, self.combine, *self.parts(x))


def symmetric(triangle: Float64[Tensor, " t"]) -> Float64[Tensor, "d d"]:
    """The symmetric matrix with this lower triangle, given row by row."""
    width = _width(triangle)
    lower = torch.zeros(width, width, dtype=triangle.dtype, device=triangle.device)
    lower[_lower(width, triangle.device)] = triangle
    return lower + lower.tril(-1).T


def _lower(width: int, device: torch.device) -> Tensor:
    return torch.ones(width, width, dtype=torch.bool, device=device).tril()


def _width(triangle: Tensor) -> int:
    """d of a triangle of d(d + 1)/2 numbers."""
    return (math.isqrt(8 * triangle.numel() + 1) - 1) // 2


class LastLayerGP(VarianceMixin, Detector, ExportMixin):
    """λ φ̄ᵀ(Φ̄ᵀΦ̄ + λI)⁻¹φ̄ with features of unit length and λ = `noise` · N/D: one pass over the data, one factorisation.

    It is Eq. 7 with the kernel of Eq. 14 and a little noise, without which the variance of more points than features
    would be zero everywhere. The features are those of the kernel, by default of a random network with `width` of them
    (2,048). `variance` is in the scale of the features, `relative` is the number above, in [0, 1];
    `score` as in CSD, with leave-one-out values in the place of held-out samples. Memory grows with the square of the
    number of features, and so does the file: 17 MB for 2,048.
    """

    about_like: ClassVar[dict[str, Any]] = {"noise": 0.0}

    def __init__(
        self,
        kernel: FeatureKernel | None = None,
        *,
        width: int | None = None,
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
        self.score_kind: Score = check_choice(score, "score", SCORES)
        self.seed = check_seed(seed)
        self.device = pick_device(device)

    def fit(self, x: ArrayLike) -> "LastLayerGP":
        """Learn what is familiar from `x`, unlabelled."""
        learned = read_train_data(x, self.device, self.seed, as_given=isinstance(self.kernel, ModelFeatures))
        features = feature_map(learned, self.kernel, generators(self.seed, 1)[0], self.width or WIDTH)
        width = features.features(features.encode(learned.samples[torch.arange(2, device=self.device)])).shape[1]
        scorer = GPScorer(features, width, self.score_kind)
        finished(scorer, self.device)
        state = DetectorState(
            reader=learned.reader, prepare=learned.prepare, scorer=scorer, reservoir=learned.reservoir
        )
        gram = torch.zeros_like(scorer.root)
        for batch in iterate_slices(learned.samples, self.device):
            self._absorb(scorer, gram, batch, None)
        return self._settled(state, gram)

    def update(self, x: ArrayLike, *, half_life: float | None = None) -> "LastLayerGP":
        """Take in more data; the scores become those of one fit on all of it (same standardisation and features).

        With `half_life`, a sample that came so many samples ago counts half. The threshold has to be calibrated again.
        """
        state = self._fitted()
        state = replace(state, scorer=copied(state.scorer), reservoir=state.reservoir.copy(), about={})
        scorer = state.scorer
        assert isinstance(scorer, GPScorer)
        gram = scorer.gram
        for raw in state.reader.batches(x):
            state.reservoir.add(raw, half_life)
            for batch in self._prepared(state, raw):
                self._absorb(scorer, gram, batch, half_life)
        return self._settled(state, gram)

    @torch.no_grad()
    def _absorb(self, scorer: GPScorer, gram: Tensor, batch: Any, half_life: float | None) -> None:
        """S ← Σ 2^(−age/half-life) φ̄φ̄ᵀ, the newest sample having age 0."""
        z = F.normalize(scorer.features(batch), dim=1).double()
        ages = torch.arange(len(z) - 1, -1, -1, device=z.device, dtype=torch.float64)
        weights = torch.ones_like(ages) if half_life is None else torch.exp2(-ages / half_life)
        fade = 1.0 if half_life is None else 2.0 ** (-len(z) / half_life)
        if not z.isfinite().all():
            raise InputError("the kernel's features of the train data are NaN or infinite")
        gram.mul_(fade).add_(z.T @ (weights[:, None] * z))
        scorer.count.mul_(fade).add_(weights.sum())

    @torch.no_grad()
    def _settled(self, state: DetectorState, gram: Tensor) -> "LastLayerGP":
        """Factorise, take the statistics of the combined score, and only then replace what was there."""
        scorer = state.scorer
        assert isinstance(scorer, GPScorer)
        if not gram.any():
            raise InputError("the kernel's features of the train data are all zero (is the data constant?)")
        noise = self.noise * float(scorer.count) / len(gram)
        scorer.settle(gram, noise)
        state.about["noise"] = noise
        if state.reservoir.samples is not None:
            scorer.combine.learn(*self._left_out(state))
        self._became(state)
        return self

    @torch.no_grad()
    def _left_out(self, state: DetectorState) -> tuple[Tensor, Tensor]:
        """Share and scale of remembered train samples, each as if S were without it: h/(1 − h) for its leverage h."""
        few = state.reservoir.subsample(HELD_OUT)
        share, scale = self._over_all(state, parts, few)
        leverage = (share / state.about["noise"]).clip(max=1 - 1e-6)
        left_out = (share / (1 - leverage)).clip(max=1)
        return torch.from_numpy(left_out).to(self.device), torch.from_numpy(scale).to(self.device)

    def _reference(self, state: DetectorState) -> tuple[Scores, str, float] | None:
        if state.reservoir.samples is None:
            return None
        scorer = state.scorer
        assert isinstance(scorer, GPScorer)
        scores = scored(self.score_kind, scorer.combine, *self._left_out(state))
        return scores.cpu().double().numpy(), "train samples left out", 0.1

    def _settings(self) -> dict[str, Any]:
        return {"width": self.width, "noise": self.noise, "score": self.score_kind, "seed": self.seed}

    def _empty(self, reader: Reader, about: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
        triangle = weights["triangle"]
        width = _width(triangle)
        noise = self.noise * float(weights["count"]) / width
        if not math.isclose(about["noise"], noise, rel_tol=1e-6):
            raise ValueError("not the noise of these settings")
        with torch.device("meta"):
            scorer = GPScorer(empty_map(reader, self.kernel, self.width or WIDTH), width, self.score_kind)
        if triangle.shape != scorer.triangle.shape or triangle.dtype != torch.float64:
            raise ValueError("not a triangle of a matrix")
        scorer.root = PrimalGP.of(symmetric(triangle), about["noise"]).root.contiguous()
        return scorer
