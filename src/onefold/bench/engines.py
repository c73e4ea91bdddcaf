"""Where units run: here, in processes of this machine, or on a Ray cluster. An engine is a map over units."""

import contextlib
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple, TypeAlias

from onefold.core.batches import whole
from onefold.core.memory import ran_out
from onefold.errors import InputError, MissingExtraError, OnefoldError

Engine: TypeAlias = Literal["serial", "processes", "ray"]
Work: TypeAlias = Callable[[Any], dict[str, Any]]
"""A function of a module, of one job: it has to be found in another process."""
CONTEXT = multiprocessing.get_context("spawn")
PARTING = 120.0  # seconds in which a job that is stopped may save what it has
CONNECTING = 30.0  # seconds in which a Ray cluster has to answer
CONNECT = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False)"
RETRIES = 5  # of a job whose node or process is lost; one that dies each time must not be begun for ever


class Done(NamedTuple):
    """A job that ended: its result, or why there is none."""

    place: int
    result: dict[str, Any] | None
    reason: str = ""
    trace: str = ""


def attempt(work: Work, index: int, job: Any) -> Done:
    """Do it; a failure is an answer, too."""
    try:
        return Done(index, work(job))
    except OnefoldError as error:
        return Done(index, None, str(error))
    except Exception as error:
        if ran_out(error):
            return Done(index, None, "there was not enough memory", traceback.format_exc())
        return Done(index, None, f"{type(error).__name__}: {error}".splitlines()[0][:300], traceback.format_exc())


def serial(work: Work, jobs: Sequence[Any], workers: int | None = None) -> Iterator[Done]:
    """One after another, here."""
    del workers
    for index, job in enumerate(jobs):
        yield attempt(work, index, job)


def processes(work: Work, jobs: Sequence[Any], workers: int | None = None) -> Iterator[Done]:
    """In several processes of this machine, with cores of their own. One that dies costs its job, and no other.

    Who stops before the end has them stopped as by Ctrl-C, and waits for what they have to save.
    """
    count, waiting = min(_checked(workers) or default_workers(), len(jobs)), deque(enumerate(jobs))
    staff: list[_Process] = []
    finish = multiprocessing.util.Finalize(None, _dismiss, (staff,), exitpriority=10)
    try:
        for place in range(count):
            staff.append(_Process(work, _share(place, count)))
            staff[-1].give(*waiting.popleft())
        busy: dict[Any, _Process]
        while busy := {process.pipe: process for process in staff if process.index is not None}:
            for pipe in multiprocessing.connection.wait(list(busy)):
                process = busy[pipe]
                done = process.answer()
                if waiting and process.pipe.closed:
                    place = staff.index(process)
                    process = staff[place] = _Process(work, _share(place, count))
                if waiting:
                    process.give(*waiting.popleft())
                yield done
    finally:
        finish()


class _Process:
    """Does one job after another. `index` is that of the one under way."""

    def __init__(self, work: Work, cores: list[int]) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(work, theirs, cores))
        self._process.start()
        theirs.close()  # else its death would not be heard
        self.index: int | None = None

    def give(self, index: int, job: Any) -> None:
        self.index = index
        with contextlib.suppress(OSError):  # it is dead, and the answer will say so
            self.pipe.send((index, job))

    def answer(self) -> Done:
        """Once there is one."""
        assert self.index is not None
        index, self.index = self.index, None
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.pipe.close()
            self._process.join()
            code = self._process.exitcode
            reason = "was killed or ran out of memory" if code in (-9, -15) else f"ended with exit code {code}"
            return Done(index, None, f"its process {reason}")

    def dismiss(self) -> None:
        """Let it go; a job that is under way is stopped."""
        if self.index is not None:
            self._process.terminate()
        self.pipe.close()

    def bury(self, until: float) -> None:
        """Wait for its end, but not longer than that."""
        self._process.join(max(0.0, until - time.monotonic()))
        self._process.kill()


