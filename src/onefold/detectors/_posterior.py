"""Networks drawn from a Bayesian posterior: what that is, which minibatches come when, and the chain through it."""

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Float64, Int
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

from onefold.detectors import _langevin
from onefold.detectors._classifier import Augmentation, augmented
from onefold.errors import MissingExtraError, TrainingError
from onefold.inputs.samples import TrainData
from onefold.nn.augment import UNIFORMS
from onefold.nn.cuda_graphs import replayed
from onefold.nn.cudnn import exact_float32, tune_cudnn
from onefold.nn.nets import MLP, Impala
from onefold.nn.train import Update

Sampler: TypeAlias = Literal["obabo", "baoa"]
Step: TypeAlias = Callable[[], Any]


def prior_variances(tower: MLP | Impala) -> list[float]:
    """Of the independent normals that the weights come from, parameter by parameter.

    2/fan_in for hidden layers and 1/fan_in for the head, as orthogonal weights have them in layers that do not widen;
    1 for biases.
    """
    layers = [module for module in tower.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    return [v for layer in layers for v in ((1 if layer is tower.head else 2) / layer.weight[0].numel(), 1.0)]


class Posterior:
    """U(θ) = −log p(y|x, θ) − log p(θ) of a classifier, up to a constant, where θ holds all its weights in a row.

    Gradients are in float32. What is summed over all data is summed in float64, of the network's float32 logits.
    """

    def __init__(
        self,
        first: nn.Module,
        tower: MLP | Impala,
        learned: TrainData,
        labels: Tensor,
        batch: int,
        augment: Augmentation,
    ) -> None:
        self.samples, self.labels, self.count = learned.samples, labels, len(learned.samples)
        self.net = nn.Sequential(first, tower)
        named = dict(self.net.named_parameters())
        self.shapes = {name: p.shape for name, p in named.items()}
        self.start = torch.cat([p.detach().reshape(-1) for p in named.values()])
        variances = zip(named.values(), prior_variances(tower), strict=True)
        self.precision = torch.cat([torch.full((p.numel(),), 1 / v) for p, v in variances]).to(self.start)
        self.change = augmented(learned.reader, augment)
        self.index = torch.zeros(min(batch, self.count), dtype=torch.int64, device=labels.device)
        self.uniforms = torch.zeros(len(self.index), UNIFORMS if self.change else 0, device=labels.device)
        self.at_once = learned.reader.batch_size * (8 if labels.is_cuda else 1)

    def choose(self, index: Int[Tensor, " batch"], generator: Generator) -> None:
        """The minibatch that `potential` is of from now on, augmented at random."""
        self.index.copy_(index)
        self.uniforms.uniform_(generator=generator)

    def logits(self, theta: Float[Tensor, " d"], x: Any) -> Float[Tensor, "n classes"]:
        parts = theta.split([shape.numel() for shape in self.shapes.values()])
        weights = {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        return functional_call(self.net, weights, (x,))

    def network(self, theta: Float[Tensor, " d"]) -> nn.Module:
        """A network of its own with these weights."""
        net = copy.deepcopy(self.net).requires_grad_(False)
        for p, part in zip(net.parameters(), theta.split([p.numel() for p in net.parameters()]), strict=True):
            p.copy_(part.view(p.shape))
        return net

    def potential(self, parameters: Sequence[Float[Tensor, " d"]], _: Any = None) -> Float[Tensor, ""]:
        """U_b = N/|b| Σ −log p(y|x, θ) + ½ Σ θ²/variance."""
        (theta,) = parameters
        x = self.samples[self.index]
        logits = self.logits(theta, x if self.change is None else self.change(x, self.uniforms))
        misfit = F.cross_entropy(logits, self.labels[self.index])
        return self.count * misfit + (theta.square() * self.precision).sum() / 2

    @torch.no_grad()
    def whole(self, theta: Float[Tensor, " d"]) -> Float64[Tensor, ""]:
        """U of all data as they are, without augmentation."""
        total = (theta.double().square() * self.precision).sum() / 2
        for index in torch.arange(self.count, device=self.labels.device).split(self.at_once):
            logits = self.logits(theta, self.samples[index]).double()
            total = total + F.cross_entropy(logits, self.labels[index], reduction="sum")
        return total


def there_and_back(count: int, batch: int, length: int, generator: Generator) -> Int[Tensor, "length batch"]:
    """Which samples are in which minibatch of a trajectory: random arrangements of all data, and the same way back.

    The minibatches of one arrangement are disjoint. The sequence is its own reverse, which the correction needs.
    """
    each, half = count // batch, -(-length // 2)
    device = generator.device
    orders = [torch.randperm(count, generator=generator, device=device) for _ in range(-(-half // each))]
    there = torch.cat([order[: each * batch].view(each, batch) for order in orders])[:half]
    return torch.cat([there, there[: length - half].flip(0)])


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Trajectories that are judged by nobody, those that leave a sample, and the steps of each."""

    burn_in: int
    samples: int
    steps: int
    corrected: bool


class Sampling:
    """A chain of networks, one `Update` for every trajectory; its loss is the potential a sample. Iterate it once.

    The learning rate falls linearly from trajectory to trajectory. On a GPU a step is captured as a graph and replayed.
    """

    def __init__(
        self, posterior: Posterior, schedule: Schedule, sampler: Sampler, dynamics: _langevin.Dynamics, seed: int
    ) -> None:
        self.posterior, self.schedule, self.sampler, self.dynamics = posterior, schedule, sampler, dynamics
        self.device = posterior.start.device
        self.generator = Generator(self.device).manual_seed(seed)
        theta = posterior.start.clone().requires_grad_()
        self.theta = theta.detach()  # the same numbers
        with exact_float32(), tune_cudnn():
            potential = posterior.whole(self.theta)
        self.chain = _langevin.init([theta], potential, dynamics, self.generator)
        self.members = torch.zeros(schedule.samples, len(theta), device=self.device)
        self.accepted = torch.zeros((), dtype=torch.int64, device=self.device)
        self.done = 0
        self._library = _posteriors() if sampler == "baoa" else None

    @property
    def steps(self) -> int:
        """How many trajectories there are."""
        return self.schedule.burn_in + self.schedule.samples

    @property
    def acceptance(self) -> float:
        """The share of judged trajectories that were accepted, or −1 where none are judged."""
        return float(self.accepted) / self.schedule.samples if self.schedule.corrected else -1.0

    def __iter__(self) -> Iterator[Update]:
        step = self._baoa if self.sampler == "baoa" else self._obabo
        if self.device.type == "cuda" and self.posterior.samples.in_memory:
            step = replayed(step, self.device, [self.generator])
        while self.done < self.steps:
            with exact_float32(), tune_cudnn(), self._others_randomness():
                self._walk(step)
                end = self.posterior.whole(self.theta)
            sample = self.done - self.schedule.burn_in
            if self.schedule.corrected and sample >= 0:
                self.accepted += _langevin.finish(self.chain, end, self.dynamics, self.generator).accepted
            elif end.isfinite():
                self.chain.potential.copy_(end)
            else:
                raise TrainingError(f"the chain ran off at learning rate {self.dynamics.lr:g}; use a smaller one")
            if sample >= 0:
                self.members[sample].copy_(self.theta)
            self.done += 1
            yield Update(self.done, self.chain.potential / self.posterior.count)

    def state(self) -> dict[str, Tensor]:
        """Everything that the next trajectory depends on, and what the ones before have left."""
        known = self.members[: max(0, self.done - self.schedule.burn_in)]
        tensors = {"done": torch.tensor(self.done), "accepted": self.accepted, "members": known}
        return tensors | {f"chain.{name}": t for name, t in _langevin.kept(self.chain, self.generator).items()}

    def restore(self, tensors: dict[str, Tensor], /) -> None:
        """Go on from `state()` of a chain of the same form."""
        self.done = int(tensors["done"])
        self.accepted.copy_(tensors["accepted"])
        self.members[: len(tensors["members"])] = tensors["members"].to(self.device)
        chain = {name.removeprefix("chain."): t for name, t in tensors.items() if name.startswith("chain.")}
        _langevin.restore(self.chain, self.generator, chain)

    def _walk(self, step: Step) -> None:
        """One trajectory."""
        posterior, over = self.posterior, self.done / self.steps
        first, *others = there_and_back(posterior.count, len(posterior.index), self.schedule.steps + 1, self.generator)
        posterior.choose(first, self.generator)
        _langevin.begin(self.chain, None, posterior.potential, self.dynamics.step_size(over))
        for index in others:
            posterior.choose(index, self.generator)
            step()

    def _obabo(self) -> None:
        _langevin.update(self.chain, None, self.posterior.potential, self.dynamics, self.generator)

    def _baoa(self) -> None:
        """One step of the package's own, with its friction so that the same share of momentum is kept."""
        assert self._library is not None
        chain, momentum = self.chain, self.dynamics.momentum
        friction = -math.log(momentum) if momentum > 0 else math.inf
        ended, _ = self._library.update(
            self._library.BAOAState(self.theta, chain.momentum), None, self._log_posterior,
            lr=chain.step_size, alpha=friction / chain.step_size, temperature=self.dynamics.temperature,
        )  # fmt: skip
        self.theta.copy_(ended.params)
        chain.momentum.copy_(ended.momenta)

    def _log_posterior(self, theta: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        return -self.posterior.potential([theta]), torch.zeros(())

    @contextlib.contextmanager
    def _others_randomness(self) -> Iterator[None]:
        """The package draws from torch's global generator: seed it from ours, and leave it as it was. It also warns."""
        if self.sampler == "obabo":
            yield
            return
        on_gpu = self.device.type == "cuda"
        theirs = torch.cuda.default_generators[self.device.index or 0] if on_gpu else torch.default_generator
        before = theirs.get_state()
        theirs.manual_seed(int(torch.randint(2**62, (), generator=self.generator, device=self.device)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            theirs.set_state(before)


def _posteriors() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from posteriors.sgmcmc import baoa
    except ImportError as error:
        raise MissingExtraError("sampler='baoa' needs posteriors: pip install 'onefold[mcmc]'") from error
    return baoa
