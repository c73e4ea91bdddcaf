"""Training from beginning to end: progress, curves, visited places, checkpoints, and going on after a kill."""

import contextlib
import importlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onefold.core import storage
from onefold.core.batches import pick_device
from onefold.core.provenance import provenance
from onefold.core.signals import interruptible
from onefold.errors import FileError, InputError, warn
from onefold.rl.compression import compress
from onefold.rl.learner import Learner
from onefold.rl.loop import GOAL_REWARD, LoopStep, TrainingLoop
from onefold.rl.play import single_thread
from onefold.rl.registry import find_environment, has_goal
from onefold.rl.run_folder import EPISODES, NETWORKS, NETWORKS_KIND, PROGRESS, PROGRESS_COLUMNS, RunFolder
from onefold.rl.settings import Run, plain
from onefold.rl.vector_env import LocalVectorEnv, VectorEnv, WorkerVectorEnv
from onefold.rl.visit_counts import VisitCounts

RECENT_EPISODES = 100  # episodes that returns and successes are means over
REPORTS = 500  # rows of progress in a run
MAPS = 20  # times that the map of visited places is written in a run
MAX_CHECKPOINT_FRAMES = 1_000_000  # frames between two checkpoints
CHECKPOINT_SECONDS = 900.0  # seconds between two checkpoints, at most, unless it is said how many frames
REPORT_SECONDS = 20.0  # seconds without a row of progress, at most
COMPILE_FRAMES = 500_000  # frames: below, compiling costs more than it saves


