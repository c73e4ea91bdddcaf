"""Error of a classifier on the predictions that are kept, by the score that orders them, from results/shift.

    python docs/figures/risk.py

A line is the mean over seeds. The rejection curves are those of the units: accuracies at coverages from 1 to 0.1.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from style import IMAGES, Look, both, panels

from onefold.bench.results import KEPT_SHARES, collect

RESULTS = Path(__file__).parent.parent.parent / "results" / "shift"
SETS = ("fashion_mnist", "mnist", "kmnist_10k", "notmnist_22k")
LABELS = {
    "csd_post_hoc": "CSD-Aug on the classifier", "knn-noflips": "kNN on the classifier", "energy-noflips": "energy",
    "ens15-noflips": "ENS(15)",
}  # fmt: skip


def curves(look: Look) -> Figure:
    units = collect(RESULTS).units
    figure, axes = panels(len(SETS), 15, 4.2)
    colours = dict(zip(LABELS, (look.red, look.gold, look.blue, look.ink), strict=True))
    for ax, name in zip(axes, SETS, strict=True):
        for row, label in LABELS.items():
            accuracies = [unit.rejection for unit in units if (unit.row, unit.id_set) == (row, name)]
            ax.plot(
                KEPT_SHARES, 100 * (1 - np.mean(accuracies, axis=0)), color=colours[row], linewidth=2.4, label=label
            )
        ax.set(title=name, xlabel="share of the predictions kept", xlim=(1, 0.1), ylim=(0, None))
        ax.grid(color=look.faint, linewidth=0.8)
        ax.set_axisbelow(True)
    axes[0].set_ylabel("wrong among them, %")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def main(folder: Path = IMAGES) -> None:
    both("risk", curves, folder)


if __name__ == "__main__":
    main()
