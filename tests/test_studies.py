"""The studies behind the page "Choosing a method": error bars of regressions, and wrong predictions by score."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy.stats import norm

ROOT = Path(__file__).parent.parent


def load(name: str) -> ModuleType:
    path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"study_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def regression() -> ModuleType:
    return load("regression")


def test_likelihood_and_quantile_are_those_of_the_normal_distribution(regression: ModuleType) -> None:
    rng = np.random.default_rng(0)
    error, variance = rng.normal(size=50), rng.uniform(0.1, 3, 50)
    expected = -np.mean(norm.logpdf(error, scale=np.sqrt(variance)))
    assert np.isclose(regression.negative_log_likelihood(error, variance), expected, rtol=1e-12)
    assert np.isclose(regression.QUANTILE, norm.ppf(0.5 + regression.LEVEL / 2), rtol=1e-12)


@pytest.mark.parametrize(("a", "b"), [(2.0, 0.5), (0.0, 0.3), (3.0, 0.0)])
def test_calibration_recovers_scale_and_noise(regression: ModuleType, a: float, b: float) -> None:
    """Errors drawn with variance a v + b; v has another scale, which must not matter."""
    rng = np.random.default_rng(1)
    variance = 1e-3 * rng.exponential(size=20_000)
    error = rng.normal(size=20_000) * np.sqrt(1e3 * a * variance + b)
    found = regression.calibrate(error, variance)
    np.testing.assert_allclose([found[0] / 1e3, found[1]], [a, b], rtol=0.06, atol=0.02)


def test_splits_are_disjoint_and_standardised(regression: ModuleType) -> None:
    split = regression.diabetes(3)
    assert [len(part[0]) for part in (split.train, split.validation, split.tests["test"])] == [242, 100, 100]
    rows = np.concatenate([split.train[0], split.validation[0], split.tests["test"][0]])
    assert len(np.unique(rows, axis=0)) == 442
    split = regression.synthetic(0)
    for part in split.train:
        np.testing.assert_allclose(part.mean(0), 0, atol=1e-9)
        np.testing.assert_allclose(part.std(0), 1)
    between, beyond = (split.tests[name][0][:, 0] for name in ("between them", "beyond them"))
    fitted = np.concatenate([split.train[0][:, 0], split.validation[0][:, 0]])
    assert not ((fitted > between.min()) & (fitted < between.max())).any()
    assert np.abs(beyond).min() > np.abs(fitted).max()


@pytest.mark.slow
def test_wrong_predictions_by_score_run_and_resume(tmp_path: Path) -> None:
    out = tmp_path / "risk.json"
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "risk_coverage.py"), "-o", str(out)]
    command += ["--preset", "smoke", "--seeds", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}

    def run() -> str:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "digits seed 0: max-softmax: area" in run()
    cells = json.loads(out.read_text("utf-8"))["cells"]["digits/seed0"]
    errors = {name: figures["risk"][0] for name, figures in cells.items()}
    assert len({error for name, error in errors.items() if not name.startswith("ENS")}) == 1, "one classifier"
    assert len({error for name, error in errors.items() if name.startswith("ENS(3)")}) == 1
    assert all(0 <= figures["area"] <= 1 and len(figures["risk"]) == 6 for figures in cells.values())
    assert run() == "", "what is in the file is not run again"
