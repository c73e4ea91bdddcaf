"""How long a fit of CSD on 60,000 images takes: a plain eager loop, onefold's captured steps, and compiled ones.

    python benchmarks/fit.py [--out FILE.json] [--count 60000] [--size 28] [--steps 2000]
    python benchmarks/fit.py --on-model [--out FILE.json] [--count 9000]

Images are random; the networks, the batch of 256 and, on a GPU, bfloat16 are the same for all. The plain loop stands
below, as one would write it without thinking of graphs. Time to capture or compile is stated apart. The floor is what
a step's operations would take at the rate of a large matrix product, measured here. Without a GPU only the plain loop
and onefold's own are timed.

With --on-model, it times whole fits of CSD at the default settings on a trained classifier (benchmarks/scoring.py), on
one core. A fit with the score "combined" runs the classifier on every augmented context. A fit with the default score
encodes each image and one augmented copy once. CPU seconds of this process stand beside the wall time, because other
processes hardly change them.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Generator
from torch.utils.flop_counter import FlopCounterMode

from onefold import CSD
from onefold.core.batches import pick_device
from onefold.core.provenance import provenance
from onefold.core.storage import write_json
from onefold.distil import (
    Architecture,
    AugmentedContexts,
    Chain,
    Similarity,
    TrainContexts,
    augment,
    distillation,
    similarity_loss,
    similarity_model,
)
from onefold.kernels import Features, from_model
from onefold.nn.augment import UNIFORMS
from onefold.nn.nets import Prior, Standardise, random_network
from onefold.nn.train import COMPILED_FROM, Recipe

WARM_UP = 20  # steps: capturing and compiling happen in them


def networks(x: torch.Tensor) -> tuple[Similarity, Features]:
    generator, shape = Generator().manual_seed(0), tuple(x.shape[1:])
    first = Standardise.of(x)
    prior = random_network(shape, generator, channels=(32,), hidden=(256,)).to(x.device)
    return similarity_model(shape, first, Architecture(), generator).to(x.device), Features(Prior(first, prior))


def plain_loop(x: torch.Tensor, recipe: Recipe, chain: Chain | None) -> Iterator[None]:
    """The same training, written out: draw, augment, label, regress, step."""
    model, kernel = networks(x)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(parameters, lr=recipe.lr, eps=recipe.adam_eps, fused=True)
    for step in range(recipe.steps):
        for group in optimiser.param_groups:
            group["lr"] = recipe.rate(step)
        batch = x[torch.randint(len(x), (recipe.batch,), device=x.device)]
        with torch.no_grad():
            context = (
                batch if chain is None else augment(batch, torch.rand(recipe.batch, UNIFORMS, device=x.device), chain)
            )
            left, right = (torch.nn.functional.normalize(kernel.features(side), dim=1) for side in (batch, context))
            labels = left @ right.T
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            loss = similarity_loss(model(batch, context), labels)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        yield


def ours(x: torch.Tensor, recipe: Recipe, chain: Chain | None, compiled: bool) -> Iterator[Any]:
    model, kernel = networks(x)
    contexts = TrainContexts() if chain is None else AugmentedContexts(chain, 0.0, 1.0)
    return iter(distillation(model, x, kernel, contexts, recipe, 0, compiled=compiled))


def floor_ms(x: torch.Tensor, recipe: Recipe, chain: Chain | None) -> dict[str, float]:
    """Operations of a step, in 10⁹, the rate of matrix products, in 10¹² a second, and milliseconds from both."""
    with FlopCounterMode(display=False) as counter:
        next(plain_loop(x, recipe, chain))
    size, repeats = (8192, 50) if x.is_cuda else (1024, 5)
    a = torch.randn(size, size, device=x.device, dtype=torch.bfloat16 if x.is_cuda else torch.float32)
    for count in (3, repeats):
        started = time.perf_counter()
        for _ in range(count):
            torch.mm(a, a)
        if x.is_cuda:
            torch.cuda.synchronize()
    rate = 2 * size**3 * repeats / (time.perf_counter() - started)
    operations = counter.get_total_flops()
    return {"operations_g": operations / 1e9, "rate_t": rate / 1e12, "floor_ms": 1000 * operations / rate}


def timed(make: Callable[[], Iterator[Any]], x: torch.Tensor, steps: int) -> dict[str, float]:
    """Seconds of a fit, and apart from it of what comes before the first replayed step; memory beyond the data."""

    def run(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            next(training)
        if x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    if x.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if x.is_cuda else 0
    training = make()
    first, rest = run(WARM_UP), run(steps)
    result = {"fit_s": rest, "step_ms": 1000 * rest / steps, "set_up_s": max(0.0, first - WARM_UP * rest / steps)}
    if x.is_cuda:
        result["memory_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return result


def fits_on_model(x: torch.Tensor) -> dict[str, Any]:
    """Seconds of a fit with each score, and their ratio."""
    from scoring import Classifier

    torch.set_num_threads(1)
    net = Classifier().eval()
    kernels = {"combined": from_model(net, "trunk"), "surprisal": from_model(net)}
    fits: dict[str, dict[str, float]] = {}
    for name, kernel in kernels.items():
        CSD(kernel, score=name, recipe=Recipe(steps=5, batch=64)).fit(x[:200])  # pyright: ignore[reportArgumentType]
        wall, cpu = time.perf_counter(), time.process_time()
        CSD(kernel, score=name).fit(x)  # pyright: ignore[reportArgumentType]
        fits[name] = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        print(name, fits[name], flush=True)
    shares = {key: fits["surprisal"][key] / fits["combined"][key] for key in ("wall_s", "cpu_s")}
    return {"fits": fits, "share_of_the_time": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--on-model", action="store_true")
    parser.add_argument("--count", type=int)
    parser.add_argument("--size", type=int, default=28)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    device = pick_device("auto")
    if options.on_model:
        warnings.simplefilter("ignore")  # the classifier has learned nothing, and images are random
        x = torch.rand(options.count or 9000, 1, 28, 28, generator=Generator().manual_seed(0))
        result = {**provenance(device), "images": len(x), "threads": 1, **fits_on_model(x)}
        print(result["share_of_the_time"])
        if options.out is not None:
            write_json(options.out, result)
        return
    x = torch.rand(options.count or 60_000, 1, options.size, options.size, device=device)
    recipe = Recipe(steps=WARM_UP + options.steps, batch=256, lr=1e-3)
    times: dict[str, Any] = {}
    for name, chain in (("train contexts", None), ("augmented contexts", Chain(apply=0.5))):
        row: dict[str, Any] = {"plain loop": timed(lambda c=chain: plain_loop(x, recipe, c), x, options.steps)}
        row["onefold, captured"] = timed(lambda c=chain: ours(x, recipe, c, False), x, options.steps)
        if device.type == "cuda":
            row["onefold, compiled and captured"] = timed(lambda c=chain: ours(x, recipe, c, True), x, options.steps)
        for label, found in row.items():
            found["speed_up"] = row["plain loop"]["fit_s"] / found["fit_s"]
            print(f"{name:20} {label:32}", {key: round(value, 2) for key, value in found.items()}, flush=True)
        floor = floor_ms(x, recipe, chain)
        floor["captured_over_floor"] = row["onefold, captured"]["step_ms"] / floor["floor_ms"]
        print(f"{name:20} {'floor':32}", {key: round(value, 3) for key, value in floor.items()}, flush=True)
        times[name] = {**row, "floor": floor}
    settings = {"batch": 256, "images": len(x), "pixels": options.size, "steps": options.steps}
    result = {**provenance(device), **settings, "compiled_by_default_from_steps": COMPILED_FROM, "times": times}
    if options.out is not None:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
