"""The monitor of a stream: its limits and its betting score by closed forms, its level, and resuming."""

import importlib.util
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import beta, binom, norm
from test_imports import loaded
from test_methods import vectors

import onefold
from onefold.core.files import write_json
from onefold.detectors.alarm import Alarm
from onefold.errors import FileError, InputError, NotFittedError
from onefold.monitor import BETS, Calibration, Monitor, betting_score, score_limits, tail_ranks, upper_limits

SIZES = (100, 300, 1000, 3000)


@pytest.fixture(scope="module")
def simulation() -> Any:
    """Return benchmarks/monitor.py."""
    path = Path(__file__).parent.parent / "benchmarks" / "monitor.py"
    spec = importlib.util.spec_from_file_location("monitor_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["monitor_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def detector() -> Any:
    return onefold.LastLayerGP(width=64, device="cpu").fit(vectors(300, 4)).calibrate(vectors(200, 4, 1), fpr=0.1)


# --- limits of the probabilities --------------------------------------------------------------------------------------


def test_ranks_are_tails_of_the_calibration_set() -> None:
    assert tail_ranks(1000) == (5, 10, 20, 50, 100, 200)
    assert tail_ranks(100) == (1, 2, 5, 10, 20)  # 0.5 % and 1 % are the same score
    assert tail_ranks(1) == (1,)


def test_limits_are_quantiles_of_beta_laws() -> None:
    """The largest of n uniform numbers exceeds 1 − u with probability 1 − (1 − u)ⁿ."""
    for n, alpha in itertools.product((1, 20, 1000), (0.01, 0.5)):
        assert upper_limits(n, (1,), alpha)[0] == pytest.approx(1 - (alpha / 2) ** (1 / n), rel=1e-12)
        ranks = tail_ranks(n)
        expected = [beta.ppf(1 - alpha / (2 * len(ranks)), k, n - k + 1) for k in ranks]
        np.testing.assert_allclose(upper_limits(n, ranks, alpha), expected, rtol=1e-9)


@pytest.mark.parametrize("rounded", [False, True])
def test_all_limits_hold_at_once(rounded: bool) -> None:
    """The true probabilities exceed a limit in at most a share alpha/2 of the calibration sets, here of 5,000."""
    rng, alpha, ranks = np.random.default_rng(0), 0.2, tail_ranks(200)
    scores = rng.normal(size=(5000, 200))
    if rounded:
        scores = scores.round(1)
    limits = np.sort(scores, axis=1)[:, 200 - np.array(ranks)]
    exceeding = norm.sf(limits + 0.05 if rounded else limits)  # P(a rounded score is above the limit)
    share = (exceeding > upper_limits(200, ranks, alpha)).any(axis=1).mean()
    assert share < alpha / 2
    if not rounded:
        assert share > alpha / 8  # the bound over five ranks that depend on each other is not much too large


def test_limits_of_scores_include_the_tolerance_for_ties() -> None:
    scores = np.array([3.0, 1.0, 2.0, 2.0])
    np.testing.assert_allclose(score_limits(scores, (1, 2, 4), 0.5), [3 + 5e-4 + 0.5, 2 + 4e-4 + 0.5, 1 + 3e-4 + 0.5])
    monitor = Monitor.from_scores(np.repeat([0.0, 1.0], [80, 20]), fpr=0.1)
    assert monitor.update_scores([1.0, 1.0001, 1.00001]).alarms == 0  # ties with the calibration scores
    assert monitor.update_scores([1.01]).alarms == 1


# --- the betting score ------------------------------------------------------------------------------------------------


def brute_force(exceeds: np.ndarray, limits: np.ndarray) -> float:
    """Return the mean over limits and stakes of the product over inputs."""
    products = [
        math.prod(1 + stake * (float(row[j]) / limits[j] - 1) for row in exceeds)
        for j in range(len(limits))
        for stake in BETS
    ]
    return float(np.mean(products))


def test_the_betting_score_is_the_mean_of_products() -> None:
    scores, stream = np.random.default_rng(0).normal(size=300), np.random.default_rng(1).normal(1, 1, size=80)
    monitor = Monitor.from_scores(scores, alpha=0.05)
    limits = score_limits(scores, tail_ranks(300))
    upper = upper_limits(300, tail_ranks(300), 0.05)
    crossed_at, evidence = None, monitor.evidence
    for i, score in enumerate(stream):
        evidence = monitor.update_scores([score])
        expected = brute_force(stream[: i + 1, None] > limits, upper)
        assert evidence.log10_score == pytest.approx(math.log10(expected), abs=1e-9)
        if crossed_at is None and expected >= 40:
            crossed_at = i + 1
        assert evidence.crossed_at == crossed_at
    assert evidence.log10_limit == pytest.approx(math.log10(40))
    assert crossed_at is not None


def test_the_betting_score_has_mean_one_if_the_limit_is_the_probability() -> None:
    """And less if the probability is smaller: the score is a supermartingale."""
    hits = np.arange(31)
    for limit in (0.01, 0.2):
        scores = np.exp(betting_score(hits[:, None], np.full(31, 30), np.array([limit])))
        assert (scores * binom.pmf(hits, 30, limit)).sum() == pytest.approx(1, rel=1e-12)
        assert (scores * binom.pmf(hits, 30, 0.8 * limit)).sum() < 0.95


def test_long_streams_neither_overflow_nor_underflow() -> None:
    monitor = Monitor.from_scores(np.arange(1000.0))
    assert monitor.update_scores(np.zeros(10**6)).log10_score < -1e4
    monitor = Monitor.from_scores(np.arange(1000.0))
    evidence = monitor.update_scores(np.full(10**6, 1e4))
    assert evidence.log10_score > 1e6
    assert evidence.crossed_at == 3
    assert (evidence.inputs, evidence.alarms, evidence.expected) == (10**6, 10**6, pytest.approx(5e4))


def test_nan_counts_as_above_all_limits() -> None:
    """As in an exported detector, where a broken sensor raises an alarm."""
    one, other = (Monitor.from_scores(np.arange(100.0)) for _ in range(2))
    assert one.update_scores([np.nan, 3.0, -np.inf]) == other.update_scores([np.inf, 3.0, -1.0])
    assert one.evidence.alarms == 1


def test_alarms_are_those_of_the_conservative_pvalues() -> None:
    rng = np.random.default_rng(0)
    for n, fpr in ((19, 0.05), (150, 0.1), (300, 0.0123)):
        scores, stream = rng.normal(size=n), rng.normal(0.5, 1, size=500)
        expected = int((Alarm(scores, fpr).conservative_pvalues(stream) <= fpr).sum())
        assert Monitor.from_scores(scores, fpr=fpr).update_scores(stream).alarms == expected


# --- level and delay --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True])
def test_familiar_streams_rarely_raise_an_alarm(simulation: Any, ties: bool) -> None:
    for n, alpha in itertools.product((100, 1000), (0.1, 0.01)):
        cell = simulation.level(n, alpha, ties, 1000, np.random.default_rng(0))
        assert cell["valid"], cell


@pytest.mark.parametrize("n", SIZES)
def test_the_simulation_has_the_delays_of_the_monitor(simulation: Any, n: int) -> None:
    rng = np.random.default_rng(0)
    waits = []
    for _ in range(150):
        stream = np.where(rng.random(1500) < 0.2, 99, rng.normal(size=1500))
        waits.append(Monitor.from_scores(rng.normal(size=n)).update_scores(stream).crossed_at)
    assert None not in waits
    tails = simulation.exceedance_probabilities(n, 4000, rng)
    simulated = simulation.first_crossings(0.2 + 0.8 * tails, n, 1e-3, 1500, rng)
    assert (simulated > 0).all()
    error = np.hypot(np.std(waits) / np.sqrt(150), simulated.std() / np.sqrt(4000))
    assert abs(np.mean(waits) - simulated.mean()) < 4 * error
    if n == 1000:
        assert np.quantile(waits, 0.9) < 200


def test_the_simulation_draws_the_exceedance_of_scores(simulation: Any) -> None:
    """The mean of Beta(k, n − k + 1) is k / (n + 1), and rounded scores exceed a limit less often."""
    tails = simulation.exceedance_probabilities(300, 20_000, np.random.default_rng(0))
    np.testing.assert_allclose(tails.mean(axis=0), np.array(tail_ranks(300)) / 301, rtol=0.02)
    tied = simulation.exceedance_probabilities(300, 20_000, np.random.default_rng(0), ties=True)
    assert (tied <= tails).all()
    scores = np.random.default_rng(1).normal(size=(20_000, 300)).round(1)
    limits = np.sort(scores, axis=1)[:, 300 - np.array(tail_ranks(300))]
    np.testing.assert_allclose(tied.mean(axis=0), norm.sf(limits + 0.05).mean(axis=0), rtol=0.03)


# --- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_any_division_into_batches_and_files_gives_the_same(tmp_path: Path, seed: int) -> None:
    """Before and after the betting score crosses its limit, to the last bit."""
    rng = np.random.default_rng(seed)
    calibration, stream = rng.normal(size=100), rng.normal(0.3 * seed, 1, size=500)
    whole, path = Monitor.from_scores(calibration, alpha=0.05), tmp_path / "state.json"
    expected = whole.update_scores(stream)
    evidence = None
    for part in np.split(stream, np.sort(rng.integers(0, 501, 5))):
        monitor = Monitor.from_scores(calibration, alpha=0.05)
        if evidence is not None:
            assert monitor.load(path).evidence == evidence
        evidence = monitor.update_scores(part)
        monitor.save(path)
    assert evidence == expected
    assert expected.crossed == (seed > 0)
    whole.save(tmp_path / "whole.json")
    assert path.read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_a_state_of_another_monitor_is_refused(tmp_path: Path) -> None:
    scores = np.arange(100.0)
    Monitor.from_scores(scores).save(tmp_path / "s.json")
    with pytest.raises(FileError, match=r"s\.json: is of a monitor with another calibration"):
        Monitor.from_scores(scores + 1).load(tmp_path / "s.json")
    with pytest.raises(FileError, match=r"s\.json: is of a monitor with alpha=0.001\. Use that"):
        Monitor.from_scores(scores, alpha=0.01).load(tmp_path / "s.json")


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": -1}, {"inputs": 2}, {"inputs": 10.5}, {"inputs": None}, {"alarms": 11}, {"alarms": -1}, {"hits": []},
        {"hits": [0, 0, 0, 0, 11]}, {"hits": [5, 4, 4, 4, 4]}, {"hits": [-1, 0, 0, 0, 0]}, {"hits": [0] * 6},
        {"crossed_at": 0}, {"crossed_at": 11}, {"format": 2}, {"calibration": None}, {"alpha": "x"}, {"other": 1},
        {"hits": [0, 0, 0, 0, 10**40]},
    ],
    ids=str,
)  # fmt: skip
def test_damaged_states_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    monitor = Monitor.from_scores(np.arange(100.0))
    monitor.update_scores([200.0] * 3 + [0.0] * 7)
    before = monitor.evidence
    monitor.save(tmp_path / "s.json")
    content = json.loads((tmp_path / "s.json").read_text())
    write_json(tmp_path / "s.json", {**content, **change})
    with pytest.raises(FileError, match=r"s\.json: damaged, or not the state of a monitor"):
        monitor.load(tmp_path / "s.json")
    assert monitor.evidence == before


