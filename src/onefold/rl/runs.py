"""Training runs: progress, learning curves, checkpoints, and resuming after a stop or a crash."""

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

from onefold.core import storage
from onefold.core.batches import pick_device
from onefold.core.provenance import provenance
from onefold.core.runtime import interruptible
from onefold.core.schema import to_json
from onefold.core.storage import under_prefix, with_prefix
from onefold.errors import FileError, InputError, warn
from onefold.rl.compression import compress
from onefold.rl.learner import Learner
from onefold.rl.loop import GOAL_REWARD, LoopStep, TrainingLoop
from onefold.rl.play import single_thread
from onefold.rl.registry import find_environment, has_goal
from onefold.rl.run_folder import EPISODES, NETWORKS, NETWORKS_KIND, PROGRESS, PROGRESS_COLUMNS, RunFolder
from onefold.rl.settings import Run
from onefold.rl.vector_env import LocalVectorEnv, VectorEnv, WorkerVectorEnv
from onefold.rl.visit_counts import VisitCounts

RECENT_EPISODES = 100  # episodes whose mean return and success are shown
REPORTS = 500  # rows of progress.csv in a run
VISIT_REPORTS = 20  # times that visits.json is written in a run
MAX_CHECKPOINT_FRAMES = 1_000_000  # between two checkpoints, unless set otherwise
CHECKPOINT_SECONDS = 900.0  # between two checkpoints, unless their frames are set
REPORT_SECONDS = 20.0  # the longest time without a row of progress
COMPILE_FRAMES = 500_000  # shorter runs do not regain the time of compilation


