"""Learning curves of stable-baselines3 with no bonus, RND's and CSD's, from results/bonuses.

    python docs/figures/bonuses.py

Lines are means over five seeds, bands 90 % intervals by Student's t.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from style import Look, both, panels

from onefold.report.runs_stats import t_half_width

RESULTS = Path(__file__).parent.parent.parent / "results" / "bonuses"
TITLES = {"chain": "DQN on the deceptive chain of 40", "rooms": "PPO on MiniGrid MultiRoom-N6, one layout"}
TUNING_SEED = 100


def runs(task: str, bonus: str) -> list[dict[str, Any]]:
    """Return the reported runs, without the tuning runs that chose the settings."""
    results = [json.loads(path.read_text("utf-8")) for path in sorted((RESULTS / task).glob(f"{bonus}-*.json"))]
    return [run for run in results if run["seed"] != TUNING_SEED]


def filled(curve: list[float | None]) -> list[float]:
    """Return the curve; a bin in which no episode ended repeats the bin before it."""
    last, values = 0.0, []
    for value in curve:
        last = last if value is None else value
        values.append(last)
    return values


def curves(look: Look) -> Figure:
    tasks = [task for task in TITLES if (RESULTS / task).is_dir() and runs(task, "none")]
    figure, axes = panels(len(tasks), 6.5 * len(tasks), 4.2)
    colours = {"none": ("no bonus", look.muted), "csd": ("CSD", look.blue), "rnd": ("RND", look.gold)}
    for ax, task in zip(axes, tasks, strict=True):
        for bonus, (label, colour) in colours.items():
            seeds = runs(task, bonus)
            if len(seeds) < 2:
                continue
            values = np.array([filled(run["curve"]) for run in seeds])
            steps = (np.arange(values.shape[1]) + 0.5) / values.shape[1] * seeds[0]["steps"] / 1000
            mean, half = values.mean(0), t_half_width(values)
            dashes = (0, (4, 3)) if bonus == "rnd" else "-"  # may coincide with CSD
            ax.plot(steps, mean, color=colour, linewidth=2.5, linestyle=dashes, label=f"{label}, {len(seeds)} seeds")
            ax.fill_between(steps, mean - half, mean + half, color=colour, alpha=0.2, linewidth=0)
        ax.set(title=TITLES[task], xlabel="steps, thousands", ylabel="return of an episode")
        ax.legend(loc="upper left")
    return figure


if __name__ == "__main__":
    both("bonuses", curves)
