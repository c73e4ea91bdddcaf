"""Vector environments: many environments stepped together, in this process or in restartable worker processes."""

import itertools
import logging
import multiprocessing.util
import os
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from onefold.errors import InputError, OnefoldError
from onefold.rl.env_table import (
    RESET,
    SKIP,
    EnvFactory,
    EnvGroup,
    Spaces,
    Steps,
    inspect_spaces,
    row_dtype,
    summarise_error,
)
from onefold.rl.worker import CONTEXT, LINUX, STOP_SECONDS, DonePipe, Worker, WorkerTask, current_core

LOG = logging.getLogger(__name__)
MAX_FAILURES = 5  # of one worker in a row, without a step between them
START_SECONDS = 120.0  # the least time that a worker gets to start


@runtime_checkable
class VectorEnv(Protocol):
    """Environments that step together.

    The last step of an episode returns its last frame. After an episode ends, the next `send` resets that environment
    and ignores its action. The reset seed of episode k of environment e is a hash of (seed, e, k).
    """

    count: int
    frame: tuple[int, ...]
    dtype: np.dtype
    actions: int

    def reset(self) -> Steps:
        """Start episode 0 in every environment."""
        ...

    def send(self, actions: Int64[np.ndarray, " e"]) -> None:
        """Start a step in every environment; `collect` returns its outcome."""
        ...

    def collect(self) -> Steps:
        """Wait for the outcome of the step that `send` started."""
        ...

    def episodes(self) -> Int64[np.ndarray, " e"]:
        """Return the number of the current episode of each environment."""
        ...

    def restore(self, episodes: Int64[np.ndarray, " e"], actions: Sequence[Sequence[int]]) -> None:
        """Start these episodes and replay the actions taken in each."""
        ...

    def close(self) -> None: ...


class BaseVectorEnv(ABC):
    """The part of a vector environment that does not depend on where its environments run."""

    def __init__(self, count: int, spaces: Spaces, rows: np.ndarray) -> None:
        self.count, self.frame, self.dtype, self.actions = count, spaces.frame, spaces.dtype, spaces.actions
        self._rows = rows
        self._step = 0
        self._pending = False
        self._episodes = np.full(count, -1, np.int64)
        self._set_episodes(np.zeros(count, np.int64))

    @abstractmethod
    def _start_step(self) -> None:
        """Start the step that the rows request."""

    @abstractmethod
    def _finish_step(self) -> None:
        """Wait until all rows hold the outcome of the step."""

    @abstractmethod
    def close(self) -> None:
        """Close all environments. The object cannot be used after that."""

    def reset(self) -> Steps:
        """Start episode 0 in every environment."""
        return self._start_episodes(np.zeros(self.count, np.int64))

    def send(self, actions: Int64[np.ndarray, " e"]) -> None:
        """Start a step in every environment; `collect` returns its outcome."""
        if actions.shape != (self.count,) or actions.min() < 0 or actions.max() >= self.actions:
            raise InputError(
                f"actions: must be {self.count} integers from 0 to {self.actions - 1} (got {actions.tolist()})."
            )
        self._send(actions)

    def collect(self) -> Steps:
        """Wait for the outcome of the step that `send` started."""
        if not self._pending:
            raise InputError("collect: no step was started. Call send() first.")
        self._finish_step()
        self._pending = False
        self._episodes[:] = self._rows["episodes"]
        return Steps(*(self._rows[name].copy() for name in Steps._fields))

    def episodes(self) -> Int64[np.ndarray, " e"]:
        """Return the number of the current episode of each environment, as of the last `collect`."""
        return self._episodes.copy()

    def restore(self, episodes: Int64[np.ndarray, " e"], actions: Sequence[Sequence[int]]) -> None:
        """Start these episodes and replay the actions taken in each."""
        if not len(episodes) == len(actions) == self.count or min(episodes) < 0:
            raise InputError(f"restore: needs an episode and its actions for each of {self.count} environments.")
        steps = np.full((max(map(len, actions)), self.count), SKIP, np.int64)
        for i, replayed in enumerate(actions):
            steps[: len(replayed), i] = replayed
            if len(replayed) and not 0 <= min(replayed) <= max(replayed) < self.actions:
                raise InputError(f"restore: actions must be integers from 0 to {self.actions - 1}.")
        lost = self._start_episodes(episodes).lost
        for step in steps:
            self._send(step)
            lost |= self.collect().lost
        if lost.any():
            raise OnefoldError("restore: a worker died while episodes were replayed. Restore them again.")
        if (self.episodes() != episodes).any():
            raise InputError("restore: the actions do not belong to these episodes (an episode ended too early).")

    def _start_episodes(self, episodes: Int64[np.ndarray, " e"]) -> Steps:
        self._set_episodes(episodes)
        self._send(np.full(self.count, RESET, np.int64))
        return self.collect()

    def _set_episodes(self, episodes: Int64[np.ndarray, " e"]) -> None:
        """Store k − 1 for episode k, because a reset adds 1."""
        self._rows["episodes"] = episodes - 1

    def _send(self, actions: Int64[np.ndarray, " e"]) -> None:
        if self._pending:
            raise InputError("send: the previous step is not collected. Call collect() first.")
        self._step += 1
        self._rows["actions"], self._rows["requested"], self._rows["lost"] = actions, self._step, False
        self._pending = True
        self._start_step()


