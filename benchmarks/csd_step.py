"""How long a training step of CSD takes: eager against compiled and replayed as a CUDA graph, in one run.

    python benchmarks/csd_step.py [--out FILE.json] [--count 60000] [--size 28] [--steps 300]

Images are random; the networks and the batch of 256 are the paper's. Without a GPU only the eager step is timed.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Generator

from onefold.distil import Architecture, AugmentedContexts, Chain, TrainContexts, distillation, similarity_model
from onefold.distil.contexts import Contexts
from onefold.inputs import pick_device
from onefold.methods.prior import prior_kernel, random_network
from onefold.nets import Standardise
from onefold.provenance import provenance
from onefold.store import write_json
from onefold.train import Recipe


def milliseconds(contexts: Contexts, x: torch.Tensor, steps: int, compiled: bool) -> dict[str, float]:
    """Median of five stretches of steps, after a warm-up that is timed apart."""
    generator = Generator().manual_seed(0)
    shape = tuple(x.shape[1:])
    first = Standardise.of(x).to(x.device)
    prior = random_network(shape, generator, channels=(32,), hidden=(256,)).to(x.device)
    model = similarity_model(shape, first, Architecture(), generator).to(x.device)
    recipe = Recipe(steps=20 + steps, lr=1e-3)
    training = iter(distillation(model, x, prior_kernel(first, prior), contexts, recipe, 0, compiled=compiled))

    def run(count: int) -> float:
        if x.is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            next(training)
        if x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    warmup = run(20)
    stretches = sorted(1000 * run(steps // 5) / (steps // 5) for _ in range(5))
    return {"step_ms": stretches[2], "fastest_ms": stretches[0], "slowest_ms": stretches[-1], "warmup_s": warmup}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=int, default=60_000)
    parser.add_argument("--size", type=int, default=28)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    device = pick_device("auto")
    x = torch.rand(arguments.count, 1, arguments.size, arguments.size, device=device)
    kinds: dict[str, Contexts] = {
        "train contexts": TrainContexts(),
        "augmented contexts": AugmentedContexts(Chain(), 0.0, 1.0),
    }
    times = {}
    for name, contexts in kinds.items():
        times[name] = {"eager": milliseconds(contexts, x, arguments.steps, False)}
        if device.type == "cuda":
            times[name]["compiled, CUDA graph"] = milliseconds(contexts, x, arguments.steps, True)
            times[name]["speed-up"] = times[name]["eager"]["step_ms"] / times[name]["compiled, CUDA graph"]["step_ms"]
    settings = {name: value for name, value in vars(arguments).items() if name != "out"}
    result = {**provenance(device), "benchmark": "csd_step", "batch": 256, **settings, "times": times}
    print(json.dumps(result, indent=2))
    if arguments.out:
        write_json(arguments.out, result)


if __name__ == "__main__":
    main()
