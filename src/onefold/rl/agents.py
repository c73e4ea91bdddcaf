"""The paper's five agents: return heads, action selection, exploration bonus, and learning settings."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from onefold.errors import InputError

LARGEST_BOUND = 1e6  # of a return distribution's support
Policy: TypeAlias = Literal["greedy", "thompson", "ids"]
BonusKind: TypeAlias = Literal["none", "rnd", "csd"]
BonusForm: TypeAlias = Literal["variance", "centred", "relative"]
HeadLosses: TypeAlias = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True)
class LinearSchedule:
    """A number that changes linearly over a run, such as a learning weight.

    Args:
        start: Value at frame 0.
        end: Value from frame `frames` on.
        frames: Frames between the two.

    Raises:
        InputError: A value is not finite, or `frames` is negative.
    """

    start: float
    end: float
    frames: float

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.start, self.end, self.frames))) or self.frames < 0:
            raise InputError(
                f"schedule: start, end and frames must be finite, frames at least 0 "
                f"(got {self.start}, {self.end}, {self.frames})"
            )

    def at(self, frames: Any) -> Any:
        """Return the value after a number of frames.

        Args:
            frames: Frames of all environments so far, a number or a tensor.

        Returns:
            The value, of the same type.
        """
        share = frames / max(1.0, self.frames)
        share = min(1.0, share) if isinstance(share, int | float) else share.clamp(max=1.0)
        return self.start + (self.end - self.start) * share


@dataclass(frozen=True, kw_only=True)
class Agent:
    """Return heads, policy, exploration bonus and learning rates of an agent.

    Args:
        members: Number of Q-functions, trained by the Huber loss. 0 for none.
        atoms: Atoms of a categorical head (C51), which learns the distribution of returns on ±`q_bound`. 0 for none.
        dueling: Whether heads add a state value to centred advantages.
        prior_scale: Scale of the frozen random priors that are added to the members.
        policy: "greedy" maximises the mean value; "thompson" follows one member per episode; "ids" is
            information-directed sampling (Nikolov et al., 2019).
        bonus: Exploration bonus: "none", "rnd" or "csd".
        bonus_form: Form of CSD's bonus: "variance", ‖φ₀‖²(1 − φ̄ᵀψ̄) (Eq. 27); "centred", where the mean of φ₀ is
            subtracted and the variance is divided by ‖φ₀‖² plus its mean; or "relative", 1 − φ̄ᵀψ̄.
        bonus_head: Whether a second categorical head on ±`u_bound` learns U, the return of the bonuses alone. Actions
            then maximise Q + `bonus_weight` · U. Without it, the weighted bonus is added to the reward.
        optimistic: Whether CSD's bonus is a function of state and action, for vector observations. It is then added
            when actions are selected, here and in the next state (Rashid et al., 2020).
        bonus_scale: Factor of the standardised bonus.
        bonus_weight: Weight of the bonus or of U; the confidence scale of "ids".
        bonus_reset_every: Frames after which the bonus networks get new weights; 0 never resets.
        head_losses: Whether the losses of two heads are averaged ("mean") or added ("sum").
        q_bound: Bound of the support of Q's distribution.
        u_bound: Bound of the support of U's distribution.
        lr: Learning rate of the value networks.
        bonus_lr: Learning rate of the bonus networks.

    Raises:
        InputError: A value is out of range, or the settings do not go together.
    """

    members: int = 1
    atoms: int = 0
    dueling: bool = False
    prior_scale: float = 0.0
    policy: Policy = "greedy"
    bonus: BonusKind = "none"
    bonus_form: BonusForm = "variance"
    bonus_head: bool = False
    optimistic: bool = False
    bonus_scale: float = 1.0
    bonus_weight: LinearSchedule = field(default_factory=lambda: LinearSchedule(start=0.1, end=0.01, frames=3.3e6))
    bonus_reset_every: int = 0
    head_losses: HeadLosses = "mean"
    q_bound: float = 10.0
    u_bound: float = 10.0
    lr: float = 2.5e-4
    bonus_lr: float = 2.5e-4

    def __post_init__(self) -> None:
        self._check_values()
        if self.members < 0 or self.atoms < 0 or self.members + self.atoms == 0 or self.atoms == 1:
            raise InputError("agent: needs members, or at least two atoms")
        if self.policy == "thompson" and self.members < 2:
            raise InputError("agent: policy 'thompson' needs at least two members")
        if self.policy == "ids" and (self.members < 2 or self.atoms == 0):
            raise InputError("agent: policy 'ids' needs at least two members, and atoms")
        if self.bonus_head and (self.bonus == "none" or self.members):
            raise InputError("agent: bonus_head needs a bonus and atoms, and no members")
        if self.optimistic and (self.bonus_head or self.bonus != "csd" or self.members or self.policy != "greedy"):
            raise InputError("agent: optimistic needs CSD's bonus and policy 'greedy', no bonus_head and no members")
        if self.optimistic and self.bonus_form != "relative":
            raise InputError(f"agent: optimistic needs bonus_form 'relative' (got {self.bonus_form!r})")

    def _check_values(self) -> None:
        choices = (("policy", Policy), ("bonus", BonusKind), ("bonus_form", BonusForm), ("head_losses", HeadLosses))
        for name, allowed in choices:
            if getattr(self, name) not in get_args(allowed):
                raise InputError(f"agent.{name}: {getattr(self, name)!r} is not one of {', '.join(get_args(allowed))}")
        for name in ("lr", "bonus_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"agent.{name}: must be positive (got {getattr(self, name)})")
        for name in ("prior_scale", "bonus_scale", "bonus_reset_every"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"agent.{name}: must be at least 0 (got {getattr(self, name)})")
        for name in ("q_bound", "u_bound"):
            if not 0 < getattr(self, name) <= LARGEST_BOUND:
                raise InputError(
                    f"agent.{name}: must be positive and at most {LARGEST_BOUND:g} (got {getattr(self, name)})"
                )

    @property
    def bounds(self) -> tuple[float, ...]:
        """Return the bound of the support of each categorical head: Q's and, with `bonus_head`, U's."""
        return (self.q_bound, self.u_bound) if self.bonus_head else (self.q_bound,)


N_STEP, DISCOUNT = 10, 0.997
WINDOW_SCALE = 1 - DISCOUNT**N_STEP
"""Scale of the paper's bonuses: with one bonus per n-step window, U of a constant bonus of 1 is then 1."""

