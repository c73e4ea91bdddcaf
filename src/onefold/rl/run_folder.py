"""What a run leaves behind: settings, curves, visited places, and checkpoints to go on from."""

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
from onefold.errors import FileError, InputError, warn
from onefold.rl.settings import Run, from_plain, plain
from onefold.rl.visit_counts import VisitCounts

FORMAT = 2
SETTINGS, PROGRESS, EPISODES, VISITS = "settings.json", "progress.csv", "episodes.csv", "visits.json"
CHECKPOINT, NETWORKS, LOCK = "checkpoint.safetensors", "networks.safetensors", ".lock"
CHECKPOINT_KIND, NETWORKS_KIND = "run's checkpoint", "agent's networks"
LARGEST_JSON = 2**20  # bytes: visits.json has 0.7 MB if every count has 13 digits
LARGEST_TABLE = 2**26  # bytes of a CSV file
LONGEST_LINE = 4096  # bytes of a line in it
LONGEST_REASON = 300  # characters
PROGRESS_COLUMNS = (
    "frames", "seconds", "frames_per_second", "episodes", "return", "success", "length", "q_value", "u_value", "loss",
    "td_error", "per_weight", "q_clipped", "u_clipped", "grad_norm", "bonus", "bonus_std", "bonus_loss",
    "worker_restarts",
)  # fmt: skip
EPISODE_COLUMNS = ("frames", "environment", "length", "return", "success")
TABLES: dict[str, tuple[str, ...]] = {PROGRESS: PROGRESS_COLUMNS, EPISODES: EPISODE_COLUMNS}
FINAL_SHARE = 0.1  # share of a run's frames that it is judged by


def final_episodes(
    frames: Float64[np.ndarray, " n"], environments: Float64[np.ndarray, " n"], total: int
) -> Bool[np.ndarray, " n"]:
    """Which episodes a run of so many frames is judged by: those that ended in the last tenth of them or, if none did,
    the last of every environment. Who fails ends few episodes, and must not be left out for it."""
    found = frames > (1 - FINAL_SHARE) * total
    if not found.any():
        found[[np.flatnonzero(environments == e)[-1] for e in np.unique(environments)]] = True
    return found


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """One process at a time writes to it."""
        return storage.file_lock(
            self.path / LOCK, InputError(f"another process is training in {self.path}: wait for it")
        )

    def check_new(self) -> None:
        """Refuse a folder that holds anything but a run that did not begin."""
        held = not self.path.is_dir() or any(path.name != LOCK for path in self.path.iterdir())
        if self.path.exists() and held and not self.is_unstarted():
            run = " and holds a run: go on with it by `onefold rl resume`" if (self.path / SETTINGS).exists() else ""
            raise InputError(f"{self.path} is not empty{run}; name another folder with -o")

    def is_unstarted(self) -> bool:
        """Whether it is of a run that was stopped before its first checkpoint: there is nothing to lose in it."""
        progress = self.path / PROGRESS
        done = progress.is_file() and len(list(itertools.islice(read_rows(progress), 2))) > 1
        return (self.path / SETTINGS).is_file() and not (self.path / CHECKPOINT).exists() and not done

    def create(self, run: Run, about: dict[str, Any]) -> None:
        """Make it, for a new run."""
        self.path.mkdir(parents=True, exist_ok=True)
        storage.write_json(self.path / SETTINGS, {"format": FORMAT, "run": plain(run), **about})
        for name, columns in TABLES.items():
            storage.write_bytes(self.path / name, (",".join(columns) + "\n").encode())

    def read_run(self) -> Run:
        """The run that it belongs to."""
        path = self.path / SETTINGS
        if not path.is_file():
            raise InputError(f"{self.path} holds no run: there is no {SETTINGS} in it")
        content = read_object(path)
        if content.get("format") != FORMAT:
            written = repr(content.get("format"))[:LONGEST_REASON]
            raise FileError(f"{path}: was written in format {written}, this version reads {FORMAT}")
        try:
            return from_plain(Run, content.get("run"))
        except InputError as error:
            raise FileError(f"{path}: is damaged ({str(error)[:LONGEST_REASON]})") from None

    def append(self, name: str, rows: Iterable[Sequence[Any]]) -> None:
        """Rows at the end of a CSV file, whole."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        path = self.path / name
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(text.getvalue())
        except OSError as error:  # a full disk gives no name
            raise OSError(error.errno, error.strerror, str(path)) from error

    def truncate(self, frames: int) -> None:
        """Forget what was written after so many frames, for that is going to happen again; and a row cut short.

        Damaged rows are left out with a warning. A table without its head is refused, and then none is changed.
        """
        tables = {name: _read_intact_lines(self.path / name, columns) for name, columns in TABLES.items()}
        for name, (lines, ends, damaged) in tables.items():
            if damaged:
                warn(f"{self.path / name}: damaged rows are left out ({damaged:,}). The other {len(lines):,} are kept.")
            kept = [",".join(TABLES[name]), *lines[: int(np.searchsorted(ends, frames, side="right"))]]
            storage.write_bytes(self.path / name, "".join(f"{line}\n" for line in kept).encode())

    def read_table(self, name: str) -> list[dict[str, str]]:
        """The whole rows of a CSV file."""
        head, *rows = [*read_rows(self.path / name)] or [[]]
        return [dict(zip(head, row, strict=True)) for row in rows if len(row) == len(head)]

    def save_checkpoint(self, tensors: dict[str, Tensor], run: Run) -> None:
        """A checkpoint, in place of the one before."""
        storage.save(self.path / CHECKPOINT, CHECKPOINT_KIND, tensors, {"run": plain(run)})

    def check_checkpoint(self) -> None:
        """Refuse a folder without a checkpoint."""
        if not (self.path / CHECKPOINT).is_file():
            raise InputError(f"{self.path}: there is no checkpoint in it to go on from")

    def load_checkpoint(self, run: Run) -> tuple[dict[str, Tensor], int]:
        """The last checkpoint, and for how many frames it was to be trained: as many as the run, or fewer."""
        self.check_checkpoint()
        path = self.path / CHECKPOINT
        tensors, header = storage.load(path, CHECKPOINT_KIND)
        before = from_plain(Run, header.get("run"))
        if replace(before, frames=run.frames) != run or before.frames > run.frames:
            raise FileError(f"{path}: belongs to a run with other settings than {SETTINGS}")
        return tensors, before.frames

    def update_settings(self, run: Run) -> None:
        """Write the run's settings anew if it has more frames than before."""
        if self.read_run() != run:
            storage.write_json(self.path / SETTINGS, {**read_object(self.path / SETTINGS), "run": plain(run)})

    def trained_frames(self) -> int:
        """For how many frames the networks that lie in it had been trained; they are the last that is written."""
        path = self.path / NETWORKS
        frames = storage.load(path, NETWORKS_KIND)[1].get("frames") if path.is_file() else None
        return frames if isinstance(frames, int) else 0

    def save_visits(self, visits: VisitCounts) -> None:
        """Where the agent has been so far."""
        storage.write_json(self.path / VISITS, visits.plain())


