"""How many frames a second MyWayHome gives: one environment, Gymnasium's AsyncVectorEnv, and onefold's Workers.

    python benchmarks/environments.py [--out FILE.json] [--count 16 …] [--rounds 5] [--seconds 2] [--workers N]

All run at the same time but work in turns, round after round, so that what else the machine does hits them alike; what
is stated is the median of the rounds. Actions are random, frames are 42 × 42, and nothing is done with them.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from onefold.core.provenance import provenance
from onefold.core.storage import write_json
from onefold.rl.doom import ACTIONS, MyWayHome
from onefold.rl.vector_env import WorkerVectorEnv

WARM_UP = 10  # steps of a round that are not counted


def make(number: int = 0) -> MyWayHome:
    del number
    return MyWayHome("sparse")


def rate(step: Callable[[], Any], frames: int, seconds: float) -> float:
    """Frames a second, if a step gives so many."""
    for _ in range(WARM_UP):
        step()
    started, steps = time.perf_counter(), 0
    while time.perf_counter() < started + seconds:
        step()
        steps += 1
    return steps * frames / (time.perf_counter() - started)


def rates(count: int, workers: int | None, rounds: int, seconds: float) -> dict[str, Any]:
    """Of so many environments at once: what each way gives, and the ratio of the last two."""
    rng = np.random.default_rng(0)
    one, theirs = make(), gymnasium.vector.AsyncVectorEnv([make] * count, context="spawn")
    ours = WorkerVectorEnv(make, count, 0, workers=workers)
    one.reset(seed=0)
    theirs.reset(seed=0)
    ours.reset()

    def step_one() -> None:
        if any(one.step(rng.integers(len(ACTIONS)))[2:4]):
            one.reset()

    def step_ours() -> None:
        ours.send(rng.integers(len(ACTIONS), size=count))
        ours.collect()

    sides: dict[str, tuple[Callable[[], Any], int]] = {
        "one environment": (step_one, 1),
        "AsyncVectorEnv": (lambda: theirs.step(rng.integers(len(ACTIONS), size=count)), count),
        "Workers": (step_ours, count),
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (step, frames) in sides.items():
            found[name].append(rate(step, frames, seconds))
    for each in (one, theirs, ours):
        each.close()
    medians = {name: statistics.median(some) for name, some in found.items()}
    return {
        "environments": count,
        "workers": ours.workers,
        "frames_per_second": medians,
        "all_rounds": found,
        "workers_over_async": medians["Workers"] / medians["AsyncVectorEnv"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=int, nargs="+", default=[16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()
    rows = []
    for count in options.count:
        row = rates(count, options.workers, options.rounds, options.seconds)
        for name, median in row["frames_per_second"].items():
            every = ", ".join(f"{found:,.0f}" for found in row["all_rounds"][name])
            print(f"{name:16} {median:8,.0f} frames/s   ({every})")
        print(f"{count} environments, Workers / AsyncVectorEnv: {row['workers_over_async']:.2f}", flush=True)
        rows.append(row)
    if options.out is not None:
        about = {"rounds": options.rounds, "seconds": options.seconds, "rows": rows}
        write_json(options.out, {**provenance(torch.device("cpu")), **about})


if __name__ == "__main__":
    main()
