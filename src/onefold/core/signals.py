"""Handling of Ctrl-C and of the signals that are treated like it."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

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
