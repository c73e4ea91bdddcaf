"""What people are told while agents train and play: on one terminal line, or in lines of a log."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command's help needs none of them
    from onefold.rl.grid import Ended, Job
    from onefold.rl.play import Played

PAUSE = 60.0  # seconds between two words on how far many runs are


def shown(rows: Iterable[dict[str, Any]], total: int, label: str) -> None:
    """Progress as it comes: a bar where a person watches, else a line every twentieth of the way."""
    if not sys.stderr.isatty():
        last = 0
        for row in rows:
            if row["frames"] >= total or 20 * row["frames"] // total > last:
                last = 20 * row["frames"] // total
                left = max(0.0, total - row["frames"]) / max(1e-9, row["frames_per_second"])
                print(f"{label}: {_line(row)}, {left / 60:.1f} min left", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Column

    text = TextColumn("{task.fields[line]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    columns = (BarColumn(16), TaskProgressColumn(), TimeRemainingColumn(compact=True), text)
    console = Console(stderr=True)
    console.print(label, style="bold")
    with Progress(*columns, console=console, expand=True) as bar:
        task = bar.add_task(label, total=total, line="…")
        for row in rows:
            bar.update(task, completed=row["frames"], line=_line(row))


def counted(played: "Iterator[Played]", count: int) -> "Iterator[Played]":
    """Episodes as they come; who watches is told how many have."""
    for i, each in enumerate(played, 1):
        if sys.stderr.isatty():
            line = f"{i:,} of {count:,} episodes" if i < count else ""
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        elif i < count and 10 * i // count > 10 * (i - 1) // count:
            print(f"{i:,} of {count:,} episodes", file=sys.stderr, flush=True)
        yield each


@contextlib.contextmanager
def under_way(jobs: "Sequence[Job]") -> Iterator[None]:
    """A line every minute on how far runs are together, read from their folders: they may be in other processes."""
    total, stop = sum(job.run.frames for job in jobs), threading.Event()

    def tell() -> None:
        begun, started = _made(jobs), time.monotonic()
        while not stop.wait(PAUSE):
            made = _made(jobs)
            speed = (made - begun) / (time.monotonic() - started)
            left = f", {(total - made) / speed / 3600:.1f} h left" if speed > 0 else ""
            print(f"all runs: {made:,} of {total:,} frames, {speed:,.0f}/s{left}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _made(jobs: "Sequence[Job]") -> int:
    """Frames of these runs so far."""
    from onefold.errors import FileError
    from onefold.rl.folder import PROGRESS, Folder

    made = 0
    for job in jobs:
        with contextlib.suppress(FileError, OSError, KeyError, ValueError, IndexError):  # not begun, or being written
            made += int(Folder(job.out).rows(PROGRESS)[-1]["frames"])
    return made


def told(ended: "Iterable[Ended]") -> set[str]:
    """A line for each run that ended; the names of those that failed."""
    failed = set()
    for name, row, reason, before in ended:
        if row is None:
            failed.add(name)
        said = f"failed: {reason}" if row is None else f"done before: {_line(row)}" if before else _line(row)
        print(f"{name}: {said}", file=sys.stderr, flush=True)
    return failed


def _line(row: dict[str, Any]) -> str:
    ended = f", return {row['return']:.3f}" if row["return"] == row["return"] else ""  # not so before one has ended
    reached = f", goal {row['reached']:.0%}" if row["reached"] == row["reached"] else ""
    return (
        f"{int(row['frames']):,} frames, {row['frames_per_second']:,.0f}/s{ended}{reached}, bonus {row['bonus']:.3g}, "
        f"loss {row['loss']:.3g}"
    )
