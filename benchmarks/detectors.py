"""Which score ranks best, and whether a detector on a trained model beats its rivals: four image sets, each against the
other three and a perturbed copy of itself.

    python benchmarks/detectors.py DATASETS [--out FILE.json] [--seeds 0 1] [--sets mnist …] [--train 60000] [--limit S]

DATASETS is a folder with mnist.npz, fashion_mnist.npz, kmnist_10k.npz and notmnist_22k.npz (x_train, y_train, x_test).
Everything runs at its defaults. No strange image is seen before it is scored. After --limit seconds no set is begun.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, nn
from torch.nn import functional as F  # noqa: N812

from onefold import CSD, KNN, DeepEnsemble, Energy, LastLayerGP
from onefold.core.batches import pick_device
from onefold.core.provenance import provenance
from onefold.core.storage import write_json
from onefold.data.perturb import perturb
from onefold.inputs import open_npz
from onefold.kernels import from_model
from onefold.metrics import accuracy, auroc
from onefold.nn.nets import Standardise, backbone
from onefold.nn.train import Draws, Recipe, Training, run

SETS = ("fashion_mnist", "mnist", "kmnist_10k", "notmnist_22k")
LAYER = "1.flatten"  # its output is the input of the classifier's dense layers
CLASSIFIER = Recipe(steps=2000, batch=256, lr=1e-3)
MOST = 5000  # test images of a set


def read(path: Path) -> dict[str, np.ndarray]:
    """Images as float32 [N, 1, 28, 28] in [0, 1] and labels; at most 5,000 test images."""
    arrays = {key: open_npz(path, key).tensor.numpy() for key in ("x_train", "y_train", "x_test", "y_test")}
    arrays = {key: a[:MOST] if key.endswith("test") else a for key, a in arrays.items()}
    return {key: a[:, None] / np.float32(255) if key.startswith("x") else a for key, a in arrays.items()}


def classifier(x: np.ndarray, y: np.ndarray, seed: int, device: torch.device) -> nn.Module:
    """A trained classifier as a user might bring it: the paper's network, without augmentation."""
    data, labels = torch.from_numpy(x).to(device), torch.from_numpy(y).long().to(device)
    generator = Generator().manual_seed(seed)
    net = backbone((1, 28, 28), channels=(32, 64), hidden=(256, 256), outputs=10, generator=generator)
    model = nn.Sequential(Standardise.of(data), net).to(device)

    def loss(integers: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        del uniforms
        i = integers[:, 0] % len(data)
        return F.cross_entropy(model(data[i]), labels[i])

    draws = Draws(CLASSIFIER.batch, 1, 0, seed, device)
    run(Training(list(net.parameters()), loss, CLASSIFIER, draws, bf16=True), "classifier")
    return model.requires_grad_(False)


def strange_sets(name: str, sets: dict[str, Any]) -> dict[str, np.ndarray]:
    """The test images of the other sets, and those of this one perturbed, as in the paper and clipped to [0, 1]."""
    strange = {other: sets[other]["x_test"] for other in SETS if other != name}
    for clip in (False, True):
        changed = perturb(sets[name]["x_test"][:, 0], seed=0, clip=clip)
        strange["perturbed_clipped" if clip else "perturbed"] = changed[:, None]
    return strange


def measured(detector: Any, test: np.ndarray, strange: dict[str, np.ndarray]) -> dict[str, Any]:
    """AUROC against every strange set, by each of its scores."""
    kinds = ("score", "variance", "relative") if hasattr(detector, "relative") else ("score",)
    result: dict[str, Any] = {}
    for kind in kinds:
        familiar = getattr(detector, kind)(test)
        values = {name: 100 * auroc(familiar, getattr(detector, kind)(x)) for name, x in strange.items()}
        foreign = [value for name, value in values.items() if name in SETS]
        result[kind] = {**values, "foreign": float(np.mean(foreign))}
        result[kind]["mean"] = float(np.mean([*foreign, values["perturbed"]]))
    return result


def detectors(x: np.ndarray, y: np.ndarray, seed: int, device: torch.device) -> Iterator[tuple[str, Any]]:
    """Fitted detectors, one after another."""
    yield "CSD", CSD(seed=seed).fit(x)
    yield "CSD, no augmentation", CSD(seed=seed, augment=0.0).fit(x)
    yield "LastLayerGP", LastLayerGP(seed=seed).fit(x)
    net = classifier(x, y, seed, device)
    yield "CSD on a trained model", CSD(from_model(net, LAYER), seed=seed).fit(x)
    yield "LastLayerGP on a trained model", LastLayerGP(from_model(net, LAYER), seed=seed).fit(x)
    yield "KNN on a trained model", KNN(from_model(net, LAYER), bank=60_000, seed=seed).fit(x)
    yield "KNN on a trained model, last layer", KNN(from_model(net, "1.mlp.hidden.1"), bank=60_000, seed=seed).fit(x)
    yield "Energy", Energy(net, seed=seed).fit(x)
    yield "ENS(5)", DeepEnsemble(5, seed=seed, recipe=CLASSIFIER).fit(x, y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--train", type=int, default=60_000)
    parser.add_argument("--limit", type=float, default=float("inf"))
    options = parser.parse_args()
    device, started = pick_device("auto"), time.monotonic()
    sets = {name: read(options.datasets / f"{name}.npz") for name in SETS}
    result: dict[str, Any] = {**provenance(device), "data": list(SETS), "cells": {}}
    for seed in options.seeds:
        for name in options.sets:
            if time.monotonic() - started > options.limit:
                continue
            train, y = (sets[name][key][: options.train] for key in ("x_train", "y_train"))
            strange, test = strange_sets(name, sets), sets[name]["x_test"]
            for label, detector in detectors(train, y, seed, device):
                cell = measured(detector, test, strange)
                if isinstance(detector, DeepEnsemble):
                    cell["accuracy"] = accuracy(detector.predict(test), sets[name]["y_test"])
                result["cells"][f"{label}/{name}/seed{seed}"] = cell
                figures = "  ".join(f"{kind} {cell[kind]['mean']:.2f}" for kind in cell if kind != "accuracy")
                print(f"{time.monotonic() - started:5.0f} s  {name:14} {label:36} {figures}", flush=True)
                if options.out is not None:
                    write_json(options.out, result)


if __name__ == "__main__":
    main()
