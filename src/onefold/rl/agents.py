"""What an agent is: which returns it learns, how it chooses, and what it is curious about. Five are the paper's."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from onefold.errors import InputError
from onefold.rl.replay import Memory
from onefold.rl.returns import Support

LARGEST = 1e6  # return that a support may hold
Choice: TypeAlias = Literal["greedy", "member", "information"]
Curiosity: TypeAlias = Literal["none", "rnd", "csd"]


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """A number that goes from `first` to `last` over so many frames, and stays there."""

    first: float
    last: float
    frames: float

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.first, self.last, self.frames))) or self.frames < 0:
            raise InputError(f"a ramp has finite ends and frames, not {self.first}, {self.last} and {self.frames}")

    def at(self, frames: Any) -> Any:
        """At this number of frames, which may be a tensor."""
        share = frames / max(1.0, self.frames)
        share = min(1.0, share) if isinstance(share, int | float) else share.clamp(max=1.0)
        return self.first + (self.last - self.first) * share


@dataclass(frozen=True, kw_only=True)
class Agent:
    """Returns: `members` values by Huber's loss, with additive random priors of scale `prior`, and a distribution over
    `atoms` (C51); either may be absent. With both, values choose and the distribution tells how noisy returns are.

    `choice` is what to do: the best on average, what is best for the member that an episode was given, or by
    information-directed sampling. `bonus` is added to rewards with weight `weight`, which is the scale of confidence
    for information-directed sampling. Support and what is not said in the paper: docs/log.md.

    With `apart`, the bonus has a distribution of returns of its own, learned at the weight's first value: the weight
    of the moment counts only when an action is chosen. So what is known of a goal does not change as bonuses do, and
    neither has to be told from the other.

    With `untried`, for vectors, CSD's bonus is of a state and an action together, and the share of the prior variance
    that is left: 0 where all is known, 1 where nothing is. So an action can be new before it is taken: it counts, too,
    when the next one is chosen, and in what a state is worth (Rashid et al., 2020).
    """

    members: int = 1
    atoms: int = 0
    prior: float = 0.0
    choice: Choice = "greedy"
    bonus: Curiosity = "none"
    apart: bool = False
    untried: bool = False
    weight: Ramp = field(default_factory=lambda: Ramp(first=0.1, last=0.01, frames=3.3e6))
    low: float = -10.0
    high: float = 10.0
    lr: float = 2.5e-4
    bonus_lr: float = 2.5e-4

    def __post_init__(self) -> None:
        self._check_values()
        if self.members < 0 or self.atoms < 0 or self.members + self.atoms == 0 or self.atoms == 1:
            raise InputError("an agent needs members, or at least two atoms")
        if self.choice == "member" and self.members < 2:
            raise InputError("choice 'member' needs at least two members")
        if self.choice == "information" and (self.members < 2 or self.atoms == 0):
            raise InputError("choice 'information' needs at least two members, and atoms")
        if self.apart and (self.bonus == "none" or self.members or self.weight.first <= 0):
            raise InputError("a bonus whose returns are apart needs atoms, no members, and a weight above 0")
        if self.untried and (self.apart or self.bonus != "csd" or self.members or self.choice != "greedy"):
            raise InputError("untried actions need CSD's bonus, not apart, no members, and choice 'greedy'")

    def _check_values(self) -> None:
        for name, value, known in (("choice", self.choice, Choice), ("bonus", self.bonus, Curiosity)):
            if value not in get_args(known):
                raise InputError(f"{name} is one of {', '.join(get_args(known))}, not {value!r}")
        if not all(0 < rate < math.inf for rate in (self.lr, self.bonus_lr)):
            raise InputError(f"learning rates must be positive, not {self.lr} and {self.bonus_lr}")
        if not 0 <= self.prior < math.inf:
            raise InputError(f"the scale of priors is at least 0, not {self.prior}")
        if not -LARGEST <= self.low < self.high <= LARGEST:
            raise InputError(f"the support goes from low to high, not from {self.low} to {self.high}")

    @property
    def support(self) -> Support:
        return Support(self.low, self.high, self.atoms)


UNIT = 0.2
"""What β is multiplied by, as bonuses are in running deviations: in what units the paper has them is not said. With 1,
the rooms on the way were worth more than the goal (docs/log.md)."""


def _fading(first: float, last: float) -> Ramp:
    return Ramp(first=UNIT * first, last=UNIT * last, frames=3.3e6)


AGENTS: dict[str, Agent] = {
    "dqn": Agent(),
    "bdqn": Agent(members=10, prior=1.0, choice="member"),
    "rnd": Agent(members=0, atoms=101, bonus="rnd", lr=6.25e-4, weight=_fading(1.0, 0.01)),
    "ids": Agent(members=10, atoms=101, prior=1.0, choice="information"),
    "csd": Agent(
        members=0, atoms=101, bonus="csd", apart=True, lr=6.25e-4, weight=_fading(0.1, 0.01), low=-2.0, high=2.0
    ),
}
"""Table "hpsettingsvizdoom". CSD's "101/101" heads are read as one for rewards and one for bonuses."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How all agents learn (paper, Table "hpsettingsvizdoom"; where it is silent, Schmidt & Schmied, 2021)."""

    memory: Memory = field(default_factory=Memory)
    batch: int = 256
    start: int = 100_000
    """Frames before the first update."""
    target_every: int = 8000
    """Frames between two copies to the target network."""
    epsilon: Ramp = field(default_factory=lambda: Ramp(first=1.0, last=0.01, frames=500_000))
    importance: Ramp = field(default_factory=lambda: Ramp(first=0.45, last=1.0, frames=5e6))
    clip: float = 10.0
    adam_eps: float = 0.005 / 256
    channels: tuple[int, ...] = (32, 32, 64)
    hidden: int = 256

    def __post_init__(self) -> None:
        if min(self.batch, self.target_every, self.hidden, *self.channels) < 1 or self.start < 0:
            raise InputError("batch, target_every, hidden and channels are at least 1, and start is not below 0")
        for ramp in (self.epsilon, self.importance):
            if not (0 <= ramp.first <= 1 and 0 <= ramp.last <= 1):
                raise InputError(f"epsilon and importance lie between 0 and 1, not at {ramp.first} and {ramp.last}")
        if not (0 < self.clip < math.inf and 0 < self.adam_eps < 1):
            raise InputError(f"clip must be above 0, and adam_eps between 0 and 1; not {self.clip} and {self.adam_eps}")
