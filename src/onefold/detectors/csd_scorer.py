"""The scorer of CSD: specification, networks and features, and the measurements of a fit."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from onefold.core.rng import generators
from onefold.detectors.base import DIAGNOSED
from onefold.detectors.build import Spec, Summary
from onefold.detectors.variance_scorer import ModelScore, VarianceScorer
from onefold.distil import Architecture, Similarity
from onefold.errors import InputError
from onefold.inputs.samples import Samples
from onefold.kernels import ModelFeatures
from onefold.kernels.feature_maps import FeatureMap, StageFeatures
from onefold.nn.train import Recipe
from onefold.types import Kernel

Role: TypeAlias = Literal["classifier", "encoder"]
ROLES: tuple[Role, ...] = ("classifier", "encoder")

SLICE = 64  # samples per forward pass; images may be large


@dataclass(frozen=True, kw_only=True)
class CSDSpec(Spec):
    """Settings of `CSD`, and what the data decide.

    Args:
        centre: Size of the vector that is subtracted from features or encodings, or None.
        classes: Number of logits of which the score uses the energy, or None.
    """

    augment: float | None
    centred: bool | None
    score: ModelScore
    role: Role | None
    recipe: Recipe
    architecture: Architecture
    centre: int | None = None
    classes: int | None = None


@dataclass(frozen=True, kw_only=True)
class CSDSummary(Summary):
    """Measurements of a fit or an update.

    Args:
        loss: Mean loss over the last tenth of the steps.
        explained: Share of the kernel's variance over pairs of training samples that the regression explains.
        dissimilarity: Mean of 1 − Θ(x, x′)/Θ(x, x) over pairs of training samples.
        since_reset: Samples of updates since the fit or the last reset of φ and ψ.
        resets: Number of resets since the fit.
        confidence: Mean of the largest softmax probability over the training samples; 0 without logits.
    """

    loss: float = math.nan
    explained: float = 0.0
    dissimilarity: float = 0.0
    since_reset: int = 0
    resets: int = 0
    confidence: float = 0.0


class CSDScorer(VarianceScorer):
    """Variance of Eq. 12 from the networks φ and ψ and the prior features φ₀."""

    def __init__(
        self, model: Similarity, features: FeatureMap, kind: ModelScore, *, classes: int | None = None
    ) -> None:
        super().__init__(features, kind, has_energy=classes is not None)
        self.model, self.classes = model, classes

    @property
    def networks(self) -> nn.Module:
        """The trained networks, φ and ψ."""
        return self.model

    def parts(self, x: Any) -> tuple[Tensor, ...]:
        """Return 1 − g(x, x)/Θ(x, x), Θ(x, x) and, for a classifier, the energy, from one pass of the user's model."""
        z, logits = self.map.outputs(x) if isinstance(self.map, StageFeatures) else (self.map.encode(x), None)
        scale = self.map.scale(z)
        if self.model.normalise:
            relative = self.model.gap(z).clamp(min=0)
        else:
            tiny = torch.finfo(torch.float32).tiny
            relative = (1 - self.model.confidence(z) / scale.clamp(min=tiny)).clamp(min=0)
        if self.classes is None:
            return relative, scale
        if logits is None or logits.shape[1] != self.classes:
            raise InputError(f"the model gave other outputs than {self.classes} logits. Pass the model of the fit.")
        return relative, scale, -torch.logsumexp(logits.float(), dim=1)

    def similarity(self, x: Any) -> Tensor | None:
        """Return products of stages, and of logits if used, by which `load` recognises the model of the fit.

        Products of positive and negative parts do not cancel, so that all devices agree.
        """
        if not isinstance(self.map, StageFeatures):
            return None
        z, logits = self.map.outputs(x)
        used = [z] if logits is None or self.classes is None else [z, logits.float()]
        parts = [torch.cat([values.relu(), (-values).relu()], dim=1) for values in used]
        return torch.cat([part @ part.T for part in parts])


def default_score(kernel: Kernel | None) -> ModelScore:
    """Return the default score: "surprisal" for a trained model of which no layer is named, else "combined"."""
    if not isinstance(kernel, ModelFeatures) or kernel.settings["outputs"] or kernel.settings["layer"] is not None:
        return "combined"
    return "surprisal"


def is_pretrained(kernel: ModelFeatures) -> bool:
    """Return True for a model of `kernels.from_pretrained`: its classes, if it has any, are not those of the data."""
    return kernel.settings.get("pretrained") is not None


@torch.no_grad()
def measure_fit(scorer: CSDScorer, train: Samples, seed: int, device: torch.device) -> dict[str, float]:
    """Return the `explained` and `dissimilarity` of a `CSDSummary`, over pairs of some training samples."""
    rows = torch.randperm(len(train), generator=generators(seed, 1)[0])[:DIAGNOSED].to(device)
    parts = [scorer.map.encode(train[part]) for part in rows.split(SLICE)]
    if scorer.map.has_features:
        features = torch.cat([scorer.map.features(z) for z in parts])
        theta = features @ features.T
    else:
        z = scorer.map.encode(train[rows])
        theta = scorer.map.labels(z, z)
    if scorer.model.normalise:
        length = theta.diagonal().clamp(min=1e-30).sqrt()
        theta = theta / length[:, None] / length
    pairs = ~torch.eye(len(rows), dtype=torch.bool, device=theta.device)
    sides: tuple[Callable[..., list[Tensor]], ...] = (scorer.model.left, scorer.model.right)
    left, right = ([torch.cat(vectors) for vectors in zip(*map(side, parts), strict=True)] for side in sides)
    labels = theta[pairs].double()
    predictions = scorer.model.match(left, right).to(theta.device)[pairs].double()
    spread = float((labels - labels.mean()).square().mean())
    explained = 1 - float((predictions - labels).square().mean()) / max(spread, 1e-30)
    diagonal = float(theta.diagonal().mean())
    return {"explained": explained, "dissimilarity": 1 - float(labels.mean()) / diagonal if diagonal > 0 else 0.0}
