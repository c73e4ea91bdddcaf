"""Alarms: the rate that was asked for, on average over calibration draws, whatever the scores look like."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_methods import LABELLED, MAKERS, fit, vectors

import onefold
from onefold.core import storage
from onefold.detectors import METHODS
from onefold.detectors.alarm import Alarm, GroupAlarms, benjamini_hochberg
from onefold.detectors.base import ExportMixin
from onefold.detectors.save import KIND
from onefold.errors import FileError, InputError, NotFittedError, OnefoldWarning
from onefold.nn.train import Recipe

SHAPES = {
    "continuous": lambda rng, n: rng.normal(size=n),
    "heavy tail": lambda rng, n: rng.standard_cauchy(size=n),
    "rounded": lambda rng, n: rng.normal(size=n).round(1),
    "three values": lambda rng, n: rng.choice([0.0, 1.0, 2.0], p=[0.9, 0.08, 0.02], size=n),
    "mostly zero": lambda rng, n: np.maximum(rng.normal(size=n), 0),
    "constant": lambda _, n: np.zeros(n),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("rate", "count"), [(0.001, 999), (0.001, 1500), (0.01, 150), (0.05, 73), (0.05, 400), (0.2, 9)]
)
def test_false_alarms_come_at_the_rate_asked_for(shape: str, rate: float, count: int) -> None:
    """Over calibration draws the mean rate is `rate` without ties, within its sampling error, and never more."""
    draws, fresh = 8000 if rate < 0.01 else 1500, 200
    rng = np.random.default_rng(0)
    rates = np.empty(draws)
    for i in range(draws):
        alarm = Alarm(SHAPES[shape](rng, count), rate, seed=i)
        rates[i] = (SHAPES[shape](rng, fresh) > alarm.threshold).mean()
    error = rates.std() / np.sqrt(draws)
    assert error < rate / 2  # or the lines below would say nothing
    assert rates.mean() < rate + 4 * error + 1e-12
    if shape in ("continuous", "heavy tail"):
        assert rates.mean() > rate - 4 * error - 1e-12


@pytest.mark.parametrize("shape", SHAPES)
def test_the_threshold_is_the_lowest_that_keeps_the_rate(shape: str) -> None:
    """Below it lies an atom of calibration scores that would exceed the rate, whatever u is."""
    rng = np.random.default_rng(3)
    for rate in (0.01, 0.05, 0.3):
        scores = SHAPES[shape](rng, 500)
        alarm = Alarm(scores, rate)
        above = int((scores > alarm.threshold).sum())
        assert above <= rate * 501
        atom = scores[scores <= alarm.threshold].max()
        assert above + (np.abs(scores - atom) <= 1e-4 * (abs(atom) + np.median(np.abs(scores)))).sum() + 1 > rate * 501


def test_equal_scores_raise_no_alarm_together() -> None:
    """The rate is kept by every calibration, not only on average over many."""
    for seed in range(200):
        alarm = Alarm(np.repeat([0.0, 1.0], [380, 20]), 0.05, seed=seed)
        assert alarm.threshold >= 1 or alarm.u <= 0.05
        assert not (np.zeros(5) > alarm.threshold).any()


def test_ties_that_lower_the_rate_are_named() -> None:
    with pytest.warns(OnefoldWarning, match=r"calibration: 390 of 400 scores are equal, .* about 2.50% instead of 0.1"):
        Alarm(np.append(np.zeros(390), np.arange(1.0, 11)), 0.1).warn_of_ties()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Alarm(np.random.default_rng(0).normal(size=400), 0.1).warn_of_ties()
        Alarm(np.random.default_rng(0).normal(size=19), 0.05).warn_of_ties()


@given(st.lists(st.integers(-5, 5), min_size=19, max_size=60), st.floats(0.05, 0.9))
def test_pvalue_threshold_and_decision_agree(values: list[int], rate: float) -> None:
    alarm = Alarm(np.array(values, float), rate)
    queries = np.concatenate([np.arange(-6, 6.5, 0.5), np.nextafter(np.arange(-5.0, 6), np.inf)])
    p = alarm.pvalues(queries)
    np.testing.assert_array_equal(p <= rate, queries > alarm.threshold)
    assert (np.diff(p[np.argsort(queries)]) <= 1e-15).all()  # stranger is never more likely
    assert ((p > 0) & (p <= 1)).all()
    assert (alarm.conservative_pvalues(queries) >= p).all()


def test_pvalues_by_hand() -> None:
    alarm = Alarm(np.array([1.0, 2.0, 2.0, 3.0]), 0.25)
    u = alarm.u
    np.testing.assert_allclose(alarm.pvalues(np.array([0.0, 2.0, 2.5, 9.0])), np.array([4 + u, 3 + u, 1 + u, u]) / 5)
    np.testing.assert_allclose(alarm.conservative_pvalues(np.array([0.0, 2.0, 9.0])), [1, 4 / 5, 1 / 5])


def test_calibration_is_repeatable_and_does_not_depend_on_order() -> None:
    scores = np.random.default_rng(0).normal(size=100)
    assert Alarm(scores, 0.05).u == Alarm(scores[::-1], 0.05).u
    assert len({Alarm(scores + i, 0.05).u for i in range(20)}) == 20


@pytest.mark.parametrize(("rate", "needed"), [(0.05, 19), (0.001, 999), (0.2, 4), (0.3, 3)])
def test_too_few_samples_are_refused_with_the_number_needed(rate: float, needed: int) -> None:
    with pytest.raises(InputError, match=f"{needed - 1} calibration samples are too few .*: {needed} are needed"):
        Alarm(np.zeros(needed - 1), rate)
    Alarm(np.zeros(needed), rate)
    with pytest.raises(InputError, match="fpr: must"):
        Alarm(np.zeros(9), 1.5)


def test_benjamini_hochberg_by_hand_and_against_its_definition() -> None:
    p = np.array([0.01, 0.04, 0.03, 0.5, 0.02])
    np.testing.assert_array_equal(benjamini_hochberg(p, 0.05), [True, True, True, False, True])
    np.testing.assert_array_equal(benjamini_hochberg(p, 0.04), [False] * 5)
    np.testing.assert_array_equal(benjamini_hochberg(np.array([0.2, 0.9]), 0.05), [False, False])
    with pytest.raises(InputError, match="fdr: must"):
        benjamini_hochberg(p, 0.0)


def test_false_discoveries_stay_within_the_rate() -> None:
    """Half of the batch is strange: of those flagged, at most a share fdr is familiar, on average."""
    rng, fdr, shares, found = np.random.default_rng(1), 0.2, [], []
    for _ in range(400):
        alarm = Alarm(rng.normal(size=500), 0.05)
        scores = np.concatenate([rng.normal(size=50), rng.normal(3, 1, size=50)])
        flagged = benjamini_hochberg(alarm.conservative_pvalues(scores), fdr)
        shares.append(flagged[:50].sum() / max(1, flagged.sum()))
        found.append(flagged[50:].mean())
    assert 0.05 < np.mean(shares) <= fdr / 2 + 3 * np.std(shares) / np.sqrt(400)  # BH keeps fdr × the familiar share
    assert np.mean(found) > 0.8


# --- as verbs of every detector ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_the_verbs(name: str) -> None:
    detector, x = fit(name, vectors(300)), vectors(400, seed=5)
    with pytest.raises(NotFittedError, match=f"this {name} has no threshold: call calibrate"):
        detector.is_ood(x)
    with pytest.raises(NotFittedError, match="not fitted yet"):
        MAKERS[name]().calibrate(x)
    assert detector.calibrate(x[:199], fpr=0.1) is detector
    scores = detector.score(x)
    np.testing.assert_array_equal(detector.is_ood(x), scores > detector.threshold)
    np.testing.assert_array_equal(detector.pvalue(x) <= 0.1, detector.is_ood(x))
    assert 0.01 < detector.is_ood(x[199:]).mean() < 0.25
    np.testing.assert_array_equal(
        detector.is_ood(x, fdr=0.3), benjamini_hochberg(detector.alarm.conservative_pvalues(scores), 0.3)
    )
    with pytest.raises(InputError, match=r"18 calibration samples are too few .* 19 are needed"):
        detector.calibrate(x[:18])
    assert detector.alarm.fpr == 0.1  # what was there is still there
    labels = (np.arange(300) % 3,) if name in LABELLED else ()
    detector.fit(vectors(300), *labels)
    with pytest.raises(NotFittedError, match="again after fit or update"):
        detector.is_ood(x)


@pytest.mark.parametrize("name", ["CSD", "LastLayerGP", "RND"])
def test_calibrating_on_other_data_warns(name: str) -> None:
    recipe = Recipe(steps=300, batch=32, lr=3e-3)
    detector = {"CSD": onefold.CSD(recipe=recipe), "LastLayerGP": onefold.LastLayerGP(),
                "RND": onefold.RND(recipe=recipe)}[name].fit(vectors(500))  # fmt: skip
    with pytest.warns(
        OnefoldWarning, match=r"likeness: held-out samples look stranger than .* seem to come from elsewhere"
    ):
        detector.calibrate(3 + 2 * vectors(200, seed=1))
    assert "likeness" not in [w.name for w in detector.diagnose(vectors(300, seed=2), show=False) if w.ok is False]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.floats(0.05, 0.5))
def test_benjamini_hochberg_steps_up(numbers: list[int], fdr: float) -> None:
    """All up to the largest p-value that lies below its line, whatever those before it do."""
    p = np.array(numbers) / 40
    k = max((k for k in range(1, len(p) + 1) if np.sort(p)[k - 1] <= fdr * k / len(p)), default=0)
    np.testing.assert_array_equal(benjamini_hochberg(p, fdr), p <= (np.sort(p)[k - 1] if k else -1))


def repeated_rows(seed: int, new: int = 40, count: int = 300) -> np.ndarray:
    """Rows of which most are repeated, in random order; some are new."""
    known, rng = vectors(30, 5), np.random.default_rng(seed)
    return rng.permutation(np.concatenate([known[rng.integers(0, 30, count - new)], vectors(new, 5, seed)]))


def in_batches(function: Callable[[Any], Any], x: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([np.asarray(function(x[i : i + size])) for i in range(0, len(x), size)])


def assert_alarm_for_non_finite_input(run: Callable[[np.ndarray], Any]) -> None:
    """`run` is an exported model: samples to scores, p-values and alarms."""
    x = vectors(4, seed=1) / 10
    x[1, 2], x[3, 0] = np.nan, np.inf
    score, pvalue, alarm = (np.asarray(output) for output in run(x))
    assert not np.isfinite(score[1])
    assert alarm[1]
    assert pvalue[1] <= pvalue.min()
    assert alarm[3] or np.isfinite(score[3])  # an infinite input may have a finite score


@pytest.mark.parametrize("name", METHODS)
def test_alarms_do_not_depend_on_the_batch(name: str, tmp_path: Path) -> None:
    """Repeated rows tie with the threshold, where the last digit of a score decides. Exported models agree, too."""
    detector, x = fit(name, repeated_rows(1)), repeated_rows(3)
    thresholds, alarms = {}, {}
    for fpr in (0.05, 0.2):
        detector.calibrate(repeated_rows(2), fpr=fpr)
        thresholds[fpr], alarms[fpr] = detector.threshold, detector.is_ood(x)
        assert alarms[fpr].mean() < 1
        assert alarms[fpr].any() or fpr == 0.05  # ten copies of the highest score are more than 5 %
        for size in (1, 7):
            np.testing.assert_array_equal(in_batches(detector.is_ood, x, size), alarms[fpr])
            np.testing.assert_array_equal(in_batches(detector.pvalue, x, size) <= fpr, alarms[fpr])
    with pytest.raises(InputError):
        detector.is_ood(np.full((1, 5), np.nan, np.float32))
    if isinstance(detector, ExportMixin):
        import onnxruntime

        detector.export(tmp_path / "d.onnx")
        session: Any = onnxruntime.InferenceSession(str(tmp_path / "d.onnx"), providers=["CPUExecutionProvider"])
        for size in (1, 7, len(x)):
            scores, exported = (
                in_batches(lambda part, i=i: session.run(None, {"x": part})[i], x, size) for i in (0, 2)
            )
            np.testing.assert_array_equal(exported, alarms[0.2])
            np.testing.assert_array_equal(scores.astype(np.float64) > thresholds[0.05], alarms[0.05])
        assert_alarm_for_non_finite_input(lambda x: session.run(None, {"x": x}))


def test_no_alarm_for_data_that_only_repeats() -> None:
    """All distances are 0 then, up to rounding, and all inputs tie."""
    x = np.tile(vectors(20), (20, 1))
    with pytest.warns(OnefoldWarning, match="400 of 400 scores are equal"):
        detector = onefold.KNN(k=3).fit(x).calibrate(x, fpr=0.05)
    assert not any(detector.is_ood(row[None])[0] for row in x[:40])
    assert not detector.is_ood(x).any()


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.exports])
def test_programs_raise_the_alarm_for_non_finite_input(name: str, tmp_path: Path) -> None:
    fit(name, vectors()).calibrate(vectors(seed=1), fpr=0.1).export(tmp_path / "d.pt2")
    program = torch.export.load(str(tmp_path / "d.pt2")).module()
    assert_alarm_for_non_finite_input(lambda x: program(torch.from_numpy(x)))


# --- other rates, and groups ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide_and_narrow() -> Any:
    """A detector, and familiar data of two groups, of which one scores much higher."""
    rng = np.random.default_rng(0)
    detector = onefold.KNN(device="cpu").fit(rng.normal(size=(300, 3)).astype(np.float32))
    groups = np.where(np.arange(400) % 4 == 0, "wide", "narrow")
    x = (rng.normal(size=(400, 3)) * np.where(groups == "wide", 3, 1)[:, None]).astype(np.float32)
    return detector, x, groups


def test_another_rate_uses_the_stored_scores(wide_and_narrow: Any) -> None:
    detector, x, _ = wide_and_narrow
    strict = onefold.KNN(device="cpu").fit(vectors(300, 3)).calibrate(x, fpr=0.01)
    p, threshold = strict.pvalue(x), strict.threshold
    for rate in (0.005, 0.01, 0.05, 0.2, 0.9):
        np.testing.assert_array_equal(strict.is_ood(x, fpr=rate), p <= rate)
    assert strict.threshold == threshold
    with pytest.raises(InputError, match=r"400 calibration samples are too few .* of 0.001: 999 are needed"):
        strict.is_ood(x, fpr=0.001)
    with pytest.raises(InputError, match=r"fpr: excludes fdr\. Set one of them"):
        strict.is_ood(x, fpr=0.1, fdr=0.1)
    with pytest.raises(InputError, match="groups: the detector was calibrated without groups"):
        strict.pvalue(x, groups=["a"] * len(x))
    with pytest.raises(NotFittedError):
        detector.is_ood(x, fpr=0.1)


def test_each_group_has_the_pvalues_of_crepes() -> None:
    """With u = 1 these are the unsmoothed p-values of an independent implementation, ties included."""
    crepes = pytest.importorskip("crepes.base", reason="crepes is not installed")
    rng = np.random.default_rng(0)
    groups, new_groups = rng.integers(0, 3, 500), rng.integers(0, 3, 300)
    scores, new = rng.integers(0, 100, 500) + 30.0 * groups, rng.integers(-5, 200, 300).astype(np.float64)
    pvalues = GroupAlarms.calibrate(scores, groups, 0.1).apply(Alarm.conservative_pvalues, new, new_groups)
    np.testing.assert_allclose(pvalues, crepes.p_values_batch(scores, new, groups, new_groups, smoothing=False))


def test_a_group_is_calibrated_as_if_alone(wide_and_narrow: Any) -> None:
    detector, x, groups = wide_and_narrow
    new, new_groups = x[::-1] * np.float32(1.1), groups[::-1]
    detector.calibrate(x, fpr=0.1, groups=groups)
    tested = detector._alarm.apply(Alarm.conservative_pvalues, detector.score(new), new_groups)
    discovered = benjamini_hochberg(tested, 0.3)
    np.testing.assert_array_equal(discovered, detector.is_ood(new, groups=new_groups, fdr=0.3))
    for name in ("wide", "narrow"):
        alone = onefold.KNN(device="cpu").fit(np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32))
        alone.calibrate(x[groups == name], fpr=0.1)
        part = new_groups == name
        assert detector.group_alarms[name].threshold == alone.threshold
        np.testing.assert_array_equal(detector.pvalue(new, groups=new_groups)[part], alone.pvalue(new[part]))
        flagged = detector.is_ood(new, groups=new_groups, fpr=0.2)
        np.testing.assert_array_equal(flagged[part], alone.is_ood(new[part], fpr=0.2))


def test_the_rate_holds_in_each_group() -> None:
    """One threshold for both would flag 20 % of one group and none of the other."""
    rng = np.random.default_rng(0)
    rates = []
    for seed in range(300):
        groups = np.repeat([1, 2], [150, 450])
        alarms = GroupAlarms.calibrate(rng.normal(size=600) * groups**3, groups, 0.1, seed=seed)
        flagged = alarms.apply(Alarm.exceeds, rng.normal(size=600) * groups**3, groups)
        rates.append([flagged[:150].mean(), flagged[150:].mean()])
    mean, error = np.mean(rates, axis=0), np.std(rates, axis=0) / np.sqrt(300)
    assert (np.abs(mean - 0.1) < 4 * error).all()
    assert (error < 0.003).all()


def test_groups_are_saved(wide_and_narrow: Any, tmp_path: Path) -> None:
    detector, x, groups = wide_and_narrow
    detector.calibrate(x, fpr=0.1, groups=groups)
    detector.save(tmp_path / "m.onefold")
    loaded = onefold.load(tmp_path / "m.onefold", device="cpu")
    np.testing.assert_array_equal(loaded.pvalue(x, groups=list(groups)), detector.pvalue(x, groups=groups))
    assert loaded.alarm is None
    for call in (lambda: loaded.threshold, lambda: loaded.pvalue(x), lambda: loaded.is_ood(x)):
        with pytest.raises(InputError, match=r"threshold for each group|calibrated in groups"):
            call()
    assert isinstance(loaded, ExportMixin)
    loaded.export(tmp_path / "m.pt2")
    program = torch.export.load(tmp_path / "m.pt2").module()
    assert len(program(torch.from_numpy(x))) == 1  # no alarm: there is no single threshold


def test_damaged_groups_are_refused(wide_and_narrow: Any, tmp_path: Path) -> None:
    detector, x, groups = wide_and_narrow
    detector.calibrate(x, fpr=0.1, groups=groups)
    detector.save(tmp_path / "m.onefold")
    tensors, header = storage.load(tmp_path / "m.onefold", KIND)
    for sizes in (
        {},
        {"a": 10**12},
        {"a": 399},
        {"a": 401},
        {"a": 500, "b": -100},
        {"a": 200, "b": 200.0},
        {"a": None},
    ):
        storage.save(tmp_path / "bad.onefold", KIND, tensors, {**header, "alarm": {"fpr": 0.1, "groups": sizes}})
        with pytest.raises(FileError, match="damaged"):
            onefold.load(tmp_path / "bad.onefold")


def test_groups_that_cannot_be_used_are_refused(wide_and_narrow: Any) -> None:
    detector, x, groups = wide_and_narrow
    with pytest.raises(
        InputError,
        match=r"groups: too few calibration samples .* in each group \('wide' has 100\)\. Each group needs 199:",
    ):
        detector.calibrate(x, fpr=0.005, groups=groups)
    with pytest.raises(InputError, match=r"groups: shape \(3,\) does not match 400 inputs"):
        detector.calibrate(x, groups=["a", "b", "c"])
    with pytest.raises(InputError, match="groups: must be text or integers"):
        detector.calibrate(x, groups=np.full(400, 0.5))
    detector.calibrate(x, fpr=0.1, groups=groups)
    with pytest.raises(InputError, match="groups: 'other' was not in the calibration"):
        detector.is_ood(x, groups=["other", *groups[1:]])
    with pytest.raises(InputError, match="groups: missing"):
        detector.is_ood(x)
    with pytest.raises(InputError, match="is calibrated in groups"):
        onefold.Monitor(detector)


def test_ties_in_a_group_are_named() -> None:
    scores = np.concatenate([np.append(np.zeros(390), np.arange(1.0, 11)), np.random.default_rng(0).normal(size=400)])
    with pytest.warns(OnefoldWarning, match="calibration of group '7': 390 of 400 scores are equal"):
        GroupAlarms.calibrate(scores, np.repeat([7, 8], 400), 0.1).warn_of_ties()
