"""How many frames a second MyWayHome gives: one environment, Gymnasium's AsyncVectorEnv, and onefold's Workers.

    python benchmarks/environments.py [--out FILE.json] [--count 16] [--rounds 5] [--seconds 2] [--workers N]

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

from onefold.provenance import provenance
from onefold.rl.doom import MyWayHome
from onefold.rl.vector import Workers
from onefold.store import write_json

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()
    rng, count = np.random.default_rng(0), options.count
    one, theirs = make(), gymnasium.vector.AsyncVectorEnv([make] * count, context="spawn")
    ours = Workers(make, count, 0, workers=options.workers)
    one.reset(seed=0)
    theirs.reset(seed=0)
    ours.reset()

    def step_one() -> None:
        if any(one.step(rng.integers(3))[2:4]):
            one.reset()

    def step_ours() -> None:
        ours.send(rng.integers(3, size=count))
        ours.collect()

    sides: dict[str, tuple[Callable[[], Any], int]] = {
        "one environment": (step_one, 1),
        "AsyncVectorEnv": (lambda: theirs.step(rng.integers(3, size=count)), count),
        "Workers": (step_ours, count),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, (step, frames) in sides.items():
            rates[name].append(rate(step, frames, options.seconds))
    for each in (one, theirs, ours):
        each.close()
    medians = {name: statistics.median(found) for name, found in rates.items()}
    for name, median in medians.items():
        print(f"{name:16} {median:8,.0f} frames/s   ({', '.join(f'{found:,.0f}' for found in rates[name])})")
    ratio = medians["Workers"] / medians["AsyncVectorEnv"]
    print(f"Workers / AsyncVectorEnv: {ratio:.2f}")
    settings = {
        "environments": count,
        "workers": ours.workers,
        "rounds": options.rounds,
        "seconds": options.seconds,
    }
    result = {**provenance(torch.device("cpu")), **settings, "frames_per_second": medians, "all_rounds": rates}
    if options.out is not None:
        write_json(options.out, {**result, "workers_over_async": ratio})


if __name__ == "__main__":
    main()
