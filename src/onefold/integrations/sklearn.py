"""onefold as a scikit-learn outlier detector for tables of numbers: pipelines, grid searches, clones."""

import warnings
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, OutlierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from onefold.core.arguments import check_choice, check_integer, check_number
from onefold.core.batches import check_seed
from onefold.detectors import CSD, KNN, METHODS, RND, LastLayerGP, LocalGP, MethodInfo
from onefold.detectors.alarm import min_calibration_samples
from onefold.detectors.variance_scorer import SCORES
from onefold.distil import Architecture
from onefold.errors import InputError, OnefoldWarning
from onefold.nn.train import Recipe
from onefold.types import ArrayLike, Scores

Wrapped: TypeAlias = KNN | LocalGP | LastLayerGP | CSD | RND

Parameter: TypeAlias = Any
"""A constructor parameter of any type: scikit-learn checks parameters in `fit`."""

SUPPORTED = {name: METHODS[name] for name in ("CSD", "LastLayerGP", "LocalGP", "RND", "KNN")}
SETTINGS = ("n_neighbors", "width", "score_kind", "steps", "batch", "learning_rate")
FALSE_ALARM_RATE = 0.05  # for contamination="auto"
ENOUGH = min_calibration_samples(FALSE_ALARM_RATE)  # held-out rows that a threshold for that rate needs
MAX_HELD_OUT = 1000
MIN_ROWS = 3  # two to fit and one to hold out
BLOCK = 16  # rows; for fewer than four the CPU multiplies matrices by routines that round differently
DTYPES = (np.float64, np.float32)


