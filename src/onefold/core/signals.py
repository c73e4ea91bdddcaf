"""Ctrl-C, and what is answered as it is."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

OTHERS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, from `timeout`, a scheduler or a container that is stopped, is answered as Ctrl-C is. So is SIGHUP, of a
    terminal that is closed, unless it is ignored (`nohup`)."""
    try:
        before = {sign: signal.signal(sign, signal.default_int_handler) for sign in OTHERS if _may_end(sign)}
    except ValueError:  # a thread does not hear of it
        yield
        return
    try:
        yield
    finally:
        for sign, answer in before.items():
            signal.signal(sign, answer)


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is answered when it suits: the function says whether it came. The second time it is answered at once.
    So is whatever else is answered as Ctrl-C is; where that is ignored, it still is."""
    came: list[int] = []

    def note(sign: int, _: Any) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(sign)

    alike = [s for s in (signal.SIGINT, *OTHERS) if signal.getsignal(s) is signal.default_int_handler]
    try:
        before = {sign: signal.signal(sign, note) for sign in alike}
    except ValueError:  # a thread does not hear of it
        yield lambda: False
        return
    try:
        yield lambda: bool(came)
    finally:
        for sign, answer in before.items():
            signal.signal(sign, answer)


def _may_end(sign: signal.Signals) -> bool:
    return signal.getsignal(sign) is signal.SIG_DFL