class TrainingRun:
    """A run under way, in its folder."""

    def __init__(self, run: Run, folder: RunFolder, device: torch.device, workers: int | None) -> None:
        place = find_environment(run.environment, run.frames)
        self.run, self.folder = run, folder
        self.environments: VectorEnv = (
            WorkerVectorEnv(place.make, run.num_envs, run.seed, workers=workers)
            if place.processes
            else LocalVectorEnv(place.make, run.num_envs, run.seed)
        )
        if device.type == "cuda":
            importlib.import_module("onefold.rl.fused")  # registers the CUDA kernels
        self.learner = Learner(
            run.agent, run.learning, environments=run.num_envs, frame=self.environments.frame,
            dtype=torch.from_numpy(np.zeros(0, self.environments.dtype)).dtype, actions=self.environments.actions,
            seed=run.seed, device=device, compiled=device.type == "cuda" and run.frames >= COMPILE_FRAMES,
        )  # fmt: skip
        self.loop = TrainingLoop(
            self.learner, self.environments, run.frames, GOAL_REWARD if has_goal(run.environment) else math.inf
        )
        self.visits = VisitCounts(run.environment, run.frames)
        self.recent: deque[tuple[float, bool, int]] = deque(maxlen=RECENT_EPISODES)
        self.episodes, self.seconds, self.replaced = 0, 0.0, 0

    def restore(self) -> None:
        """Go on from the last checkpoint; what was written after it is forgotten."""
        tensors, frames = self.folder.load_checkpoint(self.run)
        try:
            parts = {key: _under(tensors, key) for key in ("replay", "learner", "loop", "run")}
            self.learner.replay.restore(parts["replay"])
            self.learner.restore(parts["learner"])
            self.loop.restore(parts["loop"])
            self.visits.restore(parts["run"]["visits"].numpy(), frames)
            self.recent.extend((a, bool(b), int(c)) for a, b, c in parts["run"]["recent"].tolist())
            self.episodes, self.seconds = int(parts["run"]["episodes"]), float(parts["run"]["seconds"])
            self.replaced = int(parts["run"]["replaced"])
        except FileError as error:
            raise FileError(f"{self.folder.path}: {error}") from None
        except (KeyError, RuntimeError, ValueError, IndexError) as error:
            raise FileError(f"{self.folder.path}: its checkpoint is not of this run ({type(error).__name__})") from None
        self.folder.truncate(self.loop.frames)
        self.folder.update_settings(self.run)
        self._save_networks()  # it may have been killed between the two files

    def save_checkpoint(self) -> None:
        """Write a checkpoint, and the networks alone beside it; a good one is never replaced by one with NaN in it."""
        self.learner.check()
        own = {
            "visits": torch.from_numpy(self.visits.counts),
            "recent": torch.tensor(list(self.recent), dtype=torch.float64).reshape(-1, 3),
            "episodes": torch.tensor(self.episodes),
            "replaced": torch.tensor(self._replaced()),
            "seconds": torch.tensor(self.seconds, dtype=torch.float64),
        }
        parts = {"replay": self.learner.replay.tensors(), "learner": self.learner.tensors(), "run": own}
        parts["loop"] = self.loop.tensors()
        self.folder.save_checkpoint(
            {f"{key}.{name}": t for key, part in parts.items() for name, t in part.items()}, self.run
        )
        self._save_networks()

    def train(self, checkpoint_every: int | None) -> Iterator[dict[str, Any]]:
        """Train to the end; a row of progress now and then, the first when all is ready. Who interrupts it is left a
        checkpoint."""
        count, started, before = self.run.num_envs, time.monotonic(), self.seconds
        report = max(count, self.run.frames // REPORTS)
        safe = math.inf if checkpoint_every else CHECKPOINT_SECONDS
        every = checkpoint_every or max(1, min(MAX_CHECKPOINT_FRAMES, self.run.frames // 4))
        last, at, kept = self.loop.frames, started, started
        nothing = dict.fromkeys(PROGRESS_COLUMNS, float("nan"))
        yield nothing | {
            "frames": last,
            "seconds": before,
            "episodes": self.episodes,
            "worker_restarts": self._replaced(),
        }
        with _tensorboard(self.folder.path, last) as board, interruptible() as interrupted:
            for moment in self.loop:
                self._note(moment)
                now = time.monotonic()
                self.seconds = before + now - started
                done = moment.frames >= self.run.frames
                if done or moment.frames % report < count or now > at + REPORT_SECONDS:
                    speed = (moment.frames - last) / max(1e-9, now - at)
                    last, at = moment.frames, now
                    row = self._row(moment.frames, speed)
                    self.folder.append(PROGRESS, [[row[name] for name in PROGRESS_COLUMNS]])
                    board(row)
                    yield row
                if moment.frames % max(count, self.run.frames // MAPS) < count:
                    self.folder.save_visits(self.visits)
                if done or moment.frames % every < count or now > kept + safe or interrupted():
                    self.save_checkpoint()
                    kept = time.monotonic()
                if interrupted():
                    raise KeyboardInterrupt

    def _save_networks(self) -> None:
        light = compress(self.learner.networks())
        storage.save(
            self.folder.path / NETWORKS, NETWORKS_KIND, light, {"run": plain(self.run), "frames": self.loop.frames}
        )
        self.folder.save_visits(self.visits)

    def _note(self, moment: LoopStep) -> None:
        self.visits.add(moment.frames, moment.steps.positions)
        if moment.ended:
            self.episodes += len(moment.ended)
            self.recent.extend((e.reward, e.reached, e.length) for e in moment.ended)
            self.folder.append(EPISODES, [(*e[:3], f"{e.reward:.6g}", int(e.reached)) for e in moment.ended])

    def _row(self, frames: int, speed: float) -> dict[str, Any]:
        means = [float(np.mean(part)) for part in zip(*self.recent, strict=True)] or [float("nan")] * 3
        row: dict[str, Any] = dict.fromkeys(PROGRESS_COLUMNS, 0.0)
        reached = means[1] if has_goal(self.run.environment) else float("nan")
        row |= {"return": means[0], "success": reached, "length": means[2], "frames_per_second": speed}
        row |= {"bonus_std": float(self.learner.bonus_moments.std()), "seconds": self.seconds} | self.learner.report()
        row = {name: float(f"{value:.6g}") for name, value in row.items()}
        return row | {"frames": frames, "episodes": self.episodes, "worker_restarts": self._replaced()}

    def _replaced(self) -> int:
        """Workers, in this process and in those before it."""
        return self.replaced + getattr(self.environments, "replaced", 0)


def train(
    run: Run, out: str | Path, *, device: str = "auto", workers: int | None = None, checkpoint_every: int | None = None
) -> Iterator[dict[str, Any]]:
    """A new run into a new folder. Iterate it: rows of progress come by. `every` is the frames between checkpoints; if
    it is not said, a quarter of them all, at most a million, and at most what a quarter of an hour makes."""
    folder, place = RunFolder(Path(out)), pick_device(device)
    folder.check_new()
    with _open_training(run, folder, place, workers) as training, folder.lock():
        folder.check_new()
        folder.create(run, provenance(place))
        training.save_checkpoint()
        yield from training.train(checkpoint_every)


def resume(
    out: str | Path,
    *,
    frames: int | None = None,
    device: str = "auto",
    workers: int | None = None,
    checkpoint_every: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Go on with a run that was stopped or killed, even before it began. With `frames`, train it for so many in all,
    more than it was to make; schedules keep the lengths that settings.json has."""
    folder, place = RunFolder(Path(out)), pick_device(device)
    run = extend_run(folder.read_run(), frames)
    if not folder.is_unstarted():
        folder.check_checkpoint()
    with folder.lock(), _open_training(run, folder, place, workers) as training:
        if folder.is_unstarted():
            folder.create(run, provenance(place))
            training.save_checkpoint()
        else:
            training.restore()
        yield from training.train(checkpoint_every)


def extend_run(run: Run, frames: int | None) -> Run:
    """Return the run with so many frames in all; fewer than it has are refused."""
    if frames is None:
        return run
    if frames < run.frames:
        raise InputError(f"frames: the run has {run.frames:,} (got {frames:,}). Give more to train it longer.")
    return replace(run, frames=frames)


@contextlib.contextmanager
def _open_training(run: Run, folder: RunFolder, device: torch.device, workers: int | None) -> Iterator[TrainingRun]:
    training = TrainingRun(run, folder, device, workers)
    small = isinstance(training.environments, LocalVectorEnv)
    try:
        with single_thread() if small else contextlib.nullcontext():
            yield training
    finally:
        training.environments.close()
        training.learner.close()


@contextlib.contextmanager
def _tensorboard(path: Path, frames: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Takes rows of progress for TensorBoard, where it is installed; what it has of later frames is forgotten. If its
    files cannot be written the run goes on without it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        yield lambda _: None
        return
    writers: list[Any] = []

    def add(row: dict[str, Any]) -> None:
        try:
            for name in PROGRESS_COLUMNS[1:] if writers else ():
                writers[0].add_scalar(name, row[name], row["frames"])
        except OSError as error:
            give_up(error)

    def give_up(error: OSError) -> None:
        warn(f"TensorBoard gets no more of this run ({error.strerror}), which goes on without it")
        writers.clear()

    before = threading.excepthook
    threading.excepthook = lambda what: None if isinstance(what.exc_value, OSError) else before(what)  # of its thread
    try:
        writers.append(SummaryWriter(str(path), purge_step=frames + 1))
    except OSError as error:
        give_up(error)
    try:
        yield add
    finally:
        with contextlib.suppress(OSError):
            for writer in writers:
                writer.close()
        threading.excepthook = before


def _under(tensors: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{key}."): tensor for name, tensor in tensors.items() if name.startswith(f"{key}.")}
