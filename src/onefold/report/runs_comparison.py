"""Comparison of runs: agents by environment, their final performance, and probabilities of improvement.

Only runs with equal settings, apart from the seed, are averaged. Runs of one agent whose settings differ have titles
that name the difference.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from onefold.errors import InputError
from onefold.report.runs_data import RETURN, SUCCESS, RunRecord
from onefold.report.runs_stats import Finals, Interval, improvement, improvement_interval, iqm, iqm_interval
from onefold.rl.agents import AGENTS
from onefold.rl.registry import DOOM_VARIANTS, adapt_agent, find_environment
from onefold.rl.settings import Run

BINS = 50  # of a learning curve
_DEFAULT = object()  # value of a setting that follows its environment
TITLES = {name: name.upper() for name in AGENTS} | {"bdqn": "BDQN+P"}  # as in the paper


class FinalEstimate(NamedTuple):
    """A final metric over `n` runs; no interval where an environment has a single run."""

    mean: float
    iqm: float
    interval: Interval | None
    n: int


class PairComparison(NamedTuple):
    """The probability that a run of the first agent ends with a higher return than a run of the second."""

    first: str
    second: str
    probability: float
    interval: Interval | None
    environments: int


@dataclass(frozen=True)
class AgentRuns:
    """The runs of one agent in one environment, with equal settings. Metrics are over finished runs."""

    title: str
    ours: bool
    records: list[RunRecord]

    @property
    def finished(self) -> list[RunRecord]:
        return [record for record in self.records if record.finished]

    @property
    def unfinished(self) -> list[RunRecord]:
        return [record for record in self.records if not record.finished]

    @property
    def run(self) -> Run:
        """The settings, with the seed of the first run."""
        return self.records[0].run

    def finals(self, metric: str) -> Finals:
        """Return the final metric of each finished run with at least one episode."""
        values = [record.final(metric) for record in self.finished]
        return np.array([value for value in values if value is not None], np.float64)

    def estimate(self, metric: str) -> FinalEstimate | None:
        """Return the estimate of a final metric; None without finished runs."""
        return estimate_final([self.finals(metric)])


@dataclass(frozen=True)
class EnvironmentRuns:
    """The agents of one environment."""

    name: str
    agents: list[AgentRuns]

    @property
    def records(self) -> list[RunRecord]:
        return [record for agent in self.agents for record in agent.records]

    @property
    def edges(self) -> Float64[np.ndarray, " e"]:
        """Edges of the bins of all learning curves, in frames."""
        return np.linspace(0, max(record.run.frames for record in self.records), BINS + 1)

    @property
    def equal_frames(self) -> bool:
        """Whether all runs have the same number of frames."""
        return len({agent.run.frames for agent in self.agents}) == 1

    @property
    def pairs(self) -> list[PairComparison]:
        return list(_compare_pairs([self]))

    @property
    def learning_differences(self) -> list[str]:
        """Learning settings that differ between agents, with their values and agents.

        The paper has one set for all agents (Table "hpsettingsvizdoom"). Lengths of schedules are left out where the
        runs have different numbers of frames.
        """
        agents_by_value: dict[str, dict[Any, list[str]]] = {}
        for agent in self.agents:
            for key, value in (("num_envs", agent.run.num_envs), *_flatten(asdict(agent.run.learning))):
                agents_by_value.setdefault(key, {}).setdefault(value, []).append(agent.title)
        return [
            _describe_values(key, values)
            for key, values in agents_by_value.items()
            if len(values) > 1 and (self.equal_frames or ".frames" not in key)
        ]


@dataclass(frozen=True)
class RunComparison:
    """All runs of a report, by environment."""

    environments: list[EnvironmentRuns]

    @property
    def records(self) -> list[RunRecord]:
        return [record for environment in self.environments for record in environment.records]

    @property
    def agent_titles(self) -> list[str]:
        """Titles of all agents."""
        return _titles(self.environments)

    @property
    def success(self) -> dict[str, FinalEstimate]:
        """Final success over all environments, of agents that finished runs in each of them with equal settings.

        Returns are not averaged: each environment has its own scale.
        """
        estimates, mixed = {}, self.mixed_settings
        for title in (title for title in self.agent_titles if title not in mixed):
            strata = [
                agent.finals(SUCCESS)
                for environment in self.environments
                for agent in environment.agents
                if agent.title == title
            ]
            estimate = estimate_final(strata)
            if estimate is not None and len(strata) == len(self.environments) and all(map(len, strata)):
                estimates[title] = estimate
        return estimates

    @property
    def pairs(self) -> list[PairComparison]:
        """Pairs of agents, averaged over the environments of both."""
        mixed = self.mixed_settings
        return [
            pair for pair in _compare_pairs(self.environments) if pair.first not in mixed and pair.second not in mixed
        ]

    @property
    def mixed_settings(self) -> dict[str, list[str]]:
        """For agents with different settings in different environments, each such setting with its values.

        A setting that follows the defaults of its environment is not a difference, except for the form of the bonus.
        """
        by_title: dict[str, dict[str, Run]] = {}
        for environment in self.environments:
            for agent in environment.agents:
                by_title.setdefault(agent.title, {})[environment.name] = agent.run
        differences = {title: _setting_differences(runs) for title, runs in by_title.items()}
        return {title: settings for title, settings in differences.items() if settings}


def compare_runs(records: Sequence[RunRecord]) -> RunComparison:
    """Return the comparison of at least one run. Environments and agents of the paper come first."""
    names = {record.run.environment for record in records}
    return RunComparison(
        [
            _group_agents(name, [record for record in records if record.run.environment == name])
            for name in sorted(names, key=lambda name: (_rank(name, DOOM_VARIANTS), name))
        ]
    )


def _group_agents(environment: str, records: Iterable[RunRecord]) -> EnvironmentRuns:
    """Return the runs of one environment by their settings."""
    records = sorted(records, key=lambda record: (record.run.seed, record.path))
    titles = _title_runs([record.run for record in records])
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(titles[replace(record.run, seed=0)], []).append(record)
    ordered = sorted(groups.items(), key=lambda group: (_rank(group[1][0].run.name, AGENTS), group[0]))
    return EnvironmentRuns(
        environment, [AgentRuns(title, group[0].run.agent.bonus == "csd", group) for title, group in ordered]
    )


def estimate_final(strata: Sequence[Finals]) -> FinalEstimate | None:
    """Return the estimate over all runs of all strata; None without runs."""
    strata = [runs for runs in strata if len(runs)]
    if not strata:
        return None
    values = np.concatenate(strata)
    return FinalEstimate(float(values.mean()), float(iqm(values)), iqm_interval(strata), len(values))


def _compare_pairs(environments: Sequence[EnvironmentRuns]) -> Iterator[PairComparison]:
    """Yield each ordered pair of agents with finished runs of equal length in a common environment."""
    by_title = [
        {agent.title: agent for agent in environment.agents if len(agent.finals(RETURN))}
        for environment in environments
    ]
    titles = _titles(environments)
    for first in titles:
        for second in titles:
            both = [(agents[first], agents[second]) for agents in by_title if first in agents and second in agents]
            finals = [(a.finals(RETURN), b.finals(RETURN)) for a, b in both if a.run.frames == b.run.frames]
            if first != second and finals:
                yield PairComparison(first, second, improvement(finals), improvement_interval(finals), len(finals))


def titles_of_ours(environments: Sequence[EnvironmentRuns]) -> set[str]:
    """Return the titles of agents with CSD's bonus."""
    return {agent.title for environment in environments for agent in environment.agents if agent.ours}


