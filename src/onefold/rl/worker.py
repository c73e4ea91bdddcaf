"""One worker process: the environments in it, the pipes to it, and its end, which may come at any time.

A byte through a pipe says "go"; a number through another, which all workers share, says who is done; everything else is
in the table. A third is for last words. Pipes also tell of the other side's death: a worker whose owner is gone closes
its environments and leaves.
"""

import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from onefold.errors import OnefoldError
from onefold.rl.env_table import EnvFactory, EnvGroup, Spaces, row_dtype, summarise_error

CONTEXT = multiprocessing.get_context("spawn")  # nothing of the owner's state, threads or open files comes along
GO, STOP = b"g", b"s"
LINUX = hasattr(os, "sched_getaffinity")
SCHED_GETCPU: Any = getattr(ctypes.CDLL(None), "sched_getcpu", None) if LINUX else None  # Python has no name for it
STOP_SECONDS = 10  # seconds in which environments have to be closed


class WorkerTask(NamedTuple):
    """What a worker has to know: its environments are those from `start` to `stop`."""

    make: EnvFactory
    memory: Any
    form: Spaces
    start: int
    stop: int
    seed: int
    number: int
    core: int | None
    """Where it runs. A game is a process of its own that works while its worker waits: on one core, neither of them is
    ever woken from afar or finds its caches cold. That gave 1.7 times the frames."""


def current_core() -> int | None:
    """The one that this runs on, where that can be told."""
    return None if SCHED_GETCPU is None else SCHED_GETCPU()


class DonePipe:
    """What workers ring when they are done. One read hears all that have rung since the last one."""

    def __init__(self) -> None:
        self._heard, self.rope = CONTEXT.Pipe(duplex=False)
        self.fileno = self._heard.fileno

    @staticmethod
    def ring(rope: Connection, number: int) -> None:
        os.write(rope.fileno(), number.to_bytes(2, "little"))  # never torn, as it is short

    def rung(self) -> set[int]:
        """Those that have rung, once some have."""
        return set(np.frombuffer(os.read(self._heard.fileno(), select.PIPE_BUF), "<u2").tolist())

    def close(self) -> None:
        self._heard.close()
        self.rope.close()


def serve(task: WorkerTask, commands: Connection, rope: Connection, words: Connection) -> None:
    """What a worker does: answer at once, since its first episodes are asked for as it starts, then at each go."""
    os.setpgid(0, 0)  # what the environments start can be ended with it, and no Ctrl-C comes through
    for pipe in (commands, rope, words):  # nor may it keep the pipes open
        os.set_inheritable(pipe.fileno(), False)
    if task.core is not None:
        with contextlib.suppress(OSError):  # the core may be forbidden by now
            os.sched_setaffinity(0, {task.core})
    rows = np.frombuffer(task.memory, row_dtype(task.form))[task.start : task.stop]
    with contextlib.ExitStack() as stack:
        try:
            group = EnvGroup(task.make, rows, task.start, task.seed)
            stack.callback(group.close)
            stack.callback(signal.alarm, STOP_SECONDS)
            go = GO
            while go == GO:
                step = rows["asked"].copy()
                group.answer()
                rows["answered"] = step
                DonePipe.ring(rope, task.number)
                go = os.read(commands.fileno(), 1)
        except BrokenPipeError:
            pass  # the owner is gone
        except BaseException as error:  # an environment may raise SystemExit
            os.write(words.fileno(), summarise_error(error).encode())


class Worker:
    """The owner's end of it."""

    def __init__(self, task: WorkerTask, bell: DonePipe) -> None:
        commands, self._commands = CONTEXT.Pipe(duplex=False)
        self._words, words = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=serve, args=(task, commands, bell.rope, words), daemon=True)
        try:
            self._process.start()
        except Exception as error:
            raise OnefoldError(f"a worker cannot be started ({summarise_error(error)})") from error
        for end in (commands, words):  # else the death of the process would not be heard
            end.close()
        self.fileno = self._words.fileno  # there is something to read once it has failed, or is no more
        self.pid, self.core = self._process.pid or 0, task.core

    def go(self) -> None:
        """Have it answer its rows."""
        with contextlib.suppress(BrokenPipeError):  # its last words will say why
            os.write(self._commands.fileno(), GO)

    def last_words(self) -> str:
        """Why it will never answer again; once there is something to read."""
        if words := os.read(self._words.fileno(), select.PIPE_BUF):
            return words.decode(errors="replace")
        code = self._wait(time.monotonic() + STOP_SECONDS)  # before it is killed here
        self.kill()
        if code is None:
            return f"closed its pipe and did not end within {STOP_SECONDS} s"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def dismiss(self) -> None:
        """Ask it to leave."""
        with contextlib.suppress(OSError):
            os.write(self._commands.fileno(), STOP)

    def bury(self, until: float) -> None:
        """Wait for its end, but not longer than that."""
        if self._wait(until) != 0:
            self.kill()

    def _wait(self, until: float) -> int | None:
        """Return its exit code, or None if it has not ended by then. `join` would wait for ever for one that has closed
        all its files."""
        while (code := self._process.exitcode) is None and time.monotonic() < until:
            time.sleep(0.002)
        return code

    def kill(self) -> None:
        """End it, and what its environments have started."""
        if self._commands.closed:
            return
        with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._commands.close()
        self._words.close()
