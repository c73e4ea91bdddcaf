"""Results, options and names are those of the golden file; see reference.py."""

import json
from pathlib import Path
from typing import Any

import pytest
from reference import GOLDEN, bonuses, detectors, differences, names, options, reports, training, unit

EXPECTED: dict[str, Any] = json.loads(GOLDEN.read_text())


def agree(actual: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    """Equal up to rounding, which differs between processors."""
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert actual[name] == pytest.approx(values, rel=2e-3, abs=1e-4), name


def test_scores_of_all_detectors() -> None:
    agree(detectors(), EXPECTED["detectors"])


def test_bonuses() -> None:
    agree(bonuses(), EXPECTED["bonuses"])


def test_training_runs(tmp_path: Path) -> None:
    actual = training(tmp_path)
    agree(actual, EXPECTED["training"])


def test_a_benchmark_unit(tmp_path: Path) -> None:
    assert unit(tmp_path) == pytest.approx(EXPECTED["unit"], rel=1e-2, abs=0.5)


def test_numbers_of_the_committed_reports() -> None:
    assert reports() == EXPECTED["reports"]


def test_options_and_names() -> None:
    assert not list(
        differences({k: EXPECTED[k] for k in ("options", "names")}, {"options": options(), "names": names()})
    )
