"""The unit files of a benchmark, as a report takes them: every figure within its bounds, or the file left out."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from onefold.bench.checked import LONGEST, Measured, measured
from onefold.bench.results import FAILURES, LARGEST, Results
from onefold.core.storage import read_json
from onefold.errors import FileError, InputError, visible
from onefold.report.origins import count_origins


class Failure(NamedTuple):
    unit: str
    reason: str


class Collected(NamedTuple):
    """What a results folder holds: its manifest, its units, a line for each file left out, and what failed."""

    about: dict[str, Any]
    units: list[Measured]
    skipped: list[str]
    failures: list[Failure]


def collect(folder: Path) -> Collected:
    """Everything of a results folder that can be used; an InputError if nothing can."""
    if not folder.is_dir():
        raise InputError(f"{visible(str(folder))}: there is no such folder")
    results = Results(folder)
    about = results.about()
    contents, skipped = results.every()
    units: dict[tuple[str, str, int], Measured] = {}
    for content in contents:
        try:
            unit = measured(content, about["settings"])
            if (unit.method, unit.id, unit.seed) in units:
                raise FileError("is there twice; the first one counts")
            units[unit.method, unit.id, unit.seed] = unit
        except FileError as error:
            skipped.append(f"{content['unit'][:LONGEST]}: {error}")
    skipped = [visible(line) for line in skipped]
    if not units:
        why = f": {skipped[0]}" if skipped else f": fill it with onefold bench run -o {visible(str(folder))}"
        raise InputError(f"{visible(str(folder))} holds no result that can be read{why}")
    failures, damaged = _failures(folder / FAILURES)
    return Collected(about, list(units.values()), [*skipped, *damaged], failures)


def origins(units: Iterable[Measured]) -> dict[str, dict[str, int]]:
    """Return how many units each commit, machine, … made."""
    return count_origins(unit.origin for unit in units)


def _failures(folder: Path) -> tuple[list[Failure], list[str]]:
    found, damaged = [], []
    for path in sorted(folder.rglob("*.json")):
        try:
            content = read_json(path, LARGEST)
            found.append(Failure(visible(str(content["unit"])[:LONGEST]), visible(str(content["reason"])[:2000])))
        except FileError as error:
            damaged.append(visible(str(error)))
        except (LookupError, TypeError):
            damaged.append(visible(f"{path}: is damaged: it lacks a unit or a reason"))
    return found, damaged
