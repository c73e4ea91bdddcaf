"""Many runs: agents × worlds × seeds, or the paper's search for rates, on the benchmark's engines."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onefold.bench.engines import engine
from onefold.errors import FileError, InputError, warn
from onefold.rl.agents import AGENTS, Agent
from onefold.rl.registry import import_environment
from onefold.rl.run_folder import (
    EPISODES,
    PROGRESS,
    PROGRESS_COLUMNS,
    SETTINGS,
    RunFolder,
    final_episodes,
    read_columns,
)
from onefold.rl.runs import resume, train
from onefold.rl.settings import Run, make_run, override_settings

RATES = (1.25e-4, 2.5e-4, 3.75e-4, 5e-4, 6.25e-4, 7.5e-4)
WEIGHTS = (0.05, 0.1, 0.5, 1.0, 5.0, 10.0)
SPACES: dict[str, dict[str, tuple[float, ...]]] = {  # paper, Table "hpsearchspacevizdoom"
    "dqn": {"lr": RATES},
    "bdqn": {"lr": RATES, "prior_scale": (1.0, 3.0, 5.0)},
    "ids": {"lr": RATES, "prior_scale": (1.0, 3.0, 5.0)},
    "rnd": {"lr": RATES, "bonus_weight": WEIGHTS, "bonus_lr": RATES},
    "csd": {"lr": RATES, "bonus_weight": WEIGHTS, "bonus_lr": RATES},
}


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """A run and its folder. What has begun is gone on with."""

    run: Run
    out: Path
    device: str = "auto"
    checkpoint_every: int | None = None


class RunOutcome(NamedTuple):
    """A run that ended or was done before: its last row of progress, or why there is none."""

    name: str
    row: dict[str, Any] | None
    reason: str = ""
    before: bool = False


def plan_grid(
    agents: Sequence[str],
    worlds: Sequence[str],
    seeds: Sequence[int],
    frames: int,
    out: Path,
    settings: Sequence[str] = (),
    **how: Any,
) -> list[RunJob]:
    """One run for each agent, world and seed, seed by seed, in folders like csd/my-way-home-sparse/seed0."""
    if not (agents and worlds and seeds):
        raise InputError("needs at least one agent, one world and one seed")
    runs = [make_run(agent, name, frames, seed) for seed in seeds for name in worlds for agent in agents]
    out = out.absolute()  # it may be another process that writes there, with another working folder
    return [RunJob(run=override_settings(run, settings), out=out / str(run), **how) for run in dict.fromkeys(runs)]


def plan_search(
    agent: str,
    world: str,
    frames: int,
    seed: int,
    out: Path,
    most: int | None = None,
    settings: Sequence[str] = (),
    **how: Any,
) -> list[RunJob]:
    """The paper's search space of an agent; at most so many of its points, drawn without repetition."""
    if agent not in SPACES:
        raise InputError(f"there is no agent {agent!r}; known are {', '.join(AGENTS)}")
    space, base = SPACES[agent], override_settings(make_run(agent, world, frames, seed), settings)
    points = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    if most is not None and most < len(points):
        points = [points[i] for i in np.random.default_rng(seed).permutation(len(points))[:most]]
    return [
        RunJob(run=replace(base, agent=_agent_at(base.agent, point)), out=out.absolute() / point_name(point), **how)
        for point in points
    ]


def point_name(point: dict[str, float]) -> str:
    return ",".join(f"{name}={value:g}" for name, value in point.items())


def run_jobs(jobs: Sequence[RunJob], how: str, workers: int | None = None) -> Iterator[RunOutcome]:
    """Do what is not done; every run comes by once."""
    waiting = []
    for job in jobs:
        if (row := _finished_row(job)) is not None:
            yield RunOutcome(_job_name(job), row, before=True)
        else:
            waiting.append(job)
    for ended in engine(how)(run_job, waiting, workers):
        yield RunOutcome(_job_name(waiting[ended.place]), ended.result, ended.reason)


def run_job(job: RunJob) -> dict[str, Any]:
    """Train to the end, from the last checkpoint if there is one."""
    import_environment(job.run.environment)  # this may be another process; the name is that of the user's command
    begun = (job.out / SETTINGS).exists()
    how: dict[str, Any] = {"device": job.device, "checkpoint_every": job.checkpoint_every}
    for _ in resume(job.out, **how) if begun else train(job.run, job.out, **how):
        pass
    found = _finished_row(job)
    assert found is not None
    return found


def final_return(out: Path) -> float:
    """The mean return of the episodes in the last tenth of a run's frames; NaN if none has ended, or with a warning if
    the file is damaged."""
    run = RunFolder(out).read_run()
    try:
        columns = read_columns(out / EPISODES, ("frames", "environment", "return"))
    except FileError as error:
        warn(str(error))
        return math.nan
    frames, environments, rewards = columns.values()
    return float(rewards[final_episodes(frames, environments, run.frames)].mean()) if len(rewards) else math.nan


def _finished_row(job: RunJob) -> dict[str, Any] | None:
    """The last row of a run that is done, its networks being the last that it writes; another run's is refused."""
    if not (job.out / SETTINGS).exists():
        return None
    if RunFolder(job.out).read_run() != job.run:
        raise InputError(f"{job.out} holds a run with other settings: name another folder with -o")
    with contextlib.suppress(FileError):  # damaged networks and tables are written anew when the run is resumed
        if (frames := RunFolder(job.out).trained_frames()) >= job.run.frames:
            columns = read_columns(job.out / PROGRESS, PROGRESS_COLUMNS)
            row = {name: float(values[-1]) if len(values) else math.nan for name, values in columns.items()}
            return row | {"frames": frames}
    return None


def _agent_at(agent: Agent, point: dict[str, float]) -> Agent:
    """Return the agent at a point of the grid. Without a head for bonuses, Q's support grows with their weight."""
    values: dict[str, Any] = dict(point)
    start = values.pop("bonus_weight", agent.bonus_weight.start)
    wider = 1.0 if agent.bonus_head else max(1.0, start / agent.bonus_weight.start)
    weight = replace(agent.bonus_weight, start=start, end=min(start, agent.bonus_weight.end))  # it never rises
    return replace(agent, bonus_weight=weight, q_bound=wider * agent.q_bound, **values)


def _job_name(job: RunJob) -> str:
    return f"{job.run}" if job.out.name.startswith("seed") else job.out.name
