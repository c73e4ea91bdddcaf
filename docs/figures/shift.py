"""AUROC of every method of the distribution-shift benchmark on the four ID sets, from results/shift.

    python docs/figures/shift.py

A dot is a seed and a line is the mean over seeds, on a logarithmic axis of 100 minus AUROC. CSD-OOD is left out,
because it was fitted with images of the OOD sets.
"""

from pathlib import Path

from matplotlib.figure import Figure
from style import IMAGES, Look, both, panels

from onefold.bench.results import collect
from onefold.report.bench_table import TableRow, build_table

RESULTS = Path(__file__).parent.parent.parent / "results" / "shift"
TICKS = (60, 80, 90, 95, 98, 99, 99.5, 99.9)


def compared(rows: list[TableRow]) -> dict[str, TableRow]:
    """Return one row for each method by its title: CSD by its default score, rivals at their best."""
    return {row.title: row for row in rows if row.kind in ("ours", "rival") and not row.uses_ood}


def methods(look: Look) -> Figure:
    *sections, average = build_table(collect(RESULTS).units)
    order = sorted(compared(average.rows).values(), key=lambda row: row.auroc)
    figure, axes = panels(len(sections), 15, 5.2, sharey=True)
    for ax, section in zip(axes, sections, strict=True):
        rows = compared(section.rows)
        for place, title in enumerate(row.title for row in order):
            missing = [100 - value for value in rows[title].values["auroc"].values()]
            colour = look.red if rows[title].ours else look.blue
            ax.plot(missing, [place] * len(missing), "o", color=colour, alpha=0.45, markersize=6, markeredgewidth=0)
            ax.plot([sum(missing) / len(missing)] * 2, [place - 0.32, place + 0.32], color=colour, linewidth=2.6)
        ax.set_xscale("log")
        ax.set_xlim(60, 0.02)
        ax.set_xticks([100 - tick for tick in TICKS if tick in (60, 90, 99, 99.9)], ["60", "90", "99", "99.9"])
        ax.set_xticks([100 - tick for tick in TICKS], minor=True, labels=[])
        ax.set_yticks(range(len(order)), [row.title for row in order])
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="both", color=look.faint, linewidth=0.8)
        ax.set_axisbelow(True)
        ax.set_title(section.name)
        ax.set_xlabel("AUROC, %")
    for label, row in zip(axes[0].get_yticklabels(), order, strict=True):
        label.set_color(look.red if row.ours else look.ink)
    return figure


def main(folder: Path = IMAGES) -> None:
    both("shift", methods, folder)


if __name__ == "__main__":
    main()
