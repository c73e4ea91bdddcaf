"""Maps of where agents have been, in slices of time, and how much of the world they know."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from jaxtyping import Bool, Float64
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_hex
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import EngFormatter, MaxNLocator

from onefold.errors import FileError, MissingExtraError
from onefold.report.figures import INK, Panel, PanelFigure, label_text, style_axes
from onefold.report.runs_plots import Curve, Kind
from onefold.report.runs_read import Record
from onefold.report.runs_table import Row, World
from onefold.rl.registry import DOOM_VARIANTS
from onefold.rl.tasks import STARTS, GameMap, read_map
from onefold.rl.visit_counts import SLICES

TIMES = 5  # maps in a row
TALLEST = 4.0  # of a map, in its widths: a column of single places would make a picture of gigabytes
GAP = 0.06  # of a map's width, between two of them
# A map is dark on every page, so that few visits can be seen beside none.
NIGHT, WALLS, START, GOAL = "#10151b", "#7d8a97", "#ffffff", "#37e0a9"
START_LOOK: dict[str, Any] = {"marker": "o", "ms": 3.2, "mfc": START, "mec": INK}
GOAL_LOOK: dict[str, Any] = {"marker": "*", "ms": 8, "mfc": GOAL, "mec": INK}
HEAT = LinearSegmentedColormap.from_list("visits", matplotlib.colormaps["inferno"](np.linspace(0.3, 1, 256)))


class Places(NamedTuple):
    """A world's places: which of the grid's rows and columns are shown, what can be visited, and the map, if any."""

    rows: Bool[np.ndarray, " r"]
    columns: Bool[np.ndarray, " c"]
    floor: Bool[np.ndarray, "r c"]
    bounds: tuple[float, float, float, float]
    plan: GameMap | None
    spots: list[tuple[float, float]]

    @property
    def shape(self) -> float:
        """Height over width, in the world's own units."""
        left, bottom, right, top = self.bounds
        return (top - bottom) / (right - left)

    @property
    def flat(self) -> bool:
        """All places lie in a line, as those of a chain."""
        return bool(self.rows.sum() == 1)

    def cells(self, points: np.ndarray) -> np.ndarray:
        """x, y, x, y, … in cells of the grid."""
        left, bottom, right, top = self.bounds
        shape = np.array(self.floor.shape[::-1])
        return (points.reshape(-1, 2) - (left, bottom)) / (right - left, top - bottom) * shape


def places(world: World) -> Places | None:
    """What is known of a world's places; None if its runs say nothing of them."""
    records = [record for row in world.rows for record in row.records]
    seen = np.any([record.visits.any(0) for record in records], axis=0)
    if not seen.any():
        return None
    bounds, plan = records[0].bounds, _plan(world.name)
    if plan is None:
        return Places(seen.any(1), seen.any(0), seen, bounds, None, [])
    start = STARTS[DOOM_VARIANTS[world.name]]  # pyright: ignore[reportArgumentType]
    spots = list(plan.spots.values()) if start is None else [plan.spots[start.spot]]
    everything = np.ones(len(seen), bool)
    return Places(everything, everything, inside(plan.walls, bounds, seen.shape), bounds, plan, spots)


def _plan(name: str) -> GameMap | None:
    """MyWayHome's map, where its package is there to be read."""
    try:
        return read_map() if name in DOOM_VARIANTS else None
    except (FileError, MissingExtraError):
        return None


def inside(
    walls: np.ndarray, bounds: tuple[float, float, float, float], shape: tuple[int, ...]
) -> Bool[np.ndarray, "r c"]:
    """The cells whose middle lies within the walls: a line from there to the left crosses an odd number of them."""
    left, bottom, right, top = bounds
    y = bottom + (np.arange(shape[0])[:, None] + 0.5) * (top - bottom) / shape[0]
    x = left + (np.arange(shape[1])[:, None] + 0.5) * (right - left) / shape[1]
    ax, ay, bx, by = walls.astype(np.float64).T
    level = ay == by  # a wall along the line is never crossed
    crossing = ax + (y - ay) * (bx - ax) / np.where(level, 1.0, by - ay)
    crossed = ((ay > y) != (by > y))[:, None, :] & (crossing[:, None, :] < x[None])
    return crossed.sum(-1) % 2 == 1


