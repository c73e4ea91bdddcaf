"""`onefold rl`: train agents, go on with them, see how they do."""

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from onefold.rl.console import check_runs, show_episodes, show_outcomes, show_total, show_training

Out = Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="DIR")]
RunFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Settings = Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE …")]
Device = Literal["auto", "cpu", "cuda"]
Engine = Literal["serial", "processes", "ray"]


@dataclass(frozen=True)
class Train:
    """Train an agent: Rainbow with a CSD bonus, or one of its rivals, in a world with a far goal.

    The folder gets settings.json, progress.csv, episodes.csv, visits.json, networks.safetensors (to share), a
    checkpoint to go on from (`onefold rl resume DIR`), and files for TensorBoard where it is installed.
    """

    out: Out
    """Folder of the run, for example runs/csd-sparse-0."""
    agent: Literal["dqn", "bdqn", "rnd", "ids", "csd"] = "csd"
    """ε-greedy alone; ten members with random priors; Rainbow with an RND bonus; information-directed; with CSD's."""
    env: str = "my-way-home-sparse"
    """my-way-home-dense, -sparse, -very-sparse; chain-N, deep-sea-N; an id of Gymnasium's; or one of your own, as
    my_package:MyEnv-v0, where importing my_package registers it. Observations are vectors or grey images, actions
    Discrete."""
    frames: float = 5e6
    """Of all environments together."""
    seed: int = 0
    """Everything random follows from it."""
    settings: Settings = ()
    """Other settings than the agent's own, named as in settings.json: learning.target_period=2000 agent.lr=1e-3."""
    environments: int | None = None
    """At once; 16 for MyWayHome, 4 for small worlds."""
    workers: int | None = None
    """Processes that run them."""
    checkpoint: float | None = None
    """Frames between two checkpoints; if it is not said, a quarter of them all, and at least one every 15 minutes."""
    device: Device = "auto"
    """Where to learn."""

    @property
    def onward(self) -> str:
        return _onward(self.out, self.env)

    def __call__(self) -> None:
        from onefold.rl.runs import train
        from onefold.rl.settings import make_run, override_settings

        _look_here(self.env)
        run = make_run(self.agent, self.env, _count(self.frames, "--frames"), self.seed, self.environments)
        run = override_settings(run, self.settings)
        how = _how(self.device, self.workers, self.checkpoint)
        check_runs([run])
        show_training(train(run, self.out, **how), run, self.device)
        _trained(self.out, self.env)


@dataclass(frozen=True)
class Resume:
    """Go on with a run that was stopped or killed, from its last checkpoint, or train it longer with --frames."""

    run: RunFolder
    """Its folder."""
    frames: float | None = None
    """Train for so many frames in all, more than the run was to make. Schedules keep their lengths in settings.json."""
    env: str | None = None
    """The run's environment, to import its module, if it is module:Id. A run's folder never has a module imported."""
    workers: int | None = None
    """Processes that run the environments."""
    checkpoint: float | None = None
    """Frames between two checkpoints; if it is not said, a quarter of them all, and at least one every 15 minutes."""
    device: Device = "auto"
    """Where to learn."""

    @property
    def onward(self) -> str:
        return _onward(self.run, self.env)

    def __call__(self) -> None:
        from onefold.errors import FileError
        from onefold.rl.run_folder import RunFolder
        from onefold.rl.runs import extend_run, resume

        frames = _maybe(self.frames, "--frames")
        run = extend_run(RunFolder(self.run).read_run(), frames)
        _import(self.env, run.environment)
        with contextlib.suppress(FileError):  # networks that are damaged will be written anew
            if RunFolder(self.run).trained_frames() >= run.frames:
                print(f"{self.run}: has been trained to its end before; --frames trains it longer")
                return
        show_training(
            resume(self.run, frames=frames, **_how(self.device, self.workers, self.checkpoint)), run, self.device
        )
        _trained(self.run, run.environment)