def _titles(environments: Sequence[EnvironmentRuns]) -> list[str]:
    return list(dict.fromkeys(agent.title for environment in environments for agent in environment.agents))


def _title_runs(runs: Sequence[Run]) -> dict[Run, str]:
    """Return a title for each set of settings, with seed 0: the agent's name and, if not unique, what differs."""
    runs_by_name: dict[str, list[Run]] = {}
    for run in dict.fromkeys(replace(run, seed=0) for run in runs):
        runs_by_name.setdefault(TITLES.get(run.name, run.name), []).append(run)
    titles = {}
    for name, variants in runs_by_name.items():
        settings = [dict(_flatten(asdict(run))) for run in variants]
        keys = _distinguishing_keys(settings)
        for run, values in zip(variants, settings, strict=True):
            differences = ", ".join(f"{_setting_name(key)} {_format_value(values[key])}" for key in keys)
            titles[run] = f"{name} ({differences})" if differences else name
    return titles


def _setting_differences(runs: dict[str, Run]) -> list[str]:
    """Return the settings of one agent that differ between environments, with their values."""
    changed = {environment: _changed_settings(run) for environment, run in runs.items()}
    keys = dict.fromkeys(key for settings in changed.values() for key in settings)
    differences = []
    for key in keys:
        if len({settings.get(key, _DEFAULT) for settings in changed.values()}) > 1:
            environments: dict[Any, list[str]] = {}
            for environment, run in runs.items():
                value = dict(_flatten(asdict(run))).get(key)
                environments.setdefault(value, []).append(environment)
            differences.append(_describe_values(key, environments))
    return differences


def _changed_settings(run: Run) -> dict[str, Any]:
    """Return the settings that differ from the defaults of the agent and the environment, and the bonus's form."""
    in_paper = run.name in AGENTS
    defaults: dict[str, Any] = {}
    if in_paper:
        agent = adapt_agent(AGENTS[run.name], run.environment, run.frames)
        defaults |= {f"agent.{key}": value for key, value in _flatten(asdict(agent))}
    with contextlib.suppress(InputError):  # an environment of Gymnasium that is not installed here
        learning = find_environment(run.environment, run.frames).learning
        defaults |= {f"learning.{key}": value for key, value in _flatten(asdict(learning))}
    changed = {}
    for key, value in _flatten({"agent": asdict(run.agent), "learning": asdict(run.learning)}):
        if key.startswith("learning.") and key not in defaults:
            continue
        if key == "agent.bonus_weight.frames" and not in_paper:
            continue
        if key not in defaults or value != defaults[key]:
            changed[key] = value
    if run.agent.bonus == "csd":  # another form is another agent, also where it is the environment's default
        changed["agent.bonus_form"] = run.agent.bonus_form
    return changed


def _distinguishing_keys(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the first settings, as few as possible, that together distinguish all dictionaries."""
    keys: list[str] = []
    distinct = 1
    for key in settings[0]:
        combinations = len({tuple(values[k] for k in (*keys, key)) for values in settings})
        if combinations > distinct:
            keys, distinct = [*keys, key], combinations
    return keys


def _flatten(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dictionaries, with their keys joined by dots."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _describe_values(key: str, owners: dict[Any, list[str]]) -> str:
    """Return a setting, its values and their owners, such as "target period 400 (DQN) and 4,000 (RND)"."""
    values = [f"{_format_value(value)} ({', '.join(names)})" for value, names in owners.items()]
    return f"{_setting_name(key)} {' and '.join(values)}"


def _setting_name(key: str) -> str:
    return key.removeprefix("agent.").removeprefix("learning.").replace(".", " ").replace("_", " ")


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)


def _rank(name: str, order: Iterable[str]) -> int:
    """Return the position of a name in an order; names that are not in it come last."""
    names = list(order)
    return names.index(name) if name in names else len(names)