def read_rows(path: Path) -> Iterator[list[str]]:
    """Yield the values of every line of a CSV file of numbers. A last line without an end was cut short: left out.

    A line that is too long has no values.
    """
    if not path.is_file():
        raise FileError(f"{path}: is missing")
    if path.stat().st_size > LARGEST_TABLE:
        raise FileError(f"{path}: is larger than any file of a run")
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE):
            rest = line
            while not rest.endswith(b"\n") and (rest := file.readline(LONGEST_LINE)):
                line = b""
            if rest:
                yield line.decode("utf-8", "replace").rstrip("\r\n").split(",") if line else []


def read_columns(path: Path, names: Sequence[str]) -> dict[str, Float64[np.ndarray, " _"]]:
    """Return columns of a CSV file of numbers; refuse it if a line is damaged."""
    rows, values = read_rows(path), array("d")
    head = next(rows, [])
    if absent := [name for name in names if name not in head]:
        raise FileError(f"{path}: is damaged: it lacks the column {absent[0]}")
    places = [head.index(name) for name in names]
    for number, row in enumerate(rows, 2):
        if len(row) != len(head):
            raise FileError(f"{path}: is damaged: line {number} has {len(row)} values, not {len(head)}")
        try:
            values.extend(float(row[place]) for place in places)
        except ValueError as error:
            raise FileError(f"{path}: is damaged: line {number}: {str(error)[:LONGEST_REASON]}") from None
    columns = np.frombuffer(values).reshape(-1, len(names)).T
    return dict(zip(names, columns, strict=True))


def _read_intact_lines(path: Path, columns: Sequence[str]) -> tuple[list[str], Float64[np.ndarray, " _"], int]:
    """Return the lines of a CSV file that are not damaged, their frames, which never fall, and how many others are."""
    rows = read_rows(path)
    head = next(rows, [])
    if absent := [name for name in columns if name not in head]:
        first = ",".join(columns)
        raise FileError(f"{path}: is damaged: it lacks the column {absent[0]}. Restore its first line: {first}")
    places = [head.index(name) for name in columns]
    lines, ends, damaged = [], array("d"), 0
    for row in rows:
        try:
            end, *_ = [float(row[place]) for place in places]
        except (ValueError, IndexError):
            end = 0.0
        if len(row) == len(head) and end >= 1:
            lines.append(",".join(row[place] for place in places))
            ends.append(end)
        else:
            damaged += 1
    frames = np.frombuffer(ends)
    # A row that is out of order can have too many frames or too few: leave out the fewest.
    below = frames <= np.minimum.accumulate(frames[::-1])[::-1]
    above = frames >= np.maximum.accumulate(frames)
    ordered = below if below.sum() >= above.sum() else above
    kept = [line for line, good in zip(lines, ordered, strict=True) if good]
    return kept, frames[ordered], damaged + len(lines) - len(kept)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object that a run has left."""
    content = storage.read_json(path, LARGEST_JSON)
    if not isinstance(content, dict):
        raise FileError(f"{path}: is damaged: no JSON object")
    return content
