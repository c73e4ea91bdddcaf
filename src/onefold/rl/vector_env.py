"""Many environments at once: in this process, or in worker processes that may die without harm."""

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
START_SECONDS = 120.0  # seconds that a worker has to start in, at least


@runtime_checkable
class VectorEnv(Protocol):
    """What training needs. An episode's last step shows its last frame; the next action is ignored and the next episode
    begins. Episode k of environment e is the same in every run of one seed, whatever was before and whoever runs it."""

    count: int
    frame: tuple[int, ...]
    dtype: np.dtype
    actions: int

    def reset(self) -> Steps:
        """Begin episode 0 everywhere."""
        ...

    def send(self, actions: Int64[np.ndarray, " e"]) -> None:
        """Have every environment take a step; `collect` has the answers."""
        ...

    def collect(self) -> Steps: ...

    def episodes(self) -> Int64[np.ndarray, " e"]:
        """The number of the episode that each environment is in."""
        ...

    def restore(self, episodes: Int64[np.ndarray, " e"], actions: Sequence[Sequence[int]]) -> None:
        """Be again where environments were that had begun these episodes and then been sent these actions."""
        ...

    def close(self) -> None: ...


class BaseVectorEnv(ABC):
    """What any group of environments has in common; how the answers come is left open."""

    def __init__(self, count: int, form: Spaces, rows: np.ndarray) -> None:
        self.count, self.frame, self.dtype, self.actions = count, form.frame, form.dtype, form.actions
        self._rows = rows
        self._step = 0
        self._waiting = False
        self._episodes = np.full(count, -1, np.int64)
        self._restart(np.zeros(count, np.int64))

    @abstractmethod
    def _ask(self) -> None:
        """Let the work begin that the rows ask for."""

    @abstractmethod
    def _hear(self) -> None:
        """Wait until all rows are answered."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Nothing can be asked after that."""

    def reset(self) -> Steps:
        """Begin episode 0 everywhere."""
        return self._begin(np.zeros(self.count, np.int64))

    def send(self, actions: Int64[np.ndarray, " e"]) -> None:
        """Have every environment take a step; `collect` has the answers."""
        if actions.shape != (self.count,) or actions.min() < 0 or actions.max() >= self.actions:
            raise InputError(f"needs {self.count} actions from 0 to {self.actions - 1}, not {actions.tolist()}")
        self._send(actions)

    def collect(self) -> Steps:
        """The answers to what was sent."""
        if not self._waiting:
            raise InputError("nothing was sent that could be collected")
        self._hear()
        self._waiting = False
        self._episodes[:] = self._rows["episodes"]
        return Steps(*(self._rows[name].copy() for name in Steps._fields))

    def episodes(self) -> Int64[np.ndarray, " e"]:
        """The number of the episode that each environment is in, as of the last answers."""
        return self._episodes.copy()

    def restore(self, episodes: Int64[np.ndarray, " e"], actions: Sequence[Sequence[int]]) -> None:
        """Be again where environments were that had begun these episodes and then been sent these actions."""
        if not len(episodes) == len(actions) == self.count or min(episodes) < 0:
            raise InputError(f"needs an episode and its actions for each of {self.count} environments")
        steps = np.full((max(map(len, actions)), self.count), SKIP, np.int64)
        for i, taken in enumerate(actions):
            steps[: len(taken), i] = taken
            if len(taken) and not 0 <= min(taken) <= max(taken) < self.actions:
                raise InputError(f"actions are numbers from 0 to {self.actions - 1}")
        lost = self._begin(episodes).lost
        for step in steps:
            self._send(step)
            lost |= self.collect().lost
        if lost.any():
            raise OnefoldError("a worker was lost while its episodes were taken up again: restore them once more")
        if (self.episodes() != episodes).any():
            raise InputError("the actions do not belong to these episodes: one of them ends before its last action")

    def _begin(self, episodes: Int64[np.ndarray, " e"]) -> Steps:
        self._restart(episodes)
        self._send(np.full(self.count, RESET, np.int64))
        return self.collect()

    def _restart(self, episodes: Int64[np.ndarray, " e"]) -> None:
        self._rows["episodes"] = episodes - 1

    def _send(self, actions: Int64[np.ndarray, " e"]) -> None:
        if self._waiting:
            raise InputError("what was sent before has to be collected first")
        self._step += 1
        self._rows["actions"], self._rows["asked"], self._rows["lost"] = actions, self._step, False
        self._waiting = True
        self._ask()


class LocalVectorEnv(BaseVectorEnv):
    """All environments in this process, one after the other: for small worlds."""

    def __init__(self, make: EnvFactory, count: int, seed: int) -> None:
        found = inspect_spaces(make)
        super().__init__(count, found, np.zeros(count, row_dtype(found)))
        self._group = EnvGroup(make, self._rows, 0, seed)

    def _ask(self) -> None:
        pass

    def _hear(self) -> None:
        try:
            self._group.answer()
        except SystemExit as error:  # it would end the whole program, perhaps as if it had been done
            raise OnefoldError(f"an environment raised {summarise_error(error)}") from error

    def close(self) -> None:
        self._group.close()


