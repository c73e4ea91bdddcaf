"""Speed and memory of one agent: milliseconds per update, and frames per second of the whole training loop.

    python benchmarks/agent.py [--out FILE.json] [--agent csd] [--frames 100000] [--updates 300] [--small]

Updates are timed on a replay of random frames, in four forms: eager; captured as a CUDA graph; compiled and captured;
and with fused stages as well, which is what training uses. The loop is timed with 16 ViZDoom environments, after
learning has begun; `environments.py` times the environments alone. Only one agent is in memory at a time. `--small` is
for a machine without a GPU.
"""

import argparse
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import onefold.rl.fused  # noqa: F401  (registers the CUDA kernels)
from onefold.core.batches import pick_device
from onefold.core.provenance import provenance
from onefold.core.storage import write_json
from onefold.rl.agents import AGENTS, Learning, ReplaySettings
from onefold.rl.doom import ACTIONS
from onefold.rl.learner import Learner
from onefold.rl.loop import TrainingLoop
from onefold.rl.registry import find_environment
from onefold.rl.vector_env import Steps, WorkerVectorEnv

ENVIRONMENTS = 16
TASK = "my-way-home-sparse"


def make_learner(agent: str, learning: Learning, device: torch.device, **form: bool) -> Learner:
    return Learner(
        AGENTS[agent], learning, environments=ENVIRONMENTS, frame=(42, 42), dtype=torch.uint8, actions=len(ACTIONS),
        seed=0, device=device, **form,
    )  # fmt: skip


def random_steps(rng: np.random.Generator, *, began: bool = False) -> Steps:
    no, e = np.zeros(ENVIRONMENTS, bool), ENVIRONMENTS
    frames = rng.integers(0, 256, (e, 42, 42), np.uint8)
    return Steps(frames, np.zeros(e, np.float32), no, no, no | began, no, np.zeros((e, 2), np.float32))


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_updates(agent: str, learning: Learning, device: torch.device, count: int, **form: bool) -> dict[str, float]:
    """Return milliseconds per update and per action selection after warm-up, and seconds of the warm-up."""
    learner, rng = make_learner(agent, learning, device, **form), np.random.default_rng(0)
    for step in range(80):
        learner.observe(random_steps(rng, began=step == 0))
    started = time.perf_counter()
    for _ in range(8):
        learner.learn()
    synchronise(device)
    set_up, started = time.perf_counter() - started, time.perf_counter()
    for _ in range(count):
        learner.learn()
    synchronise(device)
    update, started = (time.perf_counter() - started) / count, time.perf_counter()
    steps = random_steps(rng)
    for _ in range(count):
        learner.observe(steps)
        learner.selected_actions()
    act = (time.perf_counter() - started) / count
    learner.close()
    return {"update_ms": 1e3 * update, "act_ms": 1e3 * act, "set_up_s": set_up}


def time_loop(agent: str, learning: Learning, device: torch.device, frames: int) -> dict[str, float]:
    """Return frames per second of environments and learner together, and the share of time the GPU is idle."""
    on_gpu = device.type == "cuda"
    learner = make_learner(agent, learning, device, compiled=on_gpu)
    environments = WorkerVectorEnv(find_environment(TASK, 5_000_000).make, ENVIRONMENTS, 0)
    try:
        warm = learning.learning_starts + 40 * ENVIRONMENTS
        busy: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        loop = iter(TrainingLoop(learner, environments, warm + frames))
        for moment in loop:
            if moment.frames >= warm:
                break
        if on_gpu:
            phases: Any = learner
            phases._run_add, phases._run_update = (
                timed(phase, busy) for phase in (learner._run_add, learner._run_update)
            )
        synchronise(device)
        started = time.perf_counter()
        for _ in loop:
            pass
        synchronise(device)
        seconds = time.perf_counter() - started
        rates = {"frames_per_second": frames / seconds, "iteration_ms": 1e3 * seconds * ENVIRONMENTS / frames}
        if busy:
            rates["gpu_idle_share"] = 1 - sum(start.elapsed_time(end) for start, end in busy) / (1e3 * seconds)
        return rates
    finally:
        environments.close()
        learner.close()


def timed(phase: Any, busy: list[Any]) -> Any:
    """Return a function that runs `phase` between two CUDA events, which it appends to `busy`."""

    def run() -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        phase()
        end.record()
        busy.append((start, end))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--agent", default="csd", choices=AGENTS)
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    device = pick_device("auto")
    learning = replace(find_environment(TASK, 5_000_000).learning, learning_starts=8000, bonus_learning_starts=8000)
    if options.small:
        learning = replace(
            learning, replay=ReplaySettings(capacity=20_000), batch_size=8, channels=(8, 8, 8), learning_starts=400,
            bonus_learning_starts=400,
        )  # fmt: skip
    forms: dict[str, dict[str, bool]] = {"eager": {"captured": False, "fused": False}}
    if device.type == "cuda":
        forms |= {"captured": {"fused": False}, "compiled and captured": {"compiled": True, "fused": False}}
        forms |= {"fused, compiled and captured": {"compiled": True}}
    rows: dict[str, Any] = {}
    for name, form in forms.items():
        rows[name] = time_updates(options.agent, learning, device, options.updates, **form)
        rows[name]["speed_up"] = rows["eager"]["update_ms"] / rows[name]["update_ms"]
        print(f"{name:30}", {key: round(value, 3) for key, value in rows[name].items()}, flush=True)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # the published figure is that of the loop
    loop = time_loop(options.agent, learning, device, options.frames)
    memory = {
        "gpu_gb": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0,
        "host_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }
    print({key: round(value, 3) for key, value in {**loop, **memory}.items()})
    if options.out is not None:
        about = {"agent": options.agent, "environments": ENVIRONMENTS, "batch": learning.batch_size}
        about["small"] = options.small
        write_json(options.out, {**provenance(device), **about, "updates": rows, "loop": loop, "memory": memory})


if __name__ == "__main__":
    main()
