"""MC dropout (Gal & Ghahramani, 2016): the disagreement of one network under random draws of dropped units."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.core.arguments import check_choice, check_instance, check_integer, check_number, check_sizes
from onefold.core.batches import check_seed, pick_device
from onefold.core.rng import generators
from onefold.detectors.build import initial_standardise, streams
from onefold.detectors.members import (
    TASKS,
    Augmentation,
    Disagreement,
    MemberDetector,
    MemberSpec,
    MembersScorer,
    Task,
    check_augmentation,
    check_disagreement,
    make_targets,
    train_networks,
)
from onefold.errors import InputError
from onefold.inputs.samples import read_train_data
from onefold.nn.nets import MLP, Impala, backbone
from onefold.nn.train import Recipe
from onefold.types import ArrayLike


@dataclass(frozen=True, kw_only=True)
class MCDropoutSpec(MemberSpec):
    """Settings of `MCDropout`."""

    samples: int
    rate: float
    task: Task
    recipe: Recipe


class ThinnedNetworks(nn.Module):
    """A network with dropout after every convolutional stage and after every hidden layer.

    Each row of `kept` is one thinned network: True for units that are not dropped. The rows are the same for every
    input, so that a score depends on the input only.
    """

    kept: Tensor

    def __init__(self, first: nn.Module, net: MLP | Impala, shape: tuple[int, ...], rate: float, samples: int) -> None:
        super().__init__()
        self.first, self.net, self.rate = first, net, rate
        self.sizes = _units(net, shape)
        device = next(net.parameters()).device
        self.register_buffer("kept", torch.ones(samples, self.units, dtype=torch.bool, device=device))

    @property
    def units(self) -> int:
        """Number of units that can be dropped."""
        return sum(size.numel() for size in self.sizes)

    def draw(self, generator: Generator) -> None:
        """Draw the units that each thinned network keeps."""
        self.kept.copy_(torch.rand(self.kept.shape, generator=generator) >= self.rate)

    def forward(self, x: Any) -> Float[Tensor, "samples n outputs"]:
        """Return the outputs of every thinned network."""
        z = self._stages()[0](self.first(x))  # the part before the first dropout is common to all
        return torch.stack([self._rest(z, kept[None]) for kept in self.kept])

    def thinned(self, x: Any, uniforms: Float[Tensor, "n units"]) -> Float[Tensor, "n outputs"]:
        """Return outputs with a separate draw of dropped units for every sample, for training."""
        return self._rest(self._stages()[0](self.first(x)), uniforms >= self.rate)

    def _rest(self, z: Tensor, kept: Bool[Tensor, "n units"]) -> Tensor:
        masks = kept.split([size.numel() for size in self.sizes], dim=1)
        for stage, size, mask in zip(self._stages()[1:], self.sizes, masks, strict=True):
            z = stage(z * mask.view(-1, *size).to(z.dtype) / (1 - self.rate))
        return z

    def _stages(self) -> list[Any]:
        """Return the parts of the network between dropouts."""
        net = self.net
        if isinstance(net, Impala):
            trunk = [net.trunk[i : i + 4] for i in range(0, len(net.trunk), 4)]
            *early, last = trunk
            return [*early, lambda z: F.relu(last(z)).flatten(1), *_dense(net.mlp)]
        return _dense(net)


class MCDropout(MemberDetector):
    """One network trained with dropout; its predictions under fixed draws of dropped units disagree.

    Default rate and number of samples are the paper's.

    Args:
        samples: Number of draws, from 2 to 10,000.
        rate: Share of units that are dropped, in (0, 1).
        channels: Channels of the convolutional stages, for images.
        hidden: Hidden layers, at least one.
        score: Measure of disagreement of classifiers. Regressors disagree by their variance.
        task: "classification", "regression", or "auto": whole numbers 0, 1, 2 … are classes.
        augment: Augmentation of training images: "crops" enlarges a random part, "flips" also mirrors it.
        recipe: Steps, batch size and learning rate.
        seed: Seed of all random numbers.
        device: "auto", "cpu", "cuda" or "cuda:1".

    Raises:
        InputError: An argument is out of range.
    """

    spec_class = MCDropoutSpec

    def __init__(
        self,
        samples: int = 100,
        *,
        rate: float = 0.1,
        channels: tuple[int, ...] = (32, 64),
        hidden: tuple[int, ...] = (256, 256),
        score: Disagreement = "mutual_information",
        task: Task = "auto",
        augment: Augmentation = "none",
        recipe: Recipe | None = None,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        if not hidden:
            raise InputError("MC dropout needs a hidden layer to drop units of")
        self.samples = check_integer(samples, "samples", 2, 10_000)
        self.rate = check_number(rate, "rate", 0, 1)
        self.channels, self.hidden = check_sizes(channels, "channels"), check_sizes(hidden, "hidden")
        self.score_kind: Disagreement = check_disagreement(score)
        self.task: Task = check_choice(task, "task", TASKS)
        self.augment: Augmentation = check_augmentation(augment)
        self.recipe = check_instance(recipe or Recipe(steps=2000, lr=3e-4), "recipe", Recipe)
        self.seed = check_seed(seed)
        self.device = pick_device(device)

    def fit(
        self,
        x: ArrayLike,
        y: ArrayLike | None = None,
        *,
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
    ) -> "MCDropout":
        """Train the network on samples and targets.

        Args:
            x: Training data, as in `CSD.fit`.
            y: Class labels 0, 1, 2 …, or real targets. A Dataset of pairs (x, y) needs no `y`.
            checkpoint: File to resume from, as in `CSD.fit`.
            progress: Show a progress bar; by default only on a terminal.

        Returns:
            This detector.

        Raises:
            InputError: The data or the targets cannot be used.
            TrainingError: The training diverged.
        """
        data = read_train_data(x, self.device, self.seed)
        targets = make_targets(x, y, len(data.samples), self.task, self.device)
        spec = MCDropoutSpec(
            **self.settings,
            inputs=data.reader.sample_shape,
            outputs=targets.outputs,
            regression=targets.regression,
        )
        scorer = self._initial_scorer(spec, data).to(self.device)
        net = scorer.members
        assert isinstance(net, ThinnedNetworks)
        train_networks(
            [net.thinned], [p for p in net.parameters() if p.requires_grad], data, targets, self.recipe,
            seed=generators(self.seed, 3)[2].initial_seed(), label="MC dropout", augment=self.augment,
            extra_uniforms=net.units, settings=asdict(spec), checkpoint=checkpoint, progress=progress,
        )  # fmt: skip
        self._finish(data, targets, scorer, spec)
        return self

    def build(self, spec: MCDropoutSpec, *, meta: bool = False) -> MembersScorer:
        """Return the network and its thinned versions: with initial weights, or on the meta device."""
        weights, masks, _ = streams(spec.seed, 3, meta=meta)
        net = backbone(spec.inputs, channels=spec.channels, hidden=spec.hidden, outputs=spec.outputs, generator=weights)
        first = initial_standardise(spec.inputs, meta=meta)
        members = ThinnedNetworks(first, net, spec.inputs, spec.rate, spec.samples)
        if masks is not None:
            members.draw(masks)
        return MembersScorer(members, spec, meta=meta)


def _dense(mlp: MLP) -> list[Any]:
    return [*(lambda z, layer=layer: F.relu(layer(z)) for layer in mlp.hidden), mlp.head]


def _units(net: MLP | Impala, shape: tuple[int, ...]) -> list[torch.Size]:
    """Return the shapes of the activations that dropout applies to."""
    if isinstance(net, MLP):
        return [torch.Size([layer.out_features]) for layer in net.hidden]  # pyright: ignore[reportArgumentType]
    height, width, sizes = shape[1], shape[2], []
    convolutions = [layer for layer in net.trunk if isinstance(layer, nn.Conv2d)]
    for layer in convolutions:
        height, width = (height + 1) // 2, (width + 1) // 2
        sizes.append(torch.Size([layer.out_channels, height, width]))
    sizes[-1] = torch.Size([sizes[-1].numel()])  # flattened before its dropout
    return [*sizes, *_units(net.mlp, shape)]
