"""The posterior of a classifier's weights, and Langevin dynamics that sample it (Garriga-Alonso & Fortuin, 2021)."""

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

from onefold.core.arguments import check_integer, check_number
from onefold.core.storage import under_prefix, with_prefix
from onefold.detectors.members import Augmentation, make_augmentation
from onefold.errors import InputError, MissingExtraError, TrainingError
from onefold.inputs.samples import TrainData
from onefold.nn.augment import UNIFORMS
from onefold.nn.cuda_graphs import replayed
from onefold.nn.cudnn import exact_float32, tune_cudnn
from onefold.nn.nets import MLP, Impala
from onefold.nn.train import Update

Potential: TypeAlias = Callable[[Sequence[Tensor], Any], Tensor]
"""(parameters, batch) -> U_b = N/|b| Σ −log p(y|x, θ) − log p(θ), with mean U over minibatches: a sum over data."""


@dataclass(frozen=True, kw_only=True)
class Dynamics:
    """Learning rate, number of data N, share a of momentum that a step keeps, and temperature T."""

    lr: float
    data: int
    momentum: float
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_number(self.lr, "lr")
        check_number(self.temperature, "temperature")
        check_integer(self.data, "data")
        check_number(self.momentum, "momentum", 0, 1, closed="left")

    def step_size(self, progress: float = 0.0) -> float:
        """Return h = √(lr (1 − progress) / N), with the share of finished trajectories as `progress`."""
        if not 0 <= progress < 1:
            raise InputError(f"progress: {progress} is not in [0, 1). Pass the share of finished trajectories.")
        return math.sqrt(self.lr * (1 - progress) / self.data)


class ChainState(NamedTuple):
    """State of a chain. Momenta and gradients are flat, parameter after parameter; energies are float64."""

    parameters: list[Tensor]
    """θ: the tensors passed to `init`, updated in place."""
    momentum: Float[Tensor, "*chains d"]
    gradient: Float[Tensor, "*chains d"]
    """∇U_b(θ) of the minibatch of the next kick."""
    work: Float64[Tensor, "*chains"]
    """Σ ΔK since the start of the trajectory."""
    step_size: Float[Tensor, ""]
    potential: Float64[Tensor, "*chains"]
    """U of all data at the start of the trajectory."""
    start: Float[Tensor, "2 *chains d"]
    """θ and m at the start of the trajectory."""


class Acceptance(NamedTuple):
    """Whether a trajectory was accepted, and −ΔE/T, on their device."""

    accepted: Bool[Tensor, "*chains"]
    log_ratio: Float64[Tensor, "*chains"]


def init(
    parameters: Sequence[Tensor], potential: Float[Tensor, "*chains"], dynamics: Dynamics, generator: Generator
) -> ChainState:
    """Return a chain at `parameters`, where the potential of all data is `potential`, with a momentum from N(0, T).

    The parameters must be leaves that require gradients; the chain updates them in place. If `potential` is a vector,
    each entry belongs to one chain.
    """
    parameters, chains = list(parameters), potential.shape
    if not parameters or not all(p.is_leaf and p.requires_grad and p.is_floating_point() for p in parameters):
        raise InputError("a chain needs parameters: leaf tensors of real numbers that require gradients")
    if len({(p.dtype, p.device) for p in parameters}) > 1:
        raise InputError("the parameters of a chain must share one type of number and one device")
    if len(chains) > 1 or 0 in chains or any(p.shape[: len(chains)] != chains for p in parameters):
        raise InputError("potential and parameters of several chains must share their first axis")
    position = torch.cat([p.detach().reshape(*chains, -1) for p in parameters], dim=-1)
    momentum = torch.empty_like(position).normal_(generator=generator).mul_(math.sqrt(dynamics.temperature))
    return ChainState(
        parameters=parameters,
        momentum=momentum,
        gradient=torch.zeros_like(position),
        work=position.new_zeros(chains, dtype=torch.float64),
        step_size=position.new_full((), dynamics.step_size()),
        potential=position.new_zeros(chains, dtype=torch.float64).copy_(potential.detach()),
        start=torch.stack([position, momentum]),
    )


