"""Reader for the folders of `onefold rl train`: checks every number and lists the runs that it leaves out."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float64, Int64

from onefold.core.schema import from_json
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
MAX_NAME = 200  # characters
MAX_VALUE = 1e30  # of a return or a loss
MAX_COORDINATE, MAX_ASPECT = 1e12, 10.0  # of a map; the aspect is height over width or the reverse
RETURN, SUCCESS = "return", "success"  # columns of the final metrics
Columns: TypeAlias = dict[str, Float64[np.ndarray, " _"]]


@dataclass(frozen=True)
class RunRecord:
    """One run: settings, provenance, learning curves and visited cells."""

    path: str
    run: Run
    origin: dict[str, str]
    progress: Columns
    episodes: Columns
    visits: Int64[np.ndarray, "slices rows columns"]
    bounds: tuple[float, float, float, float]

    @property
    def frames(self) -> int:
        """Frames so far."""
        return int(self.progress["frames"][-1]) if len(self.progress["frames"]) else 0

    @property
    def finished(self) -> bool:
        """Whether the run has made all its frames."""
        return self.frames >= self.run.frames

    @property
    def mapped_frames(self) -> int:
        """Frames that the visit counts cover; training writes them at intervals."""
        return self.run.frames if self.finished else int(self.visits.sum())

    def final(self, metric: str) -> float | None:
        """Return the mean over the final episodes of `metric`, which is "return" or "success".

        It is None for an unfinished run, without episodes, and for success in an environment without a goal.
        """
        undefined = metric == SUCCESS and not has_goal(self.run.environment)
        if undefined or not self.finished or not len(self.episodes["frames"]):
            return None
        final = final_episodes(self.episodes["frames"], self.episodes["environment"], self.run.frames)
        return float(self.episodes[metric][final].mean())

    @property
    def first_goal(self) -> int | None:
        """Frames at the end of the first episode that reached the goal."""
        successes = np.flatnonzero(self.episodes["success"])
        return int(self.episodes["frames"][successes[0]]) if len(successes) else None

    @property
    def seconds(self) -> float:
        """Training time so far."""
        return float(self.progress["seconds"][-1]) if len(self.progress["seconds"]) else 0.0

    @property
    def frames_per_second(self) -> float | None:
        """Mean speed over the whole training time."""
        return self.frames / self.seconds if self.seconds > 0 else None

    @property
    def replaced_workers(self) -> int:
        """Workers that were lost and replaced. The counter in the file restarts when a run is resumed."""
        counts = self.progress["worker_restarts"]
        steps = np.diff(counts, prepend=0.0)
        return int(np.where(steps >= 0, steps, counts).sum())


class RunCollection(NamedTuple):
    """The runs in a folder, and one line for each run that was left out."""

    records: list[RunRecord]
    skipped: list[str]


def collect_runs(folder: Path) -> RunCollection:
    """Return all runs in a folder and below it; raise InputError if none can be read.

    Of two folders with the same settings and seed, the run with more frames counts, then the later one.
    """
    records: dict[Run, RunRecord] = {}
    skipped = []
    for path in sorted(folder.rglob(SETTINGS)):
        name = folder.name if path.parent == folder else path.parent.relative_to(folder).as_posix()
        try:
            record = read_run(path.parent, name)
            if record is None:
                continue
            other = records.setdefault(record.run, record)
            dropped, kept = sorted((record, other), key=lambda record: (record.frames, record.origin["date"]))
            records[record.run] = kept
            if other is not record:
                reason = "longer" if dropped.frames < kept.frames else "later"
                raise FileError(f"{dropped.path}: is the same run as {kept.path}; the {reason} one counts")
        except (FileError, OSError) as error:
            skipped.append(visible(str(error)))
    if not records:
        reason = skipped[0] if skipped else f"no {SETTINGS} in it is of `onefold rl train`"
        raise InputError(f"{visible(str(folder))} holds no run that can be read: {reason}")
    return RunCollection(list(records.values()), skipped)


def read_run(path: Path, name: str) -> RunRecord | None:
    """Return the run in a folder; None if another program wrote the settings. Raise FileError if a file is damaged."""
    settings = path / SETTINGS
    try:
        content = read_object(settings)
    except FileError:
        if (path / PROGRESS).exists():
            raise
        return None
    if "run" not in content:
        return None
    run = RunFolder(path).read_run()
    if max(len(run.name), len(run.environment)) > MAX_NAME:
        raise FileError(f"{settings}: is damaged: a name has more than {MAX_NAME} characters")
    progress = _read_table(path / PROGRESS, PROGRESS_COLUMNS)
    episodes = _read_table(path / EPISODES, EPISODE_COLUMNS)
    _check_range(episodes["return"], -MAX_VALUE, MAX_VALUE, path / EPISODES, "return")
    _check_range(episodes["success"], 0, 1, path / EPISODES, "success")
    for column in ("environment", "length"):
        _check_range(episodes[column], 0, 1e12, path / EPISODES, column)
    for column, values in progress.items():
        if column in ("seconds", "worker_restarts"):
            _check_range(values, 0, 1e12, path / PROGRESS, column)
        else:  # NaN before the first value, such as a return before the first episode ends
            _check_range(values[np.isfinite(values)], -MAX_VALUE, MAX_VALUE, path / PROGRESS, column)
    visits, bounds = _read_visits(path / VISITS)
    return RunRecord(name, run, parse_origin(content), progress, episodes, visits, bounds)


def _read_table(path: Path, names: Sequence[str]) -> Columns:
    """Return the columns of a CSV file, without a last line that is still being written."""
    columns = read_columns(path, names)
    _check_range(columns["frames"], 1, 1e13, path, "frames")
    if (np.diff(columns["frames"]) < 0).any():
        raise FileError(f"{path}: is damaged: its frames decrease")
    return columns


def _check_range(values: Float64[np.ndarray, " n"], low: float, high: float, path: Path, column: str) -> None:
    if not ((values >= low) & (values <= high)).all():  # False for NaN
        raise FileError(f"{path}: is damaged: {column} has a value that is not between {low:g} and {high:g}")


@dataclass(frozen=True)
class _VisitsFile:
    """The content of visits.json: the map's left, bottom, right and top, and a line of counts for each row."""

    bounds: tuple[float, float, float, float]
    frames: int
    counts: list[list[str]]


