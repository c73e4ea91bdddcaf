"""Time to fit and to score against the number of rows, from results/growth.json.

python docs/figures/growth.py
"""

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from style import IMAGES

RESULTS = Path(__file__).parent.parent.parent / "results" / "growth.json"


def main(folder: Path = IMAGES) -> None:
    """Time against rows, both logarithmic, with a line of slope one."""
    result = json.loads(RESULTS.read_text("utf-8"))
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    for axes, what in zip(figure.subplots(1, 2, sharey=True), ("fit", "score"), strict=True):
        rows = np.array(result["rows"])
        for name, times in result["seconds"].items():
            axes.plot(rows, times[what], marker="o", ms=4, label=name)
        axes.plot(rows, result["seconds"]["LastLayerGP"][what][-1] * rows / rows[-1], ":", c="grey", label="linear")
        axes.set(xscale="log", yscale="log", xlabel="rows", title=what)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("seconds")
    figure.axes[0].legend(frameon=False)
    figure.savefig(folder / "growth.png", dpi=150)


if __name__ == "__main__":
    main()