class TrainingRun:
    """A run in progress: its environments, learner and loop, and the folder that it writes to."""

    def __init__(self, run: Run, folder: RunFolder, device: torch.device, workers: int | None) -> None:
        spec = find_environment(run.environment, run.frames)
        self.run, self.folder = run, folder
        self.environments: VectorEnv = (
            WorkerVectorEnv(spec.make, run.num_envs, run.seed, workers=workers)
            if spec.in_workers
            else LocalVectorEnv(spec.make, run.num_envs, run.seed)
        )
        if device.type == "cuda":
            importlib.import_module("onefold.rl.fused")  # registers the CUDA kernels
        self.learner = Learner(
            run.agent, run.learning, environments=run.num_envs, frame=self.environments.frame,
            dtype=torch.from_numpy(np.zeros(0, self.environments.dtype)).dtype, actions=self.environments.actions,
            seed=run.seed, device=device, compiled=device.type == "cuda" and run.frames >= COMPILE_FRAMES,
        )  # fmt: skip
        goal = GOAL_REWARD if has_goal(run.environment) else math.inf
        self.loop = TrainingLoop(self.learner, self.environments, run.frames, goal)
        self.visits = VisitCounts(run.environment, run.frames)
        self.recent: deque[tuple[float, bool, int]] = deque(maxlen=RECENT_EPISODES)
        """Return, success and length of the last episodes."""
        self.episodes, self.seconds = 0, 0.0
        self.earlier_restarts = 0
        """Restarts of workers before the run was resumed."""

    def restore(self) -> None:
        """Continue from the checkpoint, and remove what was recorded after it."""
        tensors, frames = self.folder.load_checkpoint(self.run)
        try:
            parts = {key: under_prefix(key, tensors) for key in ("replay", "learner", "loop", "run")}
            self.learner.replay.restore(parts["replay"])
            self.learner.restore(parts["learner"])
            self.loop.restore(parts["loop"])
            self.visits.restore(parts["run"]["visits"].numpy(), frames)
            self.recent.extend((a, bool(b), int(c)) for a, b, c in parts["run"]["recent"].tolist())
            self.episodes, self.seconds = int(parts["run"]["episodes"]), float(parts["run"]["seconds"])
            self.earlier_restarts = int(parts["run"]["replaced"])
        except FileError as error:
            raise FileError(f"{self.folder.path}: {error}") from None
        except (KeyError, RuntimeError, ValueError, IndexError) as error:
            raise FileError(
                f"{self.folder.path}: the checkpoint is not of this run ({type(error).__name__})."
            ) from None
        self.folder.truncate(self.loop.frames)
        self.folder.update_settings(self.run)
        self._save_networks()  # the run may have been killed between the two files

    def save_checkpoint(self) -> None:
        """Write the checkpoint and the networks; raise TrainingError before that if the loss is NaN or infinite."""
        self.learner.check()
        counters = {
            "visits": torch.from_numpy(self.visits.counts),
            "recent": torch.tensor(list(self.recent), dtype=torch.float64).reshape(-1, 3),
            "episodes": torch.tensor(self.episodes),
            "replaced": torch.tensor(self._worker_restarts()),
            "seconds": torch.tensor(self.seconds, dtype=torch.float64),
        }
        tensors = {
            **with_prefix("replay", self.learner.replay.tensors()), **with_prefix("learner", self.learner.tensors()),
            **with_prefix("run", counters), **with_prefix("loop", self.loop.tensors()),
        }  # fmt: skip
        self.folder.save_checkpoint(tensors, self.run)
        self._save_networks()

    def train(self, checkpoint_every: int | None) -> Iterator[dict[str, Any]]:
        """Train to the end, and yield rows of progress; the first one before any training.

        On KeyboardInterrupt, save a checkpoint.
        """
        count, total, started, seconds_before = self.run.num_envs, self.run.frames, time.monotonic(), self.seconds
        report_every, visits_every = max(count, total // REPORTS), max(count, total // VISIT_REPORTS)
        checkpoint_seconds = math.inf if checkpoint_every else CHECKPOINT_SECONDS
        checkpoint_every = checkpoint_every or max(1, min(MAX_CHECKPOINT_FRAMES, total // 4))
        reported_frames, reported, saved = self.loop.frames, started, started
        first = {"frames": reported_frames, "seconds": seconds_before, "episodes": self.episodes}
        yield dict.fromkeys(PROGRESS_COLUMNS, math.nan) | first | {"worker_restarts": self._worker_restarts()}
        with _tensorboard(self.folder.path, reported_frames) as add_to_tensorboard, interruptible() as interrupted:
            for step in self.loop:
                self._record(step)
                now = time.monotonic()
                self.seconds = seconds_before + now - started
                ended = step.frames >= total
                if ended or step.frames % report_every < count or now > reported + REPORT_SECONDS:
                    speed = (step.frames - reported_frames) / max(1e-9, now - reported)
                    reported_frames, reported = step.frames, now
                    row = self._progress_row(step.frames, speed)
                    self.folder.append(PROGRESS, [[row[name] for name in PROGRESS_COLUMNS]])
                    add_to_tensorboard(row)
                    yield row
                if step.frames % visits_every < count:
                    self.folder.save_visits(self.visits)
                is_due = step.frames % checkpoint_every < count or now > saved + checkpoint_seconds
                if ended or is_due or interrupted():
                    self.save_checkpoint()
                    saved = time.monotonic()
                if interrupted():
                    raise KeyboardInterrupt

    def _save_networks(self) -> None:
        """Write the networks in half precision, and the counts of visits."""
        header = {"run": to_json(self.run), "frames": self.loop.frames}
        storage.save(self.folder.path / NETWORKS, NETWORKS_KIND, compress(self.learner.networks()), header)
        self.folder.save_visits(self.visits)

    def _record(self, step: LoopStep) -> None:
        """Count visits, and write the episodes that have ended."""
        self.visits.add(step.frames, step.steps.positions)
        if step.ended:
            self.episodes += len(step.ended)
            self.recent.extend((e.reward, e.reached, e.length) for e in step.ended)
            self.folder.append(EPISODES, [(*e[:3], f"{e.reward:.6g}", int(e.reached)) for e in step.ended])

    def _progress_row(self, frames: int, speed: float) -> dict[str, Any]:
        """Return a row of progress.csv."""
        means = [float(np.mean(part)) for part in zip(*self.recent, strict=True)] or [math.nan] * 3
        row: dict[str, Any] = dict.fromkeys(PROGRESS_COLUMNS, 0.0)
        success = means[1] if has_goal(self.run.environment) else math.nan
        row |= {"return": means[0], "success": success, "length": means[2], "frames_per_second": speed}
        row |= {"bonus_std": float(self.learner.bonus_moments.std()), "seconds": self.seconds} | self.learner.report()
        row = {name: float(f"{value:.6g}") for name, value in row.items()}
        return row | {"frames": frames, "episodes": self.episodes, "worker_restarts": self._worker_restarts()}

    def _worker_restarts(self) -> int:
        """Return the restarts of workers since the run began."""
        return self.earlier_restarts + getattr(self.environments, "restarts", 0)


def train(
    run: Run, out: str | Path, *, device: str = "auto", workers: int | None = None, checkpoint_every: int | None = None
) -> Iterator[dict[str, Any]]:
    """Train a new run in a new folder; iterate over the rows of progress to train it.

    Args:
        run: The run, from `make_run`.
        out: Folder of the run. It must not exist, or be empty.
        device: "auto", "cpu", "cuda" or "cuda:1". With "auto", a GPU if there is one.
        workers: Number of processes that run MyWayHome. By default one per core. Other environments need none.
        checkpoint_every: Frames between two checkpoints. By default a quarter of the run and at most a million, and at
            least one checkpoint every 15 minutes.

    Yields:
        A row of progress about every 500th of the run: a value for each column of progress.csv. The first row comes
        before any training.

    Raises:
        InputError: The folder is not empty, another process trains in it, or the environment cannot be trained on.
        TrainingError: The loss is NaN or infinite; the last checkpoint is intact.
    """
    folder, torch_device = RunFolder(Path(out)), pick_device(device)
    folder.check_new()
    with _open_training(run, folder, torch_device, workers) as training, folder.lock():
        folder.check_new()
        folder.create(run, provenance(torch_device))
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
    """Continue a run from its last checkpoint; iterate over the rows of progress to train it.

    Args:
        out: Folder of the run.
        frames: New length of the run, to train it longer. Schedules keep the lengths in settings.json. By default the
            length in settings.json.
        device: "auto", "cpu", "cuda" or "cuda:1", of the same kind as before.
        workers: Number of processes that run MyWayHome. By default one per core.
        checkpoint_every: Frames between two checkpoints, as for `train`.

    Yields:
        Rows of progress, as `train` does.

    Raises:
        InputError: The folder holds no run or no checkpoint, another process trains in it, or `frames` is less than
            before.
        FileError: The checkpoint is damaged or belongs to another run.
        TrainingError: The loss is NaN or infinite; the last checkpoint is intact.
    """
    folder, torch_device = RunFolder(Path(out)), pick_device(device)
    run = extend_run(folder.read_run(), frames)
    if not folder.is_unstarted():
        folder.check_checkpoint()
    with folder.lock(), _open_training(run, folder, torch_device, workers) as training:
        if folder.is_unstarted():
            folder.create(run, provenance(torch_device))
            training.save_checkpoint()
        else:
            training.restore()
        yield from training.train(checkpoint_every)


def extend_run(run: Run, frames: int | None) -> Run:
    """Return the run with this number of frames; raise InputError if it has more."""
    if frames is None:
        return run
    if frames < run.frames:
        raise InputError(
            f"the run has {run.frames:,} (got {frames:,})", argument="frames", hint="Give more to train it longer."
        )
    return replace(run, frames=frames)


@contextlib.contextmanager
def _open_training(run: Run, folder: RunFolder, device: torch.device, workers: int | None) -> Iterator[TrainingRun]:
    """Make the environments and the learner of a run, and close them at the end."""
    training = TrainingRun(run, folder, device, workers)
    is_local = isinstance(training.environments, LocalVectorEnv)
    try:
        with single_thread() if is_local else contextlib.nullcontext():
            yield training
    finally:
        training.environments.close()
        training.learner.close()


@contextlib.contextmanager
def _tensorboard(path: Path, frames: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that writes a row of progress for TensorBoard, if TensorBoard is installed.

    Rows after `frames` from an earlier run are removed. If a file cannot be written, warn once and write no more.
    """
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
            disable(error)

    def disable(error: OSError) -> None:
        warn(f"TensorBoard: cannot write its files ({error.strerror}). The run continues without it.")
        writers.clear()

    previous_hook = threading.excepthook
    # TensorBoard writes in a thread of its own, whose OSError would print a traceback.
    threading.excepthook = lambda args: None if isinstance(args.exc_value, OSError) else previous_hook(args)
    try:
        writers.append(SummaryWriter(str(path), purge_step=frames + 1))
    except OSError as error:
        disable(error)
    try:
        yield add
    finally:
        with contextlib.suppress(OSError):
            for writer in writers:
                writer.close()
        threading.excepthook = previous_hook
