"""Laplace approximation by laplace-torch: one classifier, and linear models drawn around it (Immer et al., 2021)."""

import contextlib
import copy
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.utils import vector_to_parameters

from onefold.core.arguments import check_instance, check_integer, check_number, check_sizes
from onefold.core.batches import check_seed, pick_device
from onefold.core.rng import generators
from onefold.detectors._classifier import Augmentation, check_augmentation, targets_of, train_together
from onefold.detectors._members import Disagreement, MemberDetector, MembersScorer, check_count, check_disagreement
from onefold.detectors._random_features import empty_standardise
from onefold.errors import MissingExtraError
from onefold.inputs.reader import Reader
from onefold.inputs.samples import TrainData, read_train_data
from onefold.nn.nets import MLP, Impala, backbone
from onefold.nn.train import Recipe
from onefold.types import ArrayLike

BATCH = 256  # samples whose curvature is taken at once
INSTALL = (
    "pip install 'onefold[laplace]' and then "
    "pip install --no-deps laplace-torch==0.3 backpack-for-pytorch==1.7.1 curvlinops-for-pytorch==3.0.1"
)


class Linearised(nn.Module):
    """A network made linear in its weights: f(x) + J(x) δ for several movements δ, which are networks, too."""

    def __init__(self, first: nn.Module, net: MLP | Impala, movements: Sequence[MLP | Impala]) -> None:
        super().__init__()
        self.first, self.net, self.movements = first, net, nn.ModuleList(movements)

    def forward(self, x: Any) -> Float[Tensor, "m n outputs"]:
        weights, z = dict(self.net.named_parameters()), self.first(x)
        moved = [
            jvp(lambda w: functional_call(self.net, w, (z,)), (weights,), (dict(movement.named_parameters()),))
            for movement in self.movements
        ]
        return torch.stack([pair[0] + pair[1] for pair in moved])


class Laplace(MemberDetector):
    """A classifier, and `samples` draws from the normal distribution that its loss's curvature gives its weights.

    Kronecker-factored, over all weights, as laplace-torch computes it; prior precision and number of samples are the
    paper's. A sample predicts with the network linearised in its weights, the model that this curvature belongs to;
    networks with the sampled weights are near chance (docs/experiments/017-laplace-linear.md). Labels, `score`
    and `augment` are as in `DeepEnsemble`; classifiers only.
    """

    def __init__(
        self,
        samples: int = 30,
        *,
        prior_precision: float = 100.0,
        channels: tuple[int, ...] = (32, 64),
        hidden: tuple[int, ...] = (256, 256),
        score: Disagreement = "mutual_information",
        augment: Augmentation = "none",
        recipe: Recipe | None = None,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        self.kernel = None
        self.samples = check_integer(samples, "samples", 2, 1000)
        self.prior_precision = check_number(prior_precision, "prior_precision")
        self.channels, self.hidden = check_sizes(channels, "channels"), check_sizes(hidden, "hidden")
        self.score_kind: Disagreement = check_disagreement(score)
        self.augment: Augmentation = check_augmentation(augment)
        self.recipe = check_instance(recipe or Recipe(steps=2000), "recipe", Recipe)
        self.seed = check_seed(seed)
        self.device = pick_device(device)

    def fit(
        self,
        x: ArrayLike,
        y: ArrayLike | None = None,
        *,
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
    ) -> "Laplace":
        """Train on samples and class labels 0, 1, 2 …; a Dataset of pairs brings its own."""
        approximation = _laplace_torch()
        learned = read_train_data(x, self.device, self.seed)
        targets = targets_of(x, y, len(learned.samples), "classification", self.device)
        weights, order, noise = generators(self.seed, 3)
        tower = self._tower(learned.reader.sample_shape, weights, targets.outputs)
        net = nn.Sequential(learned.standardise, tower).to(self.device)
        train_together(
            [lambda x, _: net(x)], [p for p in net.parameters() if p.requires_grad], learned, targets, self.recipe,
            seed=order.initial_seed(), label="Laplace", augment=self.augment,
            settings=self._settings(), checkpoint=checkpoint, progress=progress,
        )  # fmt: skip
        net = net.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
        moved = self._drawn(approximation, net, learned, targets.values, noise)
        movements = [copy.deepcopy(net[1]) for _ in moved]
        for movement, vector in zip(movements, moved, strict=True):
            vector_to_parameters(vector, movement.parameters())
        members = Linearised(net[0], net[1], movements)  # pyright: ignore[reportArgumentType]
        self._settle(learned, targets, MembersScorer(members, self.score_kind, targets.outputs).to(self.device))
        return self

    def _drawn(
        self, approximation: Any, net: nn.Module, learned: TrainData, labels: Tensor, noise: Generator
    ) -> Tensor:
        """How far draws are from the network's weights, [samples, weights]."""
        drawing = Generator(self.device).manual_seed(noise.initial_seed())
        with _quiet(self.device):
            posterior = approximation(net.eval(), "classification", "all", "kron", prior_precision=self.prior_precision)
            posterior.fit(_Minibatches(learned, labels))
            return (posterior.sample(self.samples, generator=drawing) - posterior.mean).detach()

    def _tower(self, shape: tuple[int, ...], stream: Generator | None, outputs: int) -> MLP | Impala:
        return backbone(shape, channels=self.channels, hidden=self.hidden, outputs=outputs, generator=stream)

    def _settings(self) -> dict[str, Any]:
        sizes = {"channels": list(self.channels), "hidden": list(self.hidden)}
        return {
            "samples": self.samples, "prior_precision": self.prior_precision, **sizes, "score": self.score_kind,
            "augment": self.augment, "recipe": asdict(self.recipe), "seed": self.seed,
        }  # fmt: skip

    def _empty(self, reader: Reader, about: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
        check_count(self.samples, self.hidden, weights)
        shape, outputs = reader.sample_shape, about["outputs"]
        net, *movements = (self._tower(shape, None, outputs) for _ in range(1 + self.samples))
        members = Linearised(empty_standardise(shape), net, movements)
        return MembersScorer(members, self.score_kind, outputs)


class _Minibatches:
    """The train set in order, as laplace-torch wants to be given it."""

    def __init__(self, learned: TrainData, labels: Tensor) -> None:
        self.dataset, self.labels = learned.samples, labels

    def __len__(self) -> int:
        return -(-len(self.dataset) // BATCH)

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for part in torch.arange(len(self.dataset), device=self.labels.device).split(BATCH):
            yield self.dataset[part], self.labels[part]


@contextlib.contextmanager
def _quiet(device: torch.device) -> Iterator[None]:
    """Other people's warnings are not for our users, and their random numbers not at the cost of ours."""
    devices = [device] if device.type == "cuda" else []
    with warnings.catch_warnings(), torch.random.fork_rng(devices):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


def _laplace_torch() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from laplace import Laplace as approximation  # noqa: N813
    except ImportError as error:
        raise MissingExtraError(f"Laplace needs laplace-torch: {INSTALL}") from error
    return approximation
