"""What several networks say of an input, and how much they disagree."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.core.arguments import check_choice
from onefold.detectors._classifier import Targets
from onefold.detectors.base import Detector
from onefold.detectors.state import DetectorState
from onefold.errors import InputError
from onefold.inputs.samples import TrainData
from onefold.nn.cudnn import exact_float32
from onefold.nn.nets import finished
from onefold.types import ArrayLike

Disagreement: TypeAlias = Literal["mutual_information", "entropy", "variance"]


class Several(nn.Module):
    """Networks side by side: what each makes of a batch, [M, N, outputs]."""

    def __init__(self, nets: list[nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, x: Any) -> Float[Tensor, "m n outputs"]:
        return torch.stack([net(x).double() for net in self.nets])


class MembersScorer(nn.Module):
    """Members that map a batch to [M, N, outputs], and how much they disagree."""

    shift: Tensor
    scale: Tensor

    def __init__(self, members: nn.Module, kind: Disagreement, outputs: int, *, regression: bool = False) -> None:
        super().__init__()
        self.members, self.regression = members, regression
        self.kind: Disagreement = "variance" if regression else kind
        self.register_buffer("shift", torch.zeros(outputs, dtype=torch.float32))
        self.register_buffer("scale", torch.ones(outputs, dtype=torch.float32))

    def outputs(self, x: Any) -> Float[Tensor, "m n outputs"]:
        """Class probabilities, or predicted values."""
        raw = self.members(x).double()
        return raw * self.scale + self.shift if self.regression else F.softmax(raw, dim=-1)

    def forward(self, x: Any) -> Tensor:
        return DISAGREEMENTS[self.kind](self.outputs(x))


class MemberDetector(Detector):
    """A detector of several members: it can also say what they predict, and disagree in every way at once."""

    about_like: ClassVar[dict[str, Any]] = {"outputs": 0, "regression": False}
    resolution = 1e-6  # members that agree differ by rounding only

    def probabilities(self, x: ArrayLike) -> NDArray[np.float64]:
        """What every member says, [M, N, outputs]: class probabilities, or predicted values of regressors."""
        return np.concatenate(list(self._said(x)), axis=1)

    def predict(self, x: ArrayLike) -> NDArray[Any]:
        """The class that the members find likeliest together, or the mean of their values [N, outputs]."""
        mean = np.concatenate([said.mean(0) for said in self._said(x)])
        return mean if self._fitted().about["regression"] else mean.argmax(1)

    def disagreements(self, x: ArrayLike) -> dict[str, NDArray[Any]]:
        """In one pass: the class that the members find likeliest ("predicted"), and every way of disagreeing."""
        if self._fitted().about["regression"]:
            raise InputError("regressors disagree in one way only, by their variance: call score(x)")
        parts: dict[str, list[NDArray[Any]]] = {}
        for said in self._said(x):
            p = torch.from_numpy(said)
            parts.setdefault("predicted", []).append(said.mean(0).argmax(1))
            for name, disagreement in DISAGREEMENTS.items():
                parts.setdefault(name, []).append(disagreement(p).numpy())
        return {name: np.concatenate(values) for name, values in parts.items()}

    def _settle(self, learned: TrainData, targets: Targets, scorer: MembersScorer, **more: Any) -> None:
        """The fit is done: networks learned standardised targets and answer in the targets' own scale.

        `more` is what the fit wants to remember besides, as `about_like` has it.
        """
        scorer.shift.copy_(targets.shift)
        scorer.scale.copy_(targets.scale)
        finished(scorer, self.device)
        self._became(
            DetectorState(
                reader=learned.reader,
                prepare=learned.prepare,
                scorer=scorer,
                reservoir=learned.reservoir,
                about={"outputs": targets.outputs, "regression": targets.regression, **more},
            )
        )

    def _said(self, x: ArrayLike) -> Iterator[NDArray[np.float64]]:
        state = self._fitted()
        for raw in state.reader.batches(x, size=self._at_once(state), device=self.device, ordered=True):
            for batch in self._prepared(state, raw):
                with torch.no_grad(), exact_float32():
                    outputs = state.scorer.outputs(batch)  # pyright: ignore[reportCallIssue]
                yield outputs.cpu().numpy()


def check_disagreement(kind: Disagreement) -> Disagreement:
    """Return the score of a method with members, if there is one of that name."""
    return check_choice(kind, "score", DISAGREEMENTS)


def check_count(members: int, hidden: Sequence[int], weights: Mapping[str, Tensor]) -> None:
    """Refuse a file that claims more networks than its weights can hold: each has two tensors for every dense layer."""
    if members * 2 * (len(hidden) + 1) > len(weights):
        raise ValueError(f"{members} networks cannot have {len(weights)} tensors")


def entropy(p: Float[Tensor, "m n k"]) -> Float[Tensor, " n"]:
    """Entropy of the mean prediction, in nats: what nobody is sure about, for whatever reason."""
    return _entropy(p.mean(0))


def mutual_information(p: Float[Tensor, "m n k"]) -> Float[Tensor, " n"]:
    """Entropy of the mean prediction less the members' mean entropy: what they disagree about."""
    return (_entropy(p.mean(0)) - _entropy(p).mean(0)).clamp(min=0)


def variance(p: Float[Tensor, "m n k"]) -> Float[Tensor, " n"]:
    """Variance of the class probabilities, or of the predicted values, over the members, summed over the outputs."""
    return p.var(0, correction=0).sum(-1)


def _entropy(p: Tensor) -> Tensor:
    return -torch.special.xlogy(p, p).sum(-1)


DISAGREEMENTS = {"mutual_information": mutual_information, "entropy": entropy, "variance": variance}
