"""`onefold report`: results as a page, as tables, as plots, and as figures for scripts."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from onefold.errors import InputError, visible


@dataclass(frozen=True)
class Report:
    """Show the results of `onefold bench run`, or runs of `onefold rl train`: a page with tables and plots.

    Of a benchmark, rivals are shown at the best of their scores, with and without flips, in hindsight; CSD at its
    default score. Of runs: learning curves, final figures, visited places. Beside the page lies table.md and, of a
    benchmark, table.tex. Files that are damaged are named and left out.
    """

    results: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RESULTS_DIR")]
    """The folder that `onefold bench run` wrote, that of a run, or one with runs anywhere below it."""
    out: Annotated[
        Path | None,
        tyro.conf.arg(aliases=["-o"], metavar="OUT_DIR", help_behavior_hint="(default: RESULTS_DIR/report)"),
    ] = None
    """Folder to write to."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print every figure as one JSON object; files are written only if -o names a folder."""

    def __call__(self) -> None:
        found = (_runs if _holds_runs(self.results) else _benchmark)(self.results)
        for line in found.skipped:
            print(f"left out: {visible(line)}", file=sys.stderr)
        if self.json:
            import json

            print(json.dumps(found.figures(), allow_nan=False, indent=2))
        if self.out is not None or not self.json:
            from rich.console import Console

            from onefold.report.figures import PLOTS

            out = self.results / "report" if self.out is None else self.out
            with Console(stderr=True).status("Drawing"):
                page, *tables = found.write(out)
            lines = [f"The page: {page}", f"Tables: {', '.join(map(str, tables))}", f"Plots: {out / PLOTS}"]
            print(*map(visible, lines), sep="\n", file=sys.stderr if self.json else sys.stdout)


class _Found(NamedTuple):
    """What a folder holds, to be printed and to be written; what could not be read is said."""

    skipped: list[str]
    figures: Callable[[], dict[str, Any]]
    write: Callable[[Path], list[Path]]


def _holds_runs(folder: Path) -> bool:
    """Whether it is no benchmark's and has settings of runs; an InputError if it is there and has neither."""
    if (folder / "bench.json").exists() or not folder.is_dir():
        return False
    if next(folder.rglob("settings.json"), None) is None:
        raise InputError(
            f"{folder} holds no results: there is no bench.json in it, and no settings.json of a run in it or below"
        )
    return True


def _benchmark(folder: Path) -> _Found:
    from onefold.report.shift import build
    from onefold.report.shift_files import as_json
    from onefold.report.shift_units import collect

    def write(out: Path) -> list[Path]:
        from onefold.report.shift_page import write

        return write(collected, out)

    collected = collect(folder)
    return _Found(collected.skipped, lambda: as_json(build(collected.units), collected), write)


def _runs(folder: Path) -> _Found:
    from onefold.report.runs_read import collect
    from onefold.report.runs_table import build
    from onefold.report.runs_text import as_json

    def write(out: Path) -> list[Path]:
        from onefold.report.runs_page import write

        return write(collected, out)

    collected = collect(folder)
    return _Found(collected.skipped, lambda: as_json(collected, build(collected.records)), write)
