"""Rows of the benchmark table: the one registry, and how the detector of each row is fitted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from onefold.bench.classifier import DENSE_INPUT, LAST_HIDDEN, classifier_sizes, load_or_train_classifier
from onefold.bench.grid import Augmentation, Preset, Unit, check_seeds
from onefold.bench.sets import draw_contexts, load_id_set, with_channels
from onefold.core.batches import pick_device
from onefold.core.rng import generators
from onefold.detectors import CSD, KNN, RND, SGMCMC, DeepEnsemble, Energy, Laplace, LastLayerGP, MCDropout
from onefold.detectors.base import Detector
from onefold.distil import Architecture
from onefold.errors import InputError
from onefold.kernels import EmpiricalNTK, from_model
from onefold.nn.nets import Standardise, random_network

Fit: TypeAlias = Callable[[], Detector]
"""The fit that is timed. Work that the row does not pay for, such as training the classifier, is done before."""
BANK = 60_000  # most training images that kNN stores


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method with fixed settings.

    Args:
        name: Name on the command line and in files.
        title: Name in tables.
        family: Name of the row that stands for this one in tables. Of a rival's family, tables show the best row.
        build: Prepare the fit of a unit, with the augmentation of the row's classifier.
        augment: Augmentation in the training of the classifier: the row's own, or the separate one that gives the
            accuracy of rows without labels.
        variant: Text that tells the row from others of its family, such as "no flips".
        ours: True for forms of CSD.
        few: True for rows that take long and have few seeds.
        ablation: True for forms of CSD that only the table of ablations has.
        default: Score that the row is ranked by unless it is chosen in hindsight.
        uses_labels: True if the fit needs class labels.
        uses_ood: True if the fit gets unlabelled images of the OOD sets' training splits.
        channel_axis: True if grey images need an axis for their one channel.
    """

    name: str
    title: str
    family: str
    build: Callable[[Unit, Augmentation], Fit]
    augment: Augmentation = "flips"
    variant: str = ""
    ours: bool = False
    few: bool = False
    ablation: bool = False
    default: str = "score"
    uses_labels: bool = False
    uses_ood: bool = False
    channel_axis: bool = False

    def images(self, x: np.ndarray) -> np.ndarray:
        """Return images in the shape that the row's detector takes."""
        return with_channels(x) if self.channel_axis else x


def select_rows(names: Sequence[str]) -> list[Row]:
    """Return rows by name, in this order and each once; all rows of the main table if `names` is empty.

    Raises:
        InputError: There is no row of that name.
    """
    if unknown := [name for name in names if name not in ROWS]:
        raise InputError(f"no method {unknown[0]!r}. Use one of: {', '.join(ROWS)}.")
    return [ROWS[name] for name in dict.fromkeys(names)] or [row for row in ROWS.values() if not row.ablation]


def seeds_by_row(preset: Preset, names: Sequence[str] = (), seeds: Sequence[int] = ()) -> dict[str, Sequence[int]]:
    """Return the seeds of each row: `seeds`, or by default those of the preset.

    Raises:
        InputError: There is no row of a name, or a seed is not in 0 … 2³¹ − 1.
    """
    check_seeds(seeds)
    return {row.name: seeds or (preset.few_seeds if row.few else preset.seeds) for row in select_rows(names)}


def _training_data(unit: Unit) -> tuple[np.ndarray, np.ndarray | None]:
    images = load_id_set(unit.id_set, unit.data_dir, unit.preset)
    return images.x_train, images.y_train


def _architecture(unit: Unit) -> Architecture:
    return Architecture(channels=(8,), hidden=(64,), outputs=64) if unit.preset.small else Architecture()


def _classifier_settings(unit: Unit, augment: Augmentation) -> dict[str, Any]:
    return {**classifier_sizes(small=unit.preset.small), "augment": augment, "seed": unit.seed}


def _build_ensemble(unit: Unit, augment: Augmentation, *, members: int) -> Fit:
    x, y = _training_data(unit)
    recipe = unit.preset.recipe(unit.rate("classifier"))
    ensemble = DeepEnsemble(unit.preset.count(members), recipe=recipe, **_classifier_settings(unit, augment))
    return lambda: ensemble.fit(x, y, progress=False)


def _build_mc_dropout(unit: Unit, augment: Augmentation) -> Fit:
    x, y = _training_data(unit)
    recipe, rate = unit.preset.recipe(unit.rate("mc_dropout")), unit.rate("dropout")
    detector = MCDropout(unit.preset.count(100), rate=rate, recipe=recipe, **_classifier_settings(unit, augment))
    return lambda: detector.fit(x, y, progress=False)


