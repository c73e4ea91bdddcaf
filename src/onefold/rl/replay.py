"""Prioritised replay on the device: a ring of single frames, from which stacks and n-step returns are built by index.

A slot holds one time step of one environment. Slots of priority 0 are never sampled: those whose n-step window is not
complete, last frames of episodes, and those whose stack has been partly overwritten. Therefore no window crosses the
start of an episode or the write head.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from onefold.core.runtime import available, require
from onefold.errors import InputError
from onefold.rl.agents import ReplaySettings

CONTINUES, TERMINATED, TRUNCATED, NO_STEP = 0, 1, 2, 3  # how the step of a slot ended; NO_STEP: there was none
SMALLEST_PRIORITY = 1e-6  # added to every TD error


class Batch(NamedTuple):
    """A minibatch of n-step transitions.

    Rewards are Σ_{k<m} γᵏ r_{t+k}. Discounts are γᵐ, or 0 where the episode terminated. m is n, or the number of steps
    to the end of the episode if that is less. A truncated episode bootstraps from its last frame.
    """

    slots: Int[Tensor, " n"]
    states: Tensor
    actions: Int[Tensor, " n"]
    rewards: Float[Tensor, " n"]
    discounts: Float[Tensor, " n"]
    next_states: Tensor
    weights: Float[Tensor, " n"]


class Replay:
    """Prioritised replay memory: a ring of `capacity` / `environments` time steps of each environment.

    All state, including the write head, is in tensors on the device, so that `add` and `sample` can be captured in CUDA
    graphs.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        environments: int,
        frame: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.settings, self.environments, self.device = settings, environments, device
        self.length = settings.capacity // environments
        if self.length < settings.stack + settings.n_step + 2:
            raise InputError(
                f"learning.replay.capacity: too small ({settings.capacity}). {environments} environments, stacks of "
                f"{settings.stack} frames and {settings.n_step}-step returns need at least "
                f"{environments * (settings.stack + settings.n_step + 2)}"
            )
        slots = (self.length, environments)
        size = math.prod(slots) * (math.prod(frame) * dtype.itemsize + 14)
        limit = available(device)
        require(size, limit, what=f"a replay of {settings.capacity:,}", way_out="lower learning.replay.capacity")
        self.frames = torch.zeros(*slots, *frame, dtype=dtype, device=device)
        self.actions = torch.zeros(slots, dtype=torch.uint8, device=device)
        self.rewards = torch.zeros(slots, dtype=torch.float32, device=device)
        self.ended = torch.full(slots, NO_STEP, dtype=torch.uint8, device=device)
        self.age = torch.zeros(slots, dtype=torch.int32, device=device)
        self.priority = torch.zeros(slots, dtype=torch.float32, device=device)
        self.highest = torch.ones((), dtype=torch.float32, device=device)
        self.head = torch.full((), -1, dtype=torch.int64, device=device)
        """Number of time steps written, less one; the newest is at `head` modulo `length`."""
        self._back = torch.arange(settings.stack - 1, -1, -1, device=device)
        self._ahead = torch.arange(settings.n_step, device=device)
        self._powers = settings.discount ** torch.arange(settings.n_step + 1, device=device, dtype=torch.float32)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint; of a ring that is not full, only the part in use."""
        names = ("frames", "actions", "rewards", "ended", "age", "priority")
        used = min(self.length, int(self.head) + 1)
        return {name: getattr(self, name)[:used] for name in names} | {"highest": self.highest, "head": self.head}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the `tensors()` of another replay with the same settings into this one, which must be empty."""
        for name, current in self.tensors().items():
            saved = tensors[name]
            (getattr(self, name)[: len(saved)] if current.ndim else current).copy_(saved)

    @torch.no_grad()
    def add(
        self,
        frames: Tensor,
        rewards: Float[Tensor, " e"],
        terminated: Bool[Tensor, " e"],
        truncated: Bool[Tensor, " e"],
        began: Bool[Tensor, " e"],
        lost: Bool[Tensor, " e"],
    ) -> None:
        """Add the outcome of the last actions and the new frames; see `env_table.Steps`.

        Where an episode began, the frame before it is the last of the previous episode and has no step. Where a worker
        was lost, the previous episode is truncated at its last frame.
        """
        before, last = (self.head - 1) % self.length, self.head % self.length
        self.head += 1
        now = self.head % self.length
        end = torch.where(terminated, TERMINATED, torch.where(truncated, TRUNCATED, CONTINUES))
        _put(self.rewards, last, rewards)
        _put(self.ended, last, torch.where(began, NO_STEP, end).to(torch.uint8))
        ended = _get(self.ended, before)
        _put(self.ended, before, torch.where(lost & (ended == CONTINUES), TRUNCATED, ended))
        _put(self.frames, now, frames)
        _put(self.age, now, torch.where(began, 0, _get(self.age, last) + 1))
        _put(self.ended, now, torch.full_like(self.ended[0], NO_STEP))
        zero = torch.zeros_like(self.rewards[0])
        _put(self.priority, now, zero)
        _put(self.priority, (now + self.settings.stack - 1) % self.length, zero)
        ready = (now - self.settings.n_step) % self.length
        complete = (_get(self.ended, ready) != NO_STEP) & (self.head >= self.settings.n_step)
        _put(self.priority, ready, torch.where(complete, self.highest, 0.0))

    def set_actions(self, actions: Int[Tensor, " e"]) -> None:
        """Store the actions taken at the newest frames."""
        _put(self.actions, self.head % self.length, actions.to(torch.uint8))

    def newest_stacks(self) -> Tensor:
        """Return the stacks of the newest frames: [E, stack · channels, …] for images, [E, …] for vectors."""
        environments = torch.arange(self.environments, device=self.device)
        return self._stacks((self.head % self.length).expand(self.environments), environments)

    def sample(
        self, uniforms: Float[Tensor, " n"], beta: float | Tensor
    ) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
        """Sample one slot from each of n equal parts of the sum of priorities (Schaul et al., 2016).

        Args:
            uniforms: Random numbers in [0, 1), one per slot.
            beta: Exponent of the importance weights.

        Returns:
            Indices of the slots, and the weights (N · P(i))^−β divided by their maximum, for N slots of priority > 0.
        """
        flat = self.priority.flatten()
        cumulative = flat.double().cumsum(0)
        quantiles = (torch.arange(len(uniforms), device=self.device) + uniforms.double()) / len(uniforms)
        index = torch.searchsorted(cumulative, quantiles * cumulative[-1], right=True)
        index = torch.where(flat[index.clamp(max=len(flat) - 1)] > 0, index, flat.argmax()).clamp(max=len(flat) - 1)
        relative_probability = flat[index] / cumulative[-1] * (flat > 0).sum()
        weights = relative_probability.float() ** -beta
        return index, weights / weights.max()

    def update_priorities(self, index: Int[Tensor, " n"], td_error: Float[Tensor, " n"]) -> None:
        """Set priorities to (|TD error| + 10⁻⁶)^α; new slots get the highest priority so far."""
        priority = (td_error.detach().float() + SMALLEST_PRIORITY) ** self.settings.alpha
        self.priority.view(-1)[index] = priority
        torch.maximum(self.highest, priority.max(), out=self.highest)

    def fetch(self, index: Int[Tensor, " n"], weights: Float[Tensor, " n"]) -> Batch:
        """Return the transitions that begin in these slots."""
        time, environment = index // self.environments, index % self.environments
        window = (time[:, None] + self._ahead) % self.length
        ended, rewards = self.ended[window, environment[:, None]], self.rewards[window, environment[:, None]]
        continues = (ended == CONTINUES).cumprod(1)
        in_window = torch.cat([torch.ones_like(continues[:, :1]), continues[:, :-1]], 1)
        steps = in_window.sum(1)
        terminated = ((ended == TERMINATED) & (in_window > 0)).any(1)
        return Batch(
            slots=index,
            states=self._stacks(time, environment),
            actions=self.actions[time, environment].long(),
            rewards=(rewards * in_window * self._powers[:-1]).sum(1),
            discounts=torch.where(terminated, 0.0, self._powers[steps]),
            next_states=self._stacks((time + steps) % self.length, environment),
            weights=weights,
        )

    def _stacks(self, time: Int[Tensor, " n"], environment: Int[Tensor, " n"]) -> Tensor:
        """Return the stacks of frames up to these times; the first frame of an episode fills those before it."""
        back = torch.minimum(self._back, self.age[time, environment][:, None])
        stacks = self.frames[(time[:, None] - back) % self.length, environment[:, None]]
        return stacks.flatten(1) if stacks.ndim == 3 else stacks.flatten(1, -3)


def _get(ring: Tensor, time: Tensor) -> Tensor:
    """Return `ring[time]` without a copy of `time` to the host."""
    return ring.index_select(0, time.reshape(1))[0]


def _put(ring: Tensor, time: Tensor, values: Tensor) -> None:
    """Set `ring[time]` without a copy of `time` to the host."""
    ring.index_copy_(0, time.reshape(1), values.to(ring.dtype)[None])
