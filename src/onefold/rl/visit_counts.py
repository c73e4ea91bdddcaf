"""Counts of visited positions on a grid over the environment's map, in equal slices of a run's frames."""

import re
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from onefold.rl.registry import DOOM_VARIANTS, has_goal

SLICES, CELLS = 20, 48  # slices of the run; cells on each side of the grid


class VisitCounts:
    """Counts of visited positions, [slice, row, column]."""

    def __init__(self, environment: str, frames: int) -> None:
        self.bounds, self.frames = map_bounds(environment), frames
        self.enabled = has_goal(environment)  # the map of other environments is not known
        self.counts: Int64[np.ndarray, "slices rows columns"] = np.zeros((SLICES, CELLS, CELLS), np.int64)

    def add(self, frames: int, positions: Float32[np.ndarray, "e 2"]) -> None:
        """Count the positions of all environments at this number of frames; NaN is ignored."""
        if not self.enabled:
            return
        left, bottom, right, top = self.bounds
        relative = (positions - (left, bottom)) / (right - left, top - bottom)
        relative = relative[np.isfinite(relative).all(1)]
        if len(relative) == 0:
            return
        cells = np.clip((relative * CELLS).astype(int), 0, CELLS - 1)
        np.add.at(self.counts[self._slice(frames)], (cells[:, 1], cells[:, 0]), 1)

    def restore(self, counts: Int64[np.ndarray, "slices rows columns"], frames: int) -> None:
        """Continue from the counts of a run that had this many frames in all.

        A slice of that run that overlaps two slices of this run is added to the later one. So the counts are exact if
        this run is as long as that one, or a multiple of it.
        """
        self.counts[:] = 0
        for i, part in enumerate(counts):
            self.counts[self._slice(-(-(i + 1) * frames // SLICES))] += part

    def _slice(self, frame: int) -> int:
        return min(SLICES - 1, SLICES * (frame - 1) // self.frames)

    def to_json(self) -> dict[str, Any]:
        """Return the content of visits.json: a text of counts per row of the grid, from the bottom."""
        rows = [[" ".join(map(str, row)) for row in part] for part in self.counts.tolist()]
        return {"bounds": list(self.bounds), "frames": self.frames, "counts": rows}


def map_bounds(environment: str) -> tuple[float, float, float, float]:
    """Return the smallest and largest coordinates of an environment's map: left, bottom, right, top."""
    if environment in DOOM_VARIANTS:
        from onefold.rl.tasks import read_map

        walls = read_map().walls
        x, y = walls[:, ::2], walls[:, 1::2]
        return float(x.min()), float(y.min()), float(x.max()), float(y.max())
    match = re.search(r"-(\d+)$", environment)
    side = float(match[1]) if match else 1.0
    return 0.0, 0.0, side, side
