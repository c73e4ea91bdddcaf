"""Rows for the rivals of pytorch-ood in the distribution-shift benchmark, on the classifiers of onefold's own rows.

    python -m venv benchmarks/rivals/.venv
    benchmarks/rivals/.venv/bin/pip install -c constraints.txt "torch==2.13.0" -e .
    benchmarks/rivals/.venv/bin/pip install --no-deps -r benchmarks/rivals/requirements.txt
    benchmarks/rivals/.venv/bin/python benchmarks/rivals/run.py -o results/shift --preset paper

The environment is its own: pytorch-ood is not a dependency of onefold. Units are those of `onefold bench run`: one file
each, in the same format, and finished ones are skipped. In the folder of onefold's rows they share the classifiers, and
`onefold report` shows them in the same table. The rows are "po_vim", "po_vim-noflips" and so on.

Settings are those that the documentation of pytorch-ood 0.4 states. Where a class has a search space
(`hyperparameter_space`), it is searched on in-distribution data alone: a tenth of the train images against mosaics of
four of them. The unit's file has the choice. The score is "chosen"; "documented" is the setting of the documentation
where it names one. No setting was changed after results on out-of-distribution data.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

# torchvision registers a meta function for these operators, which its compiled part would define.
TORCHVISION = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    TORCHVISION.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import pytorch_ood  # noqa: E402  # pyright: ignore[reportMissingImports]
from pytorch_ood.detector import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    DICE,
    GEN,
    ODIN,
    SHE,
    Mahalanobis,
    MultiMahalanobis,
    NNGuide,
    ReAct,
    ViM,
)

from onefold.bench.classifier import load_or_train_classifier  # noqa: E402
from onefold.bench.evaluate import evaluate  # noqa: E402
from onefold.bench.grid import PRESETS, Augmentation, Unit  # noqa: E402
from onefold.bench.results import ResultsFolder  # noqa: E402
from onefold.bench.rows import ROWS, Fit, Row  # noqa: E402
from onefold.bench.run import begin_folder, plan_units  # noqa: E402
from onefold.bench.sets import load_id_set, with_channels  # noqa: E402
from onefold.metrics import auroc  # noqa: E402

BATCH = 512  # images per pass
HELD_OUT = 0.1  # share of the train images that settings are chosen on

Settings: TypeAlias = Mapping[str, Any]
Score: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Parts:
    """A trained classifier in parts, and the in-distribution data that a rival is fitted on."""

    net: nn.Sequential
    x: Float[Tensor, "n c h w"]
    y: Tensor

    def encode(self, x: Tensor) -> Tensor:
        """Return the features before the logits [n, 256]."""
        return self.tower.features(self.net[0](x))

    @property
    def tower(self) -> Any:
        """The network behind the standardisation of pixels."""
        return self.net[1]

    @property
    def head(self) -> nn.Linear:
        """The layer of the logits."""
        return self.tower.head

    def layers(self) -> list[nn.Module]:
        """Return consecutive parts: two stages, and two hidden layers as maps of one pixel."""
        trunk, hidden = self.tower.trunk, self.tower.mlp.hidden
        stages = [nn.Sequential(self.net[0], *trunk[:4]), nn.Sequential(*trunk[4:], nn.ReLU())]
        return [
            *stages,
            *(nn.Sequential(nn.Flatten(), layer, nn.ReLU(), nn.Unflatten(1, (-1, 1, 1))) for layer in hidden),
        ]

    def features(self) -> Tensor:
        """Return the features of all images."""
        return in_batches(self.encode, self.x)

    def subset(self, kept: Tensor) -> "Parts":
        """Return the classifier with some of the images."""
        return Parts(self.net, self.x[kept], self.y[kept])


@dataclass(frozen=True)
class Rival:
    """A method of pytorch-ood.

    Args:
        title: Name in tables.
        fit: Fit the method with these settings and return its score.
        space: The library's search space; empty if it has none.
        documented: Settings that the library's documentation states; None if it leaves one open.
    """

    title: str
    fit: Callable[..., Score]
    space: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    documented: Settings | None = field(default_factory=dict)


def _features_score(detector: Any, parts: Parts) -> Score:
    detector.fit_features(parts.features(), parts.y)
    return lambda x: detector.predict_features(parts.encode(x))


def fit_mahalanobis(parts: Parts) -> Score:
    return _features_score(Mahalanobis(None), parts)


def fit_multi_mahalanobis(parts: Parts) -> Score:
    detector = MultiMahalanobis(parts.layers()).to(parts.x.device)
    detector.fit(DataLoader(TensorDataset(parts.x, parts.y), BATCH))
    return detector.predict


def fit_vim(parts: Parts, *, d: int) -> Score:
    """The library replaces a d above the number of features by half of it. Equal to it, no residual is left."""
    d = d if d < parts.head.in_features else parts.head.in_features // 2
    return _features_score(ViM(None, d=d, w=parts.head.weight, b=parts.head.bias), parts)


def fit_odin(parts: Parts, *, eps: float, temperature: float) -> Score:
    """Pixels are in [0, 1] before the network standardises them, so eps is in the units that the library assumes."""
    return ODIN(parts.net, eps=eps, temperature=temperature).predict


def fit_gen(parts: Parts, *, gamma: float) -> Score:
    """The ten classes are all used: the library's smallest M is ten."""
    return GEN(parts.net, gamma=gamma).predict