def coverage(found: Places) -> Kind:
    """The share of the world's places that a run has visited by then."""

    def curve(record: Record) -> Curve:
        frames = record.run.frames * np.arange(1, SLICES + 1) / SLICES
        known = np.logical_or.accumulate(record.visits > 0) & found.floor
        share = known.sum((1, 2)) / max(1, found.floor.sum())
        return frames, np.where(frames <= record.mapped, share, np.nan)

    return Kind("Places ever visited", "places, %", curve, "shares", 100)


class Maps(NamedTuple):
    """Of one world: a plate for files and, for the page, a plate for each agent and the legend of all."""

    file: PanelFigure
    rows: list[tuple[str, PanelFigure]]
    legend: PanelFigure


class Strip(NamedTuple):
    """An agent's maps: how often each place was visited in each slice of time, in the mean over its runs."""

    title: str
    counts: Float64[np.ndarray, "t h w"]
    spans: list[str]


def map_plates(world: World, found: Places, stem: str) -> Maps:
    """Where the agents went: maps in slices of time or, where places lie in a line, places over time."""
    strips = [_strip(row, found, SLICES if found.flat else TIMES) for row in world.rows]
    some = np.concatenate([strip.counts[strip.counts > 0] for strip in strips])
    low = float(some.min(initial=1.0))
    norm = LogNorm(low, float(some.max(initial=10 * low)))
    about, keys = (world.name, "Where the agents went", _caption(found)), _keys(norm, found)
    legend = PanelFigure("", *about, [], keys)
    alts = [f"Places in {world.name} that {strip.title} visited" for strip in strips]
    if found.flat:
        step = max(1.0, (found.bounds[2] - found.bounds[0]) / found.floor.shape[1])  # places of a cell
        frames = [row.records[0].run.frames for row in world.rows]
        drawn = [_line(strip, step, total, norm) for strip, total in zip(strips, frames, strict=True)]
        panels = list(map(Panel, alts, drawn))
        file = PanelFigure(f"visits_{stem}", *about, panels, keys)
        return Maps(file, [("", PanelFigure("", *about, panels, []))], legend)
    high = found.floor.shape[1] / found.floor.shape[0] * found.rows.sum() / found.columns.sum() * found.shape
    high = min(TALLEST, high)
    size = (4.7, 0.2 + len(strips) * (0.3 + 9 / TIMES * high))
    file = PanelFigure(f"visits_{stem}", *about, [Panel("", _atlas(strips, found, norm))], keys, size)
    rows = []
    for strip, alt in zip(strips, alts, strict=True):
        singles = [Strip("", strip.counts[i : i + 1], [span]) for i, span in enumerate(strip.spans)]
        panels = [Panel(f"{alt}, {single.spans[0]} frames", _atlas([single], found, norm)) for single in singles]
        rows.append((strip.title, PanelFigure("", *about, panels, [], (2.1, 0.3 + 2 * high))))
    return Maps(file, rows, legend)