@dataclass(frozen=True)
class Grid:
    """Many runs: agents, worlds and seeds, one folder each under OUT. What is done is skipped, what was killed goes on.

    Look at the curves with `onefold report OUT`.
    """

    out: Out
    """Folder of the runs."""
    agents: tuple[str, ...] = ("dqn", "bdqn", "rnd", "ids", "csd")
    """Which agents."""
    envs: tuple[str, ...] = ("my-way-home-dense", "my-way-home-sparse", "my-way-home-very-sparse")
    """Which worlds."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Which seeds."""
    frames: float = 5e6
    """Of each run."""
    settings: Settings = ()
    """Other settings than the agents' own, for all of them: learning.target_period=2000 learning.batch_size=128."""
    engine: Engine = "serial"
    """One after another, in processes of this machine, or on the Ray cluster that RAY_ADDRESS names."""
    workers: int | None = None
    """How many at a time."""
    checkpoint: float | None = None
    """Frames between two checkpoints; if it is not said, a quarter of a run, and at least one every 15 minutes."""
    device: Device = "auto"
    """Where to learn."""

    @property
    def onward(self) -> str:
        return "the same command"

    def __call__(self) -> int:
        from onefold.rl.grid import plan_grid, run_jobs

        how: dict[str, Any] = {"device": self.device, "checkpoint_every": _maybe(self.checkpoint, "--checkpoint")}
        frames = _count(self.frames, "--frames")
        _look_here(*self.envs)
        planned = plan_grid(self.agents, self.envs, self.seeds, frames, self.out, self.settings, **how)
        check_runs([job.run for job in planned], elsewhere=self.engine == "ray")
        with show_total(planned):
            failed = show_outcomes(run_jobs(planned, self.engine, _maybe(self.workers, "--workers")))
        if len(failed) < len(planned):
            print(f"Runs: {self.out}; look at them with: onefold report {self.out}")
        return 1 if failed else 0


@dataclass(frozen=True)
class Search:
    """Search an agent's rates over the paper's grid, by the return at the end. Done trials are not done again."""

    agent: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="AGENT")]
    """dqn, bdqn, rnd, ids or csd."""
    out: Out
    """Folder of the trials."""
    env: str = "my-way-home-sparse"
    """Where."""
    frames: float = 5e6
    """Of each trial."""
    seed: int = 0
    """Of each trial, and of which are tried if not all."""
    trials: int | None = None
    """At most so many points of the grid, drawn at random."""
    settings: Settings = ()
    """Other settings than the agent's own, for all trials, as for `onefold rl grid`."""
    engine: Engine = "serial"
    """As for `onefold rl grid`."""
    workers: int | None = None
    """How many at a time."""
    device: Device = "auto"
    """Where to learn."""

    @property
    def onward(self) -> str:
        return "the same command"

    def __call__(self) -> int:
        from onefold.rl.grid import final_return, plan_search, run_jobs

        frames, most = _count(self.frames, "--frames"), _maybe(self.trials, "--trials")
        _look_here(self.env)
        planned = plan_search(
            self.agent, self.env, frames, self.seed, self.out, most, self.settings, device=self.device
        )
        check_runs([job.run for job in planned], elsewhere=self.engine == "ray")
        with show_total(planned):
            failed = show_outcomes(run_jobs(planned, self.engine, _maybe(self.workers, "--workers")))
        found = {job.out.name: final_return(job.out) for job in planned if job.out.name not in failed}
        known = {name: value for name, value in found.items() if value == value}  # not so if no episode ended
        if known:
            print("The best, by the mean return of episodes in the last tenth of the frames:")
        for name in sorted(known, key=lambda name: -known[name])[:5]:
            print(f"{name}: return {known[name]:.4f}")
        return 1 if failed else 0


