"""Many runs: agents × environments × seeds, or the paper's grid search, in a pool of jobs."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onefold.bench.engines import Outcome, find_engine
from onefold.bench.grid import grid_points, point_name, rank
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
    """A run to train or resume in its folder."""

    run: Run
    out: Path
    device: str = "auto"
    checkpoint_every: int | None = None

    @property
    def name(self) -> str:
        """Return agent, environment and seed in a grid, or the folder's name in a search."""
        return str(self.run) if self.out.name.startswith("seed") else self.out.name


def plan_grid(
    agents: Sequence[str],
    environments: Sequence[str],
    seeds: Sequence[int],
    frames: int,
    out: Path,
    settings: Sequence[str] = (),
    **options: Any,
) -> list[RunJob]:
    """Return a job for each agent, environment and seed, seed by seed, in folders like csd/my-way-home-sparse/seed0.

    `settings` are assignments for `override_settings`; `options` are further fields of `RunJob`.
    """
    if not (agents and environments and seeds):
        raise InputError("grid: needs at least one agent, one environment and one seed.")
    runs = [make_run(agent, name, frames, seed) for seed in seeds for name in environments for agent in agents]
    out = out.absolute()  # another process with another working folder may write there
    return [RunJob(run=override_settings(run, settings), out=out / str(run), **options) for run in dict.fromkeys(runs)]


def plan_search(
    agent: str,
    environment: str,
    frames: int,
    seed: int,
    out: Path,
    limit: int | None = None,
    settings: Sequence[str] = (),
    **options: Any,
) -> list[RunJob]:
    """Return a job for each point of the paper's search space of an agent, or for `limit` random points of it."""
    if agent not in SPACES:
        raise InputError(f"{agent!r} is not one of {', '.join(AGENTS)}", argument="agent")
    space, base = SPACES[agent], override_settings(make_run(agent, environment, frames, seed), settings)
    return [
        RunJob(run=replace(base, agent=_agent_at(base.agent, point)), out=out.absolute() / point_name(point), **options)
        for point in grid_points(space, limit, seed)
    ]


def run_jobs(jobs: Sequence[RunJob], engine_name: str, workers: int | None = None) -> Iterator[Outcome[RunJob]]:
    """Train the runs that are not finished, and yield the outcome of every run: its last row of progress."""
    unfinished = []
    for job in jobs:
        if (row := _finished_row(job)) is not None:
            yield Outcome(job, row, resumed=True)
        else:
            unfinished.append(job)
    yield from find_engine(engine_name)(run_job, unfinished, workers)


def run_job(job: RunJob) -> dict[str, Any]:
    """Train a run to its end, from its last checkpoint if there is one, and return the last row of progress."""
    import_environment(job.run.environment)  # the user typed this name; this may be another process
    options: dict[str, Any] = {"device": job.device, "checkpoint_every": job.checkpoint_every}
    has_started = (job.out / SETTINGS).exists()
    for _ in resume(job.out, **options) if has_started else train(job.run, job.out, **options):
        pass
    row = _finished_row(job)
    assert row is not None
    return row


def final_return(out: Path) -> float:
    """Return the mean return of a run's `final_episodes`; NaN if there is none, or if the file is damaged."""
    run = RunFolder(out).read_run()
    try:
        columns = read_columns(out / EPISODES, ("frames", "environment", "return"))
    except FileError as error:
        warn(str(error))
        return math.nan
    frames, environments, returns = columns.values()
    return float(returns[final_episodes(frames, environments, run.frames)].mean()) if len(returns) else math.nan


def rank_runs(jobs: Sequence[RunJob]) -> list[tuple[str, float]]:
    """Return names and final returns of the runs, best first; runs without an episode are left out."""
    return rank((job.name, final_return(job.out)) for job in jobs)


def _finished_row(job: RunJob) -> dict[str, Any] | None:
    """Return the last row of progress, or None for an unfinished run; raise InputError if it is another run."""
    if not (job.out / SETTINGS).exists():
        return None
    if RunFolder(job.out).read_run() != job.run:
        raise InputError(f"{job.out}: holds a run with other settings. Choose another folder with -o.")
    with contextlib.suppress(FileError):  # resuming the run writes damaged networks and tables again
        if (frames := RunFolder(job.out).trained_frames()) >= job.run.frames:
            columns = read_columns(job.out / PROGRESS, PROGRESS_COLUMNS)
            row = {name: float(values[-1]) if len(values) else math.nan for name, values in columns.items()}
            return row | {"frames": frames}
    return None


def _agent_at(agent: Agent, point: dict[str, float]) -> Agent:
    """Return the agent at a point of the grid. Without a head for bonuses, Q's support grows with their weight."""
    values: dict[str, Any] = dict(point)
    start = values.pop("bonus_weight", agent.bonus_weight.start)
    factor = 1.0 if agent.bonus_head else max(1.0, start / agent.bonus_weight.start)
    weight = replace(agent.bonus_weight, start=start, end=min(start, agent.bonus_weight.end))  # it never rises
    return replace(agent, bonus_weight=weight, q_bound=factor * agent.q_bound, **values)
