"""What people are told while agents train and play: on one terminal line, or in lines of a log."""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command's help needs none of them
    from onefold.rl.grid import RunJob, RunOutcome
    from onefold.rl.play import Rollout
    from onefold.rl.settings import Run

LINE_SECONDS = 60.0  # seconds between two words on how far runs are
SLOW_SECONDS = 86_400.0  # seconds left that are worth a remark
CLIPPED_SHARE = 0.05  # share of targets outside the support that is


def check_runs(runs: "Sequence[Run]", *, elsewhere: bool = False) -> None:
    """What can be said of runs before they begin: how many there are, and that nothing will come of them. Worlds that
    cannot be made here end it now, not run after run, unless they are to be made `elsewhere`."""
    from onefold.errors import warn
    from onefold.rl.env_table import inspect_spaces
    from onefold.rl.registry import find_environment

    for name in dict.fromkeys(run.environment for run in runs if not elsewhere):
        inspect_spaces(find_environment(name, runs[0].frames).make)
    if len(runs) > 1:
        print(f"{len(runs)} runs of {runs[0].frames:,} frames", file=sys.stderr, flush=True)
    if starts := {run.learning.learning_starts for run in runs if run.frames <= run.learning.learning_starts}:
        warn(f"nothing will be learned: that begins after {min(starts):,} frames of this world")


def show_training(rows: Iterator[dict[str, Any]], run: "Run", device: str) -> None:
    """Progress as it comes: a bar where a person watches, else a line every twentieth of the way and every minute."""
    from onefold.core.batches import pick_device

    where = "a GPU" if pick_device(device).type == "cuda" else "a CPU"
    first = (
        f"{run}: on {where}, {run.num_envs} environments, learning begins after {run.learning.learning_starts:,} frames"
    )
    left, begun = _Forecast(run), next(rows)["frames"]
    if not sys.stderr.isatty():
        print(first, file=sys.stderr, flush=True)
        part, at = 20 * begun // run.frames, time.monotonic()
        for row in rows:
            words = left.after(row)
            if 20 * row["frames"] // run.frames > part or time.monotonic() > at + LINE_SECONDS:
                part, at = 20 * row["frames"] // run.frames, time.monotonic()
                print(f"{run}: {words}{_format_row(row)}", file=sys.stderr, flush=True)
            for remark in left.remarks():
                print(f"{run}: {remark}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.table import Column

    text = TextColumn("{task.fields[line]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    console = Console(stderr=True)
    console.print(first, style="bold")
    with Progress(BarColumn(16), TaskProgressColumn(), text, console=console, expand=True) as bar:
        task = bar.add_task(str(run), total=run.frames, completed=begun, line="…")
        for row in rows:
            bar.update(task, completed=row["frames"], line=f"{left.after(row)}{_format_row(row)}")
            for remark in left.remarks():
                bar.print(remark)


class _Forecast:
    """How long a run will take, by its last rows of progress since learning began, and what is worth a remark."""

    def __init__(self, run: "Run") -> None:
        self._run, self._rows, self._said = run, deque[dict[str, Any]](maxlen=20), set[str]()
        self._seconds = 0.0

    def after(self, row: dict[str, Any]) -> str:
        if row["frames"] <= self._run.learning.learning_starts:
            return ""
        self._rows.append(row)
        made, taken = (row[name] - self._rows[0][name] for name in ("frames", "seconds"))
        self._seconds = (self._run.frames - row["frames"]) * taken / made if made else 0.0
        return f"{format_duration(self._seconds)} left, " if self._seconds else ""

    def remarks(self) -> Iterator[str]:
        """Each once."""
        agent, found = self._run.agent, dict[str, str]()
        if self._seconds > SLOW_SECONDS:
            found["slow"] = (
                f"this will take {format_duration(self._seconds)}: it is made for a GPU; fewer --frames or smaller "
                "networks take less (--set learning.channels=[8,8,16] learning.batch_size=32)"
            )
        for name, bound in (("q", agent.q_bound), ("u", agent.u_bound)):
            if len(self._rows) > 1 and (share := self._rows[-1][f"{name}_clipped"]) > CLIPPED_SHARE:
                found[name] = (
                    f"{share:.0%} of {name.upper()}'s targets lie outside ±{bound:g} and are clipped. "
                    f"Widen the support: --set agent.{name}_bound=…"
                )
        for name in found.keys() - self._said:
            self._said.add(name)
            yield found[name]


def format_duration(seconds: float) -> str:
    """90 -> '1.5 min'."""
    for unit, length, most in (("min", 60.0, 120.0), ("h", 3600.0, 48.0)):
        if seconds < most * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 86400:.0f} days"


def show_episodes(played: "Iterator[Rollout]", count: int) -> "Iterator[Rollout]":
    """Episodes as they come; who watches is told how many have."""
    for i, each in enumerate(played, 1):
        if sys.stderr.isatty():
            line = f"{i:,} of {count:,} episodes" if i < count else ""
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        elif i < count and 10 * i // count > 10 * (i - 1) // count:
            print(f"{i:,} of {count:,} episodes", file=sys.stderr, flush=True)
        yield each


@contextlib.contextmanager
def show_total(jobs: "Sequence[RunJob]") -> Iterator[None]:
    """A line every minute on how far runs are together, read from their folders: they may be in other processes."""
    total, stop = sum(job.run.frames for job in jobs), threading.Event()

    def tell() -> None:
        begun, started = _total_frames(jobs), time.monotonic()
        while not stop.wait(LINE_SECONDS):
            made = _total_frames(jobs)
            speed = (made - begun) / (time.monotonic() - started)
            left = f", {format_duration((total - made) / speed)} left" if speed > 0 else ""
            print(f"all runs: {made:,} of {total:,} frames, {speed:,.0f}/s{left}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _total_frames(jobs: "Sequence[RunJob]") -> int:
    """Frames of these runs so far."""
    from onefold.errors import FileError
    from onefold.rl.run_folder import PROGRESS, RunFolder

    made = 0
    for job in jobs:
        with contextlib.suppress(FileError, OSError, KeyError, ValueError, IndexError):  # not begun, or being written
            made += int(RunFolder(job.out).read_table(PROGRESS)[-1]["frames"])
    return made


def show_outcomes(ended: "Iterable[RunOutcome]") -> set[str]:
    """A line for each run that ended; the names of those that failed."""
    failed = set()
    for name, row, reason, before in ended:
        if row is None:
            failed.add(name)
        said = (
            f"failed: {reason}" if row is None else f"done before: {_format_row(row)}" if before else _format_row(row)
        )
        print(f"{name}: {said}", file=sys.stderr, flush=True)
    return failed


def _format_row(row: dict[str, Any]) -> str:
    ended = f", return {row['return']:.3f}" if row["return"] == row["return"] else ""  # not so before one has ended
    reached = f", goal {row['success']:.0%}" if row["success"] == row["success"] else ""
    return (
        f"{int(row['frames']):,} frames, {row['frames_per_second']:,.0f}/s{ended}{reached}, bonus {row['bonus']:.3g}, "
        f"loss {row['loss']:.3g}"
    )
