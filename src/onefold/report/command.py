"""`onefold report`: a benchmark's results as a page, as tables, as plots, and as figures for scripts."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Report:
    """Show the results of `onefold bench run`: a page, index.html, with tables and plots; table.md and table.tex.

    Rivals are shown at the best of their scores, with and without flips, in hindsight; CSD at its default score. Files
    that are damaged are named and left out.
    """

    results: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RESULTS_DIR")]
    """The folder that `onefold bench run` wrote."""
    out: Annotated[
        Path | None,
        tyro.conf.arg(aliases=["-o"], metavar="OUT_DIR", help_behavior_hint="(default: RESULTS_DIR/report)"),
    ] = None
    """Folder to write to."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print every figure as one JSON object; files are written only if -o names a folder."""

    def __call__(self) -> None:
        from onefold.report.shift_units import collect

        collected = collect(self.results)
        for line in collected.skipped:
            print(f"left out: {line}", file=sys.stderr)
        if self.json:
            import json

            from onefold.report.shift import build
            from onefold.report.shift_files import as_json

            print(json.dumps(as_json(build(collected.units), collected), allow_nan=False, indent=2))
        if self.out is not None or not self.json:
            from rich.console import Console

            from onefold.report.shift_page import PLOTS, write

            out = self.results / "report" if self.out is None else self.out
            with Console(stderr=True).status("Drawing"):
                page, *tables = write(collected, out)
            print(
                f"The page: {page}\nTables: {', '.join(map(str, tables))}\nPlots: {out / PLOTS}",
                file=sys.stderr if self.json else sys.stdout,
            )
