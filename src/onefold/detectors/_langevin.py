"""Langevin dynamics with minibatch gradients and a Metropolis correction (Garriga-Alonso & Fortuin, 2021).

Samples θ from exp(−U(θ)/T), U(θ) = −log p(D|θ) − log p(θ), through momenta m of the law N(0, T). A step is O B A B O:

    O   m ← √a m + √((1 − a)T) ξ        half a refreshment; a = exp(−γh) is the share of m that a whole step keeps
    B   m ← m − (h/2) ∇U_b(θ)           half a kick, by minibatch b
    A   θ ← θ + h m                     the drift, with h = √(lr/N)

A trajectory of k steps is accepted with probability min(1, exp(−ΔE/T)), where ΔE = U(θₖ) − U(θ₀) + Σ ΔK: U is that of
all data, and ΔK a step's change of ½|m|² over its B A B. Refreshments leave N(0, T) alone, each balanced with its own
reverse, and do not enter. A rejected trajectory ends where it began, with its momentum turned round.

Which minibatch kicks when: B A B shears, whatever function of θ the gradient is, so it keeps volumes and runs backwards
with its two gradients exchanged. The correction is exact if a trajectory's gradients are as likely to come in the
reverse order, independently of what was before. That allows two forms:

- One gradient a step, at its end, which also opens the next step: `begin` with minibatch 0, then `update` with 1 … k.
  Minibatches are drawn independently or as a random arrangement of disjoint ones. Gradients of all data at both ends
  are as good. Two minibatches in one step do no harm: the sequence b₀ … bₖ is reversed, not the single step.
- One minibatch for both kicks of a step: `reopen` with it before `update` with it. Every step is reversible by itself,
  at two gradients a step. It is no more exact and no less noisy: either way a minibatch gives one whole kick in all.

Several chains run side by side if all parameters and potentials have a first axis for them; each has its own verdict.

Nothing here waits for the device, and state is updated in place, so that a step can be captured as a CUDA graph:
`update` in whole, after `graph.register_generator_state(generator)`, or `step` with noise that was filled outside. The
step size is a tensor that `begin` sets: a graph follows it from trajectory to trajectory.
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
"""(parameters, batch) -> U_b = N/|b| Σ −log p(y|x, θ) − log p(θ), which is U on average: a sum over data, no mean."""


@dataclass(frozen=True, kw_only=True)
class Dynamics:
    """How fast, how rough and how hot: learning rate, number of data N, share a of momentum kept, temperature T."""

    lr: float
    data: int
    momentum: float
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_number(self.lr, "lr")
        check_number(self.temperature, "temperature")
        check_integer(self.data, "data")
        check_number(self.momentum, "momentum", 0, 1, closed="left")

    def step_size(self, over: float = 0.0) -> float:
        """h = √(lr (1 − over) / N): with `over`, the share of trajectories that are over, the rate falls linearly."""
        if not 0 <= over < 1:
            raise InputError(f"the share of trajectories that are over must be in [0, 1), not {over}")
        return math.sqrt(self.lr * (1 - over) / self.data)


class State(NamedTuple):
    """Where the chain is. Momenta and gradients are flat, parameter after parameter; energies are float64."""

    parameters: list[Tensor]
    """θ: the tensors that were handed in, moved in place."""
    momentum: Float[Tensor, "*chains d"]
    gradient: Float[Tensor, "*chains d"]
    """∇U_b(θ), of the minibatch that kicks next."""
    work: Float64[Tensor, "*chains"]
    """Σ ΔK since the trajectory began."""
    step_size: Float[Tensor, ""]
    potential: Float64[Tensor, "*chains"]
    """U of all data where the trajectory began."""
    start: Float[Tensor, "2 *chains d"]
    """θ and m where the trajectory began."""


class Verdict(NamedTuple):
    """Whether a trajectory was accepted, and −ΔE/T; both still on their device."""

    accepted: Bool[Tensor, "*chains"]
    log_ratio: Float64[Tensor, "*chains"]


def init(
    parameters: Sequence[Tensor], potential: Float[Tensor, "*chains"], dynamics: Dynamics, generator: Generator
) -> State:
    """A chain at `parameters`, where all data have this `potential`, with a momentum from N(0, T).

    The parameters must be leaves that require gradients, such as those of a network: they are what the chain moves.
    Where `potential` is a vector, there are as many chains.
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
    return State(
        parameters=parameters,
        momentum=momentum,
        gradient=torch.zeros_like(position),
        work=position.new_zeros(chains, dtype=torch.float64),
        step_size=position.new_full((), dynamics.step_size()),
        potential=position.new_zeros(chains, dtype=torch.float64).copy_(potential.detach()),
        start=torch.stack([position, momentum]),
    )


def begin(state: State, batch: Any, potential: Potential, step_size: float) -> State:
    """Start a trajectory here, of steps of this size, whose first kick is by `batch`."""
    state.step_size.fill_(step_size)
    state.work.zero_()
    state.start[1].copy_(state.momentum)
    with torch.no_grad():
        torch._foreach_copy_(_like(state.start[0], state.parameters), state.parameters)  # pyright: ignore[reportPrivateImportUsage]
    return reopen(state, batch, potential)


def reopen(state: State, batch: Any, potential: Potential) -> State:
    """Let the next step's first kick be by `batch`, and not by what ended the step before."""
    _fill(state.gradient, gradients(potential, state.parameters, batch))
    return state


