"""The settings of a run, and changes to single settings by name."""

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from onefold.core.batches import check_seed
from onefold.core.schema import from_json, to_json
from onefold.errors import InputError
from onefold.rl.agents import AGENTS, Agent, Learning
from onefold.rl.registry import adapt_agent, find_environment, import_environment

MAX_INTEGER, MAX_LAYERS, MAX_ENVIRONMENTS, MAX_FRAMES = 2**53, 64, 1024, 10**12


@dataclass(frozen=True, kw_only=True)
class Run:
    """The settings of one training run: an agent, an environment, a length and a seed.

    Args:
        name: Name of the agent, for tables and plots.
        environment: Name of the environment.
        frames: Number of frames, of all environments together.
        seed: Seed of everything random.
        num_envs: Number of environments that step together.
        agent: The agent.
        learning: Learning settings.
    """

    name: str
    environment: str
    frames: int
    seed: int
    num_envs: int
    agent: Agent
    learning: Learning

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if not 1 <= self.num_envs <= MAX_ENVIRONMENTS:
            raise InputError(f"run: num_envs must be between 1 and {MAX_ENVIRONMENTS:,} (got {self.num_envs}).")
        if not self.num_envs <= self.frames <= MAX_FRAMES:
            raise InputError(f"run: frames must be between num_envs ({self.num_envs}) and 10¹² (got {self.frames:,}).")
        if len(self.learning.channels) > MAX_LAYERS:
            raise InputError(
                f"learning.channels: must be at most {MAX_LAYERS} sizes (got {len(self.learning.channels)})."
            )

    def __str__(self) -> str:
        return f"{self.name}/{self.environment}/seed{self.seed}"


def make_run(agent: str, environment: str, frames: int, seed: int, num_envs: int | None = None) -> Run:
    """Return the run of one of the paper's agents, with settings that suit the environment.

    Args:
        agent: "dqn", "bdqn", "rnd", "ids" or "csd".
        environment: "my-way-home-dense", "my-way-home-sparse", "my-way-home-very-sparse", "chain-N", "deep-sea-N", an
            id of Gymnasium, or `module:Id`, whose module is imported.
        frames: Number of frames, of all environments together.
        seed: Seed of everything random.
        num_envs: Number of environments that step together. By default 16 for MyWayHome and 4 for others.

    Returns:
        The run. Change single settings with `dataclasses.replace`, and pass it to `train`.

    Raises:
        InputError: The agent or the environment does not exist, or a number is out of range.
    """
    import_environment(environment)
    if agent not in AGENTS:
        raise InputError(f"{agent!r} is not one of {', '.join(AGENTS)}", argument="agent")
    spec = find_environment(environment, frames)
    return Run(
        name=agent, environment=environment, frames=frames, seed=seed,
        num_envs=spec.num_envs if num_envs is None else num_envs,
        agent=adapt_agent(AGENTS[agent], environment, frames), learning=spec.learning,
    )  # fmt: skip


def override_settings(run: Run, assignments: Sequence[str]) -> Run:
    """Return the run with changed settings of its agent or learning, each as in `learning.target_period=2000`.

    Values are JSON, or text. For an integer setting, a float with an integral value is accepted, such as 1e4.
    """
    content = to_json(run)
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        *parents, key = name.split(".")
        parent: Any = content
        for part in parents:
            parent = parent.get(part) if isinstance(parent, dict) else None
        current = parent.get(key) if isinstance(parent, dict) else None
        if not equals or current is None or isinstance(current, dict) or parents[:1] not in (["agent"], ["learning"]):
            similar = difflib.get_close_matches(name, _setting_names(content), 1, 0.5)
            example = f"{similar[0]}=…" if similar else "learning.target_period=2000"
            raise InputError(f"{assignment!r}: is not a setting. Use a name from settings.json, such as {example}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        is_integral = isinstance(current, int) and isinstance(value, float) and value.is_integer()
        parent[key] = int(value) if is_integral else value
    return parse_run(content)


def _setting_names(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the names of all settings that `override_settings` can change."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _setting_names(value, f"{prefix}{name}.")
        elif prefix:
            yield f"{prefix}{name}"


def parse_run(content: Any) -> Run:
    """Return the run that `core.schema.to_json` wrote; raise InputError for any other content."""
    for name, value in _leaves(content):
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise InputError(f"{name}: the integer is too large.")
    return from_json(Run, content)


def _leaves(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict):
        for name, value in content.items():
            yield from _leaves(value, f"{prefix}{name}." if isinstance(value, dict) else f"{prefix}{name}")
    else:
        yield prefix, content
