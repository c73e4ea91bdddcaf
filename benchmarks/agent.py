"""How fast an agent learns: milliseconds of an update, frames a second of the whole loop, and what it costs in memory.

    python benchmarks/agent.py [--out FILE.json] [--agent csd] [--frames 100000] [--updates 300] [--small]

Updates are timed on a replay full of random frames: by cuDNN and launched one by one (eager); captured as a graph;
compiled and captured; and the same with fused stages, which is what agents do. The loop is timed with ViZDoom itself,
16 environments, after learning has begun; `environments.py` times them alone. The GPU is busy while it remembers or
learns, and chooses actions meanwhile. `--small` is for a machine without one.
"""

import argparse
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onefold.inputs import pick_device
from onefold.provenance import provenance
from onefold.rl.agents import AGENTS, Learning
from onefold.rl.learner import Learner
from onefold.rl.loop import Loop
from onefold.rl.replay import Memory
from onefold.rl.vector import Steps, Workers
from onefold.rl.worlds import world
from onefold.store import write_json

ENVIRONMENTS = 16
WORLD = "my-way-home-sparse"


def learner(agent: str, learning: Learning, device: torch.device, **how: bool) -> Learner:
    return Learner(
        AGENTS[agent], learning, environments=ENVIRONMENTS, frame=(42, 42), dtype=torch.uint8, actions=3, seed=0,
        device=device, **how,
    )  # fmt: skip


def invented(rng: np.random.Generator, *, began: bool = False) -> Steps:
    no, e = np.zeros(ENVIRONMENTS, bool), ENVIRONMENTS
    frames = rng.integers(0, 256, (e, 42, 42), np.uint8)
    return Steps(frames, np.zeros(e, np.float32), no, no, no | began, no, np.zeros((e, 2), np.float32))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def updates(agent: str, learning: Learning, device: torch.device, count: int, **how: bool) -> dict[str, float]:
    """Milliseconds of an update and of choosing actions, once everything is warm."""
    mind, rng = learner(agent, learning, device, **how), np.random.default_rng(0)
    for step in range(80):
        mind.observe(invented(rng, began=step == 0))
    started = time.perf_counter()
    for _ in range(8):
        mind.learn()
    wait(device)
    first, started = time.perf_counter() - started, time.perf_counter()
    for _ in range(count):
        mind.learn()
    wait(device)
    each, started = (time.perf_counter() - started) / count, time.perf_counter()
    answer = invented(rng)
    for _ in range(count):
        mind.observe(answer)
        mind.answer()
    acting = (time.perf_counter() - started) / count
    mind.close()
    return {"update_ms": 1e3 * each, "act_ms": 1e3 * acting, "set_up_s": first}


def whole_loop(agent: str, learning: Learning, device: torch.device, frames: int) -> dict[str, float]:
    """Frames a second of environments and learner together, and the share of time in which the GPU does nothing."""
    place = world(WORLD, 5_000_000)
    mind = learner(agent, learning, device, compiled=device.type == "cuda")
    environments = Workers(place.make, ENVIRONMENTS, 0)
    try:
        warm = learning.start + 40 * ENVIRONMENTS
        busy: list[Any] = []
        loop = iter(Loop(mind, environments, warm + frames))
        for moment in loop:
            if moment.frames >= warm:
                break
        if device.type == "cuda":
            mind._remember, mind._learn = (_watched(graph, busy) for graph in (mind._remember, mind._learn))
        wait(device)
        started = time.perf_counter()
        for _ in loop:
            pass
        wait(device)
        seconds = time.perf_counter() - started
        found = {"frames_per_second": frames / seconds, "iteration_ms": 1e3 * seconds * ENVIRONMENTS / frames}
        if busy:
            found["gpu_idle_share"] = 1 - sum(a.elapsed_time(b) for a, b in busy) / (1e3 * seconds)
        return found
    finally:
        environments.close()


def _watched(graph: Any, busy: list[Any]) -> Any:
    def run() -> None:
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        graph()
        pair[1].record()
        busy.append(pair)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--agent", default="csd", choices=AGENTS)
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    device, learning = pick_device("auto"), replace(world(WORLD, 5_000_000).learning, start=8000)
    if options.small:
        learning = replace(learning, memory=Memory(capacity=20_000), batch=8, channels=(8, 8, 8), start=400)
    forms: dict[str, dict[str, bool]] = {"eager": {"captured": False, "fused": False}}
    if device.type == "cuda":
        forms |= {"captured": {"fused": False}, "compiled and captured": {"compiled": True, "fused": False}}
        forms |= {"fused, compiled and captured": {"compiled": True}}
    rows: dict[str, Any] = {}
    for name, how in forms.items():
        rows[name] = updates(options.agent, learning, device, options.updates, **how)
        rows[name]["speed_up"] = rows["eager"]["update_ms"] / rows[name]["update_ms"]
        print(f"{name:30}", {key: round(value, 3) for key, value in rows[name].items()}, flush=True)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # what is stated is the loop's
    loop = whole_loop(options.agent, learning, device, options.frames)
    memory = {
        "gpu_gb": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0,
        "host_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }
    print({key: round(value, 3) for key, value in {**loop, **memory}.items()})
    if options.out is not None:
        about = {"agent": options.agent, "environments": ENVIRONMENTS, "batch": learning.batch, "small": options.small}
        write_json(options.out, {**provenance(device), **about, "updates": rows, "loop": loop, "memory": memory})


if __name__ == "__main__":
    main()
