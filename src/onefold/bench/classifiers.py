"""The separate classifier, for the accuracy and to build detectors on: trained once, kept beside the results."""

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from onefold.bench.sets import Images
from onefold.core import storage
from onefold.core.batches import pick_device
from onefold.core.rng import generators
from onefold.detectors._classifier import Augmentation, targets_of, train_together
from onefold.detectors._random_features import empty_standardise
from onefold.errors import FileError
from onefold.inputs.samples import read_train_data
from onefold.nn.nets import backbone, finished
from onefold.nn.train import Recipe

KIND = "benchmark classifier"


class Sizes(NamedTuple):
    """Of the paper's classifier, or of a small one."""

    channels: tuple[int, ...]
    hidden: tuple[int, ...]


def classifier(
    images: Images, recipe: Recipe, augment: Augmentation, sizes: Sizes, seed: int, folder: Path | None
) -> nn.Module:
    """The trained classifier of a set and seed: from `folder` if it is there, else trained and left there."""
    device = pick_device("auto")
    x, y = images.x_train, images.y_train
    assert y is not None
    known = [asdict(recipe), augment, list(sizes), seed, torch.from_numpy(x), torch.from_numpy(y)]
    path = None if folder is None else folder / f"{storage.fingerprint(*known)[:24]}.safetensors"
    classes, shape = int(y.max()) + 1, (1, *x.shape[1:])
    if path is not None and path.exists():
        net = nn.Sequential(
            empty_standardise(shape), backbone(shape, **sizes._asdict(), outputs=classes, generator=None)
        )
        try:
            tensors, _ = storage.load(path, KIND)
            net.load_state_dict(tensors, assign=True)
        except (FileError, RuntimeError):
            path.unlink()  # it can be made again
        else:
            finished(net, device)
            return net
    learned = read_train_data(x[:, None], device, seed)
    targets = targets_of(x, y, len(x), "classification", device)
    weights, order = generators(seed, 2)
    tower = backbone(shape, **sizes._asdict(), outputs=classes, generator=weights)
    net = nn.Sequential(learned.standardise, tower).to(device)
    train_together(
        [lambda batch, _: net(batch)], [p for p in net.parameters() if p.requires_grad], learned, targets, recipe,
        seed=order.initial_seed(), label="classifier", augment=augment, settings={}, checkpoint=None, progress=False,
    )  # fmt: skip
    finished(net, device)
    if path is not None:
        with contextlib.suppress(OSError, FileError):  # the next one who needs it trains it again
            path.parent.mkdir(parents=True, exist_ok=True)
            storage.save(path, KIND, net.state_dict(), {})
    return net


@torch.no_grad()
def predicted(net: nn.Module, x: np.ndarray) -> np.ndarray:
    """The likeliest class of every image."""
    device = next(net.parameters()).device
    parts = torch.from_numpy(x[:, None]).split(4096)
    return torch.cat([net(part.to(device)).argmax(1).cpu() for part in parts]).numpy()