AGENTS: dict[str, Agent] = {
    "dqn": Agent(dueling=True),
    "bdqn": Agent(members=10, prior_scale=1.0, policy="thompson"),
    "rnd": Agent(
        members=0, atoms=101, bonus="rnd", bonus_scale=WINDOW_SCALE, q_bound=5.4, lr=6.25e-4,
        bonus_weight=LinearSchedule(start=1.0, end=0.01, frames=3.3e6),
    ),
    "ids": Agent(members=10, atoms=101, prior_scale=1.0, policy="ids", head_losses="sum"),
    "csd": Agent(
        members=0, atoms=101, bonus="csd", bonus_head=True, bonus_scale=WINDOW_SCALE, q_bound=2.0, u_bound=3.4,
        lr=6.25e-4,
    ),
}  # fmt: skip
"""The paper's Table "hpsettingsvizdoom", for MyWayHome. Its heads "101/101" of CSD are read as Q and U."""


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """Size and sampling of the replay memory (paper, Table "hpsettingsvizdoom"; α from Schmidt & Schmied, 2021).

    Args:
        capacity: Number of time steps over all environments.
        stack: Frames of an observation.
        n_step: Steps of a return.
        discount: γ, per step.
        alpha: Exponent of the priorities; 0 samples uniformly.
    """

    capacity: int = 1_000_000
    stack: int = 6
    n_step: int = 10
    discount: float = 0.997
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= self.stack <= 64 or not 1 <= self.n_step <= 1000:
            raise InputError(
                f"learning.replay: stack must be 1 to 64 and n_step 1 to 1,000 (got {self.stack} and {self.n_step})"
            )
        if not 0 < self.discount <= 1 or not 0 <= self.alpha <= 1:
            raise InputError(
                f"learning.replay: discount and alpha must be between 0 and 1 (got {self.discount} and {self.alpha})"
            )

    def shape(self, frame: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a stack of frames, which is the input of the networks."""
        if len(frame) not in (1, 2):
            raise InputError(f"observations: shape {frame} is not supported. Use vectors or grey images.")
        return (self.stack * frame[0],) if len(frame) == 1 else (self.stack, *frame)


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Learning settings of all agents: the paper's Table "hpsettingsvizdoom" and, where it is silent, Schmidt &
    Schmied (2021).

    Args:
        replay: Size and sampling of the replay memory.
        batch_size: Transitions of a minibatch.
        learning_starts: Frames before the first update.
        bonus_learning_starts: Frames before the first update of U.
        target_period: Frames between two copies of the networks to the target networks.
        epsilon: Share of random actions.
        per_beta: Exponent of the importance weights of prioritised replay.
        max_grad_norm: Norm at which gradients are clipped.
        adam_eps: ε of Adam.
        channels: Channels of the convolution stages; used for images only.
        hidden: Width of the hidden layers.

    Raises:
        InputError: A value is out of range.
    """

    replay: ReplaySettings = field(default_factory=lambda: ReplaySettings(n_step=N_STEP, discount=DISCOUNT))
    batch_size: int = 256
    learning_starts: int = 100_000
    bonus_learning_starts: int = 200_000
    target_period: int = 8000
    epsilon: LinearSchedule = field(default_factory=lambda: LinearSchedule(start=1.0, end=0.01, frames=500_000))
    per_beta: LinearSchedule = field(default_factory=lambda: LinearSchedule(start=0.45, end=1.0, frames=5e6))
    max_grad_norm: float = 10.0
    adam_eps: float = 0.005 / 256
    channels: tuple[int, ...] = (32, 32, 64)
    hidden: int = 256

    def __post_init__(self) -> None:
        if min(self.batch_size, self.target_period, self.hidden, *self.channels) < 1:
            raise InputError("learning: batch_size, target_period, hidden and channels must be at least 1")
        if min(self.learning_starts, self.bonus_learning_starts) < 0:
            raise InputError("learning: learning_starts and bonus_learning_starts must be at least 0")
        for name in ("epsilon", "per_beta"):
            schedule = getattr(self, name)
            if not (0 <= schedule.start <= 1 and 0 <= schedule.end <= 1):
                raise InputError(
                    f"learning.{name}: must stay between 0 and 1 (got {schedule.start} and {schedule.end})"
                )
        if not (0 < self.max_grad_norm < math.inf and 0 < self.adam_eps < 1):
            raise InputError(
                f"learning: max_grad_norm must be positive and adam_eps between 0 and 1 "
                f"(got {self.max_grad_norm} and {self.adam_eps})"
            )