def _build_laplace(unit: Unit, augment: Augmentation) -> Fit:
    x, y = _training_data(unit)
    recipe = unit.preset.recipe(unit.rate("classifier"))
    laplace = Laplace(unit.preset.count(30), recipe=recipe, **_classifier_settings(unit, augment))
    return lambda: laplace.fit(x, y, progress=False)


def _build_sgmcmc(unit: Unit, augment: Augmentation, *, sampler: str) -> Fit:
    x, y = _training_data(unit)
    chain = chain_length(unit.preset, len(x))
    detector = SGMCMC(
        sampler=sampler,  # pyright: ignore[reportArgumentType]
        lr=unit.rate("classifier"),
        batch=unit.preset.batch,
        **chain,
        **_classifier_settings(unit, augment),
    )
    return lambda: detector.fit(x, y, progress=False)


def chain_length(preset: Preset, count: int) -> dict[str, Any]:
    """Return the samples, the epochs between them and the epochs of burn-in of an SG-MCMC chain on `count` images.

    The paper's numbers, or with fewer samples about as many steps as the preset has; burn-in takes as long as five
    samples.
    """
    samples, burn_in = preset.count(30), 5
    total = preset.steps * preset.batch / count
    epochs = 2.0 if preset.samples is None else total / (samples + burn_in)
    return {"samples": samples, "epochs": epochs, "burn_in": burn_in * epochs}


def _build_rnd(unit: Unit, augment: Augmentation) -> Fit:
    del augment
    x, _ = _training_data(unit)
    channels = (8,) if unit.preset.small else (16,)
    rnd = RND(recipe=unit.preset.recipe(unit.rate("rnd")), channels=channels, seed=unit.seed)
    return lambda: rnd.fit(x, progress=False)


def _build_last_layer_gp(unit: Unit, augment: Augmentation) -> Fit:
    del augment
    x, _ = _training_data(unit)
    gp = LastLayerGP(seed=unit.seed)
    return lambda: gp.fit(x)


def _build_csd(
    unit: Unit,
    augment: Augmentation,
    *,
    share: float | None = 0.0,
    centred: bool | None = False,
    ood_contexts: bool = False,
    full_ntk: bool = False,
    **changes: Any,
) -> Fit:
    """Prepare CSD on a random network; `share` is that of augmented contexts, `changes` are of the architecture."""
    del augment
    x, _ = _training_data(unit)
    contexts = draw_contexts(unit) if ood_contexts else None
    csd = CSD(
        full_ntk_of(x, unit.preset, unit.seed) if full_ntk else None,
        augment=share,
        centred=centred,
        recipe=unit.preset.recipe(unit.rate("csd"), warmup=True),
        architecture=replace(_architecture(unit), **changes),
        seed=unit.seed,
    )
    return lambda: csd.fit(x, context=contexts, progress=False)


def full_ntk_of(x: np.ndarray, preset: Preset, seed: int) -> EmpiricalNTK:
    """Return the tangent kernel of all parameters of the random network whose last layer labels CSD's pairs."""
    images = with_channels(x)
    channels, hidden = ((8,), (64,)) if preset.small else ((32,), (256,))
    net = random_network(images.shape[1:], generators(seed, 1)[0], channels=channels, hidden=hidden)
    standardise = Standardise.of(torch.from_numpy(images))
    return EmpiricalNTK(nn.Sequential(_ChannelAxis(), standardise, net).to(pick_device("auto")))


class _ChannelAxis(nn.Module):
    """Add an axis for the one channel of grey images."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, None] if x.ndim == 3 else x


def _build_csd_on_classifier(unit: Unit, augment: Augmentation, *, share: float) -> Fit:
    x = with_channels(_training_data(unit)[0])
    kernel = from_model(load_or_train_classifier(unit, augment), DENSE_INPUT, seed=unit.seed, capturable=True)
    recipe = unit.preset.recipe(unit.rate("csd_on_classifier"), warmup=True)
    csd = CSD(kernel, augment=share, recipe=recipe, architecture=_architecture(unit), seed=unit.seed)
    return lambda: csd.fit(x, progress=False)


def _build_gp_on_classifier(unit: Unit, augment: Augmentation) -> Fit:
    x, net = with_channels(_training_data(unit)[0]), load_or_train_classifier(unit, augment)
    return lambda: LastLayerGP(from_model(net, DENSE_INPUT, seed=unit.seed), seed=unit.seed).fit(x)


def _build_knn_on_classifier(unit: Unit, augment: Augmentation, *, layer: str = DENSE_INPUT) -> Fit:
    x, net = with_channels(_training_data(unit)[0]), load_or_train_classifier(unit, augment)
    return lambda: KNN(from_model(net, layer), bank=BANK, seed=unit.seed).fit(x)


def _build_energy_of_classifier(unit: Unit, augment: Augmentation) -> Fit:
    x, net = with_channels(_training_data(unit)[0]), load_or_train_classifier(unit, augment)
    return lambda: Energy(net, seed=unit.seed).fit(x)


def _with_and_without_flips(name: str, title: str, build: Callable[..., Fit], **options: Any) -> list[Row]:
    """Return two rows of one family: the paper's augmentation with flips and crops, and crops alone."""
    common: dict[str, Any] = {"family": name, "build": build, "uses_labels": True, **options}
    variant = common.pop("variant", "")
    names = [", ".join(part for part in (variant, flips) if part) for flips in ("flips", "no flips")]
    return [
        Row(name=name, title=title, augment="flips", variant=names[0], **common),
        Row(name=f"{name}-noflips", title=f"{title}, no flips", augment="crops", variant=names[1], **common),
    ]


