"""Ranking metrics against brute force; the embedded sets are what they say."""

import itertools
import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from onefold import metrics
from onefold.data import digits, glyphs, letters, perturb
from onefold.data.glyphs import FACES, LETTERS
from onefold.errors import InputError

scores = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=30)


@given(familiar=scores, strange=scores)
def test_auroc_counts_pairs(familiar: list[float], strange: list[float]) -> None:
    wins = np.mean([[1.0 if s > f else 0.5 if s == f else 0.0 for s in strange] for f in familiar])
    assert math.isclose(metrics.auroc(familiar, strange), wins, abs_tol=1e-9)
    shifted = metrics.auroc(np.array(familiar) + 100, np.array(strange) + 100)
    assert math.isclose(shifted, wins, abs_tol=1e-9), "scores far from [0, 1] must not saturate"


@given(familiar=scores, strange=scores)
def test_balanced_precision_does_not_depend_on_the_sizes(familiar: list[float], strange: list[float]) -> None:
    for aupr in (metrics.aupr_in, metrics.aupr_out):
        once, thrice = aupr(familiar, strange), aupr(familiar * 3, strange)
        assert math.isclose(once, thrice, abs_tol=1e-9)
    assert math.isclose(
        metrics.aupr_in(familiar, strange), metrics.aupr_out(-np.array(strange), -np.array(familiar)), abs_tol=1e-9
    )


def test_precision_by_hand() -> None:
    """Strange 3, 1; familiar 2, 0: precision is 1 at recall ½ and ⅔ at recall 1."""
    assert math.isclose(metrics.aupr_out([2, 0], [3, 1]), 0.5 * 1 + 0.5 * 2 / 3)
    assert math.isclose(metrics.aupr_out([2, 0, 0, 0], [3, 1], balanced=False), 0.5 * 1 + 0.5 * 2 / 3)


def test_fpr95_by_hand() -> None:
    familiar = np.arange(100.0)  # 95 of 100 are at most 94
    assert metrics.fpr95(familiar, [94.0, 94.5, 10.0, 1000.0]) == 0.5
    assert metrics.fpr95([0.0], [1.0, 2.0]) == 0
    assert metrics.fpr95([0.0, 0.0], [0.0]) == 1


@given(pairs=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=6))
def test_risk_is_the_mean_over_all_orders_of_ties(pairs: list[tuple[int, int]]) -> None:
    """By brute force: every order of the samples that sorts the scores, and the mean loss of each prefix."""
    orders = [order for order in itertools.permutations(pairs) if [s for s, _ in order] == sorted(s for s, _ in pairs)]
    prefixes = [[np.mean([loss for _, loss in order[:k]]) for k in range(1, len(pairs) + 1)] for order in orders]
    curve = metrics.risk_coverage([s for s, _ in pairs], [loss for _, loss in pairs])
    np.testing.assert_allclose(curve.risk, np.mean(prefixes, axis=0), atol=1e-12)
    np.testing.assert_allclose(curve.coverage, np.arange(1, len(pairs) + 1) / len(pairs))
    assert math.isclose(curve.area, np.mean(prefixes), abs_tol=1e-12)


def test_risk_coverage_in_closed_form() -> None:
    """Perfect scores, the worst, and constant ones: 3 errors among 10 predictions."""
    wrong = np.repeat([False, True], [7, 3])
    best = metrics.risk_coverage(np.arange(10), wrong)
    np.testing.assert_allclose(best.risk, [0] * 7 + [1 / 8, 2 / 9, 3 / 10])
    assert math.isclose(best.area, (1 / 8 + 2 / 9 + 3 / 10) / 10)
    worst = metrics.risk_coverage(-np.arange(10), wrong)
    np.testing.assert_allclose(worst.risk, [1, 1, 1, *(3 / k for k in range(4, 11))])
    np.testing.assert_allclose(metrics.risk_coverage(np.zeros(10), wrong).risk, 0.3)
    large = metrics.risk_coverage(np.arange(10**5), np.arange(10**5) >= 6 * 10**4)
    r = 0.4  # the optimal area is r + (1 − r) ln(1 − r) for many samples (Geifman, Uziel & El-Yaniv, 2019)
    assert math.isclose(large.area, r + (1 - r) * math.log(1 - r), abs_tol=1e-4)


