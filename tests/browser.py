"""Chromium for the tests of pages. Console messages, dialogs and external requests fail the test."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

Opener: TypeAlias = Callable[..., Any]
CHROMIUM = shutil.which("chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run"]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    api = pytest.importorskip("playwright.sync_api", reason="no playwright on this machine")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Opener]:
    """Return a function that opens a file in a new window; at the end, fail on messages, dialogs and requests."""
    events: list[str] = []
    contexts = []

    def opened(page: Path, width: int = 1200, height: int = 900, scheme: str = "light", **more: Any) -> Any:
        window = {"width": width, "height": height}
        contexts.append(browser.new_context(viewport=window, color_scheme=scheme, **more))
        tab = contexts[-1].new_page()
        tab.on("console", lambda message: events.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: events.append(f"error: {error}"))
        tab.on("dialog", lambda dialog: (events.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        tab.on("request", lambda sent: sent.url.startswith(("file:", "data:", "blob:")) or events.append(sent.url))
        tab.goto(page.as_uri())
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert events == []
