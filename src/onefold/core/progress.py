"""Signs of life while a command reads and scores, where a person watches; and memory given back meanwhile."""

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from onefold.core.batches import batch_length

T = TypeVar("T")

INTERVAL = 0.2  # seconds
HOLES = 32 * 2**20  # bytes of growth that are worth a look


def shown(parts: Iterable[T], total: int | None, label: str, count: Callable[[T], int] = batch_length) -> Iterator[T]:
    """Iterate over a long job, with a progress bar where a person watches."""
    if not sys.stderr.isatty():
        yield from parts
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        for part in parts:
            bar.advance(task, count(part))
            yield part


@contextmanager
def tidied() -> Iterator[None]:
    """Give the system back, while a long job runs, what the job has freed.

    glibc keeps freed blocks, and torch's aligned ones rarely fit into the holes: over gigabytes of images, the holes
    would grow to several times what is in use. Nothing is done where there is another C library.
    """
    trim = malloc_trim()
    if trim is None:
        yield
        return
    over = threading.Event()

    def tidy() -> None:
        low = resident()
        while not over.wait(INTERVAL):
            if resident() > low + HOLES:
                trim(0)
                low = resident()
            low = min(low, resident())

    thread = threading.Thread(target=tidy, name="onefold-tidy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def malloc_trim() -> Callable[[int], int] | None:
    """glibc's, which returns freed pages to the system; None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@contextmanager
def busy(label: str) -> Iterator[None]:
    """Something that moves while nothing can be counted, where a person watches."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(label):
        yield