class LocalVectorEnv(BaseVectorEnv):
    """Environments that step one after the other in this process; suits small environments."""

    def __init__(self, make: EnvFactory, count: int, seed: int) -> None:
        spaces = inspect_spaces(make)
        super().__init__(count, spaces, np.zeros(count, row_dtype(spaces)))
        self._group = EnvGroup(make, self._rows, 0, seed)

    def _start_step(self) -> None:
        pass

    def _finish_step(self) -> None:
        try:
            self._group.step()
        except SystemExit as error:  # it would end the program, possibly with the exit code of success
            raise OnefoldError(f"environment: raised {summarise_error(error)}.") from error

    def close(self) -> None:
        self._group.close()


class WorkerVectorEnv(BaseVectorEnv):
    """Environments in worker processes, each with consecutive rows of a shared table.

    A worker that dies, raises or does not finish a step within `timeout` seconds is restarted. Its environments lose
    their current episodes and start the next ones; other workers are only delayed. `restarts` counts these events.
    """

    def __init__(
        self, make: EnvFactory, count: int, seed: int, workers: int | None = None, timeout: float = 60.0
    ) -> None:
        cores = sorted(os.sched_getaffinity(0)) if LINUX else [None] * (os.cpu_count() or 1)
        workers = min(count, len(cores) if workers is None else workers)
        if workers < 1 or not timeout > 0:
            raise InputError(
                f"vector environment: count, workers and timeout must be positive (got {count}, {workers}, {timeout})."
            )
        spaces = inspect_spaces(make)
        dtype = row_dtype(spaces)
        memory = CONTEXT.RawArray(
            "b", count * dtype.itemsize
        )  # anonymous shared memory, freed when the last process exits
        super().__init__(count, spaces, np.frombuffer(memory, dtype))
        edges = [count * i // workers for i in range(workers + 1)]
        self.workers, self.timeout, self.restarts = workers, timeout, 0
        # The first core depends on the process, to spread concurrent runs over cores.
        self._tasks = [
            WorkerTask(make, memory, spaces, start, stop, seed, i, cores[(os.getpid() + i) % len(cores)])
            for i, (start, stop) in enumerate(itertools.pairwise(edges))
        ]
        self._worker_of_row = [task.number for task in self._tasks for _ in range(task.start, task.stop)]
        self._failures = [0] * workers
        self._done_pipe = DonePipe()
        self._ready = select.poll()
        self._ready.register(self._done_pipe, select.POLLIN)
        self._workers: list[Worker] = []
        self._worker_of_file: dict[int, int] = {}  # by the file descriptor of its failure pipe
        self._finish = multiprocessing.util.Finalize(
            self, _stop_workers, (self._workers, self._done_pipe), exitpriority=10
        )
        try:
            self._start_workers()
        except BaseException:
            self.close()
            raise

    def _start_workers(self) -> None:
        self._rows["actions"] = RESET
        for task in self._tasks:
            self._workers.append(self._start_worker(task))
        failures = self._wait(set(range(self.workers)), max(self.timeout, START_SECONDS))
        for i, reason in failures.items():
            task = self._tasks[i]
            raise OnefoldError(f"environments {task.start} to {task.stop - 1}: do not start ({reason}).")

    def _start_worker(self, task: WorkerTask) -> Worker:
        worker = Worker(task, self._done_pipe)
        self._ready.register(worker, select.POLLIN)
        self._worker_of_file[worker.fileno()] = task.number
        return worker

    def _start_step(self) -> None:
        if not self._workers:
            raise InputError("vector environment: is closed. Make a new one.")
        # Wake the worker on this core last, else it pre-empts this process before the others are woken.
        here = current_core()
        for worker in sorted(self._workers, key=lambda worker: worker.core == here):
            worker.step()

    def _finish_step(self) -> None:
        everyone = set(range(self.workers))
        lost = self._wait(everyone.copy(), self.timeout)
        for i in everyone - lost.keys():
            self._failures[i] = 0
        while lost:
            i = min(lost)
            self._restart_worker(i, lost.pop(i))
            lost |= self._wait({i}, max(self.timeout, START_SECONDS))  # other workers may fail meanwhile

    def _wait(self, waiting: set[int], seconds: float) -> dict[int, str]:
        """Wait until these workers have finished the step; return the reason for each that has failed."""
        deadline, done, lost = time.monotonic() + seconds, set[int](), dict[int, str]()
        while waiting:
            ready = self._ready.poll(1000 * max(0.0, deadline - time.monotonic()))
            for file, _ in ready:
                if file == self._done_pipe.fileno():
                    done |= self._done_pipe.read()
                else:
                    i = self._worker_of_file[file]
                    self._ready.unregister(file)
                    lost[i] = self._workers[i].read_failure()
                    waiting.discard(i)
            if waiting <= done or not ready:
                # `done` may hold a notice of the killed worker, so check the rows.
                waiting -= done - self._incomplete_workers()
            if not ready:
                for i in waiting:
                    self._ready.unregister(self._workers[i])
                return lost | dict.fromkeys(waiting, f"no response within {seconds:g} s")
        return lost

    def _incomplete_workers(self) -> set[int]:
        """Return the workers with rows that do not hold the outcome of the current step."""
        return {self._worker_of_row[k] for k in np.flatnonzero(self._rows["completed"] != self._step)}

    def _restart_worker(self, i: int, reason: str) -> None:
        """Start a new worker, whose environments begin their next episodes."""
        self._workers[i].kill()
        self._failures[i] += 1
        if self._failures[i] == MAX_FAILURES:
            self.close()
            raise OnefoldError(f"worker {i}: failed {MAX_FAILURES} times in a row ({reason}). Check the environment.")
        LOG.warning("worker %d of %d: restarted (%s)", i, len(self._workers), reason)
        self.restarts += 1
        rows = self._rows[self._tasks[i].start : self._tasks[i].stop]
        rows["actions"], rows["completed"], rows["lost"] = RESET, 0, True
        self._workers[i] = self._start_worker(self._tasks[i])

    def close(self) -> None:
        self._finish()


def _stop_workers(workers: list[Worker], done_pipe: DonePipe) -> None:
    """Ask all workers to stop, then wait for them together. Runs once: on `close`, at exit or on deletion."""
    for worker in workers:
        worker.request_stop()
    deadline = time.monotonic() + STOP_SECONDS
    for worker in workers:
        worker.stop(deadline)
    workers.clear()
    done_pipe.close()
