"""Frames per second of MyWayHome: one environment, Gymnasium's AsyncVectorEnv, and onefold's WorkerVectorEnv.

    python benchmarks/environments.py [--out FILE.json] [--count 16 …] [--rounds 5] [--seconds 2] [--workers N]

All three are open at the same time and step in turns, round after round, so that other load affects them equally. The
figure is the median of the rounds. Actions are random; the frames, 42 × 42, are not used.
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

WARM_UP = 10  # uncounted steps at the start of a round


def make(number: int = 0) -> MyWayHome:
    del number
    return MyWayHome("sparse")


def rate(step: Callable[[], Any], frames: int, seconds: float) -> float:
    """Return frames per second, for a step of `frames` frames."""
    for _ in range(WARM_UP):
        step()
    started, steps = time.perf_counter(), 0
    while time.perf_counter() < started + seconds:
        step()
        steps += 1
    return steps * frames / (time.perf_counter() - started)


def rates(count: int, workers: int | None, rounds: int, seconds: float) -> dict[str, Any]:
    """Return frames per second of the three, with `count` environments, and the ratio of the last two."""
    rng = np.random.default_rng(0)
    single, async_env = make(), gymnasium.vector.AsyncVectorEnv([make] * count, context="spawn")
    worker_env = WorkerVectorEnv(make, count, 0, workers=workers)
    single.reset(seed=0)
    async_env.reset(seed=0)
    worker_env.reset()

    def step_single() -> None:
        if any(single.step(rng.integers(len(ACTIONS)))[2:4]):
            single.reset()

    def step_workers() -> None:
        worker_env.send(rng.integers(len(ACTIONS), size=count))
        worker_env.collect()

    sides: dict[str, tuple[Callable[[], Any], int]] = {
        "one environment": (step_single, 1),
        "AsyncVectorEnv": (lambda: async_env.step(rng.integers(len(ACTIONS), size=count)), count),
        "Workers": (step_workers, count),
    }
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (step, frames) in sides.items():
            measured[name].append(rate(step, frames, seconds))
    for each in (single, async_env, worker_env):
        each.close()
    medians = {name: statistics.median(values) for name, values in measured.items()}
    return {
        "environments": count,
        "workers": worker_env.workers,
        "frames_per_second": medians,
        "all_rounds": measured,
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
            rounds = ", ".join(f"{speed:,.0f}" for speed in row["all_rounds"][name])
            print(f"{name:16} {median:8,.0f} frames/s   ({rounds})")
        print(f"{count} environments, Workers / AsyncVectorEnv: {row['workers_over_async']:.2f}", flush=True)
        rows.append(row)
    if options.out is not None:
        about = {"rounds": options.rounds, "seconds": options.seconds, "rows": rows}
        write_json(options.out, {**provenance(torch.device("cpu")), **about})


if __name__ == "__main__":
    main()
