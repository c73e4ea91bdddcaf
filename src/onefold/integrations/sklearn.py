"""onefold as a scikit-learn outlier detector, for tables of numbers: pipelines, grid searches, clones."""

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
from onefold.detectors import CSD, KNN, RND, LastLayerGP
from onefold.detectors._combined_score import SCORES
from onefold.distil import Architecture
from onefold.errors import InputError, OnefoldWarning
from onefold.nn.train import Recipe
from onefold.types import ArrayLike, Scores

Wrapped: TypeAlias = KNN | LastLayerGP | CSD | RND

Parameter: TypeAlias = Any
"""scikit-learn wants constructors to take whatever they are given; `fit` is what checks it."""

KNOBS = {
    "KNN": {"n_neighbors"},
    "LastLayerGP": {"width", "score_kind"},
    "CSD": {"width", "score_kind", "steps", "batch", "learning_rate"},
    "RND": {"width", "steps", "batch", "learning_rate"},
}
RATE = 0.05  # of false alarms, for contamination="auto"
ENOUGH = round(1 / RATE) - 1  # held-out rows from which a threshold for that rate can be told
HELD_OUT = 1000
FEWEST = 3  # rows: two to learn from and one to hold out
BLOCK = 16  # rows: fewer than four are multiplied by other routines of the CPU, which round differently
DTYPES = (np.float64, np.float32)


