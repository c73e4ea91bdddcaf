"""Experience on the device: single frames in a ring, from which stacks and n-step returns are built by index.

A slot holds what one environment did at one time. Its priority says whether it may be drawn: it is zero while the
n-step window is not complete, where an episode's last frame lies (nothing follows it), and where frames of the stack
have been overwritten. So no window ever crosses an episode's start or the write head.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from onefold.core.memory import available, require
from onefold.errors import InputError
from onefold.rl.agents import ReplaySettings

GOES_ON, TERMINATED, TRUNCATED, NOTHING = 0, 1, 2, 3  # how a slot's step ended; NOTHING: no step was made from it
SMALLEST = 1e-6  # added to every priority, so that none is forgotten


class Batch(NamedTuple):
    """A minibatch: Σ_{k<m} γᵏ r_{t+k} is in `rewards`, and `discounts` is γᵐ, or 0 where the episode terminated.

    m is the number of steps until the episode ended, at most n. A truncated episode bootstraps from its last frame.
    """

    slots: Int[Tensor, " n"]
    states: Tensor
    actions: Int[Tensor, " n"]
    rewards: Float[Tensor, " n"]
    discounts: Float[Tensor, " n"]
    next_states: Tensor
    weights: Float[Tensor, " n"]


class Replay:
    """A ring of `capacity` / `environments` times for every environment.

    Everything is a tensor on the device, the write head included: adding and drawing can be captured in a CUDA graph.
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
        self.ended = torch.full(slots, NOTHING, dtype=torch.uint8, device=device)
        self.age = torch.zeros(slots, dtype=torch.int32, device=device)
        self.priority = torch.zeros(slots, dtype=torch.float32, device=device)
        self.highest = torch.ones((), dtype=torch.float32, device=device)
        self.head = torch.full((), -1, dtype=torch.int64, device=device)
        """How many times have been written, less one; the newest is at `head` modulo `length`."""
        self._back = torch.arange(settings.stack - 1, -1, -1, device=device)
        self._ahead = torch.arange(settings.n_step, device=device)
        self._powers = settings.discount ** torch.arange(settings.n_step + 1, device=device, dtype=torch.float32)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that it is, for a checkpoint; of a ring that is not full yet, the part that is."""
        names = ("frames", "actions", "rewards", "ended", "age", "priority")
        full = min(self.length, int(self.head) + 1)
        return {name: getattr(self, name)[:full] for name in names} | {"highest": self.highest, "head": self.head}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Be what another one was, having been empty."""
        for name, own in self.tensors().items():
            kept = tensors[name]
            (getattr(self, name)[: len(kept)] if own.ndim else own).copy_(kept)

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
        """What came of the last actions, and the frames that are there now (`vector.Steps`).

        Where an episode began, the last frame is where the one before had ended, and nothing was done from it. Where a
        worker was lost, the episode is cut off at the last frame that was seen.
        """
        before, last = (self.head - 1) % self.length, self.head % self.length
        self.head += 1
        now = self.head % self.length
        how = torch.where(terminated, TERMINATED, torch.where(truncated, TRUNCATED, GOES_ON))
        _put(self.rewards, last, rewards)
        _put(self.ended, last, torch.where(began, NOTHING, how).to(torch.uint8))
        ended = _get(self.ended, before)
        _put(self.ended, before, torch.where(lost & (ended == GOES_ON), TRUNCATED, ended))
        _put(self.frames, now, frames)
        _put(self.age, now, torch.where(began, 0, _get(self.age, last) + 1))
        _put(self.ended, now, torch.full_like(self.ended[0], NOTHING))
        zero = torch.zeros_like(self.rewards[0])
        _put(self.priority, now, zero)
        _put(self.priority, (now + self.settings.stack - 1) % self.length, zero)
        ready = (now - self.settings.n_step) % self.length
        may = (_get(self.ended, ready) != NOTHING) & (self.head >= self.settings.n_step)
        _put(self.priority, ready, torch.where(may, self.highest, 0.0))

    def act(self, actions: Int[Tensor, " e"]) -> None:
        """What is done at the newest frames."""
        _put(self.actions, self.head % self.length, actions.to(torch.uint8))

    def newest(self) -> Tensor:
        """The stacks that end now, [E, stack · channels, …] for images, [E, …] for vectors."""
        here = torch.arange(self.environments, device=self.device)
        return self._stacks((self.head % self.length).expand(self.environments), here)

    def pick(
        self, uniforms: Float[Tensor, " n"], beta: float | Tensor
    ) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
        """One slot from each of n equal parts of the priorities' sum (Schaul et al., 2016), and their weights.

        Weights are (N · P(i))^−β over their largest, N being how many slots may be drawn.
        """
        flat = self.priority.flatten()
        upto = flat.double().cumsum(0)
        places = (torch.arange(len(uniforms), device=self.device) + uniforms.double()) / len(uniforms)
        index = torch.searchsorted(upto, places * upto[-1], right=True)
        index = torch.where(flat[index.clamp(max=len(flat) - 1)] > 0, index, flat.argmax()).clamp(max=len(flat) - 1)
        chance = flat[index] / upto[-1] * (flat > 0).sum()
        weights = chance.float() ** -beta
        return index, weights / weights.max()

    def reprioritise(self, index: Int[Tensor, " n"], error: Float[Tensor, " n"]) -> None:
        """Priority (error + 10⁻⁶)^α for what was drawn; what is new gets the highest that there ever was."""
        priority = (error.detach().float() + SMALLEST) ** self.settings.alpha
        self.priority.view(-1)[index] = priority
        torch.maximum(self.highest, priority.max(), out=self.highest)

    def fetch(self, index: Int[Tensor, " n"], weights: Float[Tensor, " n"]) -> Batch:
        """The transitions that begin in these slots."""
        time, who = index // self.environments, index % self.environments
        window = (time[:, None] + self._ahead) % self.length
        ended, rewards = self.ended[window, who[:, None]], self.rewards[window, who[:, None]]
        goes_on = (ended == GOES_ON).cumprod(1)
        counted = torch.cat([torch.ones_like(goes_on[:, :1]), goes_on[:, :-1]], 1)
        steps = counted.sum(1)
        terminated = ((ended == TERMINATED) & (counted > 0)).any(1)
        return Batch(
            slots=index,
            states=self._stacks(time, who),
            actions=self.actions[time, who].long(),
            rewards=(rewards * counted * self._powers[:-1]).sum(1),
            discounts=torch.where(terminated, 0.0, self._powers[steps]),
            next_states=self._stacks((time + steps) % self.length, who),
            weights=weights,
        )

    def _stacks(self, time: Int[Tensor, " n"], who: Int[Tensor, " n"]) -> Tensor:
        """The frames up to these times; before an episode's first, that one again."""
        back = torch.minimum(self._back, self.age[time, who][:, None])
        found = self.frames[(time[:, None] - back) % self.length, who[:, None]]
        return found.flatten(1) if found.ndim == 3 else found.flatten(1, -3)


def _get(where: Tensor, time: Tensor) -> Tensor:
    """`where[time]`, without asking the host what time it is."""
    return where.index_select(0, time.reshape(1))[0]


def _put(where: Tensor, time: Tensor, values: Tensor) -> None:
    where.index_copy_(0, time.reshape(1), values.to(where.dtype)[None])