def _strip(row: Row, found: Places, times: int) -> Strip:
    """Over whole runs; where there is none, over the unfinished ones, and its title says so."""
    runs, frames = row.whole or row.unfinished, row.records[0].run.frames
    counts = np.mean([run.visits for run in runs], axis=0).reshape(times, SLICES // times, *found.floor.shape).sum(1)
    named = EngFormatter(sep="")
    ends = [named(frames * i / times) for i in range(times + 1)]
    title = row.title if row.whole else f"unfinished: {row.title}"
    return Strip(title, counts[:, found.rows][:, :, found.columns], [f"{a}–{b}" for a, b in pairwise(ends)])


def _atlas(strips: Sequence[Strip], found: Places, norm: LogNorm) -> Callable[[Axes], None]:
    """A row of maps for each strip, in one picture."""
    height, width = strips[0].counts.shape[1:]
    above = height * 0.16  # room for a line of text

    def draw(ax: Axes) -> None:
        tall, wide = height + above, width * (1 + GAP)
        for i, strip in enumerate(strips):
            for j, (counts, span) in enumerate(zip(strip.counts, strip.spans, strict=True)):
                corner = np.array([j * wide, (len(strips) - 1 - i) * tall])
                _map(ax, counts, corner, found, norm)
                title = f"{label_text(strip.title)}:  {span}" if strip.title and j == 0 else span
                ax.text(corner[0], corner[1] + 1.03 * height, title, fontsize=7.5, color=INK, va="bottom")
        ax.set_xlim(0, wide * len(strips[0].spans) - width * GAP)
        ax.set_ylim(0, tall * len(strips))
        ax.set_aspect(found.shape * found.floor.shape[1] / found.floor.shape[0])
        ax.axis("off")

    return draw


def _map(ax: Axes, counts: np.ndarray, corner: np.ndarray, found: Places, norm: LogNorm) -> None:
    (height, width), (x, y), layer = counts.shape, corner, 1 + len(ax.images)
    ax.add_patch(Rectangle((x, y), width, height, color=NIGHT, lw=0, zorder=layer))
    _image(ax, counts, (x, x + width, y, y + height), norm, layer + 0.2)  # alone on its layer: else it would be redrawn
    if found.plan is not None:
        walls = found.cells(found.plan.walls).reshape(-1, 2, 2) + corner
        ax.add_collection(LineCollection(list(walls), colors=WALLS, linewidths=0.6, zorder=layer + 0.4))
        for points, look in ((found.spots, START_LOOK), ([found.plan.goal], GOAL_LOOK)):
            ax.plot(*(found.cells(np.array(points)) + corner).T, ls="", mew=0.5, zorder=layer + 0.6, **look)


def _image(
    ax: Axes, counts: np.ndarray, extent: tuple[float, float, float, float], norm: LogNorm, layer: float = 1.0
) -> None:
    """A cell of the grid is a pixel: thousands of shapes would make the page heavy."""
    shown = np.ma.masked_equal(counts, 0)
    ax.imshow(shown, HEAT, norm, origin="lower", extent=extent, aspect="auto", interpolation="none", zorder=layer)


def _line(strip: Strip, step: float, frames: int, norm: LogNorm) -> Callable[[Axes], None]:
    """Places in a line, from left to right, over time."""

    def draw(ax: Axes) -> None:
        counts = strip.counts[:, 0]
        _image(ax, counts, (-0.5, step * counts.shape[1] - 0.5, 0, frames), norm)
        ax.set_facecolor(NIGHT)
        style_axes(ax, label_text(strip.title), "place", "frames")
        ax.grid(visible=False)
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        ax.yaxis.set_major_formatter(EngFormatter(sep=""))

    return draw


def _keys(norm: LogNorm, found: Places) -> list[Artist]:
    """Colours at powers of ten, and what is marked on a map."""
    low, high = norm.vmin or 1.0, norm.vmax or 1.0
    steps = (1, 3) if high < 300 * low else (1,)
    values = [step * 10.0**k for k in range(-3, 13) for step in steps if low <= step * 10.0**k <= high]
    keys: list[Artist] = [
        Patch(color=to_hex(HEAT(norm(value))), label=f"{value:,g} visit{'s' * (value != 1)}") for value in values
    ]
    if found.plan is not None:
        looks = (("start", START_LOOK), ("goal", GOAL_LOOK))
        keys += [Line2D([], [], ls="", mew=0.5, label=label, **look) for label, look in looks]
    return keys


def _caption(found: Places) -> str:
    how = (
        "Each place from left to right, time upwards."
        if found.flat
        else "Each map is a fifth of the frames, which stand above it."
    )
    what = (
        "Walls are the map's; the share of places visited is of the cells within them."
        if found.plan is not None
        else "The share of places visited is of those that any run here ever visited."
    )
    return f"{how} Visits in the mean over whole runs; brighter is more often, on a logarithmic scale. {what}"
