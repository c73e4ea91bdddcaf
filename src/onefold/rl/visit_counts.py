"""Where an agent has been: how often each place was visited, in equal slices of a run's frames."""

import re
from typing import Any

import numpy as np

from onefold.rl.registry import DOOM_VARIANTS, has_goal

SLICES, CELLS = 20, 48


class VisitCounts:
    """Counts of positions on a grid over the world, [slice, row, column]."""

    def __init__(self, environment: str, frames: int) -> None:
        self.bounds, self.frames = map_bounds(environment), frames
        self.mapped = has_goal(environment)  # of other environments it is not known where positions can be
        self.counts = np.zeros((SLICES, CELLS, CELLS), np.int64)

    def add(self, frames: int, positions: np.ndarray) -> None:
        if not self.mapped:
            return
        left, bottom, right, top = self.bounds
        places = (positions - (left, bottom)) / (right - left, top - bottom)
        places = places[np.isfinite(places).all(1)]
        if len(places) == 0:
            return
        cells = np.clip((places * CELLS).astype(int), 0, CELLS - 1)
        np.add.at(self.counts[self._slice(frames)], (cells[:, 1], cells[:, 0]), 1)

    def restore(self, counts: np.ndarray, frames: int) -> None:
        """Be what another one was, of a run of so many frames. A slice of it that lies in two of these is in the later.

        That is exact if this run is as long as that one, or several times as long.
        """
        self.counts[:] = 0
        for i, part in enumerate(counts):
            self.counts[self._slice(-(-(i + 1) * frames // SLICES))] += part

    def _slice(self, frame: int) -> int:
        return min(SLICES - 1, SLICES * (frame - 1) // self.frames)

    def plain(self) -> dict[str, Any]:
        """As JSON has it: a line of text for each row of the grid, from the bottom."""
        rows = [[" ".join(map(str, row)) for row in part] for part in self.counts.tolist()]
        return {"bounds": list(self.bounds), "frames": self.frames, "counts": rows}


def map_bounds(environment: str) -> tuple[float, float, float, float]:
    """The smallest and largest coordinates of a world: left, bottom, right, top."""
    if environment in DOOM_VARIANTS:
        from onefold.rl.tasks import walls

        x, y = walls()[:, ::2], walls()[:, 1::2]
        return float(x.min()), float(y.min()), float(x.max()), float(y.max())
    found = re.search(r"-(\d+)$", environment)
    side = float(found[1]) if found else 1.0
    return 0.0, 0.0, side, side
