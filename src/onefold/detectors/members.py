"""Base of methods with several networks, the members: training with labels, and the disagreement of predictions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

from onefold.core.arguments import check_choice
from onefold.core.batches import as_labels, as_tensor, named
from onefold.detectors.base import Detector
from onefold.detectors.build import Spec, Summary, set_standardisation
from onefold.detectors.state import DetectorState
from onefold.errors import InputError
from onefold.inputs import LoaderSource, open_source
from onefold.inputs.reader import Reader
from onefold.inputs.samples import TrainData
from onefold.nn.augment import UNIFORMS, Chain, augment
from onefold.nn.cudnn import exact_float32
from onefold.nn.nets import finished
from onefold.nn.train import Draws, Loss, Recipe, Training, run
from onefold.types import ArrayLike

Task: TypeAlias = Literal["auto", "classification", "regression"]
TASKS: tuple[Task, ...] = ("auto", "classification", "regression")
Augmentation: TypeAlias = Literal["none", "crops", "flips"]

CROPS = Chain(
    apply=1, flip_horizontal=0, flip_vertical=0, rotate=0, blur=0, brightness=0, contrast=0,
    crop_area=(1.3**-2, 1), crop_aspect=1,
)  # fmt: skip
CHAINS: dict[str, Chain | None] = {
    "none": None,
    "crops": CROPS,  # zoom 1.0 to 1.3
    "flips": replace(CROPS, flip_horizontal=0.5, flip_vertical=0.5),  # of all classifiers in the paper
}


class Targets(NamedTuple):
    """Class labels as int64 [N], or standardised real targets [N, outputs] with their shift and scale."""

    values: Tensor
    outputs: int
    regression: bool
    shift: Tensor
    scale: Tensor


def make_targets(x: ArrayLike, y: ArrayLike | None, n: int, task: Task, device: torch.device) -> Targets:
    """Return the targets in `y`, or those of the Dataset `x`.

    With task="auto", whole numbers 0, 1, 2 … are classes and other numbers are real targets.
    """
    if isinstance(x, DataLoader) and LoaderSource(x).shuffles:
        raise InputError(
            "x: the DataLoader shuffles, so labels cannot be matched with samples. Pass its data set, or a DataLoader "
            "with shuffle=False: the training shuffles by itself."
        )
    labels = as_tensor(_read_labels(x) if y is None else y, "y")
    fractions = labels.is_floating_point() and not torch.equal(labels, labels.round())
    if task == "regression" or (task == "auto" and fractions):
        values = labels.float().reshape(len(labels), -1)
        if len(values) != n or not values.isfinite().all():
            raise InputError(
                f"y has shape {tuple(labels.shape)}: a finite target for each of the {n} samples is needed"
            )
        values = values.to(device)
        shift, scale = values.mean(0), values.std(0, correction=0).clamp(min=1e-12)
        return Targets((values - shift) / scale, values.shape[1], True, shift, scale)
    classes = as_labels(labels, n).to(device)
    outputs = int(classes.max()) + 1
    return Targets(classes, outputs, False, torch.zeros(outputs, device=device), torch.ones(outputs, device=device))


def _read_labels(x: ArrayLike) -> Tensor:
    labels = getattr(open_source(x), "labels", lambda: None)()
    if labels is None:
        raise InputError("y: this method needs labels. Call fit(x, y), or pass a Dataset of pairs (x, y).")
    return labels


def check_augmentation(kind: Augmentation) -> Augmentation:
    """Return the name of an augmentation if it exists."""
    return check_choice(kind, "augment", tuple(CHAINS))


def make_augmentation(reader: Reader, kind: Augmentation) -> Callable[[Any, Tensor], Any] | None:
    """Return the function (x, uniforms [N, 14]) -> augmented x, or None for "none"."""
    chain = CHAINS[kind]
    if chain is None:
        return None
    if not reader.may_be_pictures:
        raise InputError(f"augment={kind!r} is for images; use augment='none' for other data")

    def apply(x: Tensor, uniforms: Tensor) -> Tensor:
        if x.ndim == 3:  # grey images without a channel axis
            return augment(x[:, None], uniforms, chain, reader.low, reader.high)[:, 0]
        return augment(x, uniforms, chain, reader.low, reader.high)

    return apply


def supervised_loss(outputs: Tensor, targets: Tensor, *, regression: bool) -> Tensor:
    """Return the cross-entropy of logits, or the mean squared error of standardised values."""
    return F.mse_loss(outputs, targets) if regression else F.cross_entropy(outputs, targets)


def train_networks(
    forwards: Sequence[Callable[[Any, Tensor], Tensor]],
    parameters: Sequence[nn.Parameter],
    data: TrainData,
    targets: Targets,
    recipe: Recipe,
    *,
    seed: int,
    label: str,
    augment: Augmentation = "none",
    extra_uniforms: int = 0,
    settings: dict[str, Any],
    checkpoint: str | Path | None,
    progress: bool | None,
) -> None:
    """Train several networks, each on minibatches of its own; on a GPU they run concurrently.

    `forwards` are functions from samples and `extra_uniforms` random numbers per sample to logits or values.
    """
    augmentation, count = make_augmentation(data.reader, augment), len(data.samples)
    width = (UNIFORMS if augmentation else 0) + extra_uniforms  # uniforms per sample and network

    def loss_for(i: int, forward: Callable[[Any, Tensor], Tensor]) -> Loss:
        def loss(integers: Tensor, uniforms: Tensor) -> Tensor:
            index, draws = integers[:, i] % count, uniforms[:, i * width : (i + 1) * width]
            x = data.samples[index]
            if augmentation is not None:
                x, draws = augmentation(x, draws[:, :UNIFORMS]), draws[:, UNIFORMS:]
            return supervised_loss(forward(x, draws), targets.values[index], regression=targets.regression)

        return loss

    losses = [loss_for(i, forward) for i, forward in enumerate(forwards)]
    draws = Draws(recipe.batch, len(losses), len(losses) * width, seed, targets.values.device)
    training = Training(parameters, losses, recipe, draws, captured=data.samples.in_memory, bf16=True)
    identity = [settings, targets.values, *named(data.reservoir.samples).values()]
    run(training, label, checkpoint=checkpoint, identity=identity, show=progress)


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
