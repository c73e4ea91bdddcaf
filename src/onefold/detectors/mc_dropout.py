"""MC dropout (Gal & Ghahramani, 2016): one network, many random parts of it, and how much they disagree."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.core.arguments import check_choice, check_instance, check_integer, check_number, check_sizes
from onefold.core.batches import check_seed, pick_device
from onefold.core.rng import generators
from onefold.detectors._classifier import TASKS, Augmentation, Task, check_augmentation, targets_of, train_together
from onefold.detectors._members import Disagreement, MemberDetector, MembersScorer, check_disagreement
from onefold.detectors._random_features import empty_standardise
from onefold.errors import InputError
from onefold.inputs.reader import Reader
from onefold.inputs.samples import read_train_data
from onefold.nn.nets import MLP, Impala, backbone
from onefold.nn.train import Recipe
from onefold.types import ArrayLike


class Thinned(nn.Module):
    """A network whose units are dropped: after every stage of convolutions and after every hidden layer.

    `kept` holds one row for each thinned network of the ensemble: which of the units it has. The same ones for every
    input, so that a score depends on nothing but the input.
    """

    kept: Tensor

    def __init__(self, first: nn.Module, net: MLP | Impala, shape: tuple[int, ...], rate: float, samples: int) -> None:
        super().__init__()
        self.first, self.net, self.rate = first, net, rate
        self.sizes = _units(net, shape)
        empty = next(net.parameters()).is_meta  # the form of a file's weights
        self.register_buffer(
            "kept", torch.ones(samples, self.units, dtype=torch.bool, device="meta" if empty else "cpu")
        )

    @property
    def units(self) -> int:
        """How many units can be dropped."""
        return sum(size.numel() for size in self.sizes)

    def draw(self, generator: Generator) -> None:
        """Draw the thinned networks."""
        self.kept.copy_(torch.rand(self.kept.shape, generator=generator) >= self.rate)

    def forward(self, x: Any) -> Float[Tensor, "samples n outputs"]:
        """What every thinned network says."""
        z = self._stages()[0](self.first(x))  # what comes before the first dropout is common to all
        return torch.stack([self._rest(z, kept[None]) for kept in self.kept])

    def thinned(self, x: Any, uniforms: Float[Tensor, "n units"]) -> Float[Tensor, "n outputs"]:
        """The network with other units dropped for every sample, to train by."""
        return self._rest(self._stages()[0](self.first(x)), uniforms >= self.rate)

    def _rest(self, z: Tensor, kept: Bool[Tensor, "n units"]) -> Tensor:
        masks = kept.split([size.numel() for size in self.sizes], dim=1)
        for stage, size, mask in zip(self._stages()[1:], self.sizes, masks, strict=True):
            z = stage(z * mask.view(-1, *size).to(z.dtype) / (1 - self.rate))
        return z

    def _stages(self) -> list[Any]:
        """Functions between which units are dropped."""
        net = self.net
        if isinstance(net, Impala):
            trunk = [net.trunk[i : i + 4] for i in range(0, len(net.trunk), 4)]
            *early, last = trunk
            return [*early, lambda z: F.relu(last(z)).flatten(1), *_dense(net.mlp)]
        return _dense(net)


class MCDropout(MemberDetector):
    """One network trained with dropout; its predictions with `samples` fixed draws of dropped units disagree.

    Labels, `score` and `augment` are as in `DeepEnsemble`. Rate and number of samples are the paper's.
    """

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
        self.kernel = None
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
        """Train on samples and class labels 0, 1, 2 …, or real targets; a Dataset of pairs brings its own."""
        learned = read_train_data(x, self.device, self.seed)
        targets = targets_of(x, y, len(learned.samples), self.task, self.device)
        weights, masks, order = generators(self.seed, 3)
        shape = learned.reader.sample_shape
        scorer = self._scorer(shape, learned.standardise, weights, targets.outputs, targets.regression)
        net = scorer.members
        assert isinstance(net, Thinned)
        net.draw(masks)
        scorer.to(self.device)
        train_together(
            [net.thinned], [p for p in net.parameters() if p.requires_grad], learned, targets, self.recipe,
            seed=order.initial_seed(), label="MC dropout", augment=self.augment, extra_uniforms=net.units,
            settings=self._settings(), checkpoint=checkpoint, progress=progress,
        )  # fmt: skip
        self._settle(learned, targets, scorer)
        return self

    def _scorer(
        self, shape: tuple[int, ...], first: nn.Module, stream: Generator | None, outputs: int, regression: bool
    ) -> MembersScorer:
        net = backbone(shape, channels=self.channels, hidden=self.hidden, outputs=outputs, generator=stream)
        members = Thinned(first, net, shape, self.rate, self.samples)
        return MembersScorer(members, self.score_kind, outputs, regression=regression)

    def _settings(self) -> dict[str, Any]:
        sizes = {"channels": list(self.channels), "hidden": list(self.hidden)}
        return {
            "samples": self.samples, "rate": self.rate, **sizes, "score": self.score_kind, "task": self.task,
            "augment": self.augment, "recipe": asdict(self.recipe), "seed": self.seed,
        }  # fmt: skip

    def _empty(self, reader: Reader, about: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
        del weights
        shape = reader.sample_shape
        return self._scorer(shape, empty_standardise(shape), None, about["outputs"], about["regression"])


def _dense(mlp: MLP) -> list[Any]:
    return [*(lambda z, layer=layer: F.relu(layer(z)) for layer in mlp.hidden), mlp.head]


def _units(net: MLP | Impala, shape: tuple[int, ...]) -> list[torch.Size]:
    """The shapes of what is dropped from, one for each place."""
    if isinstance(net, MLP):
        return [torch.Size([layer.out_features]) for layer in net.hidden]  # pyright: ignore[reportArgumentType]
    height, width, found = shape[1], shape[2], []
    convolutions = [layer for layer in net.trunk if isinstance(layer, nn.Conv2d)]
    for layer in convolutions:
        height, width = (height + 1) // 2, (width + 1) // 2
        found.append(torch.Size([layer.out_channels, height, width]))
    found[-1] = torch.Size([found[-1].numel()])  # the last one is dropped from as a vector
    return [*found, *_units(net.mlp, shape)]
