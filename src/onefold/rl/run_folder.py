"""The folder of one run: settings, learning curves, counts of visits, networks and the checkpoint."""

import contextlib
import csv
import io
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64
from torch import Tensor

from onefold.core import storage
from onefold.core.schema import to_json
from onefold.errors import FileError, InputError, warn
from onefold.rl.settings import Run, parse_run
from onefold.rl.visit_counts import VisitCounts

FORMAT = 2
SETTINGS, PROGRESS, EPISODES, VISITS = "settings.json", "progress.csv", "episodes.csv", "visits.json"
CHECKPOINT, NETWORKS, LOCK = "checkpoint.safetensors", "networks.safetensors", ".lock"
CHECKPOINT_KIND, NETWORKS_KIND = "run's checkpoint", "agent's networks"
MAX_JSON = 2**20  # bytes; visits.json has 0.7 MB if every count has 13 digits
MAX_TABLE = 2**26  # bytes of a CSV file
MAX_LINE = 4096  # bytes of a line of a CSV file
MAX_REASON = 300  # characters of an error message
PROGRESS_COLUMNS = (
    "frames", "seconds", "frames_per_second", "episodes", "return", "success", "length", "q_value", "u_value", "loss",
    "td_error", "per_weight", "q_clipped", "u_clipped", "grad_norm", "bonus", "bonus_std", "bonus_loss",
    "worker_restarts",
)  # fmt: skip
EPISODE_COLUMNS = ("frames", "environment", "length", "return", "success")
TABLES: dict[str, tuple[str, ...]] = {PROGRESS: PROGRESS_COLUMNS, EPISODES: EPISODE_COLUMNS}
FINAL_SHARE = 0.1  # the last share of a run's frames, whose episodes give its final return


