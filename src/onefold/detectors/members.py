"""Detectors with several networks, the members, and the disagreement of their predictions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.core.arguments import check_choice
from onefold.detectors.base import Detector
from onefold.detectors.build import Spec, Summary, set_standardisation
from onefold.detectors.classifier import Augmentation, Targets
from onefold.detectors.state import DetectorState
from onefold.errors import InputError
from onefold.inputs.samples import TrainData
from onefold.nn.cudnn import exact_float32
from onefold.nn.nets import finished
from onefold.types import ArrayLike

Disagreement: TypeAlias = Literal["mutual_information", "entropy", "variance"]


@dataclass(frozen=True, kw_only=True)
class MemberSpec(Spec):
    """Settings that all detectors with members have, and what the labels decide.

    Args:
        outputs: Number of classes, or of values of a regressor.
        regression: True for regressors.
    """

    channels: tuple[int, ...]
    hidden: tuple[int, ...]
    score: Disagreement
    augment: Augmentation
    outputs: int
    regression: bool = False

    @property
    def networks(self) -> int:
        """Number of networks."""
        return 1

    @property
    def least_tensors(self) -> int:
        """Lower bound on the number of tensors: two for every dense layer of every network."""
        return self.networks * 2 * (len(self.hidden) + 1)


class Parallel(nn.Module):
    """Networks side by side: their outputs for a batch, [M, N, outputs]."""

    def __init__(self, nets: list[nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, x: Any) -> Float[Tensor, "m n outputs"]:
        return torch.stack([net(x).double() for net in self.nets])


class MembersScorer(nn.Module):
    """Disagreement of members that map a batch to [M, N, outputs]."""

    shift: Tensor
    scale: Tensor

    def __init__(self, members: nn.Module, spec: MemberSpec, *, meta: bool) -> None:
        super().__init__()
        self.members, self.regression = members, spec.regression
        self.kind: Disagreement = "variance" if spec.regression else spec.score
        device = "meta" if meta else "cpu"
        self.register_buffer("shift", torch.zeros(spec.outputs, dtype=torch.float32, device=device))
        self.register_buffer("scale", torch.ones(spec.outputs, dtype=torch.float32, device=device))

    def predictions(self, x: Any) -> Float[Tensor, "m n outputs"]:
        """Return class probabilities, or values of regressors, of every member."""
        raw = self.members(x).double()
        return raw * self.scale + self.shift if self.regression else F.softmax(raw, dim=-1)

    def forward(self, x: Any) -> Tensor:
        return DISAGREEMENTS[self.kind](self.predictions(x))


class MemberDetector(Detector):
    """Detector with several members, which also predicts classes or values."""

    resolution = 1e-6  # members that agree differ by rounding only

    def probabilities(self, x: ArrayLike) -> NDArray[np.float64]:
        """Return the predictions of every member.

        Args:
            x: Inputs, as in `score`.

        Returns:
            Class probabilities, or values of regressors, [M, N, outputs].
        """
        return np.concatenate(list(self._predictions(x)), axis=1)

    def predict(self, x: ArrayLike) -> NDArray[Any]:
        """Return the prediction of all members together.

        Args:
            x: Inputs, as in `score`.

        Returns:
            The class with the highest mean probability, [N], or the mean of the values, [N, outputs].
        """
        mean = np.concatenate([predictions.mean(0) for predictions in self._predictions(x)])
        return mean if self._is_regressor else mean.argmax(1)

    def disagreements(self, x: ArrayLike) -> dict[str, NDArray[Any]]:
        """Return the predicted classes and every measure of disagreement, in one pass.

        Args:
            x: Inputs, as in `score`.

        Returns:
            `predicted`, `mutual_information`, `entropy` and `variance`, [N] each.

        Raises:
            InputError: The members are regressors, which have one measure only.
        """
        if self._is_regressor:
            raise InputError("regressors disagree by their variance only. Call score(x).")
        parts: dict[str, list[NDArray[Any]]] = {}
        for predictions in self._predictions(x):
            p = torch.from_numpy(predictions)
            parts.setdefault("predicted", []).append(predictions.mean(0).argmax(1))
            for name, disagreement in DISAGREEMENTS.items():
                parts.setdefault(name, []).append(disagreement(p).numpy())
        return {name: np.concatenate(values) for name, values in parts.items()}

    @property
    def _is_regressor(self) -> bool:
        spec = self.state.spec
        assert isinstance(spec, MemberSpec)
        return spec.regression

    def _initial_scorer(self, spec: MemberSpec, data: TrainData) -> MembersScorer:
        """Return the scorer before training, with the standardisation of the training data."""
        scorer = self.build(spec)
        assert isinstance(scorer, MembersScorer)
        set_standardisation(scorer, data.standardise)
        return scorer

    def _finish(
        self,
        data: TrainData,
        targets: Targets,
        scorer: MembersScorer,
        spec: MemberSpec,
        summary: Summary | None = None,
    ) -> None:
        """Set the scale of the targets, on which regressors predict, and replace the state."""
        scorer.shift.copy_(targets.shift)
        scorer.scale.copy_(targets.scale)
        finished(scorer, self.device)
        self._set_state(DetectorState.from_data(data, scorer, spec, self.device, summary=summary or Summary()))

    def _predictions(self, x: ArrayLike) -> Iterator[NDArray[np.float64]]:
        """Yield the predictions of every member batch by batch."""
        state = self.state
        scorer = state.scorer
        assert isinstance(scorer, MembersScorer)
        for raw in state.batches(x):
            for batch in state.prepared(raw):
                with torch.no_grad(), exact_float32():
                    predictions = scorer.predictions(batch)
                yield predictions.cpu().numpy()


def check_disagreement(kind: Disagreement) -> Disagreement:
    """Return the name of a measure of disagreement if it exists."""
    return check_choice(kind, "score", DISAGREEMENTS)


def entropy(p: Float[Tensor, "m n k"]) -> Float[Tensor, " n"]:
    """Return the entropy of the mean prediction, in nats: the total uncertainty."""
    return _entropy(p.mean(0))


def mutual_information(p: Float[Tensor, "m n k"]) -> Float[Tensor, " n"]:
    """Return the entropy of the mean prediction minus the members' mean entropy: the epistemic uncertainty."""
    return (_entropy(p.mean(0)) - _entropy(p).mean(0)).clamp(min=0)


def variance(p: Float[Tensor, "m n k"]) -> Float[Tensor, " n"]:
    """Return the variance of probabilities or values over the members, summed over the outputs."""
    return p.var(0, correction=0).sum(-1)


def _entropy(p: Tensor) -> Tensor:
    return -torch.special.xlogy(p, p).sum(-1)


DISAGREEMENTS = {"mutual_information": mutual_information, "entropy": entropy, "variance": variance}
