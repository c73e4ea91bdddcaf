"""`onefold bench`: run the benchmark, with a table that grows."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from onefold.bench.engines import Outcome
from onefold.bench.evaluate import mean_over_sets
from onefold.bench.grid import PRESETS, Unit, point_name, rank
from onefold.bench.rows import ROWS
from onefold.bench.run import run as run_units
from onefold.bench.run import run_ablation
from onefold.bench.search import search as search_rates
from onefold.cli.jobs import Ablate, BenchRun, BenchSearch


def run(job: BenchRun) -> int:
    """Run the units of the benchmark."""
    units = run_units(job.out, methods=job.methods, ood=job.ood, seeds=job.seeds, **options_of(job))
    return finish(show_progress(units), job.out)


def ablate(job: Ablate) -> int:
    """Run the units of the ablation."""
    return finish(show_progress(run_ablation(job.out, seeds=job.seeds, **options_of(job))), job.out)


def search(job: BenchSearch) -> int:
    """Run the trials, print one line each, and print the best rates of every stage."""
    stages: dict[tuple[str, ...], list[tuple[str, float | None]]] = {}
    for trial in search_rates(job.out, job.method, **options_of(job)):
        name = point_name(trial.job)
        auroc = None if trial.result is None else trial.result["auroc"]
        stages.setdefault(tuple(trial.job), []).append((name, auroc))
        if auroc is None:
            print(f"{job.method}: {name}: failed: {trial.reason}", file=sys.stderr)
        else:
            print(f"{job.method}: {name}: AUROC {auroc:.2f}", flush=True)
    best = [rank(trials)[0] for trials in stages.values()]
    print("Best: " + "; ".join(f"{name} ({auroc:.2f})" for name, auroc in best))
    return 1 if any(auroc is None for trials in stages.values() for _, auroc in trials) else 0


def list_methods() -> None:
    """Print the methods and presets."""
    for row in ROWS.values():
        print(f"  {row.name:18} {row.title}")
    for preset in PRESETS.values():
        size = "all images" if preset.train is None else f"{preset.train:,} train images"
        length = f"{preset.steps:,} steps of {preset.batch}"
        print(f"  --preset {preset.name:8} {length}, {size}, seeds {preset.seeds[0]} to {preset.seeds[-1]}")


def options_of(job: BenchRun | Ablate | BenchSearch) -> dict[str, Any]:
    """Return the options that all jobs have, besides the results folder."""
    execution = job.execution
    return {
        "preset": job.preset, "ids": job.ids, "engine": execution.engine, "workers": execution.workers,
        "data_dir": job.data_dir,
    }  # fmt: skip


def show_progress(outcomes: Iterable[Outcome[Unit]]) -> list[tuple[str, str]]:
    """Show the units as they finish, as a table on a terminal, else one line each; return the failed ones."""
    cells: dict[tuple[str, str], list[float]] = {}
    failed: list[tuple[str, str]] = []
    skipped = 0
    console = Console(stderr=True)
    with Live(console=console, refresh_per_second=4, transient=not console.is_terminal) as live:
        for outcome in outcomes:
            skipped += outcome.resumed
            if outcome.result is None:
                failed.append((str(outcome.job), outcome.reason))
            else:
                key = outcome.result["settings"]["title"], outcome.result["data"]["id"]
                cells.setdefault(key, []).append(mean_auroc(outcome.result))
            if console.is_terminal:
                live.update(make_table(cells, len(failed)))
            elif not outcome.resumed:
                print(describe(outcome), file=sys.stderr, flush=True)
    if skipped and not console.is_terminal:
        print(f"{skipped} units were finished before", file=sys.stderr)
    return failed


def finish(failed: list[tuple[str, str]], out: Path) -> int:
    """Print the failed units and the next command; return the exit status."""
    for unit, reason in failed:
        print(f"failed: {unit}: {reason}", file=sys.stderr)
    print(f"Results: {out}; look at them with: onefold report {out}")
    return 1 if failed else 0


def mean_auroc(result: dict[str, Any]) -> float:
    """Return the AUROC of the default score, mean over unfamiliar sets."""
    return mean_over_sets(result["scores"][result["default"]], "auroc")[0]


def describe(outcome: Outcome[Unit]) -> str:
    """Return a line about a finished unit."""
    if outcome.result is None:
        return f"{outcome.job}: failed: {outcome.reason}"
    accuracy, seconds = 100 * outcome.result["accuracy"], outcome.result["cost"]["fit_s"]
    return f"{outcome.job}: AUROC {mean_auroc(outcome.result):.2f}, accuracy {accuracy:.2f}, fit {seconds:.1f} s"


def make_table(cells: dict[tuple[str, str], list[float]], failed: int) -> Table:
    """Return the mean AUROC of each method and familiar set so far, with the number of seeds."""
    ids = list(dict.fromkeys(id_ for _, id_ in cells))
    caption = f"{sum(map(len, cells.values()))} units done" + (f", {failed} failed" if failed else "")
    table = Table(title="AUROC, mean over unfamiliar sets (number of seeds)", caption=caption, title_justify="left")
    table.add_column("Method")
    for id_ in ids:
        table.add_column(id_, justify="right")
    for title in dict.fromkeys(title for title, _ in cells):
        row = [cells.get((title, id_), []) for id_ in ids]
        table.add_row(title, *(f"{sum(values) / len(values):.1f} ({len(values)})" if values else "" for values in row))
    return table
