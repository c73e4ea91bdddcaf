"""`onefold rl`: train agents, resume runs, evaluate trained agents."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from onefold.cli.console import print_lines
from onefold.cli.jobs import Eval, Grid, Resume, RLSearch, RunOptions, Train, Watch
from onefold.core.batches import whole
from onefold.errors import FileError, InputError
from onefold.rl.console import check_runs, show_episodes, show_outcomes, show_total, show_training

BEST = 5  # trials that a search prints


def train(job: Train) -> None:
    """Train a new run."""
    from onefold.rl.runs import train as train_run
    from onefold.rl.settings import make_run, override_settings

    allow_local_modules(job.env)
    settings = make_run(job.agent, job.env, whole(job.frames, "frames"), job.seed, job.environments)
    settings = override_settings(settings, job.settings)
    options = run_options(job.execution)
    check_runs([settings])
    show_training(train_run(settings, job.out, **options), settings, job.execution.device)
    print_next(job.out, job.env)


def resume(job: Resume) -> None:
    """Resume a run, or train it longer."""
    from onefold.rl.run_folder import RunFolder
    from onefold.rl.runs import extend_run
    from onefold.rl.runs import resume as resume_run

    frames = optional_count(job.frames, "frames")
    settings = extend_run(RunFolder(job.run).read_run(), frames)
    import_module_of(job.env, settings.environment)
    with contextlib.suppress(FileError):  # damaged networks are written again at the end
        if RunFolder(job.run).trained_frames() >= settings.frames:
            print_lines(f"{job.run}: already trained to its end. --frames trains it longer.")
            return
    progress = resume_run(job.run, frames=frames, **run_options(job.execution))
    show_training(progress, settings, job.execution.device)
    print_next(job.run, settings.environment)


def grid(job: Grid) -> int:
    """Train or resume the runs of a grid."""
    from onefold.rl.grid import plan_grid, run_jobs

    execution = job.execution
    options: dict[str, Any] = {
        "device": execution.device,
        "checkpoint_every": optional_count(job.checkpoint, "checkpoint"),
    }
    frames = whole(job.frames, "frames")
    allow_local_modules(*job.envs)
    runs = plan_grid(job.agents, job.envs, job.seeds, frames, job.out, job.settings, **options)
    check_runs([run.run for run in runs], elsewhere=execution.engine == "ray")
    with show_total(runs):
        failed = show_outcomes(run_jobs(runs, execution.engine, optional_count(execution.workers, "workers")))
    if len(failed) < len(runs):
        print_lines(f"Runs: {job.out}; look at them with: onefold report {job.out}")
    return 1 if failed else 0


def search(job: RLSearch) -> int:
    """Run the trials and print the best ones."""
    from onefold.rl.grid import plan_search, rank_runs, run_jobs

    execution = job.execution
    frames, limit = whole(job.frames, "frames"), optional_count(job.trials, "trials")
    allow_local_modules(job.env)
    runs = plan_search(job.agent, job.env, frames, job.seed, job.out, limit, job.settings, device=execution.device)
    check_runs([run.run for run in runs], elsewhere=execution.engine == "ray")
    with show_total(runs):
        failed = show_outcomes(run_jobs(runs, execution.engine, optional_count(execution.workers, "workers")))
    ranked = rank_runs([run for run in runs if run.name not in failed])
    if ranked:
        print("Best trials by the mean return of episodes in the last tenth of the frames:")
    for name, value in ranked[:BEST]:
        print(f"{name}: return {value:.4f}")
    return 1 if failed else 0


def evaluate(job: Eval) -> None:
    """Run a trained agent and print its mean return."""
    from onefold.rl.play import Player
    from onefold.rl.registry import has_goal

    count = whole(job.episodes, "episodes")
    import_module_of(job.env)
    player = Player(job.run, job.seed, job.epsilon)
    import_module_of(job.env, player.run.environment)
    episodes, goal = list(show_episodes(player.play(count), count)), has_goal(player.run.environment)
    means = {
        "episodes": len(episodes),
        "return": float(np.mean([episode.reward for episode in episodes])),
        "success": float(np.mean([episode.reached for episode in episodes])) if goal else None,
        "length": float(np.mean([episode.length for episode in episodes])),
    }
    if job.json:
        print(json.dumps(means))
        return
    success = f"goal reached in {means['success']:.0%}, " if goal else ""
    number = "1 episode" if count == 1 else f"{count:,} episodes"
    print(f"{number}: return {means['return']:.3f}, {success}{means['length']:.0f} steps on average")


def watch(job: Watch) -> None:
    """Write a film of one episode."""
    from onefold.rl.play import Player
    from onefold.rl.video import VideoFile

    video = VideoFile(job.out)
    episode = next(Player(job.run, job.seed, job.epsilon).play(1, views=True))
    video.write(episode)
    end = "reached the goal" if episode.reached else "did not reach the goal"
    print_lines(f"{job.out}: {episode.length} steps, {end}")


def allow_local_modules(*envs: str) -> None:
    """Make modules in the working folder importable if an environment is module:Id."""
    if any(":" in env for env in envs) and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def import_module_of(env: str | None, environment: str | None = None) -> None:
    """Import the module in --env, which must be the environment of the run."""
    from onefold.rl.registry import import_environment

    if env is None:
        return
    if environment not in (None, env):
        raise InputError(f"the run's environment is {environment} (got {env})", argument="env")
    allow_local_modules(env)
    import_environment(env)


def run_options(execution: RunOptions) -> dict[str, Any]:
    """Return the options of a run as arguments of the library."""
    return {
        "device": execution.device,
        "workers": optional_count(execution.workers, "workers"),
        "checkpoint_every": optional_count(execution.checkpoint, "checkpoint"),
    }


def optional_count(value: float | None, name: str) -> int | None:
    """Return a count as an int; it may be a float such as 5e6, or None."""
    return None if value is None else whole(value, name)


def print_next(out: Path, environment: str) -> None:
    """Print the command that shows a trained run."""
    from onefold.rl.registry import DOOM_VARIANTS

    command = f"onefold rl watch {out} -o play.gif" if environment in DOOM_VARIANTS else f"onefold report {out}"
    print_lines(f"Trained: {out}; look at it with: {command}")
