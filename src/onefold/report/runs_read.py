"""The folders of `onefold rl train`, as a report takes them: every number checked, or the run left out by name."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float64, Int64

from onefold.bench.results import LONGEST
from onefold.errors import FileError, InputError, visible
from onefold.report.origins import parse_origin
from onefold.rl.registry import has_goal
from onefold.rl.run_folder import (
    EPISODE_COLUMNS,
    EPISODES,
    PROGRESS,
    PROGRESS_COLUMNS,
    SETTINGS,
    VISITS,
    RunFolder,
    final_episodes,
    read_columns,
    read_object,
)
from onefold.rl.settings import Run
from onefold.rl.visit_counts import CELLS, SLICES

COUNT = re.compile("[0-9]{1,14}")
LARGEST_VALUE = 1e30  # of a return, a loss, …
LARGEST_EDGE, FLATTEST = 1e12, 10.0  # of a world's bounds: a coordinate, and height over width or the reverse
Columns: TypeAlias = dict[str, Float64[np.ndarray, " _"]]


@dataclass(frozen=True)
class Record:
    """A run: its settings, where it was made, its curves and the places that it visited."""

    path: str
    run: Run
    origin: dict[str, str]
    progress: Columns
    episodes: Columns
    visits: Int64[np.ndarray, "slices rows columns"]
    bounds: tuple[float, float, float, float]

    @property
    def frames(self) -> int:
        """How far it has got."""
        return int(self.progress["frames"][-1]) if len(self.progress["frames"]) else 0

    @property
    def whole(self) -> bool:
        return self.frames >= self.run.frames

    @property
    def mapped(self) -> int:
        """Up to which frame its map is known, which is written now and then only."""
        return self.run.frames if self.whole else int(self.visits.sum())

    def final(self, figure: str) -> float | None:
        """Mean over the episodes that a run is judged by; None before its end, or if none has ended at all.

        `figure` is "return" or "success".
        """
        unknown = figure == "success" and not has_goal(self.run.environment)
        if unknown or not self.whole or not len(self.episodes["frames"]):
            return None
        found = final_episodes(self.episodes["frames"], self.episodes["environment"], self.run.frames)
        return float(self.episodes[figure][found].mean())

    @property
    def first_goal(self) -> int | None:
        """Frames at the end of the first episode that reached the goal."""
        reached = np.flatnonzero(self.episodes["success"])
        return int(self.episodes["frames"][reached[0]]) if len(reached) else None

    @property
    def seconds(self) -> float:
        return float(self.progress["seconds"][-1]) if len(self.progress["seconds"]) else 0.0

    @property
    def speed(self) -> float | None:
        """Frames a second, over the whole time."""
        return self.frames / self.seconds if self.seconds > 0 else None

    @property
    def replaced(self) -> int:
        """Workers that were lost and replaced; after a break, a run counts them anew."""
        counts = self.progress["worker_restarts"]
        steps = np.diff(counts, prepend=0.0)
        return int(np.where(steps >= 0, steps, counts).sum())


class Found(NamedTuple):
    """What a folder holds: its runs, and a line for each one left out."""

    records: list[Record]
    skipped: list[str]


def collect(folder: Path) -> Found:
    """All runs in this folder and below it; an InputError if none can be read."""
    records: dict[Run, Record] = {}
    skipped = []
    for path in sorted(folder.rglob(SETTINGS)):
        name = folder.name if path.parent == folder else path.parent.relative_to(folder).as_posix()
        try:
            found = read(path.parent, name)
            if found is None:
                continue
            twin = records.setdefault(found.run, found)
            less, more = sorted((found, twin), key=lambda record: (record.frames, record.origin["date"]))
            records[found.run] = more
            if twin is not found:
                why = "longer" if less.frames < more.frames else "later"
                raise FileError(f"{less.path}: is the same run as {more.path}; the {why} one counts")
        except (FileError, OSError) as error:
            skipped.append(visible(str(error)))
    if not records:
        why = skipped[0] if skipped else f"no {SETTINGS} in it is of `onefold rl train`"
        raise InputError(f"{visible(str(folder))} holds no run that can be read: {why}")
    return Found(list(records.values()), skipped)


def read(path: Path, name: str) -> Record | None:
    """A run's folder, checked; None if its settings are of something else, a FileError if anything is damaged."""
    settings = path / SETTINGS
    try:
        about = read_object(settings)
    except FileError:
        if (path / PROGRESS).exists():
            raise
        return None  # of some other program
    if "run" not in about:
        return None
    run = RunFolder(path).read_run()
    if max(len(run.name), len(run.environment)) > LONGEST:
        raise FileError(f"{settings}: has a name of more than {LONGEST} letters")
    progress = _columns(path / PROGRESS, PROGRESS_COLUMNS)
    episodes = _columns(path / EPISODES, EPISODE_COLUMNS)
    _within(episodes["return"], -LARGEST_VALUE, LARGEST_VALUE, path / EPISODES, "return")
    _within(episodes["success"], 0, 1, path / EPISODES, "success")
    for column in ("environment", "length"):
        _within(episodes[column], 0, 1e12, path / EPISODES, column)
    for column, values in progress.items():
        if column in ("seconds", "worker_restarts"):
            _within(values, 0, 1e12, path / PROGRESS, column)
        else:  # NaN: not known, as before the first episode's end
            _within(values[np.isfinite(values)], -LARGEST_VALUE, LARGEST_VALUE, path / PROGRESS, column)
    counts, bounds = _visits(path / VISITS)
    return Record(name, run, parse_origin(about), progress, episodes, counts, bounds)


