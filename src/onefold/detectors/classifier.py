"""Training of methods with labels: targets, augmented minibatches, and several networks at once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

from onefold.core.arguments import check_choice
from onefold.core.batches import as_labels, as_tensor, named
from onefold.errors import InputError
from onefold.inputs import LoaderSource, open_source
from onefold.inputs.reader import Reader
from onefold.inputs.samples import TrainData
from onefold.nn.augment import UNIFORMS, Chain, augment
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
