"""`onefold data`: download and list image sets."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onefold.cli.console import print_lines
from onefold.cli.jobs import Fetch, ListSets
from onefold.core.progress import show_progress
from onefold.core.runtime import human
from onefold.data import catalogue
from onefold.data.download import ProgressCallback
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
        with progress_bar(name) as watch:
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
def progress_bar(name: str) -> Iterator[ProgressCallback]:
    """Yield a function that shows how much of a file is downloaded or read, if stderr is a terminal."""
    with show_progress(name, None) as display:
        yield lambda part, done, total: display.update(done, part, total=total)
