"""`onefold bench`: run the benchmark, with a table that grows."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from onefold.bench.cell import means
from onefold.bench.run import Plan, Progress, ablation
from onefold.bench.run import run as run_plan
from onefold.bench.search import search as search_rates
from onefold.bench.units import METHODS, PRESETS
from onefold.cli.jobs import Ablate, BenchRun, BenchSearch


def run(job: BenchRun) -> int:
    """Run the units of the benchmark."""
    return finish(
        show_progress(run_plan(make_plan(job, methods=job.methods, strange=job.strange, seeds=job.seeds))), job.out
    )


def ablate(job: Ablate) -> int:
    """Run the units of the ablation."""
    return finish(show_progress(ablation(make_plan(job, seeds=job.seeds))), job.out)


def search(job: BenchSearch) -> int:
    """Run the trials, print one line each, and print the best rates."""
    best: dict[str, tuple[float, float]] = {}
    failed = 0
    for trial in search_rates(make_plan(job), job.method):
        name = f"{trial.method}: {trial.rate} {trial.value:g}"
        if trial.auroc is None:
            failed += 1
            print(f"{name}: failed: {trial.reason}", file=sys.stderr)
            continue
        print(f"{name}: AUROC {trial.auroc:.2f}", flush=True)
        best[trial.rate] = max(best.get(trial.rate, (0.0, 0.0)), (trial.auroc, trial.value))
    print("Best: " + ", ".join(f"{rate} {value:g} ({auroc:.2f})" for rate, (auroc, value) in best.items()))
    return 1 if failed else 0


def list_methods() -> None:
    """Print the methods and presets."""
    for method in METHODS.values():
        print(f"  {method.name:18} {method.title}")
    for preset in PRESETS.values():
        size = "all images" if preset.train is None else f"{preset.train:,} train images"
        length = f"{preset.steps:,} steps of {preset.batch}"
        print(f"  --preset {preset.name:8} {length}, {size}, seeds {preset.seeds[0]} to {preset.seeds[-1]}")


def make_plan(job: BenchRun | Ablate | BenchSearch, **options: Any) -> Plan:
    """Return the plan of a job; `options` are those that not all jobs have."""
    execution = job.execution
    return Plan(
        out=job.out, preset=job.preset, ids=job.ids, engine=execution.engine, workers=execution.workers,
        data_dir=job.data_dir, **options,
    )  # fmt: skip


def show_progress(units: Iterable[Progress]) -> list[tuple[str, str]]:
    """Show the units as they finish, as a table on a terminal, else one line each; return the failed ones."""
    cells: dict[tuple[str, str], list[float]] = {}
    failed: list[tuple[str, str]] = []
    skipped = 0
    console = Console(stderr=True)
    with Live(console=console, refresh_per_second=4, transient=not console.is_terminal) as live:
        for unit in units:
            skipped += unit.before
            if unit.result is None:
                failed.append((str(unit.unit), unit.reason))
            else:
                key = unit.result["settings"]["title"], unit.result["data"]["id"]
                cells.setdefault(key, []).append(mean_auroc(unit.result))
            if console.is_terminal:
                live.update(make_table(cells, len(failed)))
            elif not unit.before:
                print(describe(unit), file=sys.stderr, flush=True)
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
    return means(result["scores"][result["default"]], "auroc")[0]


def describe(unit: Progress) -> str:
    """Return a line about a finished unit."""
    if unit.result is None:
        return f"{unit.unit}: failed: {unit.reason}"
    accuracy, seconds = 100 * unit.result["accuracy"], unit.result["cost"]["fit_s"]
    return f"{unit.unit}: AUROC {mean_auroc(unit.result):.2f}, accuracy {accuracy:.2f}, fit {seconds:.1f} s"


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