class OnefoldDetector(OutlierMixin, BaseEstimator):
    """Fit on familiar rows, then tell which rows are strange: +1 is familiar, −1 an outlier.

    Parameters
    ----------
    method : {"KNN", "LastLayerGP", "CSD", "RND"}
        The detector of onefold that does the work. "KNN", the default, looks at how far the nearest train rows are in
        the features of a random network. On tables of up to a few thousand rows it ranks about as well as LastLayerGP,
        fits in a second or two without training, and it alone does not find new rows of a small table much stranger
        than the ones it was fitted on. "LastLayerGP" ranks better where columns are strongly correlated; a fit takes
        seconds at least, but the time to score a row does not grow with the table. "CSD" and "RND" train networks,
        which takes longer still, and often rank worse on tables of some hundred rows.
    contamination : "auto" or float in (0, 0.5]
        Where `offset_` lies, and so what `predict` calls an outlier.
        "auto" is for train rows that are familiar and for judging new ones. A fifth of the rows (at least 19 while
        that is no more than half, at most 1,000) is held out of the fit, and the threshold set so that a new familiar
        row is called an outlier with probability 5 % (split-conformal). Of fewer than 38 rows half are held out, and
        the strangest of them is the threshold: that probability is then 1 in (held-out rows + 1).
        A float is the share of outliers in the train rows, as in scikit-learn's IsolationForest: all rows are fitted,
        and that share of them lies below `offset_`. On small tables, methods other than KNN find most or all new rows
        stranger than those: a float is then for `fit_predict` only.
    n_neighbors : int, optional
        KNN only: which of the nearest train rows counts. By default the fifth.
    width : int, optional
        Not for KNN: features of LastLayerGP (2,048 by default), units in each layer of CSD and RND (256).
    score_kind : {"combined", "variance", "relative"}, optional
        LastLayerGP and CSD only: what rows are ranked by; see `onefold.CSD`. By default "combined".
    steps, batch : int, optional
        CSD and RND only: how many gradient steps (2,000 by default), on how many rows each (64 for CSD, 256 for RND).
    learning_rate : float, optional
        CSD and RND only: Adam's rate after the warm-up (0.003 by default).
    random_state : int, RandomState instance or None
        A number is the seed of the wrapped detector: the same number gives the same result.
    device : str
        "auto" is the first GPU if there is one, else the CPU; or "cpu", "cuda", "cuda:1".

    Attributes
    ----------
    detector_ : the fitted detector of onefold, with its diagnosis, `save` and, after "auto", p-values.
    offset_ : float, rows with score_samples(X) below it are outliers.
    n_features_in_ : int
    feature_names_in_ : ndarray of str, only where X has column names that are all strings.

    Columns are standardised inside, in float32. A column whose spread is tiny beside its values (a time stamp, say) is
    better off behind a StandardScaler. Missing values and columns of words are for onefold's own detectors, which take
    data frames as they are. Doubts about a fit come as `onefold.errors.OnefoldWarning`.
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
        """Learn what is familiar from the rows of `X`; `y` is ignored."""
        del y
        share = _checked_contamination(self.contamination)
        knobs = self._knobs()
        rows = np.asarray(validate_data(self, X, dtype=DTYPES, ensure_min_samples=FEWEST))
        seed = _seed(self.random_state)
        familiar, aside = _split(rows, seed) if share is None else (rows, rows[:0])
        detector = _fitted(_detector(self.method, knobs, len(familiar), seed, self.device), familiar)
        if share is None:
            self.offset_ = -_threshold(detector, aside)
        else:
            self.offset_ = float(np.quantile(-_scores(detector, rows), share))
        self.detector_ = detector
        return self

    def score_samples(self, X: ArrayLike) -> Scores:
        """How familiar each row is: the wrapped detector's score with its sign turned, bigger is more normal."""
        check_is_fitted(self)
        return -_scores(self.detector_, np.asarray(validate_data(self, X, dtype=DTYPES, reset=False)))

    def decision_function(self, X: ArrayLike) -> Scores:
        """score_samples(X) − offset_: negative for outliers."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: ArrayLike) -> NDArray[np.int64]:
        """+1 for familiar rows, −1 for outliers."""
        return np.where(self.decision_function(X) < 0, -1, 1)

    def _knobs(self) -> dict[str, Any]:
        """What was set for the method, checked; a setting that it would ignore is a mistake, so it is refused."""
        check_choice(self.method, "method", tuple(KNOBS))
        known = sorted(set().union(*KNOBS.values()))
        given = {name: value for name in known if (value := getattr(self, name)) is not None}
        if ignored := [name for name in given if name not in KNOBS[self.method]]:
            takers = [method for method, names in KNOBS.items() if ignored[0] in names]
            raise InputError(f"{self.method} has no {ignored[0]}, it is for {' and '.join(takers)}: leave it at None")
        return {name: _checked_knob(name, value) for name, value in given.items()}


def _checked_contamination(value: Any) -> float | None:
    """The share of train rows to call outliers; None for "auto"."""
    if isinstance(value, str) and value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) <= 0.5:
        raise InputError(f"contamination must be 'auto' or a number above 0 and up to 0.5, not {value!r}")
    return float(value)


def _checked_knob(name: str, value: Any) -> Any:
    if name == "score_kind":
        return check_choice(value, name, SCORES)
    return check_number(value, name) if name == "learning_rate" else check_integer(value, name)


def _seed(random_state: Any) -> int:
    """A number is the seed itself, so that the detector of onefold with this seed is the same one."""
    if isinstance(random_state, Integral) and not isinstance(random_state, bool):
        return check_seed(int(random_state))
    return int(check_random_state(random_state).randint(2**31))


def _split(rows: NDArray[Any], seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows to fit, and rows that tell the threshold: a fifth, or what the rate needs while half is left to fit."""
    count = min(HELD_OUT, max(len(rows) // 5, min(ENOUGH, len(rows) // 2)))
    order = np.random.default_rng([seed, len(rows)]).permutation(len(rows))
    return rows[np.sort(order[count:])], rows[order[:count]]


def _detector(method: str, knobs: dict[str, Any], rows: int, seed: int, device: str) -> Wrapped:
    """The detector of onefold, with its own defaults for whatever was not set."""
    common: dict[str, Any] = {"seed": seed, "device": device}
    if method == "KNN":
        return KNN(k=_neighbours(knobs.get("n_neighbors"), rows), **common)
    score: dict[str, Any] = {"score": knobs["score_kind"]} if "score_kind" in knobs else {}
    width = knobs.get("width")
    if method == "LastLayerGP":
        sizes = {} if width is None else {"width": width}
        return LastLayerGP(**score, **sizes, **common)
    if method == "RND":
        sizes = {} if width is None else {"hidden": (width, width), "target_hidden": (width,), "width": width}
        return RND(**sizes, recipe=_recipe(RND(**common).recipe, knobs), **common)
    sizes = {} if width is None else {"architecture": Architecture(hidden=(width, width), outputs=width)}
    return CSD(**score, **sizes, recipe=_recipe(CSD(**common).recipe, knobs), **common)


def _neighbours(asked: int | None, rows: int) -> int:
    """The k of KNN: what was asked for, else the usual one, or all rows where there are fewer."""
    if asked is not None and asked > rows:
        raise InputError(f"n_neighbors is {asked}, but only {rows} rows are fitted: use fewer neighbours or more rows")
    return asked or min(KNN().k, rows)


def _recipe(usual: Recipe, knobs: dict[str, Any]) -> Recipe:
    """The method's usual recipe with what was set; a short training also warms up shortly."""
    steps = knobs.get("steps", usual.steps)
    return replace(
        usual,
        steps=steps,
        batch=knobs.get("batch", usual.batch),
        lr=knobs.get("learning_rate", usual.lr),
        warmup=min(usual.warmup, steps // 10),
    )


def _fitted(detector: Wrapped, rows: NDArray[Any]) -> Wrapped:
    """Fit in silence: many fits of a grid search would draw many progress bars."""
    return detector.fit(rows, progress=False) if isinstance(detector, CSD | RND) else detector.fit(rows)


def _scores(detector: Wrapped, rows: NDArray[Any]) -> Scores:
    """The detector's scores, the same to the last digit whether a row comes alone or among others."""
    filled = np.pad(rows, ((0, -len(rows) % BLOCK), (0, 0)), mode="edge")
    return detector.score(filled)[: len(rows)]


def _threshold(detector: Wrapped, aside: NDArray[Any]) -> float:
    """The score above which a familiar row is found with the chosen rate, or that of the strangest of too few."""
    if len(aside) < ENOUGH:
        return float(_scores(detector, aside).max())
    with warnings.catch_warnings():
        # The rows were held out at random: that they look stranger than fitted ones says nothing against them.
        warnings.simplefilter("ignore", OnefoldWarning)
        return detector.calibrate(aside, fpr=RATE).threshold
