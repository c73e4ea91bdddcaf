"""Progress of training and evaluation on the console: one line on a terminal, or lines of a log."""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `onefold rl --help` loads none of them
    from onefold.bench.engines import Outcome
    from onefold.rl.grid import RunJob
    from onefold.rl.play import Rollout
    from onefold.rl.settings import Run

LINE_SECONDS = 60.0  # between two lines of a log
LOG_PARTS = 20  # of a run, with a line after each
SLOW_SECONDS = 86_400.0  # remaining time that causes a hint
CLIPPED_SHARE = 0.05  # share of targets outside the support that causes a hint


def check_runs(runs: "Sequence[Run]", *, elsewhere: bool = False) -> None:
    """Make an environment of each kind, so that an error appears before any run; warn if nothing will be learned.

    With `elsewhere`, the runs are on other machines, and no environment is made here.
    """
    from onefold.errors import warn
    from onefold.rl.env_table import inspect_spaces
    from onefold.rl.registry import find_environment

    for name in dict.fromkeys(run.environment for run in runs if not elsewhere):
        inspect_spaces(find_environment(name, runs[0].frames).make)
    if len(runs) > 1:
        _print(f"{len(runs)} runs of {runs[0].frames:,} frames")
    if starts := {run.learning.learning_starts for run in runs if run.frames <= run.learning.learning_starts}:
        warn(f"frames: too few to learn anything. Learning starts after {min(starts):,} frames in this environment.")


def show_training(rows: Iterator[dict[str, Any]], run: "Run", device: str) -> None:
    """Train a run, and show its rows of progress: as a bar on a terminal, else as a line per 5 % and per minute."""
    from onefold.core.batches import pick_device
    from onefold.core.progress import show_progress

    where = "a GPU" if pick_device(device).type == "cuda" else "a CPU"
    forecast, first = _Forecast(run), next(rows)["frames"]
    with show_progress(
        str(run), run.frames, done=first, show=True, keep=True, log_interval=LINE_SECONDS, log_parts=LOG_PARTS
    ) as display:
        starts = f"learning starts after {run.learning.learning_starts:,} frames"
        display.note(f"on {where}, {run.num_envs} environments, {starts}")
        for row in rows:
            display.update(row["frames"], f"{forecast.add(row)}{_format_row(row)}")
            for hint in forecast.new_hints():
                display.note(hint)


class _Forecast:
    """The remaining time of a run, from its last rows of progress since learning began, and hints that follow."""

    def __init__(self, run: "Run") -> None:
        self._run, self._rows, self._printed_hints = run, deque[dict[str, Any]](maxlen=20), set[str]()
        self._seconds = 0.0

    def add(self, row: dict[str, Any]) -> str:
        """Add a row, and return a text with the remaining time; empty before learning begins."""
        if row["frames"] <= self._run.learning.learning_starts:
            return ""
        self._rows.append(row)
        frames, seconds = (row[name] - self._rows[0][name] for name in ("frames", "seconds"))
        self._seconds = (self._run.frames - row["frames"]) * seconds / frames if frames else 0.0
        return f"{format_duration(self._seconds)} left, " if self._seconds else ""

    def new_hints(self) -> Iterator[str]:
        """Yield hints for other settings, each of them once."""
        agent, hints = self._run.agent, dict[str, str]()
        if self._seconds > SLOW_SECONDS:
            hints["slow"] = (
                f"this will take {format_duration(self._seconds)} on this machine. Use a GPU, fewer --frames, or "
                "smaller networks (--set learning.channels=[8,8,16] learning.batch_size=32)."
            )
        for name, bound in (("q", agent.q_bound), ("u", agent.u_bound)):
            if len(self._rows) > 1 and (share := self._rows[-1][f"{name}_clipped"]) > CLIPPED_SHARE:
                hints[name] = (
                    f"{share:.0%} of {name.upper()}'s targets lie outside ±{bound:g} and are clipped. "
                    f"Widen the support: --set agent.{name}_bound=…"
                )
        for name in hints.keys() - self._printed_hints:
            self._printed_hints.add(name)
            yield hints[name]


def format_duration(seconds: float) -> str:
    """Return a duration in a suitable unit: 90 becomes '1.5 min'."""
    for unit, length, limit in (("min", 60.0, 120.0), ("h", 3600.0, 48.0)):
        if seconds < limit * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 86400:.0f} days"


def show_episodes(rollouts: "Iterator[Rollout]", count: int) -> "Iterator[Rollout]":
    """Yield the episodes, and show how many there have been: as a bar on a terminal, else as a line per 10 %."""
    from onefold.core.progress import show_progress

    with show_progress("episodes", count, show=True, log_interval=LINE_SECONDS, log_parts=10) as display:
        for i, rollout in enumerate(rollouts, 1):
            display.update(i, f"{i:,} of {count:,}")
            yield rollout


@contextlib.contextmanager
def show_total(jobs: "Sequence[RunJob]") -> Iterator[None]:
    """Print a line per minute with the progress of all runs together, read from their folders."""
    total, stop = sum(job.run.frames for job in jobs), threading.Event()

    def print_lines() -> None:
        first, started = _total_frames(jobs), time.monotonic()
        while not stop.wait(LINE_SECONDS):
            frames = _total_frames(jobs)
            speed = (frames - first) / (time.monotonic() - started)
            remaining = f", {format_duration((total - frames) / speed)} left" if speed > 0 else ""
            _print(f"all runs: {frames:,} of {total:,} frames, {speed:,.0f}/s{remaining}")

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _total_frames(jobs: "Sequence[RunJob]") -> int:
    """Return the frames of these runs so far."""
    from onefold.errors import FileError
    from onefold.rl.run_folder import PROGRESS, RunFolder

    frames = 0
    for job in jobs:
        with contextlib.suppress(FileError, OSError, KeyError, ValueError, IndexError):  # not begun, or being written
            frames += int(RunFolder(job.out).read_table(PROGRESS)[-1]["frames"])
    return frames


def show_outcomes(outcomes: "Iterable[Outcome[RunJob]]") -> set[str]:
    """Print a line for each run that has ended; return the names of those that failed."""
    failed = set()
    for outcome in outcomes:
        name = outcome.job.name
        if outcome.result is None:
            failed.add(name)
            _print(f"{name}: failed: {outcome.reason}")
        else:
            _print(f"{name}: {'already trained: ' if outcome.resumed else ''}{_format_row(outcome.result)}")
    return failed


def _format_row(row: dict[str, Any]) -> str:
    """Return a row of progress as text, without values that are NaN, as before the first episode has ended."""
    score = f", return {row['return']:.3f}" if row["return"] == row["return"] else ""
    success = f", goal {row['success']:.0%}" if row["success"] == row["success"] else ""
    return (
        f"{int(row['frames']):,} frames, {row['frames_per_second']:,.0f}/s{score}{success}, bonus {row['bonus']:.3g}, "
        f"loss {row['loss']:.3g}"
    )


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
