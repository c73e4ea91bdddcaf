"""Available memory, errors before a computation that would not fit, and the release of freed memory."""

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from onefold.errors import NotEnoughMemoryError

TRIM_INTERVAL = 0.2  # seconds
TRIM_GROWTH = 32 * 2**20  # bytes that the process may grow before its freed memory is released


def available(device: torch.device) -> int:
    """Return how many bytes a new computation can use on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 8 * 2**30  # no /proc (macOS, Windows): assume 8 GiB
    try:  # a container may be limited to less than its host has
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        return min(free, limit - used + int(statistics.get("inactive_file", 0)))
    except (OSError, ValueError):
        return free


def require(needed: int, limit: int, *, what: str, way_out: str) -> None:
    """Raise NotEnoughMemoryError with both sizes and the advice if a computation needs more than `limit` bytes."""
    if needed > limit:
        raise NotEnoughMemoryError(
            f"{what} needs {human(needed)} of memory, {human(limit)} can be used. {way_out[0].upper()}{way_out[1:]}."
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error is an out-of-memory error. On a CPU, torch raises a RuntimeError with only a text."""
    phrases = "not enough memory", "can't allocate memory", "out of memory"
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)
    )


def human(size: float) -> str:
    """Return a number of bytes with its unit: 1536 becomes '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


@contextmanager
def trim_memory() -> Iterator[None]:
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
        while not stop.wait(TRIM_INTERVAL):
            if resident() > low + TRIM_GROWTH:
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
