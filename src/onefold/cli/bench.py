"""`onefold bench run`: the grid from the command line, with a table that grows."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from onefold.bench.run import Progress


Folder = Annotated[
    Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: $ONEFOLD_DATA, or the cache)")
]


@dataclass(frozen=True)
class BenchRun:
    """Fit and measure many methods on many sets with many seeds: the paper's main table, and beyond it.

    Every unit (csd_aug/fashion_mnist/seed3) becomes one file under OUT/units. Units that are done are skipped, so a run
    that was stopped or killed goes on when the same command is given again; failures are shown with their reason and
    tried again. Look at the results with `onefold report OUT`.
    """

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="DIR")]
    """Folder of the results, for example results/shift."""
    preset: Literal["paper", "quick", "smoke"] = "quick"
    """The paper's settings; a part of the data in few steps; a few seconds each on embedded data."""
    methods: tuple[str, ...] = ()
    """Some methods only, for example: csd csd_aug ens3. `onefold bench methods` lists them."""
    ids: tuple[str, ...] = ()
    """Familiar sets, each against all others: names in the data folder, or your own as name=path, of an .npz file or
    of a folder with train/ and test/. Those of the paper that are not named here stay strange sets, unless one of your
    own or --strange is given."""
    strange: tuple[str, ...] = ()
    """Sets that are only ever strange."""
    seeds: tuple[int, ...] = ()
    """Which seeds; by default ten, three for what takes long (paper)."""
    engine: Literal["serial", "processes", "ray"] = "serial"
    """One after another, in processes of this machine, or on the Ray cluster that RAY_ADDRESS names."""
    workers: int | None = None
    """How many at a time."""
    data_dir: Folder = None
    """Folder of the image sets; see `onefold data`."""

    def __call__(self) -> int:
        from dataclasses import fields

        from onefold.bench.run import Plan, run

        failed = shown(run(Plan(**{field.name: getattr(self, field.name) for field in fields(self)})))
        return _ended(failed, self.out)


@dataclass(frozen=True)
class Ablate:
    """What each choice in CSD is worth: initialisation, kernel, pairs in the loss, contexts, score.

    One table on FashionMNIST and KMNIST (or the part of it that is there), three seeds. A stopped run goes on.
    """

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="DIR")]
    """Folder of the results, for example results/ablation."""
    preset: Literal["ablate", "smoke"] = "ablate"
    """In full, or a few seconds each on embedded data."""
    ids: tuple[str, ...] = ()
    """Familiar sets, if others than those two."""
    seeds: tuple[int, ...] = ()
    """Which seeds; by default three."""
    engine: Literal["serial", "processes", "ray"] = "serial"
    """As for `onefold bench run`."""
    workers: int | None = None
    """How many at a time."""
    data_dir: Folder = None
    """Folder of the image sets; see `onefold data`."""

    def __call__(self) -> int:
        from dataclasses import fields

        from onefold.bench.run import Plan, ablation

        failed = shown(ablation(Plan(**{field.name: getattr(self, field.name) for field in fields(self)})))
        return _ended(failed, self.out)


