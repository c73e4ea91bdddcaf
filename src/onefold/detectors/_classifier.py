"""How the labelled methods learn: targets, augmented minibatches, and networks that train side by side."""

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
    "flips": replace(CROPS, flip_horizontal=0.5, flip_vertical=0.5),  # the paper's, for all its classifiers
}


class Targets(NamedTuple):
    """Class labels as int64 [N], or standardised real targets [N, outputs] with what they were standardised by."""

    values: Tensor
    outputs: int
    regression: bool
    shift: Tensor
    scale: Tensor


def targets_of(x: ArrayLike, y: ArrayLike | None, n: int, task: Task, device: torch.device) -> Targets:
    """What to learn: whole numbers 0, 1, 2 … are classes unless task="regression"; a Dataset brings its own."""
    if isinstance(x, DataLoader) and LoaderSource(x).shuffles:
        raise InputError(
            "x: the DataLoader shuffles, so labels cannot be matched with samples. Pass its data set, or a DataLoader "
            "with shuffle=False: the training shuffles by itself."
        )
    given = as_tensor(_labels_of(x) if y is None else y, "y")
    fractions = given.is_floating_point() and not torch.equal(given, given.round())
    if task == "regression" or (task == "auto" and fractions):
        values = given.float().reshape(len(given), -1)
        if len(values) != n or not values.isfinite().all():
            raise InputError(f"y has shape {tuple(given.shape)}: a finite target for each of the {n} samples is needed")
        values = values.to(device)
        shift, scale = values.mean(0), values.std(0, correction=0).clamp(min=1e-12)
        return Targets((values - shift) / scale, values.shape[1], True, shift, scale)
    labels = as_labels(given, n).to(device)
    outputs = int(labels.max()) + 1
    return Targets(labels, outputs, False, torch.zeros(outputs, device=device), torch.ones(outputs, device=device))


def _labels_of(x: ArrayLike) -> Tensor:
    labels = getattr(open_source(x), "labels", lambda: None)()
    if labels is None:
        raise InputError("this method learns from labels: call fit(x, y), or give a Dataset of pairs (x, y)")
    return labels


def check_augmentation(kind: Augmentation) -> Augmentation:
    """Return the name of an augmentation, if there is one of that name."""
    return check_choice(kind, "augment", tuple(CHAINS))


def augmented(reader: Reader, kind: Augmentation) -> Callable[[Any, Tensor], Any] | None:
    """(x, uniforms [N, 14]) -> x through the augmentation of that kind, or None where there is none."""
    chain = CHAINS[kind]
    if chain is None:
        return None
    if not reader.may_be_pictures:
        raise InputError(f"augment={kind!r} is for images; use augment='none' for other data")

    def changed(x: Tensor, uniforms: Tensor) -> Tensor:
        if x.ndim == 3:  # grey images without an axis for it
            return augment(x[:, None], uniforms, chain, reader.low, reader.high)[:, 0]
        return augment(x, uniforms, chain, reader.low, reader.high)

    return changed


def loss_of(found: Tensor, wanted: Tensor, *, regression: bool) -> Tensor:
    """Cross-entropy of logits, or the mean squared error of standardised values."""
    return F.mse_loss(found, wanted) if regression else F.cross_entropy(found, wanted)


def train_together(
    forwards: Sequence[Callable[[Any, Tensor], Tensor]],
    parameters: Sequence[nn.Parameter],
    learned: TrainData,
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
    """Train networks, each on its own minibatches: on a GPU side by side in one graph.

    `forwards` map samples and `extra_uniforms` random numbers a sample to logits or values.
    """
    change, count = augmented(learned.reader, augment), len(learned.samples)
    needed = (UNIFORMS if change else 0) + extra_uniforms

    def loss_for(i: int, forward: Callable[[Any, Tensor], Tensor]) -> Loss:
        def loss(integers: Tensor, uniforms: Tensor) -> Tensor:
            index, own = integers[:, i] % count, uniforms[:, i * needed : (i + 1) * needed]
            x = learned.samples[index]
            if change is not None:
                x, own = change(x, own[:, :UNIFORMS]), own[:, UNIFORMS:]
            return loss_of(forward(x, own), targets.values[index], regression=targets.regression)

        return loss

    losses = [loss_for(i, forward) for i, forward in enumerate(forwards)]
    draws = Draws(recipe.batch, len(losses), len(losses) * needed, seed, targets.values.device)
    training = Training(parameters, losses, recipe, draws, captured=learned.samples.in_memory, bf16=True)
    identity = [settings, targets.values, *named(learned.reservoir.samples).values()]
    run(training, label, checkpoint=checkpoint, identity=identity, show=progress)