def fit_dice(parts: Parts, *, p: float) -> Score:
    return _features_score(DICE(None, w=parts.head.weight, b=parts.head.bias, p=p), parts)


def fit_she(parts: Parts) -> Score:
    return _features_score(SHE(None, parts.head), parts)


def fit_nnguide(parts: Parts, *, k: int) -> Score:
    return _features_score(NNGuide(parts.encode, parts.head, k=k), parts)


def fit_react(parts: Parts, *, percentile: float) -> Score:
    detector = ReAct(parts.encode, parts.head, percentile=percentile)
    detector.fit_feature_maps(parts.features(), parts.y)
    return detector.predict


RIVALS = {
    "mahalanobis": Rival("Mahalanobis (pytorch-ood)", fit_mahalanobis),
    "multi_mahalanobis": Rival("Multi-layer Mahalanobis (pytorch-ood)", fit_multi_mahalanobis),
    "vim": Rival("ViM (pytorch-ood)", fit_vim, ViM.hyperparameter_space, {"d": 64}),
    "odin": Rival("ODIN (pytorch-ood)", fit_odin, ODIN.hyperparameter_space, {"eps": 0.0014, "temperature": 1000.0}),
    "gen": Rival("GEN (pytorch-ood)", fit_gen, {"gamma": GEN.hyperparameter_space["gamma"]}, {"gamma": 0.1}),
    "dice": Rival("DICE (pytorch-ood)", fit_dice, DICE.hyperparameter_space, None),
    "she": Rival("SHE (pytorch-ood)", fit_she),
    "nnguide": Rival("NNGuide (pytorch-ood)", fit_nnguide, {}, {"k": 10}),
    "react": Rival("ReAct (pytorch-ood)", fit_react, ReAct.hyperparameter_space, {"percentile": 0.9}),
}


