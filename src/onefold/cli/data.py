"""The part of the command line that fetches and lists image sets."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from onefold.errors import visible

if TYPE_CHECKING:
    from onefold.data.download import Watch

Folder = Annotated[
    Path | None,
    tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: $ONEFOLD_DATA, else the user's cache folder)"),
]


@dataclass(frozen=True)
class Fetch:
    """Download public image sets, with checksums; what was stopped goes on when the same command is given again.

    Known are mnist, fashion_mnist, kmnist, notmnist and notmnist_large. A set that is there is left alone.
    """

    names: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME...", help_behavior_hint="(at least one)")
    ]
    """The sets."""
    data_dir: Folder = None
    """Folder of the image sets."""

    def __call__(self) -> None:
        from onefold.data.catalogue import CATALOGUE
        from onefold.data.fetch import fetch
        from onefold.data.sets import data_dir
        from onefold.errors import InputError

        unknown = [name for name in self.names if name not in CATALOGUE]
        if unknown or not self.names:
            what = f"{unknown[0]!r} is not a set that can be fetched" if unknown else "name the sets to fetch"
            raise InputError(f"{what}: known are {', '.join(CATALOGUE)}")
        for name in self.names:
            with _bar() as watch:
                note = fetch(name, data_dir(self.data_dir), watch, catalogue=CATALOGUE)
            print(visible(note))


@dataclass(frozen=True)
class Listing:
    """Say which image sets are known, which are there, and how large they are."""

    data_dir: Folder = None
    """Folder of the image sets."""

    def __call__(self) -> None:
        from onefold.core.memory import human
        from onefold.data.catalogue import CATALOGUE
        from onefold.data.sets import data_dir, found

        folder = data_dir(self.data_dir)
        there = {name: human(sum(map(_size, paths))) for name, paths in found(folder).items()}
        about = {name: known.about for name, known in CATALOGUE.items()}
        print(visible(f"Image sets in {folder}"))
        width = max(map(len, {**about, **there}))
        for name in (*about, *(name for name in there if name not in about)):
            state = there.get(name, "not there")
            print(f"  {name:{width}}  {state:>10}  {about.get(name, 'put there by hand')}")
        if absent := [name for name in about if name not in there]:
            option = "" if self.data_dir is None else f" --data-dir {folder}"
            print(visible(f"Get more with: onefold data fetch {' '.join(absent)}{option}"))


@dataclass(frozen=True)
class Data:
    """Fetch and list the image sets that methods are compared on."""

    what: Annotated[
        Annotated[Fetch, tyro.conf.subcommand("fetch")] | Annotated[Listing, tyro.conf.subcommand("list")],
        tyro.conf.arg(name=""),
    ]

    def __call__(self) -> None:
        self.what()


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(inner.stat().st_size for inner in path.rglob("*") if inner.is_file())


@contextmanager
def _bar() -> "Iterator[Watch]":
    """A progress bar where a person watches."""
    from onefold.data.download import unwatched

    if not sys.stderr.isatty():
        yield unwatched
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks = {}

        def watch(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield watch
