"""Engines, which run many jobs: one after another, in processes of this machine, or on a Ray cluster."""

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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeAlias, TypeVar

from onefold.core.batches import whole
from onefold.core.runtime import is_out_of_memory
from onefold.errors import InputError, MissingExtraError, OnefoldError

Work: TypeAlias = Callable[[Any], dict[str, Any]]
"""Function of one job. Other processes import it by name, so it must be defined in a module."""
Answer: TypeAlias = tuple[dict[str, Any] | None, str, str]
"""Result, reason and traceback: `Outcome` without its job."""
Job = TypeVar("Job")

CONTEXT = multiprocessing.get_context("spawn")
GRACE = 120.0  # seconds that a stopped job has to save its state
CONNECTING = 30.0  # seconds that a Ray cluster has to answer
CONNECT = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False)"
RETRIES = 5  # of a Ray job whose node or process is lost
JOBS_PER_GPU = 4  # on Ray, unless the number of workers is set
MOST_REASON = 300  # characters


@dataclass(frozen=True)
class Outcome(Generic[Job]):
    """Outcome of a job: its result, or None with the reason and the traceback of its failure.

    `resumed` is True if an earlier run made the result.
    """

    job: Job
    result: dict[str, Any] | None
    reason: str = ""
    trace: str = ""
    resumed: bool = False


def attempt(work: Work, job: Any) -> Answer:
    """Run one job and return its result or the reason of its failure."""
    try:
        return work(job), "", ""
    except OnefoldError as error:
        return None, str(error), ""
    except Exception as error:
        if is_out_of_memory(error):
            return None, "out of memory", traceback.format_exc()
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:MOST_REASON]
        return None, reason, traceback.format_exc()


def run_serial(work: Work, jobs: Sequence[Job], workers: int | None = None) -> Iterator[Outcome[Job]]:
    """Run jobs one after another in this process."""
    del workers
    for job in jobs:
        yield Outcome(job, *attempt(work, job))


def run_processes(work: Work, jobs: Sequence[Job], workers: int | None = None) -> Iterator[Outcome[Job]]:
    """Run jobs in processes of this machine, each with its share of the cores, and yield outcomes as they come.

    If a process dies, only its job fails. Closing the generator interrupts the running jobs as Ctrl-C does and waits
    until they have saved their state.
    """
    count, waiting = min(_checked(workers) or default_workers(), len(jobs)), deque(jobs)
    pool: list[_Worker] = []
    finish = multiprocessing.util.Finalize(None, _stop, (pool,), exitpriority=10)
    try:
        for place in range(count):
            pool.append(_Worker(work, _share_of_cores(place, count)))
            pool[-1].start(waiting.popleft())
        busy: dict[Any, _Worker]
        while busy := {worker.pipe: worker for worker in pool if worker.is_busy}:
            for pipe in multiprocessing.connection.wait(list(busy)):
                worker = busy[pipe]
                outcome = worker.receive()
                if waiting and worker.pipe.closed:
                    place = pool.index(worker)
                    worker = pool[place] = _Worker(work, _share_of_cores(place, count))
                if waiting:
                    worker.start(waiting.popleft())
                yield outcome
    finally:
        finish()


class _Worker:
    """Process that runs one job after another."""

    def __init__(self, work: Work, cores: list[int]) -> None:
        self.pipe, child_pipe = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(work, child_pipe, cores))
        self._process.start()
        child_pipe.close()  # otherwise reading would block after the process has died
        self._jobs: list[Any] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs)

    def start(self, job: Any) -> None:
        """Send a job to the process."""
        self._jobs.append(job)
        with contextlib.suppress(OSError):  # the process is dead; `receive` reports it
            self.pipe.send(job)

    def receive(self) -> Outcome[Any]:
        """Wait for the outcome of the job."""
        job = self._jobs.pop()
        try:
            return Outcome(job, *self.pipe.recv())
        except (EOFError, OSError):
            self.pipe.close()
            self._process.join()
            code = self._process.exitcode
            reason = "was killed or ran out of memory" if code in (-9, -15) else f"ended with exit code {code}"
            return Outcome(job, None, f"its process {reason}")

    def stop(self) -> None:
        """Ask the process to end; a running job is interrupted."""
        if self.is_busy:
            self._process.terminate()
        self.pipe.close()

    def join(self, deadline: float) -> None:
        """Wait for the end of the process and kill it after the deadline."""
        self._process.join(max(0.0, deadline - time.monotonic()))
        self._process.kill()


