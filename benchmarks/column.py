"""Ten seeds of CSD on one set: warm fits one after another, and all ten in one training, captured as one graph.

    python benchmarks/column.py [--out FILE.json] [--count 60000] [--seeds 10] [--steps 4000]

Images are random; networks, batch and number of steps are the paper's. A fit that comes first pays for what a process
does once, so one is run before anything is timed. Training together is what a user would write: it shares the data and
the set-up, and each seed keeps its own minibatches, labels and networks. Compiling is stated apart.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from onefold.core.batches import pick_device
from onefold.core.provenance import provenance
from onefold.core.storage import write_json
from onefold.distil import Architecture, TrainContexts, distillation, similarity_model
from onefold.kernels import Features
from onefold.nn.augment import UNIFORMS
from onefold.nn.nets import Prior, Standardise, random_network
from onefold.nn.train import Draws, Loss, Recipe, Training


def alone(x: Tensor, recipe: Recipe, seed: int) -> Training:
    generator, shape, first = Generator().manual_seed(seed), tuple(x.shape[1:]), Standardise.of(x)
    prior = random_network(shape, generator, channels=(32,), hidden=(256,)).to(x.device)
    model = similarity_model(shape, first, Architecture(), generator).to(x.device)
    return distillation(model, x, Features(Prior(first, prior)), TrainContexts(), recipe, seed, compiled=False)


def together(x: Tensor, recipe: Recipe, seeds: int, compiled: bool) -> Training:
    """One training with the losses of all seeds, each of its own columns of the random numbers."""

    def own(i: int, loss: Loss) -> Loss:
        return lambda whole, parts: loss(whole[:, 2 * i : 2 * i + 2], parts[:, UNIFORMS * i : UNIFORMS * (i + 1)])

    trainings = [alone(x, recipe, seed) for seed in range(seeds)]
    losses = [own(i, loss) for i, training in enumerate(trainings) for loss in training.losses]
    draws = Draws(recipe.batch, 2 * seeds, UNIFORMS * seeds, 0, x.device)
    parameters = [p for training in trainings for p in training.parameters]
    return Training(parameters, losses, recipe, draws, compiled=compiled, bf16=True)


def seconds(training: Training) -> dict[str, float]:
    """Of all steps, and apart from them of those before the first replay."""
    started = time.perf_counter()
    steps = iter(training)
    for _ in range(10):
        next(steps)
    if training.on_gpu:
        torch.cuda.synchronize()
    first = time.perf_counter()
    for _ in steps:
        pass
    if training.on_gpu:
        torch.cuda.synchronize()
    return {"set_up_s": first - started, "steps_s": time.perf_counter() - first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=int, default=60_000)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4000)
    options = parser.parse_args()
    device = pick_device("auto")
    x = torch.rand(options.count, 1, 28, 28, device=device)
    recipe = Recipe(steps=options.steps, batch=256, lr=1e-2)
    seconds(alone(x, Recipe(steps=20, batch=256), 0))

    one_by_one: dict[str, float] = {"set_up_s": 0.0, "steps_s": 0.0}
    started = time.perf_counter()
    for seed in range(options.seeds):
        for key, value in seconds(alone(x, recipe, seed)).items():
            one_by_one[key] += value
    rows: dict[str, Any] = {"one after another": {"all_s": time.perf_counter() - started, **one_by_one}}
    for label, compiled in (("together", False), *((("together, compiled", True),) if device.type == "cuda" else ())):
        started = time.perf_counter()
        found = seconds(together(x, recipe, options.seeds, compiled))
        rows[label] = {"all_s": time.perf_counter() - started, **found}
    for label, row in rows.items():
        row["speed_up"] = rows["one after another"]["all_s"] / row["all_s"]
        print(f"{label:24}", {key: round(value, 2) for key, value in row.items()}, flush=True)
    if options.out is not None:
        settings = {"images": options.count, "seeds": options.seeds, "steps": options.steps, "batch": 256}
        write_json(options.out, {**provenance(device), **settings, "times": rows})


if __name__ == "__main__":
    main()
