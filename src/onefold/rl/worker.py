"""One worker process: its environments, the pipes to it, and its end.

A byte through the command pipe starts a step. When the step is done, the worker writes its index to a pipe that all
workers share. A third pipe carries the reason of a failure. Everything else is in the shared table. A pipe also shows
that the process at its other end has died: a worker without an owner closes its environments and exits.
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

CONTEXT = multiprocessing.get_context("spawn")  # workers inherit no state, threads or open files
STEP, STOP = b"g", b"s"  # commands
LINUX = hasattr(os, "sched_getaffinity")
SCHED_GETCPU: Any = getattr(ctypes.CDLL(None), "sched_getcpu", None) if LINUX else None  # not in Python's os module
STOP_SECONDS = 10  # for environments to close


class WorkerTask(NamedTuple):
    """The arguments of a worker process: it runs environments `start` to `stop` of the table."""

    make: EnvFactory
    memory: Any
    spaces: Spaces
    start: int
    stop: int
    seed: int
    number: int
    core: int | None
    """Core to run on. A ViZDoom game is a process of its own that works while its worker waits. With both on one core,
    neither is woken from another core or loses its caches; that gave 1.7 times the frames per second."""


def current_core() -> int | None:
    """Return the core that runs this thread, or None where the system does not tell."""
    return None if SCHED_GETCPU is None else SCHED_GETCPU()


class DonePipe:
    """A pipe that all workers write to when their step is done. One read returns all indices written so far."""

    def __init__(self) -> None:
        self._reader, self.writer = CONTEXT.Pipe(duplex=False)
        self.fileno = self._reader.fileno

    @staticmethod
    def notify(writer: Connection, index: int) -> None:
        os.write(writer.fileno(), index.to_bytes(2, "little"))  # two bytes are written atomically

    def read(self) -> set[int]:
        """Return the indices of the workers that are done; block until there is one."""
        return set(np.frombuffer(os.read(self._reader.fileno(), select.PIPE_BUF), "<u2").tolist())

    def close(self) -> None:
        self._reader.close()
        self.writer.close()


def serve(task: WorkerTask, commands: Connection, done: Connection, failures: Connection) -> None:
    """Run the worker process: take a first step at once, then one for each command."""
    os.setpgid(0, 0)  # one signal can end the worker with all processes it started, and Ctrl-C does not reach them
    for pipe in (commands, done, failures):  # processes of the environments must not hold the pipes open
        os.set_inheritable(pipe.fileno(), False)
    if task.core is not None:
        with contextlib.suppress(OSError):  # the core may have been withdrawn from this process
            os.sched_setaffinity(0, {task.core})
    rows = np.frombuffer(task.memory, row_dtype(task.spaces))[task.start : task.stop]
    with contextlib.ExitStack() as stack:
        try:
            group = EnvGroup(task.make, rows, task.start, task.seed)
            stack.callback(group.close)
            stack.callback(signal.alarm, STOP_SECONDS)
            command = STEP
            while command == STEP:
                step = rows["requested"].copy()
                group.step()
                rows["completed"] = step
                DonePipe.notify(done, task.number)
                command = os.read(commands.fileno(), 1)
        except BrokenPipeError:
            pass  # the owner has died
        except BaseException as error:  # an environment may raise SystemExit
            os.write(failures.fileno(), summarise_error(error).encode())


class Worker:
    """The owner's handle of a worker process."""

    def __init__(self, task: WorkerTask, done: DonePipe) -> None:
        commands, self._commands = CONTEXT.Pipe(duplex=False)
        self._failures, failures = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=serve, args=(task, commands, done.writer, failures), daemon=True)
        try:
            self._process.start()
        except Exception as error:
            raise OnefoldError(f"worker: cannot be started ({summarise_error(error)}).") from error
        for end in (commands, failures):  # held open here, they would hide the death of the process
            end.close()
        self.fileno = self._failures.fileno  # readable once the worker has failed or died
        self.pid, self.core = self._process.pid or 0, task.core

    def step(self) -> None:
        """Start the step that the worker's rows request."""
        with contextlib.suppress(BrokenPipeError):  # `read_failure` will return the reason
            os.write(self._commands.fileno(), STEP)

    def read_failure(self) -> str:
        """Return why the worker has failed, once its file descriptor is readable."""
        if message := os.read(self._failures.fileno(), select.PIPE_BUF):
            return message.decode(errors="replace")
        code = self._wait(time.monotonic() + STOP_SECONDS)  # before `kill` changes the exit code
        self.kill()
        if code is None:
            return f"closed its pipe and did not end within {STOP_SECONDS} s"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def request_stop(self) -> None:
        """Ask the process to close its environments and exit."""
        with contextlib.suppress(OSError):
            os.write(self._commands.fileno(), STOP)

    def stop(self, deadline: float) -> None:
        """Wait until the process has exited, and kill it at the deadline (of `time.monotonic`)."""
        if self._wait(deadline) != 0:
            self.kill()

    def _wait(self, deadline: float) -> int | None:
        """Return the exit code, or None at the deadline.

        `Process.join` would wait for ever for a process that has closed all its files.
        """
        while (code := self._process.exitcode) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        return code

    def kill(self) -> None:
        """Kill the process and all processes that its environments have started."""
        if self._commands.closed:
            return
        with contextlib.suppress(ProcessLookupError):  # the process has not made its group yet
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._commands.close()
        self._failures.close()