def begin(state: ChainState, batch: Any, potential: Potential, step_size: float) -> ChainState:
    """Start a trajectory with this step size; the first kick uses `batch`."""
    state.step_size.fill_(step_size)
    state.work.zero_()
    state.start[1].copy_(state.momentum)
    with torch.no_grad():
        torch._foreach_copy_(_like(state.start[0], state.parameters), state.parameters)  # pyright: ignore[reportPrivateImportUsage]
    return reopen(state, batch, potential)


def reopen(state: ChainState, batch: Any, potential: Potential) -> ChainState:
    """Use `batch` for the first kick of the next step, instead of the minibatch that ended the previous step."""
    _fill(state.gradient, gradients(potential, state.parameters, batch))
    return state


def update(state: ChainState, batch: Any, potential: Potential, dynamics: Dynamics, generator: Generator) -> ChainState:
    """Run one step; its second kick and the first kick of the next step use `batch`."""
    noise = torch.empty_like(state.start).normal_(generator=generator)
    step(
        state.parameters,
        state.momentum,
        state.gradient,
        state.work,
        state.step_size,
        noise,
        lambda: gradients(potential, state.parameters, batch),
        dynamics,
    )
    return state


def finish(
    state: ChainState, potential: Float[Tensor, "*chains"], dynamics: Dynamics, generator: Generator
) -> Acceptance:
    """Accept or reject the trajectory, with the `potential` of all data at its end, preferably summed in float64.

    Accept if log u < −ΔE/T for a uniform u; else return to (θ₀, −m₀). A non-finite trajectory is rejected. Without this
    call the chain is uncorrected, which is faster far from the posterior; before the first corrected trajectory, set
    `state.potential` to the potential at its start.
    """
    if potential.shape != state.potential.shape:
        raise InputError(f"needs one potential per chain, {tuple(state.potential.shape)}, not {tuple(potential.shape)}")
    end = torch.empty_like(state.potential).copy_(potential.detach())
    log_ratio = (state.potential - end - state.work) / dynamics.temperature
    accepted = torch.empty_like(state.work).uniform_(generator=generator).log() < log_ratio
    state.potential.copy_(torch.where(accepted, end, state.potential))
    state.momentum.copy_(torch.where(accepted[..., None], state.momentum, -state.start[1]))
    with torch.no_grad():
        for p, start in zip(state.parameters, _like(state.start[0], state.parameters), strict=True):
            mask = accepted.view(*accepted.shape, *[1] * (p.ndim - accepted.ndim))
            p.copy_(torch.where(mask, p, start))
    return Acceptance(accepted, log_ratio)


def step(
    parameters: Sequence[Tensor],
    momentum: Float[Tensor, "*chains d"],
    gradient: Float[Tensor, "*chains d"],
    work: Float64[Tensor, "*chains"],
    step_size: Float[Tensor, ""],
    noise: Float[Tensor, "2 *chains d"],
    next_gradients: Callable[[], Sequence[Tensor]],
    dynamics: Dynamics,
) -> None:
    """Run O B A B O in place; `next_gradients` returns the gradients after the drift."""
    refresh(momentum, noise[0], dynamics)
    kick(momentum, gradient, work, step_size)
    with torch.no_grad():
        torch._foreach_add_(list(parameters), _like(momentum * step_size, parameters))  # pyright: ignore[reportPrivateImportUsage]
    _fill(gradient, next_gradients())
    kick(momentum, gradient, work, step_size)
    refresh(momentum, noise[1], dynamics)


def refresh(momentum: Float[Tensor, "*chains d"], noise: Float[Tensor, "*chains d"], dynamics: Dynamics) -> None:
    """O: m ← √a m + √((1 − a)T) ξ, which preserves N(0, T): a T + (1 − a)T = T."""
    momentum.mul_(math.sqrt(dynamics.momentum))
    momentum.add_(noise, alpha=math.sqrt((1 - dynamics.momentum) * dynamics.temperature))


