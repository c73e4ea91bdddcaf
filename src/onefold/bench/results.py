"""Results of a benchmark: one file for each unit, checked when it is read, and the folder that they are in."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onefold.bench.grid import Unit
from onefold.bench.rows import ROWS
from onefold.bench.sets import PERTURBED
from onefold.core.schema import from_json
from onefold.core.storage import file_lock, read_json, write_json
from onefold.errors import FileError, InputError, visible

FORMAT = 1
MANIFEST, UNITS, FAILURES, LOCK = "bench.json", "units", "failures", ".lock"
CLASSIFIERS, PREVIEWS = "classifiers", "previews"
LARGEST = 4 * 2**20  # bytes of a file; a unit on four sets has 10 KB

FALSE_ALARM_RATES = tuple(
    float(f"{rate:.4g}") for rate in np.concatenate([np.geomspace(0.001, 0.1, 9), np.linspace(0.2, 1, 9)])
)
"""False-alarm rates of the ROC curves."""
KEPT_SHARES = tuple(round(1 - 0.05 * i, 2) for i in range(19))
"""Shares of the test set in the rejection curves."""
BINS = 40  # of the histograms

METRICS = ("auroc", "aupr_in", "aupr_out", "aupr_in_plain", "aupr_out_plain", "fpr95")
"""Figures of a score for an OOD set, in per cent."""
COSTS = {"fit_s": 1e9, "score_us": 1e12, "parameters": 1e15, "peak_mb": 1e12}
"""Figures of the cost, and the largest plausible value of each."""
TIMES = ("fit_s", "score_us")
LONGEST = 200  # characters of a name
ROUNDING = 1e-6  # how far a perfect score can exceed 100


@dataclass(frozen=True, kw_only=True)
class UnitResult:
    """Contents of a unit file. Figures that this version does not know are left out; absent ones are absent here.

    Args:
        row: Name of the row.
        title: Title of the row.
        family: Name of the row that stands for this one in tables. Units of other programs name it in their settings.
        variant: Text that tells the row from others of its family.
        ours: True for a form of CSD.
        id_set: Name of the ID set.
        seed: Seed of the unit.
        default: Score that the row is ranked by.
        train: Number of training images.
        tested: Number of scored images, by set.
        accuracy: Accuracy on the ID test set, a fraction.
        scores: Per cent, by score, OOD set and one of `METRICS`.
        roc: Detected share at each of `FALSE_ALARM_RATES`, by OOD set.
        histogram_range: Smallest and largest edge of the bins.
        histogram: Counts of scores in `BINS` bins, by set; the ID test set is called "familiar".
        rejection: Accuracy on each of `KEPT_SHARES` of the test set, those with the smallest scores.
        cost: Seconds, microseconds, parameters and megabytes, by one of `COSTS`.
        alone: True if no other unit ran on the machine at the same time.
        origin: Commit, machine, versions and date, unchecked.
    """

    row: str
    title: str
    family: str
    variant: str
    ours: bool
    id_set: str
    seed: int
    default: str
    train: int
    tested: dict[str, int]
    accuracy: float
    scores: dict[str, dict[str, dict[str, float]]]
    roc: dict[str, list[float]] = field(default_factory=dict)
    histogram_range: tuple[float, float] | None = None
    histogram: dict[str, list[float]] = field(default_factory=dict)
    rejection: list[float] = field(default_factory=list)
    cost: dict[str, float] = field(default_factory=dict)
    alone: bool = True
    origin: dict[str, Any] = field(default_factory=dict)

    @property
    def ood_sets(self) -> list[str]:
        """Names of the OOD sets, the perturbed ones included."""
        return list(self.scores[self.default])


class Collected(NamedTuple):
    """Contents of a results folder: manifest, units, a line for each file left out, and failed units by reason."""

    manifest: dict[str, Any]
    units: list[UnitResult]
    skipped: list[str]
    failures: list[dict[str, str]]


def collect(folder: Path) -> Collected:
    """Return everything in a results folder that can be read.

    Raises:
        InputError: The folder does not exist, or holds no result that can be read.
        FileError: The manifest is damaged or of another format.
    """
    name = visible(str(folder))
    if not folder.is_dir():
        raise InputError(f"{name}: no such folder. Pass the folder that onefold bench run wrote.")
    results = ResultsFolder(folder)
    manifest = results.manifest()
    contents, skipped = results.read_all()
    units: dict[tuple[str, str, int], UnitResult] = {}
    for content in contents:
        try:
            unit = parse_unit(content, manifest["settings"])
            if (unit.row, unit.id_set, unit.seed) in units:
                raise FileError("a second file of this unit; the first one is used")
            units[unit.row, unit.id_set, unit.seed] = unit
        except FileError as error:
            skipped.append(f"{content['unit'][:LONGEST]}: {error}")
    skipped = [visible(line) for line in skipped]
    if not units:
        reason = f" ({skipped[0]})" if skipped else ""
        raise InputError(f"{name}: no result that can be read{reason}. Fill it with onefold bench run -o {name}.")
    failures, damaged = results.failures()
    return Collected(manifest, list(units.values()), [*skipped, *damaged], failures)


def parse_unit(content: Mapping[str, Any], settings: Mapping[str, Any]) -> UnitResult:
    """Return the content of a unit file, with every type and bound checked.

    Args:
        content: A JSON object whose parts have the types that `ResultsFolder` checks.
        settings: Settings that all units of the folder share.

    Raises:
        FileError: The unit has other settings, or a figure is missing, of the wrong type or out of its bounds.
    """
    unit_settings, data, curves = content["settings"], content["data"], content["curves"]
    if any(unit_settings.get(key) != value for key, value in settings.items()):
        raise FileError("made with other settings than the rest of the folder")
    seed = re.fullmatch(r".+/seed([0-9]{1,10})", content["unit"], re.DOTALL)
    if seed is None:
        raise FileError("unit: does not end in /seed and a number")
    row = ROWS.get(unit_settings["method"]) if isinstance(unit_settings.get("method"), str) else None
    histogram = curves.get("histogram", {})
    if not isinstance(histogram, dict):
        raise FileError("curves.histogram: not an object")
    fields = {
        "row": unit_settings.get("method"),
        "title": unit_settings.get("title") if row is None else row.title,
        "family": unit_settings.get("family", unit_settings.get("method")) if row is None else row.family,
        "variant": unit_settings.get("variant", "") if row is None else row.variant,
        "ours": unit_settings.get("ours") is True if row is None else row.ours,
        "id_set": data.get("id"),
        "seed": int(seed[1]),
        "default": content.get("default"),
        "train": data.get("train"),
        "tested": data.get("ood"),
        "accuracy": content["accuracy"],
        "scores": _known_metrics(content["scores"]),
        "roc": curves.get("roc"),
        "histogram_range": [histogram.get("low"), histogram.get("high")] if histogram else None,
        "histogram": histogram.get("counts") if histogram else None,
        "rejection": curves.get("rejection"),
        "cost": {name: value for name, value in content["cost"].items() if name in COSTS},
        "alone": content["cost"].get("alone") is not False,
        "origin": {key: value for key, value in content.items() if key not in PARTS and isinstance(value, str | int)},
    }
    try:
        result = from_json(UnitResult, {name: value for name, value in fields.items() if value is not None})
    except InputError as error:
        raise FileError(str(error)) from None
    _check_names(result)
    _check_figures(result)
    _check_curves(result)
    result.tested[result.id_set] = _count(data.get("test"))
    return result


def _count(size: Any) -> int:
    if type(size) is not int or not 0 <= size <= 1e12:
        raise FileError("data.test: not a number of images")
    return size


def _known_metrics(scores: Any) -> Any:
    """Return the figures of each score and set without metrics that this version does not know."""
    if not isinstance(scores, dict):
        return scores
    return {
        kind: {
            name: {metric: figures[metric] for metric in METRICS if metric in figures}
            if isinstance(figures, dict)
            else figures
            for name, figures in sets.items()
        }
        if isinstance(sets, dict)
        else sets
        for kind, sets in scores.items()
    }


def _check_names(result: UnitResult) -> None:
    names = [result.row, result.title, result.family, result.id_set, result.default, *result.tested, *result.scores]
    if invalid := [name for name in names if not 0 < len(name) <= LONGEST]:
        raise FileError(f"{invalid[0][:20]!r}: not a name of 1 to {LONGEST} characters")
    if len(result.variant) > LONGEST:
        raise FileError(f"variant: longer than {LONGEST} characters")
    if PERTURBED[0] not in result.tested:
        raise FileError(f"data.ood: lacks the set {PERTURBED[0]}")
    if result.default not in result.scores:
        raise FileError(f"scores: lacks the default score {result.default}")


def _check_figures(result: UnitResult) -> None:
    """Check bounds, and drop OOD sets that `data.ood` does not list."""
    for name, size in {"data.train": result.train, **result.tested}.items():
        _check_range(size, 0, 1e12, name)
    _check_range(result.accuracy, 0, 1, "accuracy")
    for name, value in result.cost.items():
        _check_range(value, 0, COSTS[name], f"cost.{name}")
    for kind, sets in result.scores.items():
        _keep(sets, result.tested, f"scores.{kind}")
        for name, figures in sets.items():
            if "auroc" not in figures:
                raise FileError(f"scores.{kind}.{name}: lacks auroc")
            for metric, value in figures.items():
                _check_range(value, -ROUNDING, 100 + ROUNDING, f"scores.{kind}.{name}.{metric}")


def _check_curves(result: UnitResult) -> None:
    if result.roc:
        _keep(result.roc, result.tested, "curves.roc")
    for name, shares in result.roc.items():
        _check_list(shares, len(FALSE_ALARM_RATES), 1, f"curves.roc.{name}")
    if result.rejection:
        _check_list(result.rejection, len(KEPT_SHARES), 1, "curves.rejection")
    if result.histogram_range is not None:
        low, high = result.histogram_range
        if not -1e300 <= low < high <= 1e300:
            raise FileError("curves.histogram: low is not below high")
        _keep(result.histogram, ["familiar", *result.tested], "curves.histogram.counts")
        for name, counts in result.histogram.items():
            _check_list(counts, BINS, 1e12, f"curves.histogram.counts.{name}")


def _keep(part: dict[str, Any], names: Iterable[str], what: str) -> None:
    """Keep the entries of these names, in this order, and refuse a part that lacks one."""
    kept = {name: part.get(name) for name in names}
    if missing := [name for name, value in kept.items() if value is None]:
        raise FileError(f"{what}: lacks {missing[0][:LONGEST]}")
    part.clear()
    part.update(kept)


def _check_list(values: Sequence[float], count: int, high: float, what: str) -> None:
    if len(values) != count:
        raise FileError(f"{what}: {len(values)} numbers instead of {count}")
    for value in values:
        _check_range(value, 0, high, what)


def _check_range(value: float, low: float, high: float, what: str) -> None:
    if not low <= value <= high:
        raise FileError(f"{what}: not a number from {round(low, 3):g} to {round(high, 3):g}")


class ResultsFolder:
    """Folder of a benchmark's results: a file for each unit, written whole or not at all, and its failures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def classifiers(self) -> Path:
        """Folder of trained classifiers, which several units use. It can be deleted at any time."""
        return self.folder / CLASSIFIERS

    @property
    def previews(self) -> Path:
        """Folder of pictures of the sets."""
        return self.folder / PREVIEWS

    def begin(self, settings: Mapping[str, Any], data: Mapping[str, str]) -> None:
        """Create the folder, or check that it was created for the same settings and data.

        Args:
            settings: Settings that all units share.
            data: Hash of the content of each set.

        Raises:
            InputError: The folder has other contents, or was created for other settings or data.
        """
        manifest = {"format": FORMAT, "settings": json.loads(json.dumps(settings)), "data": dict(data)}
        path = self.folder / MANIFEST
        if path.exists():
            self._check_same(self.manifest(), manifest)
            return
        if self.folder.exists() and any(entry.name != LOCK for entry in self.folder.iterdir()):
            raise InputError(f"{self.folder}: not empty, and not a folder of benchmark results. Pass another with -o.")
        write_json(path, manifest)

    def _check_same(self, existing: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        if existing["settings"] != wanted["settings"]:
            raise InputError(
                f"{self.folder}: made with the preset {existing['settings'].get('name')!r} and other settings. "
                "Pass another folder with -o."
            )
        data = wanted["data"]
        if changed := [name for name, digest in data.items() if existing["data"].get(name, digest) != digest]:
            raise InputError(f"{self.folder}: made with other images of {changed[0]!r}. Pass another folder with -o.")
        if set(data) != set(existing["data"]):
            raise InputError(
                f"{self.folder}: made on {', '.join(existing['data'])}, and this run is on {', '.join(data)}. Results "
                "on different OOD sets do not fit into one table; pass another folder with -o."
            )

    def manifest(self) -> dict[str, Any]:
        """Return the settings and data that the folder was created for."""
        path = self.folder / MANIFEST
        if not path.is_file():
            raise InputError(f"{self.folder}: no {MANIFEST} in it, so it is not a folder of benchmark results")
        try:
            content = _read_object(path)
        except FileError:
            raise FileError(
                f"{path}: cut short or damaged, and the settings of the units beside it are unknown without it. "
                "Pass another folder."
            ) from None
        if content.get("format") != FORMAT:
            raise FileError(
                f"{path}: has format {_shown_format(content)}, this version reads {FORMAT}. Use the version of onefold "
                "that wrote it, or pass another folder."
            )
        if not isinstance(content.get("settings"), dict) or not isinstance(content.get("data"), dict):
            raise FileError(f"{path}: lacks settings or data")
        return content

    def path(self, unit: Unit) -> Path:
        """Return the path of a unit's file."""
        return self.folder / UNITS / f"{unit}.json"

    def read(self, unit: Unit) -> dict[str, Any] | None:
        """Return the content of a unit's file; None if it is absent or no report would use it."""
        path = self.path(unit)
        if not path.exists():
            return None
        try:
            content = _read_unit(path)
            parse_unit(content, unit.preset.settings())
        except FileError:
            return None
        return content

    def write(self, unit: Unit, result: Mapping[str, Any]) -> None:
        """Write a unit's file and delete the record of an earlier failure."""
        path = self.path(unit)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result)
        self._failure(unit).unlink(missing_ok=True)

    def fail(self, unit: Unit, reason: str, trace: str) -> None:
        """Write why a unit failed. The next run tries it again."""
        path = self._failure(unit)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"unit": str(unit), "reason": reason, "traceback": trace})

    def read_all(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the contents of all unit files, ordered by path, and a line for each that cannot be read."""
        contents, skipped = [], []
        for path in sorted((self.folder / UNITS).rglob("*.json")):
            try:
                contents.append(_read_unit(path))
            except FileError as error:
                skipped.append(str(error))
        return contents, skipped

    def failures(self) -> tuple[list[dict[str, str]], list[str]]:
        """Return the units that failed and were not repeated, with reasons, and a line for each damaged record."""
        failures, damaged = [], []
        for path in sorted((self.folder / FAILURES).rglob("*.json")):
            try:
                content = read_json(path, LARGEST)
                unit, reason = str(content["unit"])[:LONGEST], str(content["reason"])[:2000]
                failures.append({"unit": visible(unit), "reason": visible(reason)})
            except FileError as error:
                damaged.append(visible(str(error)))
            except (LookupError, TypeError):
                damaged.append(visible(f"{path}: damaged, it lacks a unit or a reason"))
        return failures, damaged

    def lock(self) -> AbstractContextManager[None]:
        """Hold the folder for one run at a time; InputError if another run holds it."""
        busy = InputError(f"{self.folder}: another run is writing to it. Wait for it, or pass another folder.")
        return file_lock(self.folder / LOCK, busy)

    def _failure(self, unit: Unit) -> Path:
        return self.folder / FAILURES / f"{unit}.json"


def _shown_format(content: Mapping[str, Any]) -> str:
    return repr(content.get("format"))[:40]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, LARGEST)
    except FileError as error:
        raise FileError(f"{error}. Delete it and run again.") from None
    if not isinstance(content, dict):
        raise FileError(f"{path}: not a result. Delete it and run again.")
    return content


PARTS: dict[str, type] = {
    "unit": str, "settings": dict, "data": dict, "scores": dict, "curves": dict, "cost": dict, "accuracy": float,
}  # fmt: skip


def _read_unit(path: Path) -> dict[str, Any]:
    """Return the content of a unit file whose parts have the right types; `parse_unit` checks the rest."""
    content = _read_object(path)
    if content.get("format") != FORMAT:
        raise FileError(f"{path}: has format {_shown_format(content)}, this version reads {FORMAT}")
    if wrong := [name for name, kind in PARTS.items() if not isinstance(content.get(name), kind)]:
        raise FileError(f"{path}: lacks {wrong[0]}. Delete it and run again.")
    return content
