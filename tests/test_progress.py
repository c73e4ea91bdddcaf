"""The display of progress: a bar on a terminal, lines elsewhere, nothing by default."""

import io
import sys
from collections.abc import Callable

import pytest

from onefold.core import progress
from onefold.core.progress import show_progress, track_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_nothing_is_shown_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    def never() -> str:
        raise AssertionError("the text is not needed")

    with show_progress("fit", 10) as display:
        display.update(10, never)
        display.note("line")
    assert capsys.readouterr() == ("", "")


def test_lines_are_printed_at_intervals_after_parts_and_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    clock: Callable[[], float] = lambda: now[0]  # noqa: E731
    monkeypatch.setattr(progress.time, "monotonic", clock)
    with show_progress("fit", 100, show=True, log_interval=5, log_parts=4) as display:
        for done, seconds in ((10, 1), (20, 4), (24, 6), (25, 7), (40, 8), (100, 9)):
            now[0] = seconds
            display.update(done, lambda done=done: f"step {done}")
        display.note("stopped")
    assert capsys.readouterr().err.splitlines() == ["fit: step 24", "fit: step 25", "fit: step 100", "fit: stopped"]


def test_a_resumed_job_does_not_repeat_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("run", 100, done=60, show=True, log_interval=1e9, log_parts=2) as display:
        display.update(70)
        display.update(100)
    assert capsys.readouterr().err == "run: 100/100\n"


def test_a_terminal_shows_label_share_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with show_progress("fit [0]", None) as display:
        display.update(50, "loss [bold]", total=200)
        display.note("a remark [1]")
    assert all(part in screen.getvalue() for part in ("fit [0]", "25%", "loss [bold]", "a remark [1]"))
    monkeypatch.setattr(sys, "stderr", silent := Terminal())
    with show_progress("fit", 10, show=False) as display:
        display.update(10)
    assert silent.getvalue() == ""


def test_tracking_yields_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    assert list(track_progress(["ab", "c"], 3, "scoring", len)) == ["ab", "c"]
    assert "3/3" in screen.getvalue()
    assert "100%" in screen.getvalue()