def kick(
    momentum: Float[Tensor, "*chains d"],
    gradient: Float[Tensor, "*chains d"],
    work: Float64[Tensor, "*chains"],
    step_size: Float[Tensor, ""],
) -> None:
    """B: m ← m + p with p = −(h/2) ∇U; add ½|m + p|² − ½|m|² = p·(m + p/2) to `work`.

    The product is summed, because the difference of two energies of a million parameters would cancel in float32.
    """
    push = gradient * (-0.5 * step_size)
    work.add_((push * torch.add(momentum, push, alpha=0.5)).sum(-1, dtype=torch.float64))
    momentum.add_(push)


def gradients(potential: Potential, parameters: Sequence[Tensor], batch: Any) -> tuple[Tensor, ...]:
    """Return ∇U_b(θ), one tensor per parameter."""
    with torch.enable_grad():
        value = potential(parameters, batch)
    return torch.autograd.grad(value.sum(), parameters)


def state_tensors(state: ChainState, generator: Generator) -> dict[str, Tensor]:
    """Return every tensor that the next step depends on."""
    tensors = {name: tensor for name, tensor in state._asdict().items() if isinstance(tensor, Tensor)}
    tensors |= {f"parameters.{i}": p.detach() for i, p in enumerate(state.parameters)}
    return tensors | {"generator": generator.get_state()}


def restore(state: ChainState, generator: Generator, tensors: Mapping[str, Tensor]) -> ChainState:
    """Resume, in place, from the `state_tensors` of a chain with the same shapes."""
    expected = state_tensors(state, generator)
    if {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in expected.items()}:
        raise InputError("checkpoint: it belongs to another chain (names or shapes differ). Delete it or name another.")
    generator.set_state(tensors["generator"].cpu())
    for name, tensor in expected.items():
        if name != "generator":
            tensor.copy_(tensors[name])
    return state


