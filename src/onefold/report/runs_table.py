"""Runs in numbers: who is compared in which world, how well each agent did in the end, and who beats whom."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from onefold.errors import InputError
from onefold.report.runs_read import Record
from onefold.report.stats import Interval, Runs, improvement, improvement_interval, iqm, iqm_interval
from onefold.rl.agents import AGENTS
from onefold.rl.registry import DOOM_VARIANTS, adapt_agent
from onefold.rl.registry import find_environment as world_of
from onefold.rl.settings import Run

BINS = 50  # of a world's frames, in its curves
TITLES = {name: name.upper() for name in AGENTS} | {"bdqn": "BDQN+P"}  # as the paper has them
RETURN, SUCCESS = "return", "success"  # final figures, by their columns


class Estimate(NamedTuple):
    """Of a final figure over `n` runs; no interval where a world has one only."""

    mean: float
    iqm: float
    interval: Interval | None
    n: int


class Duel(NamedTuple):
    """How probable it is that a run of the first agent ends with a higher return than one of the second."""

    first: str
    second: str
    probability: float
    interval: Interval | None
    worlds: int


@dataclass(frozen=True)
class Row:
    """An agent in a world. Figures are over whole runs; unfinished ones are kept beside them."""

    title: str
    ours: bool
    records: list[Record]

    @property
    def whole(self) -> list[Record]:
        return [record for record in self.records if record.whole]

    @property
    def unfinished(self) -> list[Record]:
        return [record for record in self.records if not record.whole]

    @property
    def frames(self) -> int:
        """How many each of its runs was to make."""
        return self.records[0].run.frames

    def finals(self, figure: str) -> Runs:
        """Of every whole run in which an episode has ended."""
        found = [record.final(figure) for record in self.whole]
        return np.array([value for value in found if value is not None], np.float64)


@dataclass(frozen=True)
class World:
    """One environment, and the agents that were sent there."""

    name: str
    rows: list[Row]

    @property
    def edges(self) -> Float64[np.ndarray, " e"]:
        """Of the bins that all its curves are drawn over."""
        most = max(record.run.frames for row in self.rows for record in row.records)
        return np.linspace(0, most, BINS + 1)

    def estimate(self, row: Row, figure: str) -> Estimate | None:
        return estimated([row.finals(figure)])

    @property
    def duels(self) -> list[Duel]:
        return list(_duels([self]))

    @property
    def unlike(self) -> list[str]:
        """How agents learn is the same for all (paper, Table "hpsettingsvizdoom"); where it is not: what differs, and
        whose it is. Ramps may differ where the frames of runs do."""
        found: dict[str, dict[Any, list[str]]] = {}
        for row in self.rows:
            run = row.records[0].run
            for key, value in (("environments", run.num_envs), *_flat(asdict(run.learning))):
                found.setdefault(key, {}).setdefault(value, []).append(row.title)
        even = len({row.frames for row in self.rows}) == 1
        differing = {key: kinds for key, kinds in found.items() if len(kinds) > 1 and (even or ".frames" not in key)}
        said = {key: [f"{_value(v)} ({', '.join(w)})" for v, w in kinds.items()] for key, kinds in differing.items()}
        return [f"{_said(key)} {' and '.join(parts)}" for key, parts in said.items()]


@dataclass(frozen=True)
class Table:
    worlds: list[World]

    @property
    def records(self) -> list[Record]:
        return [record for world in self.worlds for row in world.rows for record in row.records]

    @property
    def shared(self) -> dict[str, Estimate]:
        """Final success of the agents that ended runs in every world: returns of two worlds have two scales."""
        found = {}
        for title in (title for title in titles(self.worlds) if title not in self.mixed):
            strata = [row.finals(SUCCESS) for world in self.worlds for row in world.rows if row.title == title]
            estimate = estimated(strata)
            if estimate is not None and len(strata) == len(self.worlds) and all(map(len, strata)):
                found[title] = estimate
        return found

    @property
    def duels(self) -> list[Duel]:
        """Within every world that both were sent to, averaged."""
        return [duel for duel in _duels(self.worlds) if not {duel.first, duel.second} & set(self.mixed)]

    @property
    def mixed(self) -> list[str]:
        """Agents that have other settings in some worlds than in others, apart from what worlds ask for."""
        kinds: dict[str, set[frozenset[Any]]] = {}
        for world in self.worlds:
            for row in world.rows:
                kinds.setdefault(row.title, set()).add(frozenset(_own(row.records[0].run).items()))
        return [title for title, some in kinds.items() if len(some) > 1]


def build(records: Sequence[Record]) -> Table:
    """The table of these runs; there is at least one."""
    worlds = []
    for name in sorted(
        {record.run.environment for record in records}, key=lambda name: (_place(name, DOOM_VARIANTS), name)
    ):
        own = sorted((r for r in records if r.run.environment == name), key=lambda r: (r.run.seed, r.path))
        titles = _named([record.run for record in own])
        rows: dict[str, list[Record]] = {}
        for record in own:
            rows.setdefault(titles[replace(record.run, seed=0)], []).append(record)
        ordered = sorted(rows.items(), key=lambda row: (_place(row[1][0].run.name, AGENTS), row[0]))
        made = [Row(title, some[0].run.agent.bonus == "csd", some) for title, some in ordered]
        worlds.append(World(name, made))
    return Table(worlds)


def estimated(strata: Sequence[Runs]) -> Estimate | None:
    """Over all runs of all strata; None if there are none."""
    strata = [runs for runs in strata if len(runs)]
    if not strata:
        return None
    every = np.concatenate(strata)
    return Estimate(float(every.mean()), float(iqm(every)), iqm_interval(strata), len(every))


def _duels(worlds: Sequence[World]) -> Iterator[Duel]:
    """Each agent against each other, in the worlds where both have ended runs of as many frames."""
    finals = [{row.title: row for row in world.rows if len(row.finals(RETURN))} for world in worlds]
    for first in titles(worlds):
        for second in titles(worlds):
            both = [(rows[first], rows[second]) for rows in finals if first in rows and second in rows]
            pairs = [(a.finals(RETURN), b.finals(RETURN)) for a, b in both if a.frames == b.frames]
            if first != second and pairs:
                yield Duel(first, second, improvement(pairs), improvement_interval(pairs), len(pairs))


def ours_of(worlds: Sequence[World]) -> set[str]:
    """The titles of agents that are curious by CSD."""
    return {row.title for world in worlds for row in world.rows if row.ours}


def titles(worlds: Sequence[World]) -> list[str]:
    return list(dict.fromkeys(row.title for world in worlds for row in world.rows))


def _named(runs: Sequence[Run]) -> dict[Run, str]:
    """A title for every kind of run, its seed set to 0: the agent's name and, where kinds share it, what differs."""
    kinds: dict[str, list[Run]] = {}
    for run in dict.fromkeys(replace(run, seed=0) for run in runs):
        kinds.setdefault(TITLES.get(run.name, run.name), []).append(run)
    found = {}
    for title, some in kinds.items():
        settings = [dict(_flat(asdict(run))) for run in some]
        keys = _telling(settings)
        for run, values in zip(some, settings, strict=True):
            said = ", ".join(f"{_said(key)} {_value(values[key])}" for key in keys)
            found[run] = f"{title} ({said})" if said else title
    return found