def test_risk_coverage_refuses_what_it_cannot_rank() -> None:
    for scores_, losses, words in (
        ([], [], "empty"), ([1.0], [1, 0], "losses: 2 values do not match the 1 scores"), ([np.nan], [1], "NaN"),
        ([1.0], [np.inf], "NaN or infinity"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            metrics.risk_coverage(scores_, losses)


@given(a=st.lists(st.integers(0, 6), min_size=3, max_size=20), seed=st.integers(0, 9))
def test_rank_correlation_is_spearmans(a: list[int], seed: int) -> None:
    b = np.random.default_rng(seed).permutation(len(a))
    if len(set(a)) == 1:
        assert math.isnan(metrics.rank_correlation(a, b))
    else:
        theirs: Any = spearmanr(a, b)
        assert math.isclose(metrics.rank_correlation(a, b), theirs.statistic, abs_tol=1e-9)


def test_scores_that_cannot_be_ranked_are_refused() -> None:
    with pytest.raises(InputError, match="at least one"):
        metrics.auroc([], [1.0])
    with pytest.raises(InputError, match="NaN"):
        metrics.auroc([0.0], [math.nan])
    assert metrics.accuracy([1, 2, 3, 4], [1, 2, 3, 5]) == 0.75


def test_digits_are_split_without_overlap() -> None:
    data = digits()
    assert data.x_train.shape == (1297, 8, 8)
    assert data.x_test.shape == (500, 8, 8)
    assert data.x_train.dtype == np.float32
    assert (data.x_train.min(), data.x_train.max()) == (0, 1)
    assert set(data.y_train) == set(range(10))
    train = {x.tobytes() for x in data.x_train}
    assert not any(x.tobytes() in train for x in data.x_test)
    assert not np.array_equal(digits(1).x_test, data.x_test)


def test_letters_are_made_like_the_digits() -> None:
    found = letters(300, seed=1)
    assert found.shape == (300, 8, 8)
    assert found.dtype == np.float32
    assert np.isin(found * 16, np.arange(17)).all(), "ink counted in blocks of 4 × 4, as in the digits"
    ink, known = found.mean((1, 2)), digits().x_train.mean((1, 2))
    assert known.min() * 0.5 < ink.mean() < known.max(), "neither blank nor a black square"
    assert ink.min() > 0
    np.testing.assert_array_equal(found, letters(300, seed=1))
    assert len({x.tobytes() for x in found}) > 290
    assert letters(3, size=16).shape == (3, 16, 16)
    assert (len(FACES), len(set(FACES))) == (22, 21)
    assert len(LETTERS) == 20


def test_letters_need_no_font_that_the_oldest_matplotlib_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib 3.9, the lower bound, has the fonts of 3.11 but for two."""
    fonts = tmp_path / "fonts" / "ttf"
    fonts.mkdir(parents=True)
    for font in (Path(matplotlib.get_data_path()) / "fonts" / "ttf").glob("*.ttf"):
        if font.stem not in ("cmti10", "LastResortHE-Regular"):
            (fonts / font.name).symlink_to(font)
    expected = letters(300)
    monkeypatch.setattr(matplotlib, "get_data_path", lambda: str(tmp_path))
    glyphs._font.cache_clear()
    try:
        np.testing.assert_array_equal(letters(300), expected)
    finally:
        glyphs._font.cache_clear()


def test_perturbation_is_brightness_contrast_and_a_box() -> None:
    x = np.random.default_rng(0).random((400, 28, 28)).astype(np.float32)
    y = perturb(x, seed=5)
    assert y.min() < -0.5
    assert y.max() > 1.5
    sides = []
    for before, after in zip(x, y, strict=True):
        rows, columns = np.nonzero(after == 0)
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert len(rows) == height * width, "one filled box"
        sides += [height, width]
        kept = after != 0
        slope, offset = np.polyfit(before[kept], after[kept], 1)
        np.testing.assert_allclose(after[kept], slope * before[kept] + offset, atol=1e-4)
        assert 0 <= slope <= 2
    assert (min(sides), max(sides)) == (7, 14)
    clipped = perturb(x, seed=5, clip=True)
    np.testing.assert_array_equal(clipped, np.clip(y, 0, 1))


def test_colour_images_are_perturbed_in_all_channels_alike() -> None:
    grey = np.random.default_rng(0).random((20, 12, 16), np.float32)
    colour = perturb(np.stack([grey] * 3, 1), seed=4)
    assert colour.shape == (20, 3, 12, 16)
    for channel in range(3):
        np.testing.assert_allclose(colour[:, channel], perturb(grey, seed=4), atol=1e-5)