def final_episodes(
    frames: Float64[np.ndarray, " n"], environments: Float64[np.ndarray, " n"], total: int
) -> Bool[np.ndarray, " n"]:
    """Return a mask of the episodes that count for the final return of a run of `total` frames.

    These are the episodes that ended in the last tenth of the frames. If there is none, the last episode of every
    environment counts: agents that fail have few, long episodes and must not drop out of a mean.
    """
    final = frames > (1 - FINAL_SHARE) * total
    if not final.any():
        final[[np.flatnonzero(environments == e)[-1] for e in np.unique(environments)]] = True
    return final


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Hold the folder's lock; raise InputError if another process holds it."""
        error = InputError(f"{self.path}: another process is training in this folder. Wait until it has ended.")
        return storage.file_lock(self.path / LOCK, error)

    def check_new(self) -> None:
        """Raise InputError if the folder holds anything but a run without progress."""
        holds_files = not self.path.is_dir() or any(path.name != LOCK for path in self.path.iterdir())
        if self.path.exists() and holds_files and not self.is_unstarted():
            content = "holds a run" if (self.path / SETTINGS).exists() else "is not empty"
            resume = "Continue it with `onefold rl resume`, or choose" if content == "holds a run" else "Choose"
            raise InputError(f"{self.path}: {content}. {resume} another folder with -o.")

    def is_unstarted(self) -> bool:
        """Return True if the run was stopped before its first checkpoint, so that nothing can be lost."""
        progress = self.path / PROGRESS
        has_rows = progress.is_file() and len(list(itertools.islice(read_rows(progress), 2))) > 1
        return (self.path / SETTINGS).is_file() and not (self.path / CHECKPOINT).exists() and not has_rows

    def create(self, run: Run, origin: dict[str, Any]) -> None:
        """Make the folder of a new run, with empty tables; `origin` is the provenance."""
        self.path.mkdir(parents=True, exist_ok=True)
        storage.write_json(self.path / SETTINGS, {"format": FORMAT, "run": to_json(run), **origin})
        for name, columns in TABLES.items():
            storage.write_bytes(self.path / name, (",".join(columns) + "\n").encode())

    def read_run(self) -> Run:
        """Return the run of settings.json."""
        path = self.path / SETTINGS
        if not path.is_file():
            raise InputError(f"{self.path}: holds no run (there is no {SETTINGS}).")
        content = read_object(path)
        if content.get("format") != FORMAT:
            written_format = repr(content.get("format"))[:MAX_REASON]
            raise FileError(f"{path}: has format {written_format}, this version of onefold reads format {FORMAT}.")
        try:
            return parse_run(content.get("run"))
        except InputError as error:
            raise FileError(f"{path}: is damaged ({str(error)[:MAX_REASON]})") from None

    def update_settings(self, run: Run) -> None:
        """Write settings.json again if the run has changed, as when it is trained longer."""
        if self.read_run() != run:
            storage.write_json(self.path / SETTINGS, {**read_object(self.path / SETTINGS), "run": to_json(run)})

    def append(self, name: str, rows: Iterable[Sequence[Any]]) -> None:
        """Append rows to a CSV file."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        path = self.path / name
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(text.getvalue())
        except OSError as error:  # the error of a full disk does not name the file
            raise OSError(error.errno, error.strerror, str(path)) from error

    def truncate(self, frames: int) -> None:
        """Remove the rows after this number of frames from the tables, and rows that are damaged or cut short.

        Damaged rows cause a warning. If a table has no head, raise FileError and change neither table.
        """
        tables = {name: _read_intact_lines(self.path / name, columns) for name, columns in TABLES.items()}
        for name, (lines, line_frames, damaged) in tables.items():
            if damaged:
                warn(f"{self.path / name}: damaged rows are left out ({damaged:,}). The other {len(lines):,} are kept.")
            content = [",".join(TABLES[name]), *lines[: int(np.searchsorted(line_frames, frames, side="right"))]]
            storage.write_bytes(self.path / name, "".join(f"{line}\n" for line in content).encode())

    def read_table(self, name: str) -> list[dict[str, str]]:
        """Return the complete rows of a CSV file."""
        head, *rows = [*read_rows(self.path / name)] or [[]]
        return [dict(zip(head, row, strict=True)) for row in rows if len(row) == len(head)]

    def save_checkpoint(self, tensors: dict[str, Tensor], run: Run) -> None:
        """Replace the checkpoint."""
        storage.save(self.path / CHECKPOINT, CHECKPOINT_KIND, tensors, {"run": to_json(run)})

    def check_checkpoint(self) -> None:
        """Raise InputError if there is no checkpoint."""
        if not (self.path / CHECKPOINT).is_file():
            raise InputError(f"{self.path}: there is no checkpoint to resume from. Train the run again.")

    def load_checkpoint(self, run: Run) -> tuple[dict[str, Tensor], int]:
        """Return the tensors of the checkpoint, and the length of the run when it was written.

        The length may be less than that of `run`; all other settings must be equal.
        """
        self.check_checkpoint()
        path = self.path / CHECKPOINT
        tensors, header = storage.load(path, CHECKPOINT_KIND)
        saved_run = parse_run(header.get("run"))
        if replace(saved_run, frames=run.frames) != run or saved_run.frames > run.frames:
            raise FileError(f"{path}: belongs to a run with other settings than {SETTINGS}.")
        return tensors, saved_run.frames

    def trained_frames(self) -> int:
        """Return after how many frames the networks were saved, or 0. They are the last file that a run writes."""
        path = self.path / NETWORKS
        frames = storage.load(path, NETWORKS_KIND)[1].get("frames") if path.is_file() else None
        return frames if isinstance(frames, int) else 0

    def save_visits(self, visits: VisitCounts) -> None:
        """Replace visits.json."""
        storage.write_json(self.path / VISITS, visits.to_json())


def read_rows(path: Path) -> Iterator[list[str]]:
    """Yield the values of each line of a CSV file of numbers, except an unfinished last line.

    A line of more than 4,096 bytes has no values.
    """
    if not path.is_file():
        raise FileError(f"{path}: is missing")
    if path.stat().st_size > MAX_TABLE:
        raise FileError(f"{path}: is larger than any table of a run ({MAX_TABLE:,} bytes).")
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE):
            rest = line
            while not rest.endswith(b"\n") and (rest := file.readline(MAX_LINE)):
                line = b""
            if rest:
                yield line.decode("utf-8", "replace").rstrip("\r\n").split(",") if line else []


def read_columns(path: Path, names: Sequence[str]) -> dict[str, Float64[np.ndarray, " _"]]:
    """Return columns of a CSV file of numbers; raise FileError if a line is damaged."""
    rows, values = read_rows(path), array("d")
    head = next(rows, [])
    if missing := [name for name in names if name not in head]:
        raise FileError(f"{path}: is damaged: it lacks the column {missing[0]}")
    indices = [head.index(name) for name in names]
    for number, row in enumerate(rows, 2):
        if len(row) != len(head):
            raise FileError(f"{path}: is damaged: line {number} has {len(row)} values, not {len(head)}")
        try:
            values.extend(float(row[index]) for index in indices)
        except ValueError as error:
            raise FileError(f"{path}: is damaged: line {number}: {str(error)[:MAX_REASON]}") from None
    columns = np.frombuffer(values).reshape(-1, len(names)).T
    return dict(zip(names, columns, strict=True))


def _read_intact_lines(path: Path, columns: Sequence[str]) -> tuple[list[str], Float64[np.ndarray, " _"], int]:
    """Return the intact lines of a CSV file, the frames of each in ascending order, and the number of other lines."""
    rows = read_rows(path)
    head = next(rows, [])
    if missing := [name for name in columns if name not in head]:
        first = ",".join(columns)
        raise FileError(f"{path}: is damaged: it lacks the column {missing[0]}. Restore its first line: {first}")
    indices = [head.index(name) for name in columns]
    lines, line_frames, damaged = [], array("d"), 0
    for row in rows:
        try:
            frames_of_row, *_ = [float(row[index]) for index in indices]
        except (ValueError, IndexError):
            frames_of_row = 0.0
        if len(row) == len(head) and frames_of_row >= 1:
            lines.append(",".join(row[index] for index in indices))
            line_frames.append(frames_of_row)
        else:
            damaged += 1
    frames = np.frombuffer(line_frames)
    # A row out of order has either too many frames or too few: leave out the fewest rows.
    not_above_later = frames <= np.minimum.accumulate(frames[::-1])[::-1]
    not_below_earlier = frames >= np.maximum.accumulate(frames)
    ordered = not_above_later if not_above_later.sum() >= not_below_earlier.sum() else not_below_earlier
    intact = [line for line, is_ordered in zip(lines, ordered, strict=True) if is_ordered]
    return intact, frames[ordered], damaged + len(lines) - len(intact)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file that a run has written."""
    content = storage.read_json(path, MAX_JSON)
    if not isinstance(content, dict):
        raise FileError(f"{path}: is damaged: no JSON object")
    return content