class WorkerVectorEnv(BaseVectorEnv):
    """Environments in worker processes, a stretch of the table each; all of them answer, or are replaced.

    A worker that dies, raises or gives no answer for `timeout` seconds loses what its environments were doing. A new
    one begins their next episodes; the others notice nothing but the delay. `replaced` counts them.
    """

    def __init__(
        self, make: EnvFactory, count: int, seed: int, workers: int | None = None, timeout: float = 60.0
    ) -> None:
        cores = sorted(os.sched_getaffinity(0)) if LINUX else [None] * (os.cpu_count() or 1)
        workers = min(count, len(cores) if workers is None else workers)
        if workers < 1 or not timeout > 0:
            raise InputError(f"needs environments, workers and time: not {count}, {workers} and {timeout}")
        found = inspect_spaces(make)
        memory = CONTEXT.RawArray("b", count * row_dtype(found).itemsize)  # has no name: it goes with its last user
        super().__init__(count, found, np.frombuffer(memory, row_dtype(found)))
        edges = [count * i // workers for i in range(workers + 1)]
        self.workers, self.timeout, self.replaced = workers, timeout, 0
        self._tasks = [
            WorkerTask(make, memory, found, start, stop, seed, i, cores[(os.getpid() + i) % len(cores)])
            for i, (start, stop) in enumerate(itertools.pairwise(edges))
        ]
        self._whose = [task.number for task in self._tasks for _ in range(task.start, task.stop)]
        self._failures = [0] * workers
        self._bell = DonePipe()
        self._ready = select.poll()
        self._ready.register(self._bell, select.POLLIN)
        self._staff: list[Worker] = []
        self._numbers: dict[int, int] = {}  # of workers, by what tells of their end
        self._finish = multiprocessing.util.Finalize(self, _stop_workers, (self._staff, self._bell), exitpriority=10)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._rows["actions"] = RESET
        for task in self._tasks:
            self._staff.append(self._hire(task))
        for i, why in self._wait(set(range(self.workers)), max(self.timeout, START_SECONDS)).items():
            raise OnefoldError(f"environments {self._tasks[i].start} to {self._tasks[i].stop - 1} do not start: {why}")

    def _hire(self, task: WorkerTask) -> Worker:
        worker = Worker(task, self._bell)
        self._ready.register(worker, select.POLLIN)
        self._numbers[worker.fileno()] = task.number
        return worker

    def _ask(self) -> None:
        if not self._staff:
            raise InputError("the workers have been let go: these environments are closed")
        here = (
            current_core()
        )  # whose worker comes last: as it is woken it takes the core, and the others would have to wait
        for worker in sorted(self._staff, key=lambda worker: worker.core == here):
            worker.go()

    def _hear(self) -> None:
        everyone = set(range(self.workers))
        lost = self._wait(everyone.copy(), self.timeout)
        for i in everyone - lost.keys():
            self._failures[i] = 0
        while lost:
            i = min(lost)
            self._replace(i, lost.pop(i))
            lost |= self._wait({i}, max(self.timeout, START_SECONDS))  # which may tell of others, too

    def _wait(self, left: set[int], seconds: float) -> dict[int, str]:
        """Until these workers have answered their rows; those that never will, and why."""
        until, rung, lost = time.monotonic() + seconds, set[int](), dict[int, str]()
        while left:
            ready = self._ready.poll(1000 * max(0.0, until - time.monotonic()))
            for number, _ in ready:
                if number == self._bell.fileno():
                    rung |= self._bell.rung()
                else:
                    i = self._numbers[number]
                    self._ready.unregister(number)
                    lost[i] = self._staff[i].last_words()
                    left.discard(i)
            if left <= rung or not ready:  # one may have rung and been replaced since: then its rows are not answered
                left -= rung - {self._whose[k] for k in np.flatnonzero(self._rows["answered"] != self._step)}
            if not ready:
                for i in left:
                    self._ready.unregister(self._staff[i])
                return lost | dict.fromkeys(left, "gave no answer in time")
        return lost

    def _replace(self, i: int, why: str) -> None:
        """Have the next episodes begun in a new worker."""
        self._staff[i].kill()
        self._failures[i] += 1
        if self._failures[i] == MAX_FAILURES:
            self.close()
            raise OnefoldError(f"a worker was lost {MAX_FAILURES} times in a row, at last because: {why}")
        LOG.warning("worker %d of %d is replaced: %s", i, len(self._staff), why)
        self.replaced += 1
        rows = self._rows[self._tasks[i].start : self._tasks[i].stop]
        rows["actions"], rows["answered"], rows["lost"] = RESET, 0, True
        self._staff[i] = self._hire(self._tasks[i])

    def close(self) -> None:
        self._finish()


def _stop_workers(staff: list[Worker], bell: DonePipe) -> None:
    """Ask all to leave, then wait for them together; called once, however the end comes."""
    for worker in staff:
        worker.dismiss()
    until = time.monotonic() + STOP_SECONDS
    for worker in staff:
        worker.bury(until)
    staff.clear()
    bell.close()
