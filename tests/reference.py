"""Reference outputs that a change of structure must not change.

    python tests/reference.py          # compare with tests/golden/reference.json, bit for bit
    python tests/reference.py --write  # replace it, after a change that is meant to change results

It computes scores of all ten detectors, bonuses, two short training runs, a benchmark unit and the numbers of the
committed reports, and lists the options of every command and the names in the reference documentation. It uses the
public interface only, and numbers are kept without their names where names may change. Between machines the last digits
differ, so `test_reference.py` allows for that; on one machine nothing may differ.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.numpy import load_file

import onefold
from onefold.cli import main
from onefold.rl import CSDBonus, LastLayerGPBonus, RNDBonus

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden" / "reference.json"
COMMANDS = (
    "demo", "fit", "score", "diagnose", "export", "serve", "toy", "report", "data fetch", "data list", "bench run",
    "bench ablate", "bench search", "bench methods", "rl train", "rl resume", "rl grid", "rl search", "rl eval",
    "rl watch",
)  # fmt: skip
ENTRY = re.compile(r"(?:-\w [^,\n]*, )?(--[\w-]+).*?\((required|optional|default: [^\n]*)\)\s*(?:\n\W*)?$", re.S)
UNREPEATABLE = {"seconds", "frames_per_second", "date", "commit", "cost", "python", "torch", "cores", "gpu"}


def run(*words: object) -> str:
    """Run the command line and return what it printed."""
    buffer = io.StringIO()
    with contextlib.redirect_stdout(buffer), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        main([str(word) for word in words])
    return buffer.getvalue()


def detectors() -> dict[str, list[float]]:
    from test_methods import METHODS, fit, pictures, vectors

    scores = {}
    for name in METHODS:
        for kind, x in (("vectors", vectors(80)), ("images", pictures(60, 3, 8, 8))):
            detector = fit(name, x)
            values = [detector.score(x[:6])]
            for other in ("variance", "relative"):
                values += [getattr(detector, other)(x[:3])] if hasattr(detector, other) else []
            detector.calibrate(x[:40], fpr=0.1)
            scores[f"{name}, {kind}"] = [float(v) for v in np.concatenate([*values, [detector.threshold]])]
    return scores


def bonuses() -> dict[str, list[float]]:
    rng = np.random.default_rng(0)
    seen = rng.normal(size=(64, 6)).astype(np.float32)
    values = {}
    for make in (CSDBonus, LastLayerGPBonus, RNDBonus):
        bonus = make()
        for _ in range(20):
            bonus.update(seen)
        values[make.__name__] = [float(v) for v in bonus(np.concatenate([seen[:3], seen[:3] + 2]))]
    return values


def training(folder: Path) -> dict[str, list[float]]:
    """Sums over the networks of two short runs, and their episodes."""
    results = {}
    for agent in ("dqn", "csd"):
        out = folder / agent
        run("rl", "train", "-o", out, "--agent", agent, "--env", "chain-8", "--frames", 900, "--device", "cpu")
        for name in ("networks", "checkpoint"):
            tensors = [
                t.astype(np.float64) for t in load_file(out / f"{name}.safetensors").values() if t.dtype.kind == "f"
            ]
            sums = sorted(float(np.abs(t).sum()) for t in tensors)
            results[f"{agent}, {name}"] = [float(len(sums)), *sums[-20:-1:6], sums[-1]]
        rows = [line.split(",") for line in (out / "episodes.csv").read_text().splitlines()[1:]]
        results[f"{agent}, episodes"] = [float(len(rows)), *np.array(rows, float).sum(0)]
    return results


def unit(folder: Path) -> list[float]:
    run("bench", "run", "-o", folder / "bench", "--preset", "smoke", "--methods", "last_layer_gp", "--seeds", "0")
    paths = sorted((folder / "bench").rglob("seed0.json"))
    return [float(v) for v in sorted(numbers([json.loads(path.read_text())["scores"] for path in paths]))]


def reports() -> dict[str, Any]:
    """A hash over all numbers of each committed report, in ascending order."""
    digests = {}
    for name in ("shift", "ablation"):
        values = sorted(numbers(json.loads(run("report", ROOT / "results" / name, "--json"))))
        text = "\n".join(f"{v:.10g}" for v in values)
        digests[name] = {"numbers": len(values), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return digests


def numbers(content: Any) -> Iterator[float]:
    """Yield every number in JSON content, except what no run repeats."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key not in UNREPEATABLE:
                yield from numbers(value)
    elif isinstance(content, list):
        for value in content:
            yield from numbers(value)
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield float(content)


def options() -> dict[str, dict[str, str]]:
    """The options of every command with their defaults, read from --help."""
    listed = {}
    for command in COMMANDS:
        with mock.patch.dict(os.environ, COLUMNS="1000"):
            lines = [line.strip("│ ") for line in run(*command.split(), "--help").splitlines()]
        lines = [line for line in lines if not line.endswith(" options")]  # titles of groups
        entries = re.split(r"(?:^|\n)(?=-)", "\n".join(lines))
        listed[command] = {}
        for entry in entries:
            if match := ENTRY.match(entry):
                listed[command][match[1]] = match[2].removeprefix("default: ")
    return listed


def names() -> list[str]:
    """Every dotted name in docs/api."""
    pages = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs" / "api").glob("*.md")))
    return sorted(set(re.findall(r"^::: ([\w.]+)", pages, re.M)))


def compute(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "detectors": detectors(), "bonuses": bonuses(), "training": training(folder), "unit": unit(folder),
            "reports": reports(), "options": options(), "names": names(),
        }  # fmt: skip


def differences(expected: Any, actual: Any, where: str = "") -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in sorted({*expected, *actual}):
            yield from differences(expected.get(key), actual.get(key), f"{where}/{key}")
    elif expected != actual:
        yield f"{where}: {str(expected)[:150]} is now {str(actual)[:150]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the golden file")
    write = parser.parse_args().write
    with tempfile.TemporaryDirectory() as place:
        content = compute(Path(place))
    if write:
        GOLDEN.write_text(json.dumps(content, indent=1) + "\n")
        print(f"{GOLDEN}: written by onefold {onefold.__version__}")
    else:
        changed = list(differences(json.loads(GOLDEN.read_text()), content))
        print("\n".join(changed) or "no difference")
        sys.exit(bool(changed))