def update(state: State, batch: Any, potential: Potential, dynamics: Dynamics, generator: Generator) -> State:
    """One step, whose second kick is by `batch`; so is the first kick of the next step."""
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


def finish(state: State, potential: Float[Tensor, "*chains"], dynamics: Dynamics, generator: Generator) -> Verdict:
    """Accept or reject the trajectory, given the `potential` of all data where it has come to, best summed in float64.

    Accept if log u < −ΔE/T for a uniform u; else go back to (θ₀, −m₀). A trajectory that ran off to infinity or to
    nowhere is rejected. Without this call the chain is the uncorrected one, which is quicker to find its way from far
    off; after such a stretch, `state.potential` has to be set to that of where the first judged trajectory begins.
    """
    if potential.shape != state.potential.shape:
        raise InputError(f"needs one potential a chain, {tuple(state.potential.shape)}, not {tuple(potential.shape)}")
    end = torch.empty_like(state.potential).copy_(potential.detach())
    log_ratio = (state.potential - end - state.work) / dynamics.temperature
    accepted = torch.empty_like(state.work).uniform_(generator=generator).log() < log_ratio
    state.potential.copy_(torch.where(accepted, end, state.potential))
    state.momentum.copy_(torch.where(accepted[..., None], state.momentum, -state.start[1]))
    with torch.no_grad():
        for p, start in zip(state.parameters, _like(state.start[0], state.parameters), strict=True):
            own = accepted.view(*accepted.shape, *[1] * (p.ndim - accepted.ndim))
            p.copy_(torch.where(own, p, start))
    return Verdict(accepted, log_ratio)


def step(
    parameters: Sequence[Tensor],
    momentum: Float[Tensor, "*chains d"],
    gradient: Float[Tensor, "*chains d"],
    work: Float64[Tensor, "*chains"],
    step_size: Float[Tensor, ""],
    noise: Float[Tensor, "2 *chains d"],
    renewed: Callable[[], Sequence[Tensor]],
    dynamics: Dynamics,
) -> None:
    """O B A B O in place, a pure function of its tensors and of `renewed`, the gradients where the drift has led to."""
    refresh(momentum, noise[0], dynamics)
    kick(momentum, gradient, work, step_size)
    with torch.no_grad():
        torch._foreach_add_(list(parameters), _like(momentum * step_size, parameters))  # pyright: ignore[reportPrivateImportUsage]
    _fill(gradient, renewed())
    kick(momentum, gradient, work, step_size)
    refresh(momentum, noise[1], dynamics)


def refresh(momentum: Float[Tensor, "*chains d"], noise: Float[Tensor, "*chains d"], dynamics: Dynamics) -> None:
    """O: m ← √a m + √((1 − a)T) ξ, which leaves N(0, T) as it is: a T + (1 − a)T = T."""
    momentum.mul_(math.sqrt(dynamics.momentum))
    momentum.add_(noise, alpha=math.sqrt((1 - dynamics.momentum) * dynamics.temperature))


def kick(
    momentum: Float[Tensor, "*chains d"],
    gradient: Float[Tensor, "*chains d"],
    work: Float64[Tensor, "*chains"],
    step_size: Float[Tensor, ""],
) -> None:
    """B: m ← m + p with p = −(h/2) ∇U; to `work` is added ½|m + p|² − ½|m|² = p·(m + p/2).

    The product is summed, because the difference of two energies of a million parameters would drown in float32.
    """
    push = gradient * (-0.5 * step_size)
    work.add_((push * torch.add(momentum, push, alpha=0.5)).sum(-1, dtype=torch.float64))
    momentum.add_(push)


def gradients(potential: Potential, parameters: Sequence[Tensor], batch: Any) -> tuple[Tensor, ...]:
    """∇U_b(θ), parameter by parameter."""
    with torch.enable_grad():
        value = potential(parameters, batch)
    return torch.autograd.grad(value.sum(), parameters)


def kept(state: State, generator: Generator) -> dict[str, Tensor]:
    """Everything that the next step or verdict depends on."""
    tensors = {name: tensor for name, tensor in state._asdict().items() if isinstance(tensor, Tensor)}
    tensors |= {f"parameters.{i}": p.detach() for i, p in enumerate(state.parameters)}
    return tensors | {"generator": generator.get_state()}


def restore(state: State, generator: Generator, tensors: Mapping[str, Tensor]) -> State:
    """Go on, in place, from what was `kept` of a chain of the same form."""
    own = kept(state, generator)
    if {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in own.items()}:
        raise InputError("what was kept belongs to a chain of another form: names or shapes differ")
    generator.set_state(tensors["generator"].cpu())
    for name, tensor in own.items():
        if name != "generator":
            tensor.copy_(tensors[name])
    return state


def _like(flat: Float[Tensor, "*chains d"], parameters: Sequence[Tensor]) -> list[Tensor]:
    """A flat tensor's parts in the shapes of the parameters, as views of it."""
    chains = flat.shape[:-1].numel()
    parts = flat.split([p.numel() // chains for p in parameters], dim=-1)
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]


def _fill(flat: Float[Tensor, "*chains d"], parts: Sequence[Tensor]) -> None:
    """Copy parts into the flat tensor that they make up."""
    torch._foreach_copy_(_like(flat, parts), list(parts))  # pyright: ignore[reportPrivateImportUsage]