class OnefoldDetector(OutlierMixin, BaseEstimator):
    """Outlier detector with the interface of scikit-learn: fit on familiar rows, predict +1 (familiar) or −1 (outlier).

    Columns are standardised inside, in float32. If the spread of a column is tiny beside its values, as for a time
    stamp, put a StandardScaler in front. Missing values and text columns are not supported here; the detectors of
    onefold accept them in data frames. Warnings about a fit are of class `onefold.errors.OnefoldWarning`.

    Args:
        method: Detector of onefold that does the work: "KNN", "LocalGP", "LastLayerGP", "CSD" or "RND". "KNN", the
            default, uses the distance to the nearest training rows in the features of a random network. It fits in a
            second or two without training, and its scores of new rows are comparable to those of training rows even in
            small tables.
            "LastLayerGP" ranks better if columns are strongly correlated; its cost per row does not grow with the
            table. "CSD" and "RND" train networks, take longer, and often rank worse on tables of some hundred rows.
        contamination: "auto", or the share of outliers in the training rows, in (0, 0.5]. It sets `offset_`, the
            threshold of `predict`. With "auto", the training rows are familiar. A fifth of them (at least 19 if that is
            no more than half, at most 1,000) is held out of the fit, and the threshold flags a new familiar row with
            probability 5 % (split-conformal). With fewer than 38 rows, half are held out and their largest score is the
            threshold; the probability is then 1 in (held-out rows + 1). With a number, as in IsolationForest, all rows
            are fitted and that share of them is flagged. Small tables need "KNN" then; other methods score most new
            rows above the training rows, so use them with `fit_predict` only.
        n_neighbors: For KNN: the distance to this nearest row is the score; None: 5. For LocalGP: number of nearest
            rows in the Gaussian process; None: 50.
        width: For LastLayerGP: number of features; None: 2,048. For CSD and RND: units per layer; None: 256.
        score_kind: For LastLayerGP and CSD: "combined", "variance" or "relative"; see `onefold.CSD`. None: "combined".
        steps: For CSD and RND: number of gradient steps. None: 2,000.
        batch: For CSD and RND: rows per gradient step. None: 64 for CSD, 256 for RND.
        learning_rate: For CSD and RND: learning rate of Adam after the warm-up. None: 0.003.
        random_state: Seed, RandomState or None. An integer is the seed of the wrapped detector.
        device: "auto" for the first GPU if there is one, else the CPU; or "cpu", "cuda", "cuda:1".

    Attributes:
        detector_: Fitted detector of onefold, with its diagnosis and `save`, and with p-values after "auto".
        offset_: Threshold; rows whose `score_samples` is below it are outliers.
        n_features_in_: Number of columns in the fit.
        feature_names_in_: Names of the columns, if all are strings.
    """

    detector_: Wrapped
    offset_: float
    n_features_in_: int
    feature_names_in_: NDArray[Any]

    def __init__(
        self,
        method: Parameter = "KNN",
        *,
        contamination: Parameter = "auto",
        n_neighbors: Parameter = None,
        width: Parameter = None,
        score_kind: Parameter = None,
        steps: Parameter = None,
        batch: Parameter = None,
        learning_rate: Parameter = None,
        random_state: Parameter = None,
        device: Parameter = "auto",
    ) -> None:
        self.method = method
        self.contamination = contamination
        self.n_neighbors = n_neighbors
        self.width = width
        self.score_kind = score_kind
        self.steps = steps
        self.batch = batch
        self.learning_rate = learning_rate
        self.random_state = random_state
        self.device = device

    def fit(self, X: ArrayLike, y: ArrayLike = None) -> "OnefoldDetector":
        """Fit the detector to familiar rows and set the threshold.

        Args:
            X: Rows of numbers, [N, D] with N of at least 3.
            y: Ignored; scikit-learn passes it.

        Returns:
            The fitted detector.

        Raises:
            InputError: A parameter is invalid, or the method does not use it.
        """
        del y
        share = _check_contamination(self.contamination)
        settings = self._check_settings()
        rows = np.asarray(validate_data(self, X, dtype=DTYPES, ensure_min_samples=MIN_ROWS))
        seed = _make_seed(self.random_state)
        fit_rows, held_out = _split(rows, seed) if share is None else (rows, rows[:0])
        detector = _make_detector(self.method, settings, len(fit_rows), seed, self.device)
        # A grid search would show hundreds of progress bars.
        keywords: dict[str, Any] = {"progress": False} if SUPPORTED[self.method].trains else {}
        detector.fit(fit_rows, **keywords)
        if share is None:
            self.offset_ = -_calibrate(detector, held_out)
        else:
            self.offset_ = float(np.quantile(-_score(detector, rows), share))
        self.detector_ = detector
        return self

    def score_samples(self, X: ArrayLike) -> Scores:
        """Return how familiar each row is: the negative score of the wrapped detector.

        Args:
            X: Rows of numbers with the columns of the fit, [N, D].

        Returns:
            Scores [N]; a bigger score means more familiar.
        """
        check_is_fitted(self)
        return -_score(self.detector_, np.asarray(validate_data(self, X, dtype=DTYPES, reset=False)))

    def decision_function(self, X: ArrayLike) -> Scores:
        """Return `score_samples(X) - offset_`, which is negative for outliers.

        Args:
            X: Rows of numbers with the columns of the fit, [N, D].

        Returns:
            Scores [N] relative to the threshold.
        """
        return self.score_samples(X) - self.offset_

    def predict(self, X: ArrayLike) -> NDArray[np.int64]:
        """Return +1 for familiar rows and −1 for outliers.

        Args:
            X: Rows of numbers with the columns of the fit, [N, D].

        Returns:
            +1 or −1 for each row, [N].
        """
        return np.where(self.decision_function(X) < 0, -1, 1)

    def _check_settings(self) -> dict[str, Any]:
        """Return the settings that are not None; raise InputError for those that the method does not use."""
        check_choice(self.method, "method", tuple(SUPPORTED))
        settings = {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}
        for name, value in settings.items():
            if name not in _settings_of(SUPPORTED[self.method]):
                users = [method.name for method in SUPPORTED.values() if name in _settings_of(method)]
                raise InputError(
                    f"{self.method} does not use it",
                    argument=name,
                    hint=f"Leave it at None; it is for {' and '.join(users)}.",
                )
            if name == "learning_rate":
                settings[name] = check_number(value, name)
            elif name == "score_kind":
                check_choice(value, name, SCORES)
            else:
                settings[name] = check_integer(value, name)
        return settings


