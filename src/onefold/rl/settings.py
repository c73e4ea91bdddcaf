"""A run's settings, and how they come back from a file."""

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from onefold.core.batches import check_seed
from onefold.errors import InputError
from onefold.rl.agents import AGENTS, Agent, Learning
from onefold.rl.registry import adapt_agent, find_environment, import_environment

T = TypeVar("T")
LARGEST_INTEGER, MOST_LAYERS = 2**53, 64


@dataclass(frozen=True, kw_only=True)
class Run:
    """An agent in a world, for so many frames of all its environments together, from one seed."""

    name: str
    environment: str
    frames: int
    seed: int
    num_envs: int
    agent: Agent
    learning: Learning

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if not 1 <= self.num_envs <= 1024:
            raise InputError(f"run: num_envs must be between 1 and 1,024 (got {self.num_envs})")
        if not self.num_envs <= self.frames <= 10**12:
            raise InputError(f"run: frames must be between num_envs ({self.num_envs}) and 10¹² (got {self.frames:,})")

    def __str__(self) -> str:
        return f"{self.name}/{self.environment}/seed{self.seed}"


def make_run(agent: str, environment: str, frames: int, seed: int, num_envs: int | None = None) -> Run:
    """One of the paper's agents, as the world's own settings have it. Of `module:Id` the module is imported."""
    import_environment(environment)
    if agent not in AGENTS:
        raise InputError(f"there is no agent {agent!r}; known are {', '.join(AGENTS)}")
    place = find_environment(environment, frames)
    return Run(
        name=agent, environment=environment, frames=frames, seed=seed,
        num_envs=place.environments if num_envs is None else num_envs,
        agent=adapt_agent(AGENTS[agent], environment, frames), learning=place.learning,
    )  # fmt: skip


def override_settings(run: Run, settings: Sequence[str]) -> Run:
    """The run with other settings of its agent and of how it learns, each like `learning.target_period=2000`."""
    content = json.loads(json.dumps(plain(run)))
    for setting in settings:
        name, equals, value = setting.partition("=")
        *above, last = name.split(".")
        part: Any = content
        for key in above:
            part = part.get(key) if isinstance(part, dict) else None
        old = part.get(last) if isinstance(part, dict) else None
        if not equals or old is None or isinstance(old, dict) or above[:1] not in (["agent"], ["learning"]):
            near = difflib.get_close_matches(name, _setting_names(content), 1, 0.5)
            example = f"{near[0]}=…" if near else "learning.target_period=2000"
            raise InputError(f"{setting!r} changes no setting; one that does: {example}")
        try:
            new = json.loads(value)
        except ValueError:
            new = value  # a word
        part[last] = int(new) if isinstance(old, int) and isinstance(new, float) and new.is_integer() else new
    return from_plain(Run, content)


def _setting_names(content: dict[str, Any], before: str = "") -> Iterator[str]:
    """Of all settings that can be changed."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _setting_names(value, f"{before}{name}.")
        elif before:
            yield f"{before}{name}"


def plain(run: Run) -> dict[str, Any]:
    """As JSON has it."""
    return asdict(run)


def from_plain(kind: type[T], content: Any) -> T:
    """A dataclass from what `plain` made of it; anything else is refused."""
    hints = get_type_hints(kind)
    needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}  # pyright: ignore[reportArgumentType]
    if not isinstance(content, dict) or not needed <= set(content) <= set(hints):
        raise InputError(f"these are no settings of a {kind.__name__.lower()}")
    return kind(**{name: _value(name, hints[name], value) for name, value in content.items()})


def _value(name: str, hint: Any, value: Any) -> Any:
    if isinstance(hint, type) and hasattr(hint, "__dataclass_fields__"):
        return from_plain(hint, value)
    wrong = InputError(f"the setting {name} cannot be {value!r}")
    if get_origin(hint) is tuple:
        if not isinstance(value, list) or len(value) > MOST_LAYERS or any(type(part) is not int for part in value):
            raise InputError(f"{wrong}: whole numbers in brackets are needed, as [16,32]")
        return tuple(_value(name, int, part) for part in value)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise InputError(f"the setting {name} is one of {', '.join(get_args(hint))}, not {value!r}")
        return value
    expected = {int: int, float: (int, float), str: str, bool: bool}.get(hint, ())
    if not isinstance(value, expected) or isinstance(value, bool) != (hint is bool):
        raise InputError(f"{wrong}: true or false") if hint is bool else wrong
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise InputError(f"the setting {name} is too large an integer")
    return float(value) if hint is float else value
