"""The scikit-learn estimator: scikit-learn's own checks, and that it says exactly what the wrapped detector says."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from onefold import CSD, KNN, RND, LastLayerGP, LocalGP
from onefold.distil import Architecture
from onefold.errors import InputError, OnefoldWarning
from onefold.integrations.sklearn import SUPPORTED
from onefold.nn.train import Recipe
from onefold.sklearn import OnefoldDetector

SMALL: dict[str, dict[str, Any]] = {
    "KNN": {},
    "LocalGP": {},
    "LastLayerGP": {"width": 64},
    "CSD": {"width": 16, "steps": 10, "batch": 16},
    "RND": {"width": 16, "steps": 10, "batch": 16},
}
UNTRAINED = pytest.mark.filterwarnings("ignore::onefold.errors.OnefoldWarning")  # 10 steps are few, and CSD says so
every_method = pytest.mark.parametrize("method", SMALL)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """So many small fits: threads would spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(method: str, **changes: Any) -> OnefoldDetector:
    return OnefoldDetector(method, **({"random_state": 0, "device": "cpu"} | SMALL[method] | changes))


def rows(count: int, columns: int = 4, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng([seed, 99]).normal(size=(count, columns))


def outlier_share(detector: OnefoldDetector, x: NDArray[np.float64]) -> float:
    return float((detector.predict(x) == -1).mean())


@UNTRAINED
@every_method
def test_scikit_learns_own_checks_pass(method: str) -> None:
    results = check_estimator(OnefoldDetector(method, device="cpu", **SMALL[method]), on_skip=None, on_fail="raise")
    assert len(results) > 40
    # LocalOutlierFactor skips it too: it needs a variable of the environment that is read when SciPy is imported.
    assert {r["check_name"] for r in results if r["status"] != "passed"} <= {"check_array_api_input"}


@UNTRAINED
@every_method
def test_scores_are_those_of_the_wrapped_detector(method: str) -> None:
    recipe = {"steps": 10, "batch": 16, "lr": 3e-3}
    wrapped = {
        "KNN": KNN(seed=7),
        "LocalGP": LocalGP(seed=7),
        "LastLayerGP": LastLayerGP(width=64, seed=7),
        "CSD": CSD(
            recipe=Recipe(**recipe, warmup=1), architecture=Architecture(hidden=(16, 16), outputs=16), seed=7,
        ),
        "RND": RND(recipe=Recipe(**recipe), hidden=(16, 16), target_hidden=(16,), width=16, seed=7),
    }[method]  # fmt: skip
    x, new = rows(200), rows(64, seed=1)
    detector = small(method, contamination=0.1, random_state=7).fit(x)
    assert np.array_equal(detector.score_samples(new), -wrapped.fit(x).score(new))
    assert np.array_equal(detector.decision_function(new), detector.score_samples(new) - detector.offset_)
    assert np.array_equal(detector.predict(new), np.where(detector.decision_function(new) < 0, -1, 1))


@UNTRAINED
@pytest.mark.parametrize("method", SUPPORTED)
def test_the_wrapped_detector_is_of_the_named_method(method: str) -> None:
    assert method in SMALL
    assert type(small(method).fit(rows(60)).detector_).__name__ == method


def test_settings_reach_the_wrapped_detector() -> None:
    x = rows(60)
    local: Any = small("LocalGP", n_neighbors=7).fit(x).detector_
    assert local.k == 7
    knn = small("KNN", n_neighbors=3).fit(x).detector_
    assert isinstance(knn, KNN)
    assert knn.k == 3
    gp = small("LastLayerGP", width=np.int64(32), score_kind="relative").fit(x)
    assert isinstance(gp.detector_, LastLayerGP)
    assert np.array_equal(-gp.score_samples(x[:16]), gp.detector_.relative(x[:16]))
    assert gp.detector_.width == 32
    rnd = small("RND", steps=np.int64(30), batch=8, learning_rate=1e-4).fit(x).detector_
    assert isinstance(rnd, RND)
    assert rnd.recipe == Recipe(steps=30, batch=8, lr=1e-4)


def test_without_settings_methods_keep_their_own() -> None:
    from onefold.integrations.sklearn import _make_detector

    csd, rnd, gp = (_make_detector(method, {}, 100, 0, "cpu") for method in ("CSD", "RND", "LastLayerGP"))
    assert isinstance(csd, CSD)
    assert isinstance(rnd, RND)
    assert isinstance(gp, LastLayerGP)
    assert (csd.recipe, csd.architecture, csd.score_kind) == (CSD().recipe, CSD().architecture, CSD().score_kind)
    assert (rnd.recipe, rnd.hidden, rnd.width) == (RND().recipe, RND().hidden, RND().width)
    assert (gp.width, gp.score_kind) == (LastLayerGP().width, LastLayerGP().score_kind)


@UNTRAINED
@every_method
def test_a_row_scores_the_same_alone_and_among_others(method: str) -> None:
    detector = small(method, contamination=0.1).fit(rows(200))
    new = rows(50, seed=1)
    alone = np.concatenate([detector.score_samples(row[None]) for row in new])
    assert np.allclose(alone, detector.score_samples(new), rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", ["KNN", "LastLayerGP"])
def test_outliers_are_found(method: str) -> None:
    detector = small(method).fit(rows(500))
    assert (detector.predict(rows(20, seed=1) + 8) == -1).all()


@UNTRAINED
@every_method
def test_a_float_is_the_share_of_outliers_in_the_train_rows(method: str) -> None:
    x = rows(200)
    assert (small(method, contamination=0.1).fit_predict(x) == -1).sum() == 20
    assert (small(method, contamination=0.5).fit_predict(x) == -1).sum() == 100


def test_a_float_holds_for_new_rows_of_a_knn() -> None:
    shares = [
        outlier_share(small("KNN", contamination=0.1).fit(rows(1000, 3, s)), rows(2000, 3, 50 + s)) for s in range(3)
    ]
    assert np.mean(shares) == pytest.approx(0.1, abs=0.025)


@pytest.mark.parametrize("method", ["KNN", "LastLayerGP"])
def test_auto_raises_five_per_cent_of_false_alarms_on_new_rows(method: str) -> None:
    """Also where a threshold from the fitted rows would call most of the new ones outliers."""
    shares = [outlier_share(small(method).fit(rows(200, 20, s)), rows(500, 20, 50 + s)) for s in range(20)]
    assert np.mean(shares) == pytest.approx(0.05, abs=0.02)
    if method == "LastLayerGP":
        overfitted = small(method, contamination=0.05, width=512).fit(rows(200, 20))
        assert outlier_share(overfitted, rows(1000, 20, 50)) > 0.5


def test_auto_is_the_alarm_of_the_wrapped_detector() -> None:
    detector, new = small("KNN").fit(rows(300)), rows(400, seed=1)
    alarm = detector.detector_.alarm
    assert alarm is not None
    assert (len(alarm.scores), alarm.fpr) == (60, 0.05)
    assert np.array_equal(detector.predict(new) == -1, detector.detector_.is_ood(new))


def test_auto_holds_out_rows_that_are_not_fitted() -> None:
    x = rows(100)
    detector = small("KNN", n_neighbors=1).fit(x)
    assert (detector.score_samples(x) < -1e-6).sum() == 20  # to its own copy in the bank, a fitted row has distance 0


def test_auto_with_few_rows_takes_the_strangest_held_out_one() -> None:
    """Half of 20 rows are held out: one in eleven new rows is stranger than all of them."""
    shares = [outlier_share(small("KNN").fit(rows(20, 3, s)), rows(500, 3, 50 + s)) for s in range(25)]
    assert np.mean(shares) == pytest.approx(1 / 11, abs=0.035)


@UNTRAINED
@every_method
@pytest.mark.parametrize("contamination", ["auto", 0.2])
def test_three_rows_of_one_feature_are_enough(method: str, contamination: Any) -> None:
    x = np.array([[0.0], [1.0], [5.0]], dtype=np.float32)
    detector = small(method, contamination=contamination).fit(x)
    assert np.isfinite(detector.decision_function(x)).all()
    with pytest.raises(ValueError, match="minimum of 3 is required"):
        small(method).fit(x[:2])


@UNTRAINED
@every_method
def test_same_seed_same_result(method: str) -> None:
    x = rows(120)
    first, again, other = (small(method, random_state=s).fit(x) for s in (3, 3, 4))
    assert first.offset_ == again.offset_
    assert np.array_equal(first.score_samples(x), again.score_samples(x))
    assert not np.array_equal(first.score_samples(x), other.score_samples(x))
    drawn = [small(method, random_state=np.random.RandomState(5)).fit(x).score_samples(x) for _ in range(2)]
    assert np.array_equal(drawn[0], drawn[1])


def test_no_seed_draws_one() -> None:
    x, detector = rows(60), small("KNN", random_state=None)
    assert not np.array_equal(detector.fit(x).score_samples(x), detector.fit(x).score_samples(x))


def test_clones_are_unfitted_with_the_same_settings() -> None:
    detector = small("LastLayerGP", contamination=0.2).fit(rows(50))
    twin = clone(detector)
    assert isinstance(twin, OnefoldDetector)
    assert twin.get_params() == detector.get_params()
    with pytest.raises(NotFittedError):
        twin.predict(rows(5))


@UNTRAINED
@every_method
def test_fitted_detectors_survive_copies(method: str) -> None:
    x, new = rows(120), rows(30, seed=1)
    detector = small(method).fit(x)
    for twin in (pickle.loads(pickle.dumps(detector)), copy.deepcopy(detector)):
        assert np.array_equal(twin.decision_function(new), detector.decision_function(new))
        twin.detector_.update(rows(50, seed=2))
        assert not np.array_equal(twin.score_samples(new), detector.score_samples(new))


def test_in_a_pipeline() -> None:
    x, new = rows(300) * [1, 10, 100, 1000] + 5, rows(100, seed=1) * [1, 10, 100, 1000] + 5
    pipeline = make_pipeline(StandardScaler(), small("KNN")).fit(x)
    scaler = StandardScaler().fit(x)
    by_hand = small("KNN").fit(scaler.transform(x))
    assert np.array_equal(pipeline.predict(new), by_hand.predict(scaler.transform(new)))
    assert np.array_equal(pipeline.score_samples(new), by_hand.score_samples(scaler.transform(new)))
    assert (pipeline.predict(new * 3) == -1).any()


def test_in_a_grid_search() -> None:
    """A tight cluster of outliers hides from the nearest neighbour, and not from the twentieth."""
    outliers = 0.05 * rows(15, 2, seed=1) + 6
    x, y = np.concatenate([rows(285, 2), outliers]), np.repeat([1, -1], [285, 15])
    grid = [{"method": ["KNN"], "n_neighbors": [1, 30]}, {"method": ["LastLayerGP"], "width": [16]}]
    folds = StratifiedKFold(3, shuffle=True, random_state=0)
    search = GridSearchCV(small("KNN", contamination=0.05), grid, scoring="roc_auc", cv=folds)
    search.fit(x, y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.best_params_ == {"method": "KNN", "n_neighbors": 30}
    assert search.best_score_ > 0.95
    assert (search.predict(outliers) == -1).all()


def test_data_frames_have_their_columns_checked() -> None:
    frame = pd.DataFrame(rows(80), columns=pd.Index(["a", "b", "c", "d"]))
    detector = small("KNN").fit(frame)
    assert detector.feature_names_in_.tolist() == ["a", "b", "c", "d"]
    assert detector.n_features_in_ == 4
    assert np.array_equal(detector.score_samples(frame), small("KNN").fit(frame.to_numpy()).score_samples(rows(80)))
    with pytest.raises(ValueError, match="same order"):
        detector.predict(frame[["b", "a", "c", "d"]])
    with pytest.warns(UserWarning, match="feature names"):
        detector.predict(frame.to_numpy())


def test_numbers_of_any_type_are_numbers() -> None:
    """uint8 rows are no pixels here, and float64 ones are the same as their float32."""
    x = np.random.default_rng(0).integers(0, 200, size=(60, 5))
    expected = small("KNN").fit(x.astype(np.float64)).score_samples(x.astype(np.float64))
    for dtype in (np.uint8, np.int32, np.float32):
        assert np.array_equal(small("KNN").fit(x.astype(dtype)).score_samples(x.astype(dtype)), expected)
    assert np.array_equal(small("KNN").fit(x).score_samples(x.astype(np.uint8)), expected)


def test_doubts_about_a_fit_reach_the_user() -> None:
    with pytest.warns(OnefoldWarning, match="has not converged"):
        small("CSD", steps=1).fit(rows(200))


def test_held_out_rows_raise_no_doubts() -> None:
    """All rows are stranger than those in the bank, whose nearest neighbour is themselves: no sign of other data."""
    x, new = rows(100), rows(100, seed=1)
    with pytest.warns(OnefoldWarning, match="seem to come from elsewhere"):
        KNN(k=1).fit(x).calibrate(new)
    small("KNN", n_neighbors=1).fit(x)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "Forest"}, "method: must be one of CSD, LastLayerGP, LocalGP, RND, KNN, not 'Forest'"),
        ({"method": ["KNN"]}, "method: must be one of"),
        ({"contamination": 0.0}, "contamination: must be 'auto' or a number above 0 and up to 0.5, not 0.0"),
        ({"contamination": 0.6}, "contamination: must be"),
        ({"contamination": True}, "contamination: must be"),
        ({"contamination": "some"}, "contamination: must be"),
        ({"n_neighbors": 0}, "n_neighbors: must be an integer of at least 1, not 0"),
        ({"n_neighbors": 2.5}, "n_neighbors: must be an integer"),
        ({"n_neighbors": 41}, "n_neighbors: 41 is more than the 40 rows of the fit"),
        ({"steps": 10}, "steps: KNN does not use it. Leave it at None; it is for CSD and RND"),
        (
            {"method": "LastLayerGP", "n_neighbors": 5},
            "n_neighbors: LastLayerGP does not use it. Leave it at None; it is for LocalGP and KNN",
        ),
        (
            {"method": "LastLayerGP", "score_kind": "odd"},
            "score_kind: must be one of combined, variance, relative, not 'odd'",
        ),
        ({"method": "RND", "learning_rate": -1}, "learning_rate: must be a positive number, not -1"),
        ({"method": "RND", "batch": 1}, "batch: must be an integer from 2"),
        ({"random_state": -1}, "seed: must be an integer"),
        ({"device": "abacus"}, "device: 'abacus' is unknown"),
    ],
)
def test_wrong_settings_are_refused_by_fit(settings: dict[str, Any], message: str) -> None:
    detector = OnefoldDetector(**settings)
    with pytest.raises(InputError, match=message):
        detector.fit(rows(59))