@dataclass(frozen=True)
class Eval:
    """Let a trained agent play, and say how well it does."""

    run: RunFolder
    """A run's folder, or its networks.safetensors."""
    episodes: int = 20
    """How many."""
    epsilon: float = 0.01
    """Share of random actions."""
    seed: int = 0
    """Of where episodes start."""
    env: str | None = None
    """The run's environment, to import its module, if it is module:Id."""
    json: bool = False
    """Print JSON."""

    def __call__(self) -> None:
        import numpy as np

        from onefold.rl.play import Player
        from onefold.rl.registry import has_goal

        count = _count(self.episodes, "--episodes")
        _import(self.env)
        player = Player(self.run, self.seed, self.epsilon)
        _import(self.env, player.run.environment)
        played, goal = list(show_episodes(player.play(count), count)), has_goal(player.run.environment)
        found = {
            "episodes": len(played),
            "return": float(np.mean([p.reward for p in played])),
            "success": float(np.mean([p.reached for p in played])) if goal else None,
            "length": float(np.mean([p.length for p in played])),
        }
        if self.json:
            print(json.dumps(found))
            return
        reached = f"goal reached in {found['success']:.0%}, " if goal else ""
        episodes = "1 episode" if count == 1 else f"{count:,} episodes"
        print(f"{episodes}: return {found['return']:.3f}, {reached}{found['length']:.0f} steps on average")


@dataclass(frozen=True)
class WatchIt:
    """Write a moving picture, GIF or MP4, of a trained agent at play in MyWayHome; other worlds have no screen."""

    run: RunFolder
    """A run's folder, or its networks.safetensors."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE")]
    """Where to: play.gif, or play.mp4 (`pip install 'onefold[video]'`)."""
    epsilon: float = 0.01
    """Share of random actions."""
    seed: int = 0
    """Of where the episode starts."""

    def __call__(self) -> None:
        from onefold.rl.play import Player
        from onefold.rl.video import VideoFile

        movie = VideoFile(self.out)
        played = next(Player(self.run, self.seed, self.epsilon).play(1, views=True))
        movie.write(played)
        end = "reached the goal" if played.reached else "did not reach the goal"
        print(f"{self.out}: {played.length} steps, {end}")


@dataclass(frozen=True)
class RL:
    """Exploration: the paper's agents in ViZDoom and in small worlds."""

    what: Annotated[
        Annotated[Train, tyro.conf.subcommand("train")]
        | Annotated[Resume, tyro.conf.subcommand("resume")]
        | Annotated[Grid, tyro.conf.subcommand("grid")]
        | Annotated[Search, tyro.conf.subcommand("search")]
        | Annotated[Eval, tyro.conf.subcommand("eval")]
        | Annotated[WatchIt, tyro.conf.subcommand("watch")],
        tyro.conf.arg(name=""),
    ]

    def __call__(self) -> int:
        return self.what() or 0


def _onward(out: Path, env: str | None) -> str:
    """How to go on with a run that was stopped; if it had not begun, by the same command."""
    named = f" --env {env}" if env and ":" in env else ""
    return f"onefold rl resume {out}{named}" if (out / "settings.json").exists() else ""


def _look_here(*envs: str) -> None:
    """Have modules of the working folder imported, too, if one is named."""
    if any(":" in env for env in envs) and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def _import(env: str | None, environment: str | None = None) -> None:
    """Import the module that was named with --env, which must be that of the run."""
    from onefold.errors import InputError
    from onefold.rl.registry import import_environment

    if env is None:
        return
    if environment not in (None, env):
        raise InputError(f"--env: the run's environment is {environment} (got {env})")
    _look_here(env)
    import_environment(env)


def _how(device: str, workers: int | None, checkpoint: float | None) -> dict[str, Any]:
    return {
        "device": device,
        "workers": _maybe(workers, "--workers"),
        "checkpoint_every": _maybe(checkpoint, "--checkpoint"),
    }


def _maybe(value: float | None, name: str) -> int | None:
    return None if value is None else _count(value, name)


def _count(value: float, name: str) -> int:
    from onefold.core.batches import whole

    return whole(value, name)


def _trained(out: Path, environment: str) -> None:
    from onefold.rl.registry import DOOM_VARIANTS

    look = f"onefold rl watch {out} -o play.gif" if environment in DOOM_VARIANTS else f"onefold report {out}"
    print(f"Trained: {out}; look at it with: {look}")
