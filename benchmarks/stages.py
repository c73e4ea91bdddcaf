"""How fast fused stages of IMPALA are: against cuDNN, in one run, captured as graphs, in microseconds.

    python benchmarks/stages.py [--out FILE.json] [--batch 256] [--repeats 50]

Every stage of the agents' networks and of their bonuses': what it makes of a minibatch without gradients, and with a
way back to its weights and, but for the first, to what came in. Kernels are timed one by one, too. A GPU is needed.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from onefold.core.provenance import provenance
from onefold.core.storage import write_json
from onefold.rl.fused.stages import StageShape, are_supported, stage

FORMS = [
    StageShape(8, 32, 42),
    StageShape(32, 32, 21),
    StageShape(32, 64, 11),
    StageShape(8, 16, 42),
    StageShape(16, 16, 21),
    StageShape(16, 32, 11),
]


def microseconds(work: Callable[[], Any], repeats: int) -> float:
    """Of one of many replays of a captured graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph, ends = torch.cuda.CUDAGraph(), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    ends[0].record()
    for _ in range(repeats):
        graph.replay()
    ends[1].record()
    torch.cuda.synchronize()
    return 1e3 * ends[0].elapsed_time(ends[1]) / repeats


def by_cudnn(x: Tensor, weights: list[Tensor]) -> Tensor:
    entry, entry_bias, units, units_bias = (w[0].bfloat16() for w in weights)
    h = F.max_pool2d(F.conv2d(x, entry, entry_bias, padding=1), 3, stride=2, padding=1)
    for i in (0, 2):
        inner = F.conv2d(F.relu(h), units[i], units_bias[i], padding=1)
        h = h + F.conv2d(F.relu(inner), units[i + 1], units_bias[i + 1], padding=1)
    return h


def invented(form: StageShape, batch: int) -> tuple[Tensor, list[Tensor]]:
    """Images and weights."""
    inputs, outputs, side = form.inputs, form.outputs, form.side
    shapes = ((outputs, inputs, 3, 3), (outputs,), (4, outputs, outputs, 3, 3), (4, outputs))
    weights = [(0.05 * torch.randn(1, *shape, device="cuda")).requires_grad_() for shape in shapes]
    x = torch.randn(1, batch, side, side, inputs, device="cuda").bfloat16()
    return x.requires_grad_(inputs >= 16), weights


def timed(form: StageShape, batch: int, repeats: int) -> dict[str, float]:
    x, weights = invented(form, batch)
    turned = x[0].permute(0, 3, 1, 2).detach().requires_grad_(x.requires_grad)  # channels last, as cuDNN likes it
    found = {}
    for name, forward, given in (
        ("fused", lambda: stage(x, *weights), x),
        ("cudnn", lambda: by_cudnn(turned, weights), turned),
    ):

        def there_and_back(forward: Callable[[], Tensor] = forward, given: Tensor = given) -> None:
            torch.autograd.grad(forward().sum(), [*weights, *([given] if given.requires_grad else [])])

        found[f"{name}_us"] = microseconds(torch.no_grad()(forward), repeats)
        found[f"{name}_with_gradients_us"] = microseconds(there_and_back, repeats)
    found["speed_up"] = found["cudnn_us"] / found["fused_us"]
    found["speed_up_with_gradients"] = found["cudnn_with_gradients_us"] / found["fused_with_gradients_us"]
    return found


def kernels(form: StageShape, batch: int) -> dict[str, float]:
    """Microseconds of each kernel, by torch's profiler."""
    x, weights = invented(form, batch)
    names = set(form.shared_memory())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(10):
            stage(x, *weights).sum().backward()
            with torch.no_grad():
                stage(x, *weights)
        torch.cuda.synchronize()
    return {e.key: e.device_time_total / e.count for e in profiler.key_averages() if e.key in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    device = torch.device("cuda")
    if not torch.cuda.is_available() or not are_supported(FORMS, device):
        parser.error("there is no GPU here that stages can be fused on")
    rows = {}
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        for form in FORMS:
            name = f"{form.inputs} to {form.outputs} channels, {form.side} pixels"
            rows[name] = timed(form, options.batch, options.repeats) | {"kernels_us": kernels(form, options.batch)}
            print(f"{name:28}", {k: round(v, 1) for k, v in rows[name].items() if k != "kernels_us"}, flush=True)
            print(" " * 28, {k: round(v, 1) for k, v in rows[name]["kernels_us"].items()}, flush=True)
    if options.out is not None:
        write_json(options.out, {**provenance(device), "batch": options.batch, "stages": rows})


if __name__ == "__main__":
    main()
