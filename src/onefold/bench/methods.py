"""How every row of the table is fitted, with the paper's settings, and what it says of images."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from onefold.bench.classifiers import Sizes, classifier, predicted
from onefold.bench.sets import Data, contexts, familiar
from onefold.bench.units import METHODS, Preset, Rates, Unit
from onefold.core.batches import pick_device
from onefold.core.rng import generators
from onefold.detectors import CSD, KNN, RND, SGMCMC, DeepEnsemble, Energy, Laplace, LastLayerGP, MCDropout
from onefold.detectors._members import MemberDetector
from onefold.detectors.base import Detector
from onefold.distil import Architecture
from onefold.errors import InputError
from onefold.kernels import EmpiricalNTK, from_model
from onefold.nn.nets import Standardise, random_network

SMALL = Architecture(channels=(8,), hidden=(64,), outputs=64)
PAPER_SIZES, SMALL_SIZES = Sizes((32, 64), (256, 256)), Sizes((8, 16), (64, 64))

LAST_HIDDEN = "1.mlp.hidden.1"  # of the classifier's layers, the one before its logits


@dataclass(frozen=True)
class Job:
    """What a fit is given."""

    unit: Unit
    preset: Preset
    data: Data
    cache: Path | None
    rates: Rates = field(default_factory=Rates)

    @property
    def augment(self) -> Any:
        return METHODS[self.unit.method].augment or "flips"

    @property
    def sizes(self) -> Sizes:
        return SMALL_SIZES if self.preset.small else PAPER_SIZES

    @property
    def architecture(self) -> Architecture:
        return SMALL if self.preset.small else Architecture()

    def classifier(self) -> Any:
        """The separate classifier, as this method's row has it."""
        images = familiar(self.data, self.unit.id, self.preset)
        return classifier(
            images, self.preset.recipe(self.rates.classifier), self.augment, self.sizes, self.unit.seed, self.cache
        )


def prepare(job: Job) -> Callable[[], Detector]:
    """The fit of a unit, as a call to be timed: whatever it does not pay for itself has been done."""
    name, seed, preset = job.unit.method.removesuffix("-noflips"), job.unit.seed, job.preset
    images = familiar(job.data, job.unit.id, preset)
    x, y = images.x_train, images.y_train
    members: dict[str, Any] = {**job.sizes._asdict(), "augment": job.augment, "seed": seed}
    plain = {"recipe": preset.recipe(job.rates.classifier), **members}
    if name in ("ens3", "ens15"):
        return lambda: DeepEnsemble(preset.count(int(name[3:])), **plain).fit(x, y, progress=False)
    if name == "mcd":
        recipe, rate = preset.recipe(job.rates.mcd), job.rates.dropout
        return lambda: MCDropout(preset.count(100), rate=rate, **{**plain, "recipe": recipe}).fit(x, y, progress=False)
    if name == "laplace":
        return lambda: Laplace(preset.count(30), **plain).fit(x, y, progress=False)
    if name in ("sgmcmc", "sgmcmc-baoa"):
        sampler = "baoa" if name.endswith("baoa") else "obabo"
        return lambda: SGMCMC(sampler=sampler, **_epochs(preset, len(x), job.rates.classifier), **members).fit(
            x, y, progress=False
        )
    if name == "rnd":
        channels = (8,) if preset.small else (16,)
        return lambda: RND(recipe=preset.recipe(job.rates.rnd), channels=channels, seed=seed).fit(x, progress=False)
    if name == "last_layer_gp":
        return lambda: LastLayerGP(seed=seed).fit(x)
    if name.startswith("csd") and not name.startswith("csd_post_hoc"):
        return _csd(name, job, x)
    return _on_the_classifier(name, job, x[:, None])


def _epochs(preset: Preset, count: int, lr: float) -> dict[str, Any]:
    """How a chain is run: the paper's numbers, or fewer samples in about the preset's steps; burn-in is worth five."""
    samples, burn_in = preset.count(30), 5
    total = preset.steps * preset.batch / count
    epochs = 2.0 if preset.samples is None else total / (samples + burn_in)
    rates = {"epochs": epochs, "burn_in": burn_in * epochs, "lr": lr, "batch": preset.batch}
    return {"samples": samples, **rates}


