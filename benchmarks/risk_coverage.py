"""Is my prediction wrong? Risk–coverage curves of a classifier by several scores, on the sets of the benchmark.

    python benchmarks/risk_coverage.py -o FILE.json [--preset paper] [--ids …] [--seeds 0 1 2] [--data-dir DIR]

One classifier is trained on each set and seed, without flips, and predicts the test set. Scores order its predictions:
those with small scores are kept. Losses are 0 for right and 1 for wrong predictions. The ensembles predict with all
their members, so that their error rate differs, too. All settings are those of the benchmark's rows. The file has the
area under every curve, and risks at some coverages; sets and seeds that are in it are not run again.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from onefold.bench.classifier import BATCH, load_or_train_classifier
from onefold.bench.evaluate import all_scores
from onefold.bench.grid import PRESETS, Unit
from onefold.bench.rows import ROWS
from onefold.bench.run import plan_units
from onefold.bench.sets import load_id_set, with_channels
from onefold.core.batches import pick_device
from onefold.core.provenance import provenance
from onefold.core.storage import write_json
from onefold.metrics import risk_coverage

ON_CLASSIFIER = ("csd_post_hoc", "gp_post_hoc-noflips", "knn-noflips")
ENSEMBLES = ("ens3-noflips", "ens15-noflips")
COVERAGES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)


def curves(unit: Unit) -> Iterator[tuple[str, NDArray[np.float64], NDArray[np.bool_]]]:
    """Yield the name of each score, its values on the test set, and which predictions are wrong."""
    images = load_id_set(unit.id_set, unit.data_dir, unit.preset)
    assert images.y_test is not None
    net = load_or_train_classifier(unit, "crops")
    device = next(net.parameters()).device
    with torch.no_grad():
        parts = torch.from_numpy(with_channels(images.x_test)).split(BATCH)
        logits = torch.cat([net(part.to(device)).double().cpu() for part in parts])
    wrong = logits.argmax(1).numpy() != images.y_test
    yield "max-softmax", -logits.softmax(1).max(1).values.numpy(), wrong
    yield "entropy of the softmax", torch.special.entr(logits.softmax(1)).sum(1).numpy(), wrong
    yield "energy", -logits.logsumexp(1).numpy(), wrong
    for name in (*ON_CLASSIFIER, *ENSEMBLES):
        row = ROWS[name]
        detector = row.build(unit, row.augment)()
        x = row.images(images.x_test)
        errors = wrong if name in ON_CLASSIFIER else detector.predict(x) != images.y_test  # pyright: ignore[reportAttributeAccessIssue]
        for kind, scores in all_scores(detector, x).items():
            yield f"{row.title}, {kind.replace('_', ' ')}", scores, errors


def measure(unit: Unit) -> dict[str, Any]:
    """Return the area and the risks at `COVERAGES` of every score."""
    result = {}
    for name, scores, wrong in curves(unit):
        curve = risk_coverage(scores, wrong)
        risks = [float(curve.risk[max(1, round(share * len(wrong))) - 1]) for share in COVERAGES]
        result[name] = {"area": curve.area, "risk": risks}
        print(f"{unit.id_set} seed {unit.seed}: {name}: area {curve.area:.5f}, error {risks[0]:.4f}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--preset", choices=list(PRESETS), default="paper")
    parser.add_argument("--ids", nargs="*", default=[])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--data-dir", type=Path)
    options = parser.parse_args()
    cells = json.loads(options.out.read_text("utf-8"))["cells"] if options.out.exists() else {}
    folder = options.out.with_suffix("")
    units = plan_units(
        folder, preset=options.preset, methods=["csd_post_hoc"], ids=options.ids, seeds=options.seeds,
        data_dir=options.data_dir,
    )  # fmt: skip
    for unit in units:
        cell = f"{unit.id_set}/seed{unit.seed}"
        if cell not in cells:
            cells[cell] = measure(unit)
            origin = {**provenance(pick_device("auto")), "preset": options.preset, "coverages": COVERAGES}
            write_json(options.out, {**origin, "cells": cells})


if __name__ == "__main__":
    main()