@dataclass(frozen=True)
class Search:
    """Search for a method's rates as the paper did: over its grids, in two stages, by AUROC on one set.

    Trials that are done are kept in OUT/search.journal (Optuna) and not done again.
    """

    method: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="METHOD")]
    """ens3, laplace, sgmcmc, mcd, rnd or csd."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="DIR")]
    """Folder of the trials."""
    preset: Literal["paper", "quick", "smoke"] = "quick"
    """As for `onefold bench run`."""
    ids: tuple[str, ...] = ()
    """The familiar set first, then the strange ones; by default FashionMNIST against the others."""
    engine: Literal["serial", "processes", "ray"] = "serial"
    """As for `onefold bench run`."""
    workers: int | None = None
    """How many at a time."""
    data_dir: Folder = None
    """Folder of the image sets; see `onefold data`."""

    def __call__(self) -> int:
        from onefold.bench.run import Plan
        from onefold.bench.search import search

        options = {name: getattr(self, name) for name in ("out", "preset", "ids", "engine", "workers", "data_dir")}
        best: dict[str, tuple[float, float]] = {}
        failed = 0
        for tried in search(Plan(**options), self.method):
            if tried.auroc is None:
                failed += 1
                print(f"{tried.method}: {tried.rate} {tried.value:g}: failed: {tried.reason}", file=sys.stderr)
                continue
            print(f"{tried.method}: {tried.rate} {tried.value:g}: AUROC {tried.auroc:.2f}", flush=True)
            best[tried.rate] = max(best.get(tried.rate, (0.0, 0.0)), (tried.auroc, tried.value))
        print("Best: " + ", ".join(f"{rate} {value:g} ({auroc:.2f})" for rate, (auroc, value) in best.items()))
        return 1 if failed else 0


@dataclass(frozen=True)
class Methods:
    """Say which methods, presets and engines there are."""

    def __call__(self) -> None:
        from onefold.bench.units import METHODS, PRESETS

        for method in METHODS.values():
            print(f"  {method.name:18} {method.title}")
        for preset in PRESETS.values():
            size = "all images" if preset.train is None else f"{preset.train:,} train images"
            length = f"{preset.steps:,} steps of {preset.batch}"
            print(f"  --preset {preset.name:8} {length}, {size}, seeds {preset.seeds[0]} to {preset.seeds[-1]}")


@dataclass(frozen=True)
class Bench:
    """The distribution-shift benchmark: many methods on many image sets, on one core, one GPU or a cluster."""

    what: Annotated[
        Annotated[BenchRun, tyro.conf.subcommand("run")]
        | Annotated[Ablate, tyro.conf.subcommand("ablate")]
        | Annotated[Search, tyro.conf.subcommand("search")]
        | Annotated[Methods, tyro.conf.subcommand("methods")],
        tyro.conf.arg(name=""),
    ]

    def __call__(self) -> int:
        return self.what() or 0


def shown(progress: "Iterable[Progress]") -> list[tuple[str, str]]:
    """Show the units as they end, as a table where a person watches, else a line each; those that failed."""
    from rich.console import Console
    from rich.live import Live

    cells: dict[tuple[str, str], list[float]] = {}
    failed: list[tuple[str, str]] = []
    before = 0
    console = Console(stderr=True)
    with Live(console=console, refresh_per_second=4, transient=not console.is_terminal) as live:
        for ended in progress:
            before += ended.before
            if ended.result is None:
                failed.append((str(ended.unit), ended.reason))
            else:
                name = ended.result["settings"]["title"], ended.result["data"]["id"]
                cells.setdefault(name, []).append(_mean(ended.result))
            if console.is_terminal:
                live.update(_table(cells, len(failed)))
            elif not ended.before:
                print(_line(ended), file=sys.stderr, flush=True)
    if before and not console.is_terminal:
        print(f"{before} units were there already", file=sys.stderr)
    return failed


def _ended(failed: list[tuple[str, str]], out: Path) -> int:
    for unit, reason in failed:
        print(f"failed: {unit}: {reason}", file=sys.stderr)
    print(f"Results: {out}; look at them with: onefold report {out}")
    return 1 if failed else 0


def _mean(result: dict[str, Any]) -> float:
    from onefold.bench.cell import means

    return means(result["scores"][result["default"]], "auroc")[0]


def _line(ended: "Progress") -> str:
    if ended.result is None:
        return f"{ended.unit}: failed: {ended.reason}"
    accuracy, seconds = 100 * ended.result["accuracy"], ended.result["cost"]["fit_s"]
    return f"{ended.unit}: AUROC {_mean(ended.result):.2f}, accuracy {accuracy:.2f}, fit {seconds:.1f} s"


def _table(cells: dict[tuple[str, str], list[float]], failed: int) -> Any:
    from rich.table import Table

    ids = list(dict.fromkeys(id_ for _, id_ in cells))
    caption = f"{sum(map(len, cells.values()))} units done" + (f", {failed} failed" if failed else "")
    table = Table(title="AUROC, mean over strange sets (number of seeds)", caption=caption, title_justify="left")
    table.add_column("Method")
    for id_ in ids:
        table.add_column(id_, justify="right")
    for title in dict.fromkeys(title for title, _ in cells):
        found = [cells.get((title, id_), []) for id_ in ids]
        table.add_row(
            title, *(f"{sum(values) / len(values):.1f} ({len(values)})" if values else "" for values in found)
        )
    return table
