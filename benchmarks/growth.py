"""How fitting and scoring grow with the data: vectors of 16 numbers, 1,000 to 1,000,000 rows, in one run.

    python benchmarks/growth.py [--out FILE.json] [--most 1000000]

CSD trains for a fixed number of steps, so its fit grows only by reading the data and computing its features.
"""

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from onefold import CSD, RND, LastLayerGP
from onefold.core.batches import pick_device
from onefold.core.provenance import provenance
from onefold.core.storage import write_json
from onefold.nn.train import Recipe

STEPS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--most", type=int, default=1_000_000)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # nothing here is trained to the end
    x = np.random.default_rng(0).normal(size=(options.most, 16)).astype(np.float32)
    sizes = [n for n in (1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000) if n <= options.most]
    makers: dict[str, Any] = {
        "CSD": lambda: CSD(recipe=Recipe(steps=STEPS, batch=64)),
        "LastLayerGP": lambda: LastLayerGP(width=512),
        "RND": lambda: RND(recipe=Recipe(steps=STEPS, batch=64)),
    }
    times: dict[str, dict[str, list[float]]] = {}
    for name, make in makers.items():
        make().fit(x[:1000]).score(x[:1000])  # warm up
        times[name] = {"fit": [], "score": []}
        for n in sizes:
            started = time.perf_counter()
            detector = make().fit(x[:n])
            fitted = time.perf_counter()
            detector.score(x[:n])
            scored = time.perf_counter()
            times[name]["fit"].append(fitted - started)
            times[name]["score"].append(scored - fitted)
            print(f"{name:12} {n:9,} rows: fit {fitted - started:7.2f} s, score {scored - fitted:7.2f} s", flush=True)
    result = {**provenance(pick_device("auto")), "columns": 16, "steps": STEPS, "rows": sizes, "seconds": times}
    if options.out is not None:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