def _like(flat: Float[Tensor, "*chains d"], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat tensor in the shapes of the parameters."""
    chains = flat.shape[:-1].numel()
    parts = flat.split([p.numel() // chains for p in parameters], dim=-1)
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]


def _fill(flat: Float[Tensor, "*chains d"], parts: Sequence[Tensor]) -> None:
    """Copy tensors into the parts of a flat tensor."""
    torch._foreach_copy_(_like(flat, parts), list(parts))  # pyright: ignore[reportPrivateImportUsage]


Sampler: TypeAlias = Literal["obabo", "baoa"]
Step: TypeAlias = Callable[[], Any]


def prior_variances(tower: MLP | Impala) -> list[float]:
    """Return the variance of the normal prior of each parameter.

    It is 2/fan_in for hidden layers, 1/fan_in for the head, and 1 for biases. Orthogonal weights have these variances
    in layers that do not widen.
    """
    layers = [module for module in tower.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    return [v for layer in layers for v in ((1 if layer is tower.head else 2) / layer.weight[0].numel(), 1.0)]


class Posterior:
    """Potential U(θ) = −log p(y|x, θ) − log p(θ) of a classifier, up to a constant; θ is the vector of all weights.

    Gradients are in float32. Sums over all data are in float64, from float32 logits.
    """

    def __init__(
        self,
        first: nn.Module,
        tower: MLP | Impala,
        data: TrainData,
        labels: Tensor,
        batch: int,
        augment: Augmentation,
    ) -> None:
        self.samples, self.labels, self.count = data.samples, labels, len(data.samples)
        self.net = nn.Sequential(first, tower)
        named = dict(self.net.named_parameters())
        self.shapes = {name: p.shape for name, p in named.items()}
        self.start = torch.cat([p.detach().reshape(-1) for p in named.values()])
        variances = zip(named.values(), prior_variances(tower), strict=True)
        self.precision = torch.cat([torch.full((p.numel(),), 1 / v) for p, v in variances]).to(self.start)
        self.augmentation = make_augmentation(data.reader, augment)
        self.index = torch.zeros(min(batch, self.count), dtype=torch.int64, device=labels.device)
        self.uniforms = torch.zeros(len(self.index), UNIFORMS if self.augmentation else 0, device=labels.device)
        self.at_once = data.reader.batch_size * (8 if labels.is_cuda else 1)

    def set_batch(self, index: Int[Tensor, " batch"], generator: Generator) -> None:
        """Set the minibatch of `potential`, with a new random augmentation."""
        self.index.copy_(index)
        self.uniforms.uniform_(generator=generator)

    def logits(self, theta: Float[Tensor, " d"], x: Any) -> Float[Tensor, "n classes"]:
        """Return the logits of the network with these weights."""
        parts = theta.split([shape.numel() for shape in self.shapes.values()])
        weights = {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        return functional_call(self.net, weights, (x,))

    def network(self, theta: Float[Tensor, " d"]) -> nn.Module:
        """Return a separate network with these weights."""
        net = copy.deepcopy(self.net).requires_grad_(False)
        for p, part in zip(net.parameters(), theta.split([p.numel() for p in net.parameters()]), strict=True):
            p.copy_(part.view(p.shape))
        return net

    def potential(self, parameters: Sequence[Float[Tensor, " d"]], _: Any = None) -> Float[Tensor, ""]:
        """Return U_b = N/|b| Σ −log p(y|x, θ) + ½ Σ θ²/variance of the minibatch."""
        (theta,) = parameters
        x = self.samples[self.index]
        logits = self.logits(theta, x if self.augmentation is None else self.augmentation(x, self.uniforms))
        misfit = F.cross_entropy(logits, self.labels[self.index])
        return self.count * misfit + (theta.square() * self.precision).sum() / 2

    @torch.no_grad()
    def full_potential(self, theta: Float[Tensor, " d"]) -> Float64[Tensor, ""]:
        """Return U of all data, without augmentation."""
        total = (theta.double().square() * self.precision).sum() / 2
        for index in torch.arange(self.count, device=self.labels.device).split(self.at_once):
            logits = self.logits(theta, self.samples[index]).double()
            total = total + F.cross_entropy(logits, self.labels[index], reduction="sum")
        return total


def palindromic_batches(count: int, batch: int, length: int, generator: Generator) -> Int[Tensor, "length batch"]:
    """Return the rows of each minibatch of a trajectory: random permutations of all data, then their reverse.

    The minibatches of one permutation are disjoint. The sequence equals its own reverse, as the Metropolis correction
    requires.
    """
    each, half = count // batch, -(-length // 2)
    device = generator.device
    orders = [torch.randperm(count, generator=generator, device=device) for _ in range(-(-half // each))]
    forward = torch.cat([order[: each * batch].view(each, batch) for order in orders])[:half]
    return torch.cat([forward, forward[: length - half].flip(0)])


@dataclass(frozen=True, kw_only=True)
class ChainSchedule:
    """Number of trajectories without and with a sample, steps per trajectory, and whether a Metropolis step follows."""

    burn_in: int
    samples: int
    steps: int
    corrected: bool


class ChainSampler:
    """Markov chain of networks. Iterating it yields one `Update` per trajectory: the potential divided by N.

    Iterate it once. The learning rate falls linearly from trajectory to trajectory. On a GPU a step is a CUDA graph.
    """

    def __init__(
        self, posterior: Posterior, schedule: ChainSchedule, sampler: Sampler, dynamics: Dynamics, seed: int
    ) -> None:
        self.posterior, self.schedule, self.sampler, self.dynamics = posterior, schedule, sampler, dynamics
        self.device = posterior.start.device
        self.generator = Generator(self.device).manual_seed(seed)
        theta = posterior.start.clone().requires_grad_()
        self.theta = theta.detach()  # shares its memory
        with exact_float32(), tune_cudnn():
            potential = posterior.full_potential(self.theta)
        self.chain = init([theta], potential, dynamics, self.generator)
        self.members = torch.zeros(schedule.samples, len(theta), device=self.device)
        self.accepted = torch.zeros((), dtype=torch.int64, device=self.device)
        self.done = 0
        self._library = _import_baoa() if sampler == "baoa" else None

    @property
    def steps(self) -> int:
        """Number of trajectories."""
        return self.schedule.burn_in + self.schedule.samples

    @property
    def acceptance(self) -> float:
        """Share of trajectories that the Metropolis step accepted; −1 without correction."""
        return float(self.accepted) / self.schedule.samples if self.schedule.corrected else -1.0

    def __iter__(self) -> Iterator[Update]:
        step = self._baoa if self.sampler == "baoa" else self._obabo
        if self.device.type == "cuda" and self.posterior.samples.in_memory:
            step = replayed(step, self.device, [self.generator])
        while self.done < self.steps:
            with exact_float32(), tune_cudnn(), self._seeded_global_rng():
                self._run_trajectory(step)
                end = self.posterior.full_potential(self.theta)
            sample = self.done - self.schedule.burn_in
            if self.schedule.corrected and sample >= 0:
                self.accepted += finish(self.chain, end, self.dynamics, self.generator).accepted
            elif end.isfinite():
                self.chain.potential.copy_(end)
            else:
                raise TrainingError(f"the chain diverged at learning rate {self.dynamics.lr:g}. Use a smaller one.")
            if sample >= 0:
                self.members[sample].copy_(self.theta)
            self.done += 1
            yield Update(self.done, self.chain.potential / self.posterior.count)

    def state(self) -> dict[str, Tensor]:
        """Return every tensor that the next trajectory depends on, and the networks so far."""
        members = self.members[: max(0, self.done - self.schedule.burn_in)]
        tensors = {"done": torch.tensor(self.done), "accepted": self.accepted, "members": members}
        return tensors | with_prefix("chain", state_tensors(self.chain, self.generator))

    def restore(self, tensors: dict[str, Tensor], /) -> None:
        """Resume from the `state()` of a chain with the same shapes."""
        self.done = int(tensors["done"])
        self.accepted.copy_(tensors["accepted"])
        self.members[: len(tensors["members"])] = tensors["members"].to(self.device)
        restore(self.chain, self.generator, under_prefix("chain", tensors))

    def _run_trajectory(self, step: Step) -> None:
        """Run one trajectory."""
        posterior, progress = self.posterior, self.done / self.steps
        first, *others = palindromic_batches(
            posterior.count, len(posterior.index), self.schedule.steps + 1, self.generator
        )
        posterior.set_batch(first, self.generator)
        begin(self.chain, None, posterior.potential, self.dynamics.step_size(progress))
        for index in others:
            posterior.set_batch(index, self.generator)
            step()

    def _obabo(self) -> None:
        """Run one step of the corrected sampler."""
        update(self.chain, None, self.posterior.potential, self.dynamics, self.generator)

    def _baoa(self) -> None:
        """Run one step of posteriors' sampler, with the friction that keeps the same share of momentum."""
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
    def _seeded_global_rng(self) -> Iterator[None]:
        """Seed torch's global generator, which posteriors draws from, and restore it; suppress warnings."""
        if self.sampler == "obabo":
            yield
            return
        on_gpu = self.device.type == "cuda"
        global_generator = torch.cuda.default_generators[self.device.index or 0] if on_gpu else torch.default_generator
        before = global_generator.get_state()
        global_generator.manual_seed(int(torch.randint(2**62, (), generator=self.generator, device=self.device)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            global_generator.set_state(before)


def _import_baoa() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from posteriors.sgmcmc import baoa
    except ImportError as error:
        raise MissingExtraError("sampler='baoa' needs posteriors: pip install 'onefold[mcmc]'") from error
    return baoa