def _settings_of(method: MethodInfo) -> set[str]:
    """Return the names of the settings that a method uses."""
    if method.name in ("KNN", "LocalGP"):
        return {"n_neighbors"}
    names = {"width", "score_kind"} if method.has_variance else {"width"}
    return names | ({"steps", "batch", "learning_rate"} if method.trains else set())


def _check_contamination(value: Any) -> float | None:
    """Return the share of training rows to flag; None for "auto"."""
    if isinstance(value, str) and value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) <= 0.5:
        raise InputError(f"must be 'auto' or a number above 0 and up to 0.5, not {value!r}", argument="contamination")
    return float(value)


def _make_seed(random_state: Any) -> int:
    """Return the seed of the wrapped detector; an integer is the seed itself."""
    if isinstance(random_state, Integral) and not isinstance(random_state, bool):
        return check_seed(int(random_state))
    return int(check_random_state(random_state).randint(2**31))


def _split(rows: NDArray[Any], seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the rows to fit and the held-out rows: a fifth, or as many as the rate needs, up to a half."""
    count = min(MAX_HELD_OUT, max(len(rows) // 5, min(ENOUGH, len(rows) // 2)))
    order = np.random.default_rng([seed, len(rows)]).permutation(len(rows))
    return rows[np.sort(order[count:])], rows[order[:count]]


def _make_detector(method: str, settings: dict[str, Any], rows: int, seed: int, device: str) -> Wrapped:
    """Return the unfitted detector; settings that are absent keep its defaults."""
    common: dict[str, Any] = {"seed": seed, "device": device}
    if method == "KNN":
        return KNN(k=_choose_k(settings.get("n_neighbors"), rows), **common)
    if method == "LocalGP":
        sizes = {"k": settings["n_neighbors"]} if "n_neighbors" in settings else {}
        return LocalGP(**sizes, **common)
    score: dict[str, Any] = {"score": settings["score_kind"]} if "score_kind" in settings else {}
    width = settings.get("width")
    if method == "LastLayerGP":
        sizes = {} if width is None else {"width": width}
        return LastLayerGP(**score, **sizes, **common)
    if method == "RND":
        sizes = {} if width is None else {"hidden": (width, width), "target_hidden": (width,), "width": width}
        return RND(**sizes, recipe=_change_recipe(RND(**common).recipe, settings), **common)
    assert method == "CSD"
    sizes = {} if width is None else {"architecture": Architecture(hidden=(width, width), outputs=width)}
    return CSD(**score, **sizes, recipe=_change_recipe(CSD(**common).recipe, settings), **common)


def _choose_k(n_neighbors: int | None, rows: int) -> int:
    """Return the k of KNN: the setting, or else the default, or the number of rows if that is smaller."""
    if n_neighbors is not None and n_neighbors > rows:
        raise InputError(
            f"{n_neighbors} is more than the {rows} rows of the fit",
            argument="n_neighbors",
            hint="Use fewer neighbours or more rows.",
        )
    return n_neighbors or min(KNN().k, rows)


def _change_recipe(recipe: Recipe, settings: dict[str, Any]) -> Recipe:
    """Return the recipe with the settings; the warm-up is at most a tenth of the steps."""
    steps = settings.get("steps", recipe.steps)
    return replace(
        recipe,
        steps=steps,
        batch=settings.get("batch", recipe.batch),
        lr=settings.get("learning_rate", recipe.lr),
        warmup=min(recipe.warmup, steps // 10),
    )


def _score(detector: Wrapped, rows: NDArray[Any]) -> Scores:
    """Return the scores of the detector; a row has the same score alone and among others, to the last digit."""
    padded = np.pad(rows, ((0, -len(rows) % BLOCK), (0, 0)), mode="edge")
    return detector.score(padded)[: len(rows)]


def _calibrate(detector: Wrapped, held_out: NDArray[Any]) -> float:
    """Return the threshold: calibrated to the false-alarm rate, or the largest score if there are too few rows."""
    if len(held_out) < ENOUGH:
        return float(_score(detector, held_out).max())
    with warnings.catch_warnings():
        # The rows were held out at random, so a warning that they come from elsewhere would be wrong.
        warnings.simplefilter("ignore", OnefoldWarning)
        return detector.calibrate(held_out, fpr=FALSE_ALARM_RATE).threshold
