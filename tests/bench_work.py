"""Work for the engines' tests: what a unit would do, in milliseconds, in whatever process it is called."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def double(job: Any) -> dict[str, Any]:
    """Twice the number; odd things for odd jobs."""
    kind, value = job
    if kind == "raise":
        raise ValueError(f"no {value} today")
    if kind == "die" and not Path(value).exists():
        Path(value).write_text("died once")
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "large":
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.\nMore words")
    if kind == "exit":
        os._exit(9)
    if kind == "beside":  # at work while another process dies
        wait_for(lambda: Path(value).exists())
        time.sleep(0.5)
    return {"kind": kind, "value": 2 * len(str(value)), "process": os.getpid()}


def slow(job: Any) -> dict[str, Any]:
    """Write a line when it starts, then take a while: which node, which process."""
    folder, number, seconds = job
    import ray

    node = ray.get_runtime_context().get_node_id()
    with Path(folder, f"started-{number}").open("a") as file:
        file.write(f"{node}\n")
    time.sleep(seconds)
    return {"number": number, "square": number * number}


def hold(folder: str) -> dict[str, Any]:
    """Say which process it is, keep it, and save something if it is stopped."""
    Path(folder, str(os.getpid())).touch()
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        time.sleep(0.3)
        Path(folder, str(os.getpid())).write_text("saved")
        raise
    return {}


def cores(folder: str) -> dict[str, Any]:
    """Which cores it may use, and how many threads; returns once two processes are at work."""
    import torch

    Path(folder, str(os.getpid())).touch()
    wait_for(lambda: len(list(Path(folder).iterdir())) == 2)
    return {"cores": sorted(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}


def overlap(folder: str) -> dict[str, Any]:
    """How many others were at work at the same time."""
    own = Path(folder, f"at-work-{os.getpid()}-{time.monotonic_ns()}")
    own.touch()
    time.sleep(2)
    others = len(list(Path(folder).glob("at-work-*"))) - 1
    own.unlink()
    return {"others": others}
