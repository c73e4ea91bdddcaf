"""The runner of pytorch-ood's methods, in its own environment: benchmarks/rivals/run.py says how it is made."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from onefold.bench.results import collect
from onefold.report.bench_table import build_table

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "rivals"
PYTHON = FOLDER / ".venv" / "bin" / "python"

CHECKS = """
import numpy as np, torch
import run
x = torch.arange(4.0)[:, None, None, None].expand(4, 1, 5, 4)
mixed = run.mosaics(x, 0)
corners = mixed[:, 0, [0, 0, -1, -1], [0, -1, 0, -1]]
assert sorted(corners[0].tolist()) == [0, 1, 2, 3], corners
assert all(sorted(corners[:, i].tolist()) == [0, 1, 2, 3] for i in range(4)), corners
assert (mixed[:, 0, :2, :2] == corners[:, :1, None]).all() and (mixed[:, 0, 2:, 2:] == corners[:, 3:, None]).all()
asked = []
def fit(parts, *, a):
    asked.append((a, len(parts.x)))
    return lambda x: {1: 0 * x[:, 0, 0, 0], 2: (x[:, 0, 0, 0] - x[:, 0, -1, -1]).abs(), 3: -x[:, 0, 0, 0]}[a]
parts = run.Parts(torch.nn.Identity(), torch.randn(400, 1, 1, 1).expand(400, 1, 4, 4), torch.zeros(400))
rival = run.Rival("", fit, {"a": [1, 2, 3]}, {"a": 1})
assert run.choose(rival, parts, 0) == {"a": 2}, "the one that separates mosaics from images of one grey"
assert sorted(asked) == [(a, 272) for a in (1, 2, 3)], asked
tie = run.Rival("", lambda parts, *, a: lambda x: 0 * x[:, 0, 0, 0], {"a": [1, 2, 3]}, {"a": 2})
assert run.choose(tie, parts, 0) == {"a": 2}
"""


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="no environment for pytorch-ood")
def test_rivals_are_chosen_on_familiar_data_and_fill_the_table(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{FOLDER}", "OMP_NUM_THREADS": "1"}

    def python(*words: str) -> str:
        done = subprocess.run([PYTHON, *words], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    python("-c", CHECKS)
    command = [str(FOLDER / "run.py"), "-o", str(tmp_path), "--preset", "smoke", "--seeds", "0", "--device", "cpu"]
    names = {"mahalanobis", "multi_mahalanobis", "vim", "odin", "gen", "dice", "she", "nnguide", "react"}
    assert python(*command).count("AUROC") == 2 * len(names)
    assert python(*command) == "", "every unit has its file"
    collected = collect(tmp_path)
    assert not collected.skipped
    section = build_table(collected.units)[0]
    assert {row.name for row in section.rows} == {f"po_{name}" for name in names}
    content = json.loads((tmp_path / "units" / "po_odin" / "digits" / "seed0.json").read_text("utf-8"))
    assert set(content["settings"]["chosen"]) == {"eps", "temperature"}
    assert content["settings"]["library"] == "pytorch-ood 0.4.0"