def _columns(path: Path, names: Sequence[str]) -> Columns:
    """The columns of a CSV file; a last line that is still being written is left out."""
    found = read_columns(path, names)
    _within(found["frames"], 1, 1e13, path, "frames")
    if (np.diff(found["frames"]) < 0).any():
        raise FileError(f"{path}: is damaged: its frames go backwards")
    return found


def _within(values: Float64[np.ndarray, " n"], low: float, high: float, path: Path, column: str) -> None:
    if not ((values >= low) & (values <= high)).all():  # NaN is not between any two
        raise FileError(f"{path}: is damaged: {column} is not always a number from {low:g} to {high:g}")


def _visits(path: Path) -> tuple[np.ndarray, tuple[float, float, float, float]]:
    if not path.is_file():
        raise FileError(f"{path}: is missing")
    content = read_object(path)
    counts, edges = _counts(content.get("counts")), content.get("bounds")
    if counts is None:
        raise FileError(f"{path}: is damaged: it has not {SLICES} grids of {CELLS} × {CELLS} counts")
    if not isinstance(edges, list) or len(edges) != 4 or any(type(edge) not in (int, float) for edge in edges):
        raise FileError(f"{path}: is damaged: its bounds are no four numbers")
    left, bottom, right, top = map(float, edges)
    within = all(abs(edge) <= LARGEST_EDGE for edge in (left, bottom, right, top))
    if not (within and left < right and bottom < top and 1 / FLATTEST <= (top - bottom) / (right - left) <= FLATTEST):
        raise FileError(f"{path}: is damaged: its bounds are none")
    return counts, (left, bottom, right, top)


def _counts(content: Any) -> Int64[np.ndarray, "slices rows columns"] | None:
    """The grids of a map; None if they are not of its size, or if a cell is no count of at most 14 digits."""
    if not _is_list(content, SLICES, list) or not all(_is_list(part, CELLS, str) for part in content):
        return None
    rows = [row.split() for part in content for row in part]
    cells = [cell for row in rows for cell in row]
    if any(len(row) != CELLS for row in rows) or not all(map(COUNT.fullmatch, cells)):
        return None
    return np.array([int(cell) for cell in cells], np.int64).reshape(SLICES, CELLS, CELLS)


def _is_list(content: Any, size: int, kind: type) -> bool:
    return isinstance(content, list) and len(content) == size and all(isinstance(part, kind) for part in content)
