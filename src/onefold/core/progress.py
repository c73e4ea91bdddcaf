"""The one display of progress: a bar on a terminal, lines in a log, or nothing."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, TypeVar

from onefold.core.batches import batch_length

T = TypeVar("T")
Text: TypeAlias = str | Callable[[], str]
"""Text, or a function that returns it, called only when the display is refreshed (reading a loss waits for a GPU)."""

BAR_INTERVAL = 0.2  # seconds between refreshes of a bar
LOG_INTERVAL = 5.0  # seconds between lines of a log


class Display(Protocol):
    """Progress of one job."""

    def update(self, done: float, text: Text = "", *, total: float | None = None) -> None:
        """Show how much is done.

        Args:
            done: Amount done so far.
            text: What to show beside the bar, or in the line after the label.
            total: New total amount, if it has changed.
        """
        ...

    def note(self, text: str) -> None:
        """Print a line of its own above the bar."""
        ...


@contextmanager
def show_progress(
    label: str,
    total: float | None,
    *,
    done: float = 0,
    show: bool | None = None,
    keep: bool = False,
    log_interval: float = LOG_INTERVAL,
    log_parts: int = 0,
) -> Iterator[Display]:
    """Yield the display of a job: a bar if stderr is a terminal, else lines of a log, or nothing.

    Args:
        label: Name of the job, before the bar or the lines.
        total: Total amount; None if it is unknown.
        done: Amount done before the job starts, as in a resumed run.
        show: False shows nothing; True also shows lines without a terminal; None shows a bar on a terminal only.
        keep: Keep the bar on the screen at the end.
        log_interval: Seconds between two lines.
        log_parts: Also print a line after each of so many equal parts of the total.
    """
    terminal = sys.stderr.isatty()
    if not (terminal if show is None else show):
        yield _NoDisplay()
    elif not terminal:
        yield _LogDisplay(label, total, done, log_interval, log_parts)
    else:
        with _open_bar(transient=not keep) as bar:
            yield _BarDisplay(bar, label, total, done)


def track_progress(
    parts: Iterable[T], total: int | None, label: str, count: Callable[[T], int] = batch_length
) -> Iterator[T]:
    """Yield the parts of a long job, with a bar if stderr is a terminal; `count` returns the size of a part."""
    with show_progress(label, total) as display:
        done = 0
        for part in parts:
            done += count(part)
            display.update(done, f"{done:,}" if total is None else f"{done:,}/{total:,}")
            yield part


@contextmanager
def show_spinner(label: str) -> Iterator[None]:
    """Show a spinner while nothing can be counted, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(label):
        yield


class _NoDisplay:
    """Display that shows nothing."""

    def update(self, done: float, text: Text = "", *, total: float | None = None) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class _LogDisplay:
    """Lines of a log: at intervals, after each of several equal parts, and at the end."""

    def __init__(self, label: str, total: float | None, done: float, interval: float, parts: int) -> None:
        self._label, self._total, self._interval, self._parts = label, total, interval, parts
        self._part, self._printed = self._part_of(done), time.monotonic()

    def update(self, done: float, text: Text = "", *, total: float | None = None) -> None:
        self._total = self._total if total is None else total
        now, part = time.monotonic(), self._part_of(done)
        if now - self._printed > self._interval or part > self._part or done == self._total:
            self._printed, self._part = now, part
            self.note(_read(text) or f"{done:,.0f}" + ("" if self._total is None else f"/{self._total:,.0f}"))

    def note(self, text: str) -> None:
        print(f"{self._label}: {text}", file=sys.stderr, flush=True)

    def _part_of(self, done: float) -> int:
        return int(self._parts * done / self._total) if self._total else 0


class _BarDisplay:
    """Bar on a terminal with the share done, a text, and the time left."""

    def __init__(self, bar: Any, label: str, total: float | None, done: float) -> None:
        self._bar, self._total, self._refreshed = bar, total, 0.0
        self._task = bar.add_task(label, total=total, completed=done, text="")

    def update(self, done: float, text: Text = "", *, total: float | None = None) -> None:
        self._total = self._total if total is None else total
        if done == self._total or time.monotonic() - self._refreshed > BAR_INTERVAL:
            self._refreshed = time.monotonic()
            self._bar.update(self._task, completed=done, total=self._total, text=_read(text))

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


def _open_bar(*, transient: bool) -> Any:
    """Return a bar on stderr; rich is imported only here, because most processes show none."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Column

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        TaskProgressColumn(),
        TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=transient)


def _read(text: Text) -> str:
    return text if isinstance(text, str) else text()