def test_files_that_are_no_states_are_refused(tmp_path: Path) -> None:
    monitor = Monitor.from_scores(np.arange(100.0))
    for content in (b"", b"[]", b"{", b"\x00\xff", b"[" * 10**5, b" " * 10**6):
        (tmp_path / "s.json").write_bytes(content)
        with pytest.raises(FileError, match=r"s\.json"):
            monitor.load(tmp_path / "s.json")
    with pytest.raises(FileError, match="No such file"):
        monitor.load(tmp_path / "absent.json")


# --- detectors and their exports --------------------------------------------------------------------------------------


def test_a_detector_is_monitored_by_its_scores(detector: Any) -> None:
    x = vectors(500, 4, 2) * np.float32(1.5)
    monitor = Monitor(detector)
    expected = Monitor.from_calibration(detector.alarm.calibration).update_scores(detector.score(x))
    assert monitor.update(x) == expected
    assert expected.alarms == detector.is_ood(x).sum()
    assert expected.expected == 50
    with pytest.raises(InputError, match="x:"):
        monitor.update(np.concatenate([x, np.full((1, 4), np.nan, np.float32)]))
    assert monitor.evidence == expected  # of a bad batch, nothing is counted


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_exported_metadata_are_enough(detector: Any, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"m{suffix}"
    detector.export(path)
    if suffix == ".onnx":
        onnx = pytest.importorskip("onnx", reason="onnx is not installed")
        metadata = json.loads({entry.key: entry.value for entry in onnx.load(path).metadata_props}["onefold"])
    else:
        import torch

        files = {"onefold.json": ""}
        torch.export.load(path, extra_files=files)
        metadata = json.loads(files["onefold.json"])
    x = vectors(300, 4, 3) * 2
    assert Monitor.from_metadata(metadata, 0.01).update_scores(detector.score(x)) == Monitor(detector, 0.01).update(x)


def test_without_calibration_there_is_no_monitor() -> None:
    fitted = onefold.LastLayerGP(width=16, device="cpu").fit(vectors(60, 4))
    with pytest.raises(NotFittedError, match="no threshold"):
        Monitor(fitted)
    with pytest.raises(InputError, match=r"metadata: no calibration\. Calibrate the detector and export it again"):
        Monitor.from_metadata({"calibration": None})
    for content in (1, {}, {"samples": 10, "ranks": [11], "limits": [0.0], "threshold": 0.0, "fpr": 0.1}):
        with pytest.raises(InputError):
            Monitor.from_metadata({"calibration": content})
    with pytest.raises(InputError, match=r"this monitor has no detector\. Use update_scores"):
        Monitor.from_scores(np.arange(100.0)).update(vectors(5, 4))


def test_bad_arguments_are_refused() -> None:
    for alpha in (0, 1, -0.1, math.nan):
        with pytest.raises(InputError, match="alpha: must be a number in"):
            Monitor.from_scores(np.arange(100.0), alpha)
    with pytest.raises(InputError, match=r"scores: 18 are too few for a false-alarm rate of 0.05\. Pass at least 19"):
        Monitor.from_scores(np.arange(18.0))
    for scores in ([], [np.nan] * 50, [[1.0, 2.0]], ["a"] * 50):
        with pytest.raises(InputError, match="scores: "):
            Calibration.from_scores(scores)
    monitor = Monitor.from_scores(np.arange(100.0))
    for scores in (3.0, [[1.0]], ["a"], [None, {}]):
        with pytest.raises(InputError, match="scores: must be one number per input"):
            monitor.update_scores(scores)
    assert monitor.update_scores([]).inputs == 0


def test_a_monitor_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import onefold; monitor = onefold.Monitor.from_scores([float(i) for i in range(100)]);"
        "monitor.update_scores([5.0, 200.0]); monitor.save('s.json');"
        "assert monitor.load('s.json').evidence.inputs == 2"
    )
    assert not loaded(code, cwd=tmp_path) & {"torch", "sklearn", "pandas", "matplotlib"}
