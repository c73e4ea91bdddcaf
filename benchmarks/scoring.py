"""What scoring costs, in passes of one classifier, all in one run: CSD, CSD on a trained model, the exported model,
ensembles and MC dropout.

    python benchmarks/scoring.py [--out FILE.json] [--count 10000]

10,000 random images of 28 × 28 pixels. The classifier and the networks are the paper's; what they have learned does not
matter here, and all compute in full float32. Everything is timed through calls that a user would make, the median of
several rounds. MC dropout on a CPU is timed on a tenth of the images and multiplied.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, nn
from torch.nn import functional as F  # noqa: N812

from onefold import CSD, DeepEnsemble
from onefold.core.batches import pick_device
from onefold.core.provenance import provenance
from onefold.core.storage import write_json
from onefold.kernels import from_model
from onefold.nn.nets import Impala, Standardise, backbone, finished
from onefold.nn.train import Recipe

BATCH = 1024
TRAIN = 2000


class Classifier(nn.Module):
    """The paper's classifier, with dropout before its dense layers for the benefit of MC dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        net = backbone(
            (1, 28, 28), channels=(32, 64), hidden=(256, 256), outputs=10, generator=Generator().manual_seed(0)
        )
        assert isinstance(net, Impala)
        self.standardise = Standardise(torch.tensor(0.5), torch.tensor(0.3))
        self.trunk, self.flatten, self.mlp = net.trunk, net.flatten, net.mlp
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.flatten(self.trunk(self.standardise(x)))
        return self.mlp(F.dropout(z, self.dropout, training=self.dropout > 0))


@torch.no_grad()
def forward(net: nn.Module, x: np.ndarray, device: torch.device, repeats: int = 1) -> np.ndarray:
    """Class probabilities of all images, the mean over repeats, in float32 as the detectors compute."""
    found = []
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for part in torch.from_numpy(x).split(BATCH):
            batch = part.to(device)
            found.append(sum(F.softmax(net(batch), dim=1) for _ in range(repeats)).cpu() / repeats)  # pyright: ignore
    return torch.cat(found).numpy()


def seconds(call: Callable[[np.ndarray], Any], x: np.ndarray, most: int) -> float:
    """Median time of up to `most` calls, fewer of long ones; results come back to the CPU, so that none is waiting."""
    call(x[:BATCH])  # to warm up
    times: list[float] = []
    while len(times) < most and sum(times) < 10:
        started = time.perf_counter()
        call(x)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # nothing here is trained to the end
    device, rng = pick_device("auto"), np.random.default_rng(0)
    x = rng.random((options.count, 1, 28, 28), dtype=np.float32)
    y = np.arange(TRAIN) % 10
    net, dropout = Classifier(), Classifier(0.5)
    for model in (net, dropout):
        finished(model, device)
    recipe = Recipe(steps=20, batch=64)
    csd = CSD(recipe=recipe).fit(x[:TRAIN])
    post_hoc = CSD(from_model(net, "flatten"), recipe=recipe).fit(x[:TRAIN])
    calls: dict[str, Callable[[np.ndarray], Any]] = {
        "one classifier": lambda x: forward(net, x, device),
        "CSD": csd.score,
        "CSD on the classifier, its own pass included": post_hoc.score,
    }
    if device.type == "cpu":
        import onnxruntime

        file = Path(tempfile.mkdtemp()) / "csd.onnx"
        csd.export(file)
        session = onnxruntime.InferenceSession(str(file))
        calls["CSD as ONNX"] = lambda x: [session.run(None, {"x": x[i : i + BATCH]}) for i in range(0, len(x), BATCH)]
    for members in (3, 15):
        calls[f"ensemble of {members}"] = (
            DeepEnsemble(members, recipe=Recipe(steps=2, batch=16)).fit(x[:TRAIN], y).score
        )
    rounds = 3 if device.type == "cpu" else 7
    times = {name: seconds(call, x, rounds) for name, call in calls.items()}
    part = x if device.type == "cuda" else x[: len(x) // 10]
    times["MC dropout, 100 samples"] = (
        seconds(lambda x: forward(dropout, x[: len(part)], device, 100), part, 1) * len(x) / len(part)
    )
    base = times["one classifier"]
    result = {
        **provenance(device),
        "images": len(x),
        "seconds": times,
        "passes": {name: value / base for name, value in times.items()},
        "threads": torch.get_num_threads(),
    }
    for name, value in times.items():
        print(f"{value:9.4f} s  {value / base:7.2f} passes  {name}", flush=True)
    if options.out is not None:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
