"""Progress displays for a terminal, and the release of freed memory during long jobs."""

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
GROWTH = 32 * 2**20  # bytes that the process may grow before its freed memory is released


def shown(parts: Iterable[T], total: int | None, label: str, count: Callable[[T], int] = batch_length) -> Iterator[T]:
    """Yield the parts of a long job, with a progress bar if stderr is a terminal."""
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
    """Return freed memory to the system while a long job runs.

    glibc keeps freed blocks, and torch's aligned blocks rarely fit into the gaps. Over gigabytes of images the gaps
    would grow to several times the memory in use. With another C library this does nothing.
    """
    trim = malloc_trim()
    if trim is None:
        yield
        return
    stop = threading.Event()

    def trim_periodically() -> None:
        low = resident()
        while not stop.wait(INTERVAL):
            if resident() > low + GROWTH:
                trim(0)
                low = resident()
            low = min(low, resident())

    thread = threading.Thread(target=trim_periodically, name="onefold-trim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's malloc_trim, which returns freed pages to the system; None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@contextmanager
def busy(label: str) -> Iterator[None]:
    """Show a spinner while nothing can be counted, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(label):
        yield
