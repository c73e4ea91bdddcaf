"""Laplace approximation by laplace-torch: one classifier, and linear models drawn around it (Immer et al., 2021)."""

import contextlib
import copy
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
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
from onefold.detectors.build import initial_standardise, streams
from onefold.detectors.members import (
    Augmentation,
    Disagreement,
    MemberDetector,
    MemberSpec,
    MembersScorer,
    check_augmentation,
    check_disagreement,
    make_targets,
    train_networks,
)
from onefold.errors import MissingExtraError
from onefold.inputs.samples import TrainData, read_train_data
from onefold.nn.nets import MLP, Impala, backbone
from onefold.nn.train import Recipe
from onefold.types import ArrayLike

BATCH = 256  # samples per minibatch of the curvature
INSTALL = (
    "pip install 'onefold[laplace]' and then "
    "pip install --no-deps laplace-torch==0.3 backpack-for-pytorch==1.7.1 curvlinops-for-pytorch==3.0.1"
)


class LinearisedNetworks(nn.Module):
    """A network linearised in its weights: f(x) + J(x) δ for several displacements δ, stored as networks."""

    def __init__(self, first: nn.Module, net: MLP | Impala, displacements: Sequence[MLP | Impala]) -> None:
        super().__init__()
        self.first, self.net, self.displacements = first, net, nn.ModuleList(displacements)

    def forward(self, x: Any) -> Float[Tensor, "m n outputs"]:
        weights, z = dict(self.net.named_parameters()), self.first(x)
        moved = [
            jvp(lambda w: functional_call(self.net, w, (z,)), (weights,), (dict(displacement.named_parameters()),))
            for displacement in self.displacements
        ]
        return torch.stack([pair[0] + pair[1] for pair in moved])


@dataclass(frozen=True, kw_only=True)
class LaplaceSpec(MemberSpec):
    """Settings of `Laplace`."""

    samples: int
    prior_precision: float
    recipe: Recipe

    @property
    def networks(self) -> int:
        """Number of networks."""
        return self.samples


class Laplace(MemberDetector):
    """A classifier, and draws from the Gaussian that the curvature of its loss implies for its weights.

    The curvature is Kronecker-factored, over all weights, as laplace-torch computes it. A sample predicts with the
    network linearised in its weights, the model that this curvature belongs to; networks with the sampled weights are
    near chance (docs/experiments/017-laplace-linear.md). Default prior precision and number of samples are the paper's.

    Args:
        samples: Number of draws, from 2 to 1,000.
        prior_precision: Precision of the Gaussian prior of the weights.
        channels: Channels of the convolutional stages, for images.
        hidden: Hidden layers.
        score: Measure of disagreement.
        augment: Augmentation of training images: "crops" enlarges a random part, "flips" also mirrors it.
        recipe: Steps, batch size and learning rate.
        seed: Seed of all random numbers.
        device: "auto", "cpu", "cuda" or "cuda:1".

    Raises:
        InputError: An argument is out of range.
    """

    spec_class = LaplaceSpec

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
        """Train the classifier and draw from the posterior.

        Args:
            x: Training data, as in `CSD.fit`.
            y: Class labels 0, 1, 2 …. A Dataset of pairs (x, y) needs no `y`.
            checkpoint: File to resume from, as in `CSD.fit`.
            progress: Show a progress bar; by default only on a terminal.

        Returns:
            This detector.

        Raises:
            InputError: The data or the labels cannot be used.
            MissingExtraError: laplace-torch is not installed.
            TrainingError: The training diverged.
        """
        approximation = _import_laplace()
        data = read_train_data(x, self.device, self.seed)
        targets = make_targets(x, y, len(data.samples), "classification", self.device)
        spec = LaplaceSpec(**self.settings, inputs=data.reader.sample_shape, outputs=targets.outputs)
        _, order, noise = generators(self.seed, 3)
        scorer = self._initial_scorer(spec, data).to(self.device)
        members = scorer.members
        assert isinstance(members, LinearisedNetworks)
        net = nn.Sequential(members.first, members.net)
        train_networks(
            [lambda x, _: net(x)], [p for p in net.parameters() if p.requires_grad], data, targets, self.recipe,
            seed=order.initial_seed(), label="Laplace", augment=self.augment,
            settings=asdict(spec), checkpoint=checkpoint, progress=progress,
        )  # fmt: skip
        net = net.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
        draws = self._draw_displacements(approximation, net, data, targets.values, noise)
        for displacement, vector in zip(members.displacements, draws, strict=True):
            vector_to_parameters(vector, displacement.parameters())
        self._finish(data, targets, scorer, spec)
        return self

    def build(self, spec: LaplaceSpec, *, meta: bool = False) -> MembersScorer:
        """Return the network and its displacements: with initial weights, or on the meta device."""
        sizes = {"channels": spec.channels, "hidden": spec.hidden, "outputs": spec.outputs}
        net = backbone(spec.inputs, generator=streams(spec.seed, 3, meta=meta)[0], **sizes)
        displacements = [copy.deepcopy(net) for _ in range(spec.samples)]
        members = LinearisedNetworks(initial_standardise(spec.inputs, meta=meta), net, displacements)
        return MembersScorer(members, spec, meta=meta)

    def _draw_displacements(
        self, approximation: Any, net: nn.Module, data: TrainData, labels: Tensor, noise: Generator
    ) -> Tensor:
        """Return draws of the weights minus the network's weights, [samples, weights]."""
        generator = Generator(self.device).manual_seed(noise.initial_seed())
        with _isolated(self.device):
            posterior = approximation(net.eval(), "classification", "all", "kron", prior_precision=self.prior_precision)
            posterior.fit(_Minibatches(data, labels))
            return (posterior.sample(self.samples, generator=generator) - posterior.mean).detach()


class _Minibatches:
    """The training data in order, as a DataLoader for laplace-torch."""

    def __init__(self, data: TrainData, labels: Tensor) -> None:
        self.dataset, self.labels = data.samples, labels

    def __len__(self) -> int:
        return -(-len(self.dataset) // BATCH)

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for part in torch.arange(len(self.dataset), device=self.labels.device).split(BATCH):
            yield self.dataset[part], self.labels[part]


@contextlib.contextmanager
def _isolated(device: torch.device) -> Iterator[None]:
    """Suppress warnings and restore the global random state."""
    devices = [device] if device.type == "cuda" else []
    with warnings.catch_warnings(), torch.random.fork_rng(devices):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


def _import_laplace() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from laplace import Laplace as approximation  # noqa: N813
    except ImportError as error:
        raise MissingExtraError(f"Laplace needs laplace-torch: {INSTALL}") from error
    return approximation
