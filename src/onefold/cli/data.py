"""`onefold data`: download and list image sets."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onefold.cli.files import print_lines
from onefold.cli.jobs import Fetch, ListSets
from onefold.core.memory import human
from onefold.data import catalogue
from onefold.data.download import ProgressCallback, ignore_progress
from onefold.data.download import fetch as fetch_set
from onefold.data.sets import data_dir, list_sets
from onefold.errors import InputError


def fetch(job: Fetch) -> None:
    """Download the sets one after another."""
    names = ", ".join(catalogue.CATALOGUE)
    if not job.names:
        raise InputError("no set is named", hint=f"Name some of {names}.")
    if unknown := [name for name in job.names if name not in catalogue.CATALOGUE]:
        raise InputError(f"{unknown[0]!r} is not in the catalogue", hint=f"Use {names}.")
    for name in job.names:
        with progress_bar() as watch:
            note = fetch_set(name, data_dir(job.data_dir), watch, catalogue=catalogue.CATALOGUE)
        print_lines(note)


def show(job: ListSets) -> None:
    """Print the public sets and the sets in the folder, with their sizes."""
    folder = data_dir(job.data_dir)
    sizes = {name: human(sum(map(size_of, paths))) for name, paths in list_sets(folder).items()}
    descriptions = {name: entry.about for name, entry in catalogue.CATALOGUE.items()}
    print_lines(f"Image sets in {folder}")
    width = max(map(len, {**descriptions, **sizes}))
    for name in (*descriptions, *(name for name in sizes if name not in descriptions)):
        print_lines(f"  {name:{width}}  {sizes.get(name, 'absent'):>10}  {descriptions.get(name, 'added by hand')}")
    if absent := [name for name in descriptions if name not in sizes]:
        option = "" if job.data_dir is None else f" --data-dir {folder}"
        print_lines(f"Download more with: onefold data fetch {' '.join(absent)}{option}")


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(inner.stat().st_size for inner in path.rglob("*") if inner.is_file())


@contextmanager
def progress_bar() -> Iterator[ProgressCallback]:
    """Yield a function that shows the progress of downloads, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield ignore_progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks = {}

        def watch(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, total=total)

        yield watch