def _own(run: Run) -> dict[str, Any]:
    """Settings of an agent, and of how it learns, that are not those which its name stands for in its world."""
    usual = (
        dict(_flat(asdict(adapt_agent(AGENTS[run.name], run.environment, run.frames)))) if run.name in AGENTS else {}
    )
    own = {key: value for key, value in _flat(asdict(run.agent)) if key not in usual or value != usual[key]}
    own = own if usual else {key: value for key, value in own.items() if key != "bonus_weight.frames"}
    with contextlib.suppress(InputError):  # a world of Gymnasium's that is not installed here
        there = dict(_flat(asdict(world_of(run.environment, run.frames).learning)))
        own |= {f"learning.{key}": v for key, v in _flat(asdict(run.learning)) if v != there[key]}
    return own


def _telling(settings: Sequence[dict[str, Any]]) -> list[str]:
    """The fewest settings, of the first that differ, by which all can be told apart."""
    keys: list[str] = []
    apart = 1
    for key in settings[0]:
        seen = len({tuple(values[k] for k in (*keys, key)) for values in settings})
        if seen > apart:
            keys, apart = [*keys, key], seen
    return keys


def _flat(content: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _said(key: str) -> str:
    return key.removeprefix("agent.").removeprefix("learning.").replace(".", " ").replace("_", " ")


def _value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)


def _place(name: str, known: Any) -> int:
    """The known ones in their order, others after them."""
    return list(known).index(name) if name in known else len(known)
