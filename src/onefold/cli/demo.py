"""`onefold demo`: five methods on handwritten digits, as a table and a page."""

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
    from onefold.demo import Outcome


def run(job: Demo) -> None:
    """Fit and compare the methods; write the results and the page."""
    check_seed(job.seed)
    job.out.mkdir(parents=True, exist_ok=True)  # before the work, so that an error about the folder comes first
    data = demo.sets(job.seed)
    outcomes = list(demo.compare(data, job.seed))
    result = demo.summary(outcomes, data, job.seed)
    write_json(job.out / "results.json", result)
    write_bytes(job.out / "index.html", render(result, outcomes, data, "CSD-Aug").encode())
    Console().print(make_table(outcomes))
    print_lines(f"Page: {job.out / 'index.html'}")


def make_table(outcomes: "list[Outcome]") -> Table:
    """Return the means over the unfamiliar sets as a table for the terminal."""
    table = Table(title="Digits against letters, perturbed digits and noise (means, %)", title_justify="left")
    table.add_column("Method")
    names = list(outcomes[0].figures)
    for name in (*names, "seconds"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        cells = [f"{outcome.figures[name]['mean']:.1f}" for name in names]
        table.add_row(outcome.name, *cells, f"{outcome.fit_seconds + outcome.score_seconds:.1f}")
    return table
