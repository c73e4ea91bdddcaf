"""The separate classifier: it gives the accuracy of rows without one and the features of rows on a classifier.

It is trained once for each ID set, seed and augmentation, and stored beside the results.
"""

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from onefold.bench.grid import Augmentation, Unit
from onefold.bench.sets import load_id_set, with_channels
from onefold.core import storage
from onefold.core.batches import pick_device
from onefold.core.rng import generators
from onefold.data.sets import ImageSet
from onefold.detectors.build import initial_standardise
from onefold.detectors.members import make_targets, train_networks
from onefold.errors import FileError
from onefold.inputs.samples import read_train_data
from onefold.nn.nets import backbone, finished

KIND = "benchmark classifier"
DENSE_INPUT = "1.flatten"
"""Name of the layer whose output is the input of the dense layers."""
LAST_HIDDEN = "1.mlp.hidden.1"
"""Name of the layer before the logits."""
BATCH = 4096  # images per pass


def classifier_sizes(*, small: bool) -> dict[str, Any]:
    """Return the channels and hidden layers of the paper's classifier, or of one for images of 8 × 8 pixels."""
    return {"channels": (8, 16), "hidden": (64, 64)} if small else {"channels": (32, 64), "hidden": (256, 256)}


def load_or_train_classifier(unit: Unit, augment: Augmentation) -> nn.Module:
    """Return the classifier of a unit's ID set and seed; train and store it if there is no intact file of it."""
    images, device = load_id_set(unit.id_set, unit.data_dir, unit.preset), pick_device("auto")
    assert images.y_train is not None
    sizes = classifier_sizes(small=unit.preset.small)
    path = _path(unit, images, augment)
    shape, classes = with_channels(images.x_train).shape[1:], int(images.y_train.max()) + 1
    if path is not None and path.exists():
        tower = backbone(shape, **sizes, outputs=classes, generator=None)
        net = nn.Sequential(initial_standardise(shape, meta=True), tower)
        try:
            tensors, _ = storage.load(path, KIND)
            net.load_state_dict(tensors, assign=True)
        except (FileError, RuntimeError):
            path.unlink()  # train it again
        else:
            finished(net, device)
            return net
    net = _train(unit, images, augment, device)
    if path is not None:
        with contextlib.suppress(OSError, FileError):  # the file only saves time
            path.parent.mkdir(parents=True, exist_ok=True)
            storage.save(path, KIND, net.state_dict(), {})
    return net


def _path(unit: Unit, images: ImageSet, augment: Augmentation) -> Path | None:
    if unit.classifiers is None:
        return None
    recipe = asdict(unit.preset.recipe(unit.rate("classifier")))
    sizes = list(classifier_sizes(small=unit.preset.small).values())
    data = [torch.from_numpy(part) for part in (images.x_train, images.y_train) if part is not None]
    return unit.classifiers / f"{storage.fingerprint(recipe, augment, sizes, unit.seed, *data)[:24]}.safetensors"


def _train(unit: Unit, images: ImageSet, augment: Augmentation, device: torch.device) -> nn.Module:
    x, y = with_channels(images.x_train), images.y_train
    train_data = read_train_data(x, device, unit.seed)
    targets = make_targets(images.x_train, y, len(x), "classification", device)
    weights, order = generators(unit.seed, 2)
    sizes = classifier_sizes(small=unit.preset.small)
    tower = backbone(x.shape[1:], **sizes, outputs=targets.outputs, generator=weights)
    net = nn.Sequential(train_data.standardise, tower).to(device)
    train_networks(
        [lambda batch, _: net(batch)], [p for p in net.parameters() if p.requires_grad], train_data, targets,
        unit.preset.recipe(unit.rate("classifier")), seed=order.initial_seed(), label="classifier", augment=augment,
        settings={}, checkpoint=None, progress=False,
    )  # fmt: skip
    finished(net, device)
    return net


@torch.no_grad()
def predict_classes(net: nn.Module, x: np.ndarray) -> np.ndarray:
    """Return the most likely class of every image."""
    device = next(net.parameters()).device
    parts = torch.from_numpy(with_channels(x)).split(BATCH)
    return torch.cat([net(part.to(device)).argmax(1).cpu() for part in parts]).numpy()