def _read_visits(path: Path) -> tuple[Int64[np.ndarray, "slices rows columns"], tuple[float, float, float, float]]:
    if not path.is_file():
        raise FileError(f"{path}: is missing")
    try:
        content = from_json(_VisitsFile, read_object(path))
    except InputError as error:
        raise FileError(f"{path}: is damaged ({error})") from None
    counts = _parse_counts(content.counts)
    if counts is None:
        raise FileError(f"{path}: is damaged: counts are not {SLICES} grids of {CELLS} × {CELLS} integers")
    left, bottom, right, top = content.bounds
    within = max(map(abs, content.bounds)) <= MAX_COORDINATE and left < right and bottom < top
    if not (within and 1 / MAX_ASPECT <= (top - bottom) / (right - left) <= MAX_ASPECT):
        raise FileError(f"{path}: is damaged: bounds are not left, bottom, right and top of a map")
    return counts, content.bounds


def _parse_counts(grids: list[list[str]]) -> Int64[np.ndarray, "slices rows columns"] | None:
    """Return the counts; None if the grids have another size or a cell is not an integer of at most 14 digits."""
    if len(grids) != SLICES or any(len(grid) != CELLS for grid in grids):
        return None
    rows = [row.split() for grid in grids for row in grid]
    cells = [cell for row in rows for cell in row]
    if any(len(row) != CELLS for row in rows) or not all(map(COUNT.fullmatch, cells)):
        return None
    return np.array([int(cell) for cell in cells], np.int64).reshape(SLICES, CELLS, CELLS)
