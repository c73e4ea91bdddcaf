"""A results folder: one file for each unit, whole or not there; failures apart; one run at a time."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from onefold.bench.cell import FORMAT
from onefold.bench.checked import measured
from onefold.bench.units import Unit
from onefold.core.storage import file_lock, read_json, write_json
from onefold.errors import FileError, InputError

MANIFEST, UNITS, FAILURES, LOCK = "bench.json", "units", "failures", ".lock"
CLASSIFIERS, PREVIEWS = "classifiers", "previews"
LARGEST = 4 * 2**20  # bytes of a file: a unit's has 10 KB for four sets


class Results:
    """The folder of a benchmark's results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def classifiers(self) -> Path:
        """Where trained classifiers lie, to be used by several units; it can be deleted at any time."""
        return self.folder / CLASSIFIERS

    @property
    def previews(self) -> Path:
        """Where pictures of the sets lie, to be looked at."""
        return self.folder / PREVIEWS

    def begin(self, settings: Mapping[str, Any], data: Mapping[str, str]) -> None:
        """Make the folder, or go on with it if it belongs to the same settings and data."""
        about = {"format": FORMAT, "settings": json.loads(json.dumps(settings)), "data": dict(data)}
        path = self.folder / MANIFEST
        if path.exists():
            known = self.about()
            if known["settings"] != about["settings"]:
                raise InputError(
                    f"{self.folder} holds results of the preset {known['settings'].get('name')!r} with other settings: "
                    "name another folder with -o"
                )
            changed = [name for name, digest in data.items() if known["data"].get(name, digest) != digest]
            if changed:
                raise InputError(f"{self.folder} holds results on other images of {changed[0]!r}: name another folder")
            if set(data) != set(known["data"]):
                raise InputError(
                    f"{self.folder} holds results on {', '.join(known['data'])}, this run is on {', '.join(data)}: "
                    "they cannot stand in one table, as strange sets differ; name another folder"
                )
            return
        if self.folder.exists() and any(p.name != LOCK for p in self.folder.iterdir()):
            raise InputError(f"{self.folder} is not empty and holds no benchmark: name another folder with -o")
        write_json(path, about)

    def about(self) -> dict[str, Any]:
        """What the folder belongs to."""
        path = self.folder / MANIFEST
        if not path.is_file():
            raise InputError(f"{self.folder} holds no benchmark results: there is no {MANIFEST} in it")
        try:
            content = _read(path)
        except FileError:
            raise FileError(
                f"{path}: is cut short or damaged, and without it nobody knows what the units beside it belong to: "
                "name another folder"
            ) from None
        if content.get("format") != FORMAT:
            raise FileError(
                f"{path}: was written in format {_format(content)}, this version reads {FORMAT}: "
                "use the version of onefold that wrote it, or name another folder"
            )
        if not isinstance(content.get("settings"), dict) or not isinstance(content.get("data"), dict):
            raise FileError(f"{path}: lacks settings or data")
        return content

    def path(self, unit: Unit) -> Path:
        return self.folder / UNITS / f"{_plain(unit)}.json"

    def read(self, unit: Unit, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result of a unit; None if it is not done, or no report would take it: then it has to be done again."""
        path = self.path(unit)
        if not path.exists():
            return None
        try:
            content = _checked(_read(path), path)
            measured(content, settings)
        except FileError:
            return None
        return content

    def write(self, unit: Unit, result: Mapping[str, Any]) -> None:
        """Keep a result; what failed before is forgotten."""
        path = self.path(unit)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result)
        self._failure(unit).unlink(missing_ok=True)

    def fail(self, unit: Unit, reason: str, trace: str) -> None:
        """Keep why a unit failed. It is tried again in the next run."""
        path = self._failure(unit)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"unit": _plain(unit), "reason": reason, "traceback": trace})

    def every(self) -> tuple[list[dict[str, Any]], list[str]]:
        """All results, in the order of their names, and a line for each file that cannot be read."""
        results, bad = [], []
        for path in sorted((self.folder / UNITS).rglob("*.json")):
            try:
                results.append(_checked(_read(path), path))
            except FileError as error:
                bad.append(str(error))
        return results, bad

    def failures(self) -> list[dict[str, Any]]:
        """What failed last time and has not been done since; a file that cannot be read says that it failed."""
        found = []
        for path in sorted((self.folder / FAILURES).rglob("*.json")):
            try:
                found.append(_read(path))
            except FileError as error:
                unit = path.relative_to(self.folder / FAILURES).with_suffix("").as_posix()
                found.append({"unit": unit, "reason": str(error), "traceback": ""})
        return found

    def locked(self) -> AbstractContextManager[None]:
        """One run at a time writes to a folder."""
        busy = InputError(f"another run is writing to {self.folder}: wait for it, or name another folder")
        return file_lock(self.folder / LOCK, busy)

    def _failure(self, unit: Unit) -> Path:
        return self.folder / FAILURES / f"{_plain(unit)}.json"


def _plain(unit: Unit) -> str:
    """The unit's id, without the path of one's own set."""
    return f"{unit.method}/{unit.id.partition('=')[0]}/seed{unit.seed}"


def _format(content: Mapping[str, Any]) -> str:
    return repr(content.get("format"))[:40]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, LARGEST)
    except FileError as error:
        raise FileError(f"{error}; delete it and run again") from None
    if not isinstance(content, dict):
        raise FileError(f"{path}: is no result")
    return content


def _checked(content: dict[str, Any], path: Path) -> dict[str, Any]:
    if content.get("format") != FORMAT:
        raise FileError(f"{path}: was written in format {_format(content)}, this version reads {FORMAT}")
    needed = {
        "unit": str,
        "settings": dict,
        "data": dict,
        "scores": dict,
        "curves": dict,
        "cost": dict,
        "accuracy": float,
    }
    wrong = [name for name, kind in needed.items() if not isinstance(content.get(name), kind)]
    if wrong:
        raise FileError(f"{path}: lacks {wrong[0]}; delete it and run again")
    return content
