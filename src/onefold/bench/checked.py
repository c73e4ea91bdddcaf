"""A unit's file, checked: every figure within its bounds, or a FileError that says what is wrong."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from onefold.bench.cell import BINS, KEPT, RATES
from onefold.bench.sets import PERTURBED
from onefold.bench.units import METHODS
from onefold.errors import FileError

METRICS = ("auroc", "aupr_in", "aupr_out", "aupr_in_plain", "aupr_out_plain", "fpr95")
COSTS = {"fit_s": 1e9, "score_us": 1e12, "parameters": 1e15, "peak_mb": 1e12}  # and the most that can be meant
TIMES = ("fit_s", "score_us")
ORIGIN = ("commit", "device", "cores", "onefold", "torch", "python", "date")
LONGEST = 200  # letters of a name
ROUNDING = 1e-6  # a perfect score can come out a little above 100
LARGE = 1e300


class Histogram(NamedTuple):
    low: float
    high: float
    counts: dict[str, list[float]]


@dataclass(frozen=True)
class Measured:
    """One unit: per cent, seconds, microseconds; `scores` has figures by score, strange set and metric."""

    method: str
    title: str
    ours: bool
    id: str
    seed: int
    train: int
    """Images it was fitted on."""
    tested: dict[str, int]
    """Images that were scored, by set."""
    accuracy: float
    default: str
    scores: dict[str, dict[str, dict[str, float]]]
    roc: dict[str, list[float]]
    histogram: Histogram
    rejection: list[float]
    cost: dict[str, float]
    alone: bool
    """Whether it had the machine to itself."""
    origin: dict[str, str]

    @property
    def row(self) -> str:
        """The row of the table that it belongs to: that of a rival is one for all its forms."""
        return METHODS[self.method].row if self.method in METHODS else self.method

    @property
    def strange(self) -> list[str]:
        return list(self.scores[self.default])


def measured(content: Mapping[str, Any], settings: Mapping[str, Any]) -> Measured:
    """A unit's file, checked; a FileError says what is wrong with it."""
    made, data = content["settings"], content["data"]
    if any(made.get(key) != value for key, value in settings.items()):
        raise FileError("was made with other settings than the rest of the folder")
    match = re.fullmatch(r".+/seed([0-9]{1,10})", content["unit"], re.DOTALL)
    if match is None:
        raise FileError("does not end in /seed and a number")
    method, default = _name(made.get("method"), "method"), _name(content.get("default"), "default")
    known = METHODS.get(method)
    sizes = _mapping(data.get("strange"), "data.strange", lambda size, what: int(_number(size, 0, 1e12, what)))
    if PERTURBED[0] not in sizes:
        raise FileError(f"lacks the strange set {PERTURBED[0]}")
    scores = _mapping(content["scores"], "scores", lambda part, what: _over(part, sizes, what, _metrics))
    if default not in scores:
        raise FileError("lacks its default score")
    curves = content["curves"]
    return Measured(
        method=method,
        title=_name(made.get("title"), "title") if known is None else known.title,
        ours=made.get("ours") is True if known is None else known.ours,
        id=_name(data.get("id"), "data.id"),
        seed=int(match[1]),
        train=int(_number(data.get("train"), 0, 1e12, "data.train")),
        tested={_name(data.get("id"), "data.id"): int(_number(data.get("test"), 0, 1e12, "data.test")), **sizes},
        accuracy=100 * _number(content["accuracy"], 0, 1, "accuracy"),
        default=default,
        scores=scores,
        roc=_over(curves.get("roc"), sizes, "roc", lambda part, what: _numbers(part, len(RATES), 1, what)),
        histogram=_histogram(curves.get("histogram"), sizes),
        rejection=_numbers(curves.get("rejection"), len(KEPT), 1, "rejection"),
        cost={name: _number(content["cost"].get(name), 0, most, name) for name, most in COSTS.items()},
        alone=content["cost"].get("alone") is not False,
        origin={name: _origin(content.get(name)) for name in ORIGIN},
    )


def _metrics(content: Any, what: str) -> dict[str, float]:
    found = _mapping(content, what, lambda value, _: value)
    return {name: _number(found.get(name), -ROUNDING, 100 + ROUNDING, f"{what}.{name}") for name in METRICS}


def _histogram(content: Any, strange: Mapping[str, Any]) -> Histogram:
    parts = _mapping(content, "histogram", lambda value, _: value)
    low, high = (_number(parts.get(end), -LARGE, LARGE, f"histogram.{end}") for end in ("low", "high"))
    if not low < high:
        raise FileError("histogram ends before it begins")
    counts = _over(
        parts.get("counts"), ["familiar", *strange], "counts", lambda part, what: _numbers(part, BINS, 1e12, what)
    )
    return Histogram(low, high, counts)


def _over(content: Any, names: Any, what: str, part: Callable[[Any, str], Any]) -> dict[str, Any]:
    """An object that has an entry for each of the names; what else it has is left out."""
    found = _mapping(content, what, lambda value, _: value)
    if absent := [name for name in names if name not in found]:
        raise FileError(f"{what} lacks {absent[0][:LONGEST]}")
    return {name: part(found[name], f"{what}.{name[:LONGEST]}") for name in names}


def _mapping(content: Any, what: str, part: Callable[[Any, str], Any]) -> dict[str, Any]:
    """An object that is not empty."""
    if not isinstance(content, dict) or not content:
        raise FileError(f"lacks {what}")
    return {_name(name, f"a name in {what}"): part(value, f"{what}.{name}") for name, value in content.items()}


def _numbers(content: Any, count: int, high: float, what: str) -> list[float]:
    if not isinstance(content, list) or len(content) != count:
        raise FileError(f"{what} is no list of {count} numbers")
    return [_number(value, 0, high, what) for value in content]


def _number(content: Any, low: float, high: float, what: str) -> float:
    if type(content) not in (int, float) or not low <= content <= high:  # NaN is not between any two
        raise FileError(f"{what} is no number from {round(low, 3):g} to {round(high, 3):g}")
    return float(content)


def _name(content: Any, what: str) -> str:
    if not isinstance(content, str) or not 0 < len(content) <= LONGEST:
        raise FileError(f"{what} is no text of 1 to {LONGEST} letters")
    return content


def _origin(content: Any) -> str:
    return str(content)[:LONGEST] if isinstance(content, str) or type(content) is int else "unknown"
