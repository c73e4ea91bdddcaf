"""Where units run: here, in processes of this machine, or on a Ray cluster. An engine is a map over units."""

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Literal, NamedTuple, TypeAlias

from onefold.errors import InputError, MissingExtraError, OnefoldError
from onefold.inputs import whole

Engine: TypeAlias = Literal["serial", "processes", "ray"]
Work: TypeAlias = Callable[[Any], dict[str, Any]]
"""A function of a module, of one job: it has to be found in another process."""


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
        return Done(index, None, f"{type(error).__name__}: {error}".splitlines()[0][:300], traceback.format_exc())


def serial(work: Work, jobs: Sequence[Any], workers: int | None = None) -> Iterator[Done]:
    """One after another, here."""
    del workers
    for index, job in enumerate(jobs):
        yield attempt(work, index, job)


def processes(work: Work, jobs: Sequence[Any], workers: int | None = None) -> Iterator[Done]:
    """In several processes of this machine; the jobs of one that dies are reported as failed, the others go on."""
    workers = at_a_time(len(jobs), workers)
    waiting = list(enumerate(jobs))
    while waiting:
        started: dict[Future[Done], int] = {}
        pool = ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(workers,)
        )
        try:
            while waiting or started:
                while waiting and len(started) < workers:
                    index, job = waiting.pop(0)
                    started[pool.submit(attempt, work, index, job)] = index
                for future in wait(started, return_when=FIRST_COMPLETED).done:
                    yield future.result()
                    del started[future]
        except BrokenProcessPool:
            for index in started.values():
                yield Done(index, None, "its process was killed or ran out of memory")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def on_ray(work: Work, jobs: Sequence[Any], workers: int | None = None) -> Iterator[Done]:
    """As Ray tasks, on the cluster that RAY_ADDRESS names or on this machine; a task whose node is lost runs again."""
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError as error:
        raise MissingExtraError("the engine ray needs Ray: pip install 'onefold[ray]'") from error
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=False, include_dashboard=False)
    try:
        gpus = ray.cluster_resources().get("GPU", 0)
        share = min(1.0, gpus / (_checked(workers) or 4 * gpus)) if gpus else 0.0
        options = {"num_cpus": 1, "num_gpus": share, "max_retries": -1}
        task = ray.remote(**options)(attempt)
        waiting, started, most = list(enumerate(jobs)), {}, _checked(workers) or len(jobs)
        while waiting or started:
            while waiting and len(started) < most:
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


def _checked(workers: int | None) -> int | None:
    return None if workers is None else whole(workers, "workers")


def at_a_time(jobs: int, workers: int | None) -> int:
    """How many of so many jobs `processes` does at once."""
    return min(_checked(workers) or default_workers(), max(1, jobs))


def cores_each(processes: int) -> int:
    """What each of so many processes of this machine may use."""
    return max(1, (os.cpu_count() or 1) // processes)


def default_workers() -> int:
    """As many processes as there are pairs of cores: two threads each. On one GPU, two: one computes, one prepares."""
    import torch

    return 2 if torch.cuda.is_available() else max(1, (os.cpu_count() or 2) // 2)


def engine(name: str) -> Callable[..., Iterator[Done]]:
    """The engine of that name."""
    known = {"serial": serial, "processes": processes, "ray": on_ray}
    if name not in known:
        raise InputError(f"there is no engine {name!r}; known are {', '.join(known)}")
    return known[name]


def _begin(workers: int) -> None:
    """A share of the cores; and a worker whose owner is killed ends, too, with its memory and its part of a GPU."""
    import torch

    torch.set_num_threads(cores_each(workers))
    threading.Thread(target=_end_with_owner, daemon=True).start()


def _end_with_owner() -> None:
    owner = multiprocessing.parent_process()
    if owner is not None:
        owner.join()
        os._exit(1)