def _csd(name: str, job: Job, x: np.ndarray) -> Callable[[], Detector]:
    seed, preset, form = job.unit.seed, job.preset, name.partition("-")[2]
    context = contexts(job.data, job.unit.id, preset, seed) if name == "csd_ood" else None
    architecture = replace(
        job.architecture, small_init=form == "small_init", pairs="random" if form == "random_pairs" else "all"
    )
    kernel = full_ntk(x, preset, seed) if form == "full_ntk" else None
    csd = CSD(
        kernel,
        augment={"csd_aug": 0.25, "csd_default": None}.get(name, 0.0),
        centred=None if name == "csd_default" else False,
        recipe=preset.recipe(job.rates.csd, warmup=True),
        architecture=architecture,
        seed=seed,
    )
    return lambda: csd.fit(x, context=context, progress=False)


def full_ntk(x: np.ndarray, preset: Preset, seed: int) -> EmpiricalNTK:
    """The tangent kernel of all parameters of the random network whose last layer gives CSD's labels otherwise."""
    first = Standardise.of(torch.from_numpy(x[:, None]))
    channels, hidden = ((8,), (64,)) if preset.small else ((32,), (256,))
    net = random_network((1, *x.shape[1:]), generators(seed, 1)[0], channels=channels, hidden=hidden)
    return EmpiricalNTK(nn.Sequential(_WithColour(), first, net).to(pick_device("auto")))


class _WithColour(nn.Module):
    """Grey images with an axis for their one colour."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, None] if x.ndim == 3 else x


def _on_the_classifier(name: str, job: Job, x: np.ndarray) -> Callable[[], Detector]:
    net, seed = job.classifier(), job.unit.seed
    if name == "knn":
        return lambda: KNN(from_model(net), bank=60_000, seed=seed).fit(x)
    if name == "knn-last":
        return lambda: KNN(from_model(net, LAST_HIDDEN), bank=60_000, seed=seed).fit(x)
    if name == "gp_post_hoc":
        return lambda: LastLayerGP(from_model(net, seed=seed), seed=seed).fit(x)
    if name == "energy":
        return lambda: Energy(net, seed=seed).fit(x)
    if name.startswith("csd_post_hoc"):
        recipe = job.preset.recipe(job.rates.post_hoc, warmup=True)
        kernel = from_model(net, seed=seed, capturable=True)
        share = 0.0 if name.endswith("-train") else 0.5
        csd = CSD(kernel, augment=share, recipe=recipe, architecture=job.architecture, seed=seed)
        return lambda: csd.fit(x, progress=False)
    raise InputError(f"there is no method {name!r}")


def score(job: Job, detector: Detector, x: np.ndarray) -> NDArray[np.float64]:
    """The default score alone, to be timed."""
    return detector.score(_shaped(job, x))


def scores(job: Job, detector: Detector, x: np.ndarray) -> dict[str, NDArray[np.float64]]:
    """Every score that there is of these images, by name."""
    x = _shaped(job, x)
    if isinstance(detector, MemberDetector):
        return {name: values for name, values in detector.disagreements(x).items() if name != "predicted"}
    return detector.outputs(x)


def classes(job: Job, detector: Detector, x: np.ndarray) -> NDArray[Any]:
    """The classes that it predicts, or that the separate classifier does."""
    return detector.predict(x) if isinstance(detector, MemberDetector) else predicted(job.classifier(), x)


def parameters(detector: Detector) -> int:
    """Return the number of parameters of the detector's networks."""
    return detector.state.parameters


def _shaped(job: Job, x: np.ndarray) -> np.ndarray:
    """What a detector on the classifier sees has an axis for the one colour."""
    return x[:, None] if job.unit.method.startswith(("knn", "gp_post_hoc", "energy", "csd_post_hoc")) else x