class RivalDetector:
    """A fitted rival with the methods that the benchmark calls."""

    def __init__(self, scores: Mapping[str, Score], device: torch.device) -> None:
        self._scores, self._device = scores, device
        self.state = SimpleNamespace(parameters=0)  # trains no network

    def score(self, x: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the scores by the chosen settings."""
        return self._evaluate(self._scores["chosen"], x)

    def outputs(self, x: NDArray[np.float32]) -> dict[str, NDArray[np.float64]]:
        """Return all scores."""
        return {name: self._evaluate(score, x) for name, score in self._scores.items()}

    def _evaluate(self, score: Score, x: NDArray[np.float32]) -> NDArray[np.float64]:
        values = in_batches(score, torch.from_numpy(x).to(self._device))
        return values.double().cpu().numpy()


def in_batches(function: Score, x: Tensor) -> Tensor:
    """Return the outputs for all images, without gradients."""
    return torch.cat([function(part).detach() for part in x.split(BATCH)])


def mosaics(x: Float[Tensor, "n c h w"], seed: int) -> Float[Tensor, "n c h w"]:
    """Return images whose quadrants are from four different images at the same places."""
    generator, (height, width) = torch.Generator().manual_seed(seed), (side // 2 for side in x.shape[2:])
    mixed, order = x.clone(), torch.randperm(len(x), generator=generator)
    for i, (rows, columns) in enumerate(
        itertools.product((slice(height), slice(height, None)), (slice(width), slice(width, None)))
    ):
        mixed[:, :, rows, columns] = x[order.roll(i), :, rows, columns]
    return mixed


def choose(rival: Rival, parts: Parts, seed: int) -> Settings:
    """Return the settings that best separate held-out train images from mosaics; at a tie the documented ones."""
    points = [dict(zip(rival.space, values, strict=True)) for values in itertools.product(*rival.space.values())]
    if not rival.space:
        return rival.documented or {}
    order = torch.randperm(len(parts.x), generator=torch.Generator().manual_seed(seed))
    count = max(BATCH // 4, round(HELD_OUT * len(order)))
    held_out, fitted = parts.x[order[:count]], parts.subset(order[count:])
    unfamiliar = mosaics(held_out, seed)

    def quality(settings: Settings) -> float:
        score = rival.fit(fitted, **settings)
        familiar, mixed = (in_batches(score, x).cpu().numpy() for x in (held_out, unfamiliar))
        return auroc(familiar, mixed)

    return max(sorted(points, key=lambda settings: settings != rival.documented), key=quality)


CHOSEN: dict[str, dict[str, Any]] = {}
"""Settings of the units of this process, for their files."""


def build(unit: Unit, augment: Augmentation, *, rival: Rival) -> Fit:
    """Prepare the fit of a unit, as the rows of onefold do: the classifier is trained before."""
    images = load_id_set(unit.id_set, unit.data_dir, unit.preset)
    net = load_or_train_classifier(unit, augment)
    device = next(net.parameters()).device
    assert isinstance(net, nn.Sequential)
    assert images.y_train is not None
    parts = Parts(
        net, torch.from_numpy(with_channels(images.x_train)).to(device), torch.from_numpy(images.y_train).to(device)
    )

    def fit() -> Any:
        chosen = choose(rival, parts, unit.seed)
        settings = {"chosen": chosen} | ({} if rival.documented in (None, chosen) else {"documented": rival.documented})
        CHOSEN[str(unit)] = settings
        return RivalDetector({name: rival.fit(parts, **values) for name, values in settings.items()}, device)

    return fit


def make_rows() -> dict[str, Row]:
    """Return two rows for each rival: classifiers trained with flips, as in the paper, and without."""
    classifiers: list[tuple[str, Augmentation, str]] = [("", "flips", "flips"), ("-noflips", "crops", "no flips")]
    rows = [
        Row(
            name=f"po_{name}{suffix}", title=rival.title, family=f"po_{name}", build=partial(build, rival=rival),
            augment=augment, variant=variant, default="chosen", uses_labels=True, channel_axis=True,
        )
        for name, rival in RIVALS.items()
        for suffix, augment, variant in classifiers
    ]  # fmt: skip
    return {row.name: row for row in rows}


def run(
    out: Path, *, preset: str, rivals: Sequence[str], ids: Sequence[str], seeds: Sequence[int], data_dir: Path | None
) -> int:
    """Evaluate the units that have no file, one after another; return the number of units that failed."""
    rows = {name: row for name, row in make_rows().items() if row.family.removeprefix("po_") in rivals}
    ROWS.update(rows)
    units = plan_units(out, preset=preset, methods=list(rows), ids=ids, seeds=seeds, data_dir=data_dir)
    results, failed = ResultsFolder(out), 0
    with results.lock():
        begin_folder(results, units)
        for unit in units:
            if results.read(unit) is not None:
                continue
            try:
                content = evaluate(unit)
            except Exception as error:  # the other units are independent of it
                print(f"{unit}: failed: {error}", file=sys.stderr, flush=True)
                results.fail(unit, str(error), "")
                failed += 1
                continue
            row = ROWS[unit.row]
            content["settings"] |= {
                "family": row.family,
                "variant": row.variant,
                "library": f"pytorch-ood {pytorch_ood.__version__}",
            }
            content["settings"] |= CHOSEN[str(unit)]
            content["cost"]["alone"] = True
            results.write(unit, content)
            means = np.mean([figures["auroc"] for figures in content["scores"]["chosen"].values()])
            print(f"{unit}: AUROC {means:.2f}, fit {content['cost']['fit_s']:.1f} s, {CHOSEN[str(unit)]}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--preset", choices=list(PRESETS), default="paper")
    parser.add_argument("--rivals", nargs="+", choices=list(RIVALS), default=list(RIVALS))
    parser.add_argument("--ids", nargs="*", default=[])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # onefold's benchmark takes a GPU if there is one
    elif options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU. Leave out --device, or install a torch for CUDA.")
    return min(
        1,
        run(
            options.out,
            preset=options.preset,
            rivals=options.rivals,
            ids=options.ids,
            seeds=options.seeds,
            data_dir=options.data_dir,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
