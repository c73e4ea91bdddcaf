"""One worker process: the environments in it, the pipes to it, and its end, which may come at any time.

A byte through a pipe says "go", another one back says "done"; everything else is in the table. A pipe also tells of the
other side's death: a worker whose owner is gone closes its environments and leaves.
"""

import contextlib
import multiprocessing
import os
import select
import signal
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from onefold.errors import OnefoldError
from onefold.rl.rows import Form, Group, Make, one_line, row

CONTEXT = multiprocessing.get_context("spawn")  # nothing of the owner's state, threads or open files comes along
GO, STOP, DONE, FAILED = b"g", b"s", b"d", b"f"
PARTING = 10  # seconds in which environments have to be closed


class Task(NamedTuple):
    """What a worker has to know: its environments are those from `start` to `stop`."""

    make: Make
    memory: Any
    form: Form
    start: int
    stop: int
    seed: int
    core: int | None
    """Where it runs. A game is a process of its own that works while its worker waits: on one core, neither of them is
    ever woken from afar or finds its caches cold. That gave 1.7 times the frames."""


def work(task: Task, commands: Connection, answers: Connection) -> None:
    """What a worker does: answer at once, since its first episodes are asked for as it starts, then at each go."""
    os.setpgid(0, 0)  # what the environments start can be ended with it, and no Ctrl-C comes through
    for pipe in (commands, answers):  # nor may it keep the pipes open
        os.set_inheritable(pipe.fileno(), False)
    if task.core is not None:
        with contextlib.suppress(OSError):  # the core may be forbidden by now
            os.sched_setaffinity(0, {task.core})
    rows = np.frombuffer(task.memory, row(task.form))[task.start : task.stop]
    with contextlib.ExitStack() as stack:
        try:
            group = Group(task.make, rows, task.start, task.seed)
            stack.callback(group.close)
            stack.callback(signal.alarm, PARTING)
            go = GO
            while go == GO:
                step = rows["asked"].copy()
                group.answer()
                rows["answered"] = step
                os.write(answers.fileno(), DONE)
                go = os.read(commands.fileno(), 1)
        except BrokenPipeError:
            pass  # the owner is gone
        except Exception as error:
            os.write(answers.fileno(), FAILED + one_line(error).encode())


class Worker:
    """The owner's end of it."""

    def __init__(self, task: Task) -> None:
        commands, self._commands = CONTEXT.Pipe(duplex=False)
        self._answers, answers = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=work, args=(task, commands, answers), daemon=True)
        try:
            self._process.start()
        except Exception as error:
            raise OnefoldError(f"a worker cannot be started ({one_line(error)})") from error
        for end in (commands, answers):  # else the death of the process would not be heard
            end.close()
        self._ready = select.poll()
        self._ready.register(self._answers, select.POLLIN)
        self.pid = self._process.pid or 0

    def go(self) -> None:
        """Have it answer its rows."""
        with contextlib.suppress(BrokenPipeError):  # `hear` will say why
            os.write(self._commands.fileno(), GO)

    def hear(self, rows: np.ndarray, step: int, until: float) -> str:
        """Nothing once its rows have the answers to this step; or why that will never be."""
        while self._ready.poll(1000 * max(0.0, until - time.monotonic())):
            sign = os.read(self._answers.fileno(), select.PIPE_BUF)
            if not sign:
                self.kill()
                code = self._process.exitcode or 0
                return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            if sign.startswith(FAILED):
                return sign[1:].decode(errors="replace")
            if (rows["answered"] == step).all():
                return ""
        return "gave no answer in time"

    def dismiss(self) -> None:
        """Ask it to leave."""
        with contextlib.suppress(OSError):
            os.write(self._commands.fileno(), STOP)

    def bury(self, until: float) -> None:
        """Wait for its end, but not longer than that."""
        self._process.join(max(0.0, until - time.monotonic()))
        if self._process.exitcode != 0:
            self.kill()

    def kill(self) -> None:
        """End it, and what its environments have started."""
        if self._commands.closed:
            return
        with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._commands.close()
        self._answers.close()