def _stop(pool: list[_Worker]) -> None:
    """Stop all workers; a second Ctrl-C kills them."""
    deadline = time.monotonic() + GRACE
    try:
        for worker in pool:
            worker.stop()
        for worker in pool:
            worker.join(deadline)
    except KeyboardInterrupt:
        for worker in pool:
            worker.join(0.0)
        raise


def _serve(work: Work, pipe: Connection, cores: list[int]) -> None:
    """Run jobs from the pipe in a worker process.

    Ctrl-C in a terminal reaches every process, but only the parent decides when workers stop, by SIGTERM. If the parent
    is killed, its workers end as well and release their memory.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    import torch

    torch.set_num_threads(len(cores))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt, EOFError, OSError):
        while True:
            pipe.send(attempt(work, pipe.recv()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(1)


def run_ray(work: Work, jobs: Sequence[Job], workers: int | None = None) -> Iterator[Outcome[Job]]:
    """Run jobs as Ray tasks on the cluster that RAY_ADDRESS names, or on this machine.

    A task whose node is lost runs again.
    """
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
        jobs_per_gpu = math.ceil(most / gpus) if gpus and most else JOBS_PER_GPU
        options = {"num_cpus": 1, "num_gpus": 1 / jobs_per_gpu if gpus else 0, "max_retries": RETRIES}
        task = ray.remote(**options)(attempt)
        waiting, started = deque(jobs), {}
        while waiting or started:
            while waiting and len(started) < (most or len(jobs)):
                job = waiting.popleft()
                started[task.remote(work, job)] = job
            finished, _ = ray.wait(list(started), num_returns=1)
            for reference in finished:
                job = started.pop(reference)
                try:
                    outcome = Outcome(job, *ray.get(reference))
                except RayError as error:
                    reason = f"Ray: {str(error).splitlines()[0][:MOST_REASON]}"
                    outcome = Outcome(job, None, reason, traceback.format_exc())
                yield outcome
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
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = lines[-1][:MOST_REASON].rstrip(".")
    raise OnefoldError(f"Ray cluster {address}: cannot connect ({reason}). Start it, or correct or unset RAY_ADDRESS.")


def _checked(workers: int | None) -> int | None:
    return None if workers is None else whole(workers, "workers")


def _cores() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _share_of_cores(place: int, count: int) -> list[int]:
    """Return the cores of one of `count` processes. All are used, and none twice unless there are too few."""
    cores = _cores()
    return cores[place * len(cores) // count : (place + 1) * len(cores) // count] or [cores[place % len(cores)]]


def default_workers() -> int:
    """Return 2 on a GPU, where one process computes while the other prepares, else one for every two cores."""
    import torch

    return 2 if torch.cuda.is_available() else max(1, len(_cores()) // 2)


ENGINES: dict[str, Callable[..., Iterator[Outcome[Any]]]] = {
    "serial": run_serial,
    "processes": run_processes,
    "ray": run_ray,
}


def find_engine(name: str) -> Callable[..., Iterator[Outcome[Any]]]:
    """Return the engine of that name: a function of the work, the jobs and the number of workers.

    Args:
        name: "serial", "processes" or "ray".

    Raises:
        InputError: There is no engine of that name.
    """
    if name not in ENGINES:
        raise InputError(f"no engine {name!r}. Use one of: {', '.join(ENGINES)}.")
    return ENGINES[name]
