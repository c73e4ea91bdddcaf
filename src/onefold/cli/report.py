"""`onefold report`: results as a page, as tables, as plots, and as JSON."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from onefold.cli.jobs import Report
from onefold.errors import InputError, visible


class Results(NamedTuple):
    """Results of a folder: names of unreadable files, and functions that give the figures and write the page."""

    skipped: list[str]
    figures: Callable[[], dict[str, Any]]
    write: Callable[[Path], list[Path]]


def run(job: Report) -> None:
    """Print the figures, or write the page, or both."""
    results = read_runs(job.results) if has_runs(job.results) else read_benchmark(job.results)
    for line in results.skipped:
        print(f"left out: {visible(line)}", file=sys.stderr)
    if job.json:
        print(json.dumps(results.figures(), allow_nan=False, indent=2))
    if job.out is not None or not job.json:
        from onefold.report.figures import PLOTS

        out = job.results / "report" if job.out is None else job.out
        with Console(stderr=True).status("drawing"):
            page, *tables = results.write(out)
        lines = [f"Page: {page}", f"Tables: {', '.join(map(str, tables))}", f"Plots: {out / PLOTS}"]
        print(*map(visible, lines), sep="\n", file=sys.stderr if job.json else sys.stdout)


def has_runs(folder: Path) -> bool:
    """Return True for runs, False for a benchmark or an absent folder; raise InputError if it holds neither."""
    if (folder / "bench.json").exists() or not folder.is_dir():
        return False
    if next(folder.rglob("settings.json"), None) is None:
        raise InputError(
            f"{folder}: no results (no bench.json, and no settings.json of a run at any depth)",
            hint="Name the folder of a benchmark or of runs.",
        )
    return True


def read_benchmark(folder: Path) -> Results:
    """Read the results of `onefold bench`."""
    from onefold.bench.results import collect
    from onefold.report.bench_page import write_report
    from onefold.report.bench_table import build_table
    from onefold.report.bench_text import to_json

    collected = collect(folder)
    return Results(
        collected.skipped,
        lambda: to_json(build_table(collected.units), collected),
        lambda out: write_report(collected, out),
    )


def read_runs(folder: Path) -> Results:
    """Read the results of `onefold rl`."""
    from onefold.report.runs_comparison import compare_runs
    from onefold.report.runs_data import collect_runs
    from onefold.report.runs_page import write_report
    from onefold.report.runs_tables import as_json

    collection = collect_runs(folder)
    return Results(
        collection.skipped,
        lambda: as_json(collection, compare_runs(collection.records)),
        lambda out: write_report(collection, out),
    )
