"""`onefold demo`: a detector on a small classifier of digits, as a table, a page and files."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from onefold import demo
from onefold.cli.console import print_lines
from onefold.cli.jobs import Demo
from onefold.core.batches import check_seed
from onefold.core.storage import write_bytes, write_json
from onefold.report.demo_page import render

if TYPE_CHECKING:
    from onefold.demo import DemoResult


def run(job: Demo) -> None:
    """Train a classifier, fit a detector on it, and write the files and the page."""
    check_seed(job.seed)
    job.out.mkdir(parents=True, exist_ok=True)  # before the work, so that an error about the folder comes first
    data = demo.demo_data(job.seed)
    result = demo.run_demo(data, job.out, job.seed, say=print_lines)
    summary = demo.summary(result, data, job.seed)
    write_json(job.out / "results.json", summary)
    write_bytes(job.out / "index.html", render(summary, result, data).encode())
    Console().print(make_table(result))
    print_lines(
        f"Detector: {job.out / 'digits.onefold'}",
        f"Exported: {job.out / 'digits.pt2'} (runs with torch alone)",
        f"Page: {job.out / 'index.html'}",
    )


def make_table(result: "DemoResult") -> Table:
    """Return the shares of confident predictions and of alarms as a table for the terminal."""
    table = Table(title="Predictions with 90 % confidence or more, and alarms of the detector", title_justify="left")
    table.add_column("Images")
    for name in ("confident", "flagged"):
        table.add_column(name, justify="right")
    for name, answers in {"digits (familiar)": result.digits, **result.unfamiliar}.items():
        table.add_row(name, f"{answers.confident:.1%}", f"{answers.flagged.mean():.1%}")
    return table
