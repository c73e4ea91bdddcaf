"""Langevin dynamics with minibatch gradients and a Metropolis correction (Garriga-Alonso & Fortuin, 2021).

Samples θ from exp(−U(θ)/T), U(θ) = −log p(D|θ) − log p(θ), through momenta m of the law N(0, T). A step is O B A B O:

    O   m ← √a m + √((1 − a)T) ξ        half a refreshment; a = exp(−γh) is the share of m that a whole step keeps
    B   m ← m − (h/2) ∇U_b(θ)           half a kick, with minibatch b
    A   θ ← θ + h m                     the drift, with h = √(lr/N)

A trajectory of k steps is accepted with probability min(1, exp(−ΔE/T)), where ΔE = U(θₖ) − U(θ₀) + Σ ΔK: U is that of
all data, and ΔK a step's change of ½|m|² over its B A B. Refreshments preserve N(0, T) and are reversible on their
own, so they do not enter. After a rejected trajectory the chain is at its start again, with the momentum negated.

Order of minibatches: B A B is a composition of shears for any gradient function of θ, so it preserves volume, and its
inverse is the same step with its two gradients exchanged. The correction is exact if the reverse order of a
trajectory's gradients is as likely as the order itself, independently of the past. That allows two forms:

- One gradient a step, at its end, which also opens the next step: `begin` with minibatch 0, then `update` with 1 … k.
  Minibatches are drawn independently or as a random permutation of disjoint ones. Gradients of all data at both ends
  are also exact. A step may have two minibatches: the sequence b₀ … bₖ is reversed, not the single step.
- One minibatch for both kicks of a step: `reopen` with it before `update` with it. Every step is reversible by itself,
  at two gradients per step. It is neither more exact nor less noisy: in both forms a minibatch gives one whole kick.

Several chains run in parallel if all parameters and potentials have a first axis for them; each is accepted or
rejected separately.

No function waits for the device, and the state is updated in place, so that a step can be captured as a CUDA graph:
`update` after `graph.register_generator_state(generator)`, or `step` with noise from outside the graph. The step size
is a tensor that `begin` sets; a captured graph reads it in every trajectory.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Float64
from torch import Generator, Tensor

from onefold.core.arguments import check_integer, check_number
from onefold.errors import InputError

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
