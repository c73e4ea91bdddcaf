"""Available memory, errors before a computation that would not fit, and handling of Ctrl-C and similar signals."""

import contextlib
import ctypes
import mmap
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from onefold.errors import NotEnoughMemoryError

TRIM_INTERVAL = 0.2  # seconds
TRIM_GROWTH = 32 * 2**20  # bytes that the process may grow before its freed memory is released


@runtime_checkable
class Device(Protocol):
    """A `torch.device`, described without importing torch."""

    @property
    def type(self) -> str: ...


def available(device: Device) -> int:
    """Return how many bytes a new computation can use on `device`."""
    if device.type == "cuda":
        import torch  # loads slowly

        return torch.cuda.mem_get_info(device)[0]  # pyright: ignore[reportArgumentType]
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


TERMINATION_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextlib.contextmanager
def raise_interrupt_on_termination() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP, as on Ctrl-C.

    SIGTERM comes from `timeout`, a scheduler or a container that is stopped, SIGHUP from a terminal that is closed.
    Signals that are ignored, as under `nohup`, stay ignored.
    """
    try:
        previous = {
            number: signal.signal(number, signal.default_int_handler)
            for number in TERMINATION_SIGNALS
            if _has_default_handler(number)
        }
    except ValueError:  # only the main thread can set handlers
        yield
        return
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Defer Ctrl-C: yield a function that returns True once it was pressed. A second Ctrl-C raises KeyboardInterrupt.

    The same holds for other signals that raise KeyboardInterrupt. Signals that are ignored stay ignored.
    """
    received: list[int] = []

    def record(number: int, _: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    numbers = [s for s in (signal.SIGINT, *TERMINATION_SIGNALS) if signal.getsignal(s) is signal.default_int_handler]
    try:
        previous = {number: signal.signal(number, record) for number in numbers}
    except ValueError:  # only the main thread can set handlers
        yield lambda: False
        return
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _has_default_handler(number: signal.Signals) -> bool:
    """Return True if the signal would end the process."""
    return signal.getsignal(number) is signal.SIG_DFL
