"""`onefold toy`: the paper's two toy figures, and the agreement of CSD with the exact answer."""

from onefold import toy
from onefold.cli.console import print_lines
from onefold.cli.jobs import Toy
from onefold.core.batches import check_seed
from onefold.core.storage import write_json
from onefold.report.example_figures import draw_line, draw_plane


def run(job: Toy) -> None:
    """Compute and draw the figures, and print the rank correlations."""
    check_seed(job.seed)
    job.out.mkdir(parents=True, exist_ok=True)  # before the work, so that an error about the folder comes first
    line, plane, summary = toy.run(job.seed)
    draw_line(line, job.out / "toy_1d.png")
    draw_plane(plane, job.out / "toy_2d.png")
    write_json(job.out / "toy.json", summary)
    print(f"Known queries: mean relative error of the variance {summary['line']['mean_relative_error']:.1%}")
    print("Rank correlation on the plane:")
    for pair, value in summary["plane"]["rank_correlation"].items():
        print(f"  {value:6.3f}  {pair}")
    print_lines(f"Figures: {job.out / 'toy_1d.png'}, {job.out / 'toy_2d.png'}")
