"""The default score of CSD on a trained classifier, against its rivals on the same classifier.

    python benchmarks/default_score.py DATASETS --out FILE.json [--sets kmnist_10k notmnist_22k] [--seeds 0] [--ood]
        [--classifiers FOLDER] [--methods "CSD, default score" KNN …]

DATASETS is a folder with mnist.npz, fashion_mnist.npz, kmnist_10k.npz and notmnist_22k.npz. A small CNN is trained on
each set, on one core. Without --ood, it reads familiar images only. It measures the seconds of each fit, what CSD
explains, and the share of alarms at a rate of 5 %, over twenty random halves of the test images. With --ood, it also
measures the AUROC against the three other sets and perturbed copies. The score was fixed before any run with --ood.
Cells are added to those in FILE.json, so that a run can be divided.
"""

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectors import SETS, read, strange_sets
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F  # noqa: N812

from onefold import CSD, KNN, Energy, LastLayerGP, LocalGP
from onefold.core.provenance import provenance
from onefold.core.storage import write_json
from onefold.detectors.alarm import Alarm
from onefold.kernels import from_model
from onefold.metrics import accuracy, auroc

EPOCHS, BATCH, RATE = 5, 128, 2e-3
MOST = 2000  # test images of a set
METHODS = ("CSD, default score", "CSD, variance only", "CSD, combined", "LastLayerGP", "LocalGP", "KNN", "Energy")


def small_cnn() -> nn.Module:
    """Three convolutions and two dense layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 9, 128), nn.ReLU(), nn.Linear(128, 10))


def train(x: np.ndarray, y: np.ndarray, seed: int) -> nn.Module:
    """A classifier as a user might bring it, without augmentation."""
    torch.manual_seed(seed)
    net, images, labels = small_cnn(), torch.from_numpy(x), torch.from_numpy(y).long()
    optimiser = torch.optim.Adam(net.parameters(), RATE)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(images)).split(BATCH):
            optimiser.zero_grad()
            F.cross_entropy(net(images[rows]), labels[rows]).backward()
            optimiser.step()
    return net.eval().requires_grad_(False)


def load_or_train(x: np.ndarray, y: np.ndarray, seed: int, path: Path | None) -> nn.Module:
    """Return the classifier in a file, which only saves time; train it and write the file if there is none."""
    file = None if path is None else path.with_name(f"{path.name}_seed{seed}.safetensors")
    net = small_cnn()
    if file is not None and file.exists():
        net.load_state_dict(load_file(file))
        return net.eval().requires_grad_(False)
    net = train(x, y, seed)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(net.state_dict(), file)
    return net


def make(label: str, net: nn.Module, seed: int) -> Any:
    """Return an unfitted detector; those that name a layer use the input of the dense layers, the earlier default."""
    dense = from_model(net, str(next(i for i, layer in enumerate(net.children()) if isinstance(layer, nn.Flatten))))
    return {
        "CSD, default score": lambda: CSD(from_model(net), seed=seed),
        "CSD, variance only": lambda: CSD(from_model(net), role="encoder", seed=seed),
        "CSD, combined": lambda: CSD(dense, score="combined", seed=seed),
        "LastLayerGP": lambda: LastLayerGP(dense, seed=seed),
        "LocalGP": lambda: LocalGP(dense, seed=seed),
        "KNN": lambda: KNN(dense, seed=seed),
        "Energy": lambda: Energy(net, seed=seed),
    }[label]()


def alarm_rate(scores: np.ndarray) -> float:
    """Return the share of alarms among familiar images at a rate of 5 %, the mean over twenty random halves."""
    rates = []
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(len(scores))
        calibration, rest = order[: len(scores) // 2], order[len(scores) // 2 :]
        rates.append((scores[rest] > Alarm(scores[calibration], 0.05, seed).threshold).mean())
    return float(np.mean(rates))


def fit(detector: Any, x: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the scores of familiar test images, and times, alarms and what CSD explains."""
    wall, cpu = time.perf_counter(), time.process_time()
    detector.fit(x)
    cell: dict[str, Any] = {"fit_s": time.perf_counter() - wall, "fit_cpu_s": time.process_time() - cpu}
    scores = detector.score(test)
    cell["alarms"] = alarm_rate(scores)
    for name in ("explained", "confidence"):
        if (value := getattr(detector.state.summary, name, None)) is not None:
            cell[name] = value
    return scores, cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", type=Path)
    parser.add_argument("--sets", nargs="+", default=["kmnist_10k", "notmnist_22k"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=[])
    parser.add_argument("--classifiers", type=Path)
    parser.add_argument("--ood", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sets = {name: read(options.datasets / f"{name}.npz") for name in (SETS if options.ood else options.sets)}
    for images in sets.values():
        images |= {key: values[:MOST] for key, values in images.items() if key.endswith("test")}
    before = json.loads(options.out.read_text())["cells"] if options.out.exists() else {}
    result: dict[str, Any] = {**provenance(torch.device("cpu")), "test_images": MOST, "threads": 1, "cells": before}
    for seed in options.seeds:
        for name in options.sets:
            x, test = sets[name]["x_train"], sets[name]["x_test"]
            net = load_or_train(x, sets[name]["y_train"], seed, options.classifiers and options.classifiers / name)
            with torch.no_grad():
                predicted = net(torch.from_numpy(test)).argmax(1).numpy()
            unfamiliar = strange_sets(name, sets) if options.ood else {}
            for label in options.methods or METHODS:
                detector = make(label, net, seed)
                scores, cell = fit(detector, x, test)
                cell["accuracy"] = accuracy(predicted, sets[name]["y_test"])
                for other, images in unfamiliar.items():
                    cell[other] = 100 * auroc(scores, detector.score(images))
                result["cells"][f"{label}/{name}/seed{seed}"] = cell
                print(f"{name:14} {label:20}", {key: round(value, 3) for key, value in cell.items()}, flush=True)
                write_json(options.out, result)


if __name__ == "__main__":
    main()
