"""What a fitted CSD computes: variances and the score made of them."""

from typing import Any

import torch
from torch import Tensor, nn

from onefold.core.rng import generators
from onefold.detectors._combined_score import Combine, Score, scored
from onefold.detectors._random_features import FeatureMap
from onefold.detectors.base import EXAMINED
from onefold.distil import Similarity
from onefold.inputs.samples import Samples

AT_ONCE = 64  # samples that go through networks together: images may be large


class CSDScorer(nn.Module):
    """Relative variance and prior scale of a batch, and the score made of them."""

    def __init__(self, model: Similarity, features: FeatureMap, kind: Score) -> None:
        super().__init__()
        self.model, self.map, self.combine = model, features, Combine()
        self.kind: Score = kind

    @property
    def networks(self) -> nn.Module:
        """The trained networks, φ and ψ."""
        return self.model

    def parts(self, x: Any) -> tuple[Tensor, Tensor]:
        """1 − g(x, x)/Θ(x, x) and Θ(x, x)."""
        z = self.map.encode(x)
        scale = self.map.scale(z)
        if self.model.normalise:
            return self.model.gap(z).clamp(min=0), scale
        tiny = torch.finfo(torch.float32).tiny
        return (1 - self.model.confidence(z) / scale.clamp(min=tiny)).clamp(min=0), scale

    def relative(self, x: Any) -> Tensor:
        return self.parts(x)[0]

    def outputs(self, x: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return score, variance and relative variance, from one pass."""
        relative, scale = self.parts(x)
        return scored(self.kind, self.combine, relative, scale), relative * scale, relative

    def forward(self, x: Any) -> Tensor:
        return scored(self.kind, self.combine, *self.parts(x))


@torch.no_grad()
def residuals(scorer: CSDScorer, train: Samples, seed: int, device: torch.device) -> dict[str, float]:
    """How much of the kernel over train pairs the regression explains, and how unlike two train samples are."""
    picked = torch.randperm(len(train), generator=generators(seed, 1)[0])[:EXAMINED].to(device)
    parts = [scorer.map.encode(train[part]) for part in picked.split(AT_ONCE)]
    if scorer.map.has_features:
        features = torch.cat([scorer.map.features(z) for z in parts])
        theta = features @ features.T
    else:
        z = scorer.map.encode(train[picked])
        theta = scorer.map.labels(z, z)
    if scorer.model.normalise:
        length = theta.diagonal().clamp(min=1e-30).sqrt()
        theta = theta / length[:, None] / length
    pairs = ~torch.eye(len(picked), dtype=torch.bool, device=theta.device)
    left, right = (
        [torch.cat(vectors) for vectors in zip(*map(side, parts), strict=True)]
        for side in (scorer.model.left, scorer.model.right)
    )
    truth, found = theta[pairs].double(), scorer.model.match(left, right).to(theta.device)[pairs].double()
    spread = float((truth - truth.mean()).square().mean())
    explained = 1 - float((found - truth).square().mean()) / max(spread, 1e-30)
    own = float(theta.diagonal().mean())
    return {"explained": explained, "dissimilarity": 1 - float(truth.mean()) / own if own > 0 else 0.0}