def _csd(name: str, title: str, **options: Any) -> Row:
    """Return a form of CSD on a random network."""
    row = {key: options.pop(key) for key in ("ablation", "uses_ood") if key in options}
    return Row(name=name, title=title, family=name, build=partial(_build_csd, **options), ours=True, **row)


_SEVERAL: dict[str, Any] = {"few": True, "default": "mutual_information", "uses_labels": True}  # networks or samples
_ON_CLASSIFIER: dict[str, Any] = {"uses_labels": True, "channel_axis": True}
_OBABO, _BAOA = (partial(_build_sgmcmc, sampler=sampler) for sampler in ("obabo", "baoa"))
_KNN_LAST = partial(_build_knn_on_classifier, layer=LAST_HIDDEN)

ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        *_with_and_without_flips("mcd", "MCD", _build_mc_dropout, **_SEVERAL),
        *_with_and_without_flips("laplace", "BNN-Laplace", _build_laplace, **_SEVERAL),
        Row(name="sgmcmc", title="BNN-MCMC", family="sgmcmc", variant="flips", build=_OBABO, **_SEVERAL),
        Row(
            name="sgmcmc-noflips", title="BNN-MCMC, corrected, no flips", family="sgmcmc",
            variant="corrected, no flips", build=_OBABO, augment="none", **_SEVERAL,
        ),
        Row(
            name="sgmcmc-baoa", title="BNN-MCMC, BAOA (uncorrected)", family="sgmcmc-baoa", build=_BAOA,
            augment="crops", **_SEVERAL,
        ),
        Row(name="rnd", title="RND", family="rnd", build=_build_rnd),
        *_with_and_without_flips("ens3", "ENS(3)", partial(_build_ensemble, members=3), **_SEVERAL),
        *_with_and_without_flips("ens15", "ENS(15)", partial(_build_ensemble, members=15), **_SEVERAL),
        _csd("csd", "CSD"),
        _csd("csd_aug", "CSD-Aug", share=0.25),
        _csd("csd_ood", "CSD-OOD", ood_contexts=True, uses_ood=True),
        _csd("csd_default", "CSD-Aug, centred", share=None, centred=None),
        Row(name="last_layer_gp", title="LastLayerGP", family="last_layer_gp", build=_build_last_layer_gp),
        *_with_and_without_flips(
            "gp_post_hoc", "LastLayerGP on the classifier", _build_gp_on_classifier, channel_axis=True
        ),
        *_with_and_without_flips("knn", "kNN on the classifier", _build_knn_on_classifier, channel_axis=True),
        *_with_and_without_flips(
            "knn-last", "kNN on the classifier, last layer", _KNN_LAST, family="knn", variant="last layer",
            channel_axis=True,
        ),
        *_with_and_without_flips("energy", "Energy of the classifier", _build_energy_of_classifier, channel_axis=True),
        Row(
            name="csd_post_hoc", title="CSD-Aug on the classifier", family="csd_post_hoc", ours=True, augment="crops",
            build=partial(_build_csd_on_classifier, share=0.5), **_ON_CLASSIFIER,
        ),
        _csd("csd-small_init", "CSD, small-function initialisation", ablation=True, small_init=True),
        _csd("csd-random_pairs", "CSD, loss over random pairs (Eq. 15)", ablation=True, pairs="random"),
        _csd("csd-full_ntk", "CSD, full empirical NTK", ablation=True, full_ntk=True),
        Row(
            name="csd_post_hoc-train", title="CSD on the classifier", family="csd_post_hoc-train", ours=True,
            ablation=True, augment="crops", build=partial(_build_csd_on_classifier, share=0.0), **_ON_CLASSIFIER,
        ),
    )
}  # fmt: skip
ABLATION = (
    "csd",
    *(name for name, row in ROWS.items() if row.ablation),
    "csd_aug",
    "csd_default",
    "csd_ood",
    "csd_post_hoc",
)
"""The rows of the table of ablations."""