def _dismiss(staff: list[_Process]) -> None:
    until = time.monotonic() + PARTING
    try:
        for process in staff:
            process.dismiss()
        for process in staff:
            process.bury(until)
    except KeyboardInterrupt:
        for process in staff:
            process.bury(0.0)
        raise


def _serve(work: Work, pipe: Connection, cores: list[int]) -> None:
    """What such a process does. Ctrl-C reaches all of them at once, but it is the owner who says when to stop; one
    whose owner is killed stops, too, with its memory and its part of a GPU."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    import torch

    torch.set_num_threads(len(cores))
    threading.Thread(target=_end_with_owner, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt, EOFError, OSError):
        while True:
            index, job = pipe.recv()
            pipe.send(attempt(work, index, job))


def _end_with_owner() -> None:
    owner = multiprocessing.parent_process()
    if owner is not None:
        owner.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PARTING)
        os._exit(1)


def on_ray(work: Work, jobs: Sequence[Any], workers: int | None = None) -> Iterator[Done]:
    """As Ray tasks, on the cluster that RAY_ADDRESS names or on this machine; a task whose node is lost runs again."""
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError as error:
        raise MissingExtraError("the engine ray needs Ray: pip install 'onefold[ray]'") from error
    started_here = not ray.is_initialized()
    if started_here:
        address = os.environ.get("RAY_ADDRESS")
        if address not in (None, "local"):
            _check_cluster(address)
        ray.init(address=address, log_to_driver=False, include_dashboard=False)
    try:
        gpus = ray.cluster_resources().get("GPU", 0)
        most = _checked(workers)
        each = math.ceil(most / gpus) if gpus and most else 4  # jobs on one card
        options = {"num_cpus": 1, "num_gpus": 1 / each if gpus else 0, "max_retries": RETRIES}
        task = ray.remote(**options)(attempt)
        waiting, started = list(enumerate(jobs)), {}
        while waiting or started:
            while waiting and len(started) < (most or len(jobs)):
                index, job = waiting.pop(0)
                started[task.remote(work, index, job)] = index
            finished, _ = ray.wait(list(started), num_returns=1)
            for reference in finished:
                index = started.pop(reference)
                try:
                    yield ray.get(reference)
                except RayError as error:
                    yield Done(index, None, f"Ray: {str(error).splitlines()[0][:300]}", traceback.format_exc())
    finally:
        if started_here:
            ray.shutdown()


def _check_cluster(address: str) -> None:
    """Refuse a Ray cluster that cannot be connected to. Ray itself tries for minutes; a process can be ended."""
    command = [sys.executable, "-c", CONNECT, address]
    try:
        done = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=CONNECTING, check=False
        )
    except subprocess.TimeoutExpired:
        reason = f"no answer within {CONNECTING:g} s"
    else:
        if done.returncode == 0:
            return
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300].rstrip(".")
    raise OnefoldError(f"Ray cluster {address}: cannot connect ({reason}). Start it, or correct or unset RAY_ADDRESS.")


def _checked(workers: int | None) -> int | None:
    return None if workers is None else whole(workers, "workers")


def _cores() -> list[int]:
    """Those that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _share(place: int, count: int) -> list[int]:
    """The cores of one of so many processes: all are used, and none by two unless there are too few."""
    cores = _cores()
    return cores[place * len(cores) // count : (place + 1) * len(cores) // count] or [cores[place % len(cores)]]


def default_workers() -> int:
    """As many processes as there are pairs of cores: two threads each. On one GPU, two: one computes, one prepares."""
    import torch

    return 2 if torch.cuda.is_available() else max(1, len(_cores()) // 2)


def engine(name: str) -> Callable[..., Iterator[Done]]:
    """The engine of that name."""
    known = {"serial": serial, "processes": processes, "ray": on_ray}
    if name not in known:
        raise InputError(f"there is no engine {name!r}; known are {', '.join(known)}")
    return known[name]
