"""Figures of runs: learning curves, internal measurements of the agents, and maps of visited places."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

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
from onefold.report.figures import (
    DASHES,
    INK,
    MUTED,
    OUR_COLOURS,
    OUR_MARKERS,
    RIVAL_COLOURS,
    RIVAL_MARKERS,
    LineStyle,
    Panel,
    PanelFigure,
    label_text,
    style_axes,
)
from onefold.report.runs_comparison import AgentRuns, EnvironmentRuns, RunComparison
from onefold.report.runs_data import RETURN, SUCCESS, RunRecord
from onefold.report.runs_stats import bin_means, t_half_width
from onefold.report.runs_tables import format_makers, format_seeds
from onefold.rl.registry import DOOM_VARIANTS, has_goal
from onefold.rl.tasks import STARTS, GameMap, read_map
from onefold.rl.visit_counts import SLICES

Curve: TypeAlias = tuple[Float64[np.ndarray, " b"], Float64[np.ndarray, " b"]]
"""Frames and the values at them; NaN without a value."""

UNFINISHED = (0, (1, 1.6))  # dashes
MARGINS = {"intervals": 0.25, "lines": 0.1}  # above and below the lines, as shares of their height
MIN_INTERVAL_RUNS = 3  # the interval of two runs is six times as wide as their distance
MAX_SINGLE_LINES = 5  # runs drawn one by one: the mean of few runs with different ends says little
LOG_RATIO = 30  # ratio of the largest to the smallest value from which an axis is logarithmic
CURVES_CAPTION = (
    "Lines are means over finished runs; each run is averaged over the episodes that ended in each fiftieth of the "
    "frames. Shaded: 90 % intervals by Student's t, for agents with three finished runs or more. Thin lines are single "
    "runs, for agents with two to five."
)
INTERNALS_CAPTION = (
    "From progress.csv, since learning began; intervals may extend beyond the picture. Bonus: before its weight. Loss: "
    "of the returns, by each agent's own measure, so not comparable between agents. Targets clipped: the share of the "
    "target distribution beyond the support of the agent's return distribution."
)


class CurveMetric(NamedTuple):
    """A metric over frames: title and axis label of its panel, the curve of a run times `scale`, and which runs count.

    `limits` sets the vertical axis: "shares" is 0 to 100 %; "intervals" and "lines" follow the lines with a margin, of
    which intervals get more. Intervals of three runs can be so wide that the lines would not be readable otherwise.
    """

    title: str
    axis: str
    curve: Callable[[RunRecord], Curve]
    limits: Literal["intervals", "shares", "lines"] = "intervals"
    scale: float = 1.0
    applies: Callable[[RunRecord], bool] = lambda _: True


class AgentCurves(NamedTuple):
    """The curves of an agent in one panel."""

    agent: AgentRuns
    frames: Float64[np.ndarray, " b"]
    finished: Float64[np.ndarray, "n b"]
    unfinished: list[Curve]

    @property
    def mean(self) -> Float64[np.ndarray, " b"]:
        """The mean over finished runs; NaN where a run has no value yet."""
        return self.finished.mean(0) if len(self.finished) else np.full(len(self.frames), np.nan)

    @property
    def single(self) -> list[Float64[np.ndarray, " b"]]:
        """Finished runs that are drawn one by one."""
        return list(self.finished) if 2 <= len(self.finished) <= MAX_SINGLE_LINES else []


def curve_figures(
    environment: EnvironmentRuns, styles: dict[str, LineStyle], stem: str, coverage: CurveMetric | None
) -> list[PanelFigure]:
    """Return two figures of an environment: the agents' performance, and their internal measurements."""
    legend, (performance, internals) = _legend([environment], styles), _metrics(environment)
    if coverage is not None:
        performance = [*performance, coverage]
    internals = [metric for metric in internals if any(map(metric.applies, environment.records))]
    caption = f"{CURVES_CAPTION} {_describe_runs(environment)}"
    return [
        PanelFigure(f"{stem_start}_{stem}", environment.name, title, text, panels, legend)
        for stem_start, title, text, panels in (
            ("curves", "Learning curves", caption, [_panel(environment, styles, m) for m in performance]),
            ("inside", "Inside the agents", INTERNALS_CAPTION, [_panel(environment, styles, m) for m in internals]),
        )
    ]


def overview_figures(comparison: RunComparison, styles: dict[str, LineStyle]) -> list[PanelFigure]:
    """Return the figures of returns and of successes, with a panel for each environment."""
    figures = []
    for i, (stem, title) in enumerate((("returns", "Returns"), ("successes", "Episodes that reached the goal"))):
        environments = [e for e in comparison.environments if i < len(_metrics(e)[0])]
        panels = [_panel(e, styles, _metrics(e)[0][i], e.name) for e in environments]
        caption = " ".join([CURVES_CAPTION, *(f"{e.name}: {_describe_runs(e)}" for e in environments)])
        figures.append(PanelFigure(stem, "all environments", title, caption, panels, _legend(environments, styles)))
    return [figure for figure in figures if figure.panels]


def _describe_runs(environment: EnvironmentRuns) -> str:
    """Return the number of seeds, the commit and the machine of each agent's runs."""
    agents_by_makers: dict[str, list[str]] = {}
    for agent in environment.agents:
        description = f"{agent.title} {format_seeds(agent)}"
        agents_by_makers.setdefault(format_makers(agent.records), []).append(description)
    groups = [f"{', '.join(names)} (commit {makers})" for makers, names in agents_by_makers.items()]
    return f"Seeds: {'; '.join(groups)}."


def agent_styles(comparison: RunComparison) -> dict[str, LineStyle]:
    """Return a line style for each agent: solid for CSD, dashed for the others, equal in all figures."""
    is_ours = {agent.title: agent.ours for environment in comparison.environments for agent in environment.agents}
    ours, rivals = ([title for title, flag in is_ours.items() if flag is which] for which in (True, False))
    styles = {}
    for i, title in enumerate(ours):
        line = "-" if i < len(OUR_COLOURS) else DASHES[i // len(OUR_COLOURS) % len(DASHES)]
        styles[title] = LineStyle(OUR_COLOURS[i % len(OUR_COLOURS)], line, OUR_MARKERS[i % len(OUR_MARKERS)], 2.0)
    for i, title in enumerate(rivals):
        line = DASHES[(i + i // len(RIVAL_COLOURS)) % len(DASHES)]
        marker = RIVAL_MARKERS[i % len(RIVAL_MARKERS)]
        styles[title] = LineStyle(RIVAL_COLOURS[i % len(RIVAL_COLOURS)], line, marker, 1.4)
    return styles


def _metrics(environment: EnvironmentRuns) -> tuple[list[CurveMetric], list[CurveMetric]]:
    """Return the metrics of performance and the internal ones, in the bins of the environment."""
    edges = environment.edges

    def episodes(metric: str) -> Callable[[RunRecord], Curve]:
        return lambda r: (edges[1:], bin_means(r.episodes["frames"], r.episodes[metric], edges, r.frames))

    def progress(column: str) -> Callable[[RunRecord], Curve]:
        def curve(record: RunRecord) -> Curve:
            frames = record.progress["frames"]
            values = np.where(frames > record.run.learning.learning_starts, record.progress[column], np.nan)
            return edges[1:], bin_means(frames, values, edges, record.frames)

        return curve

    performance = [
        CurveMetric("Return", "return", episodes(RETURN)),
        CurveMetric("Reached the goal", "episodes, %", episodes(SUCCESS), "shares", 100),
    ]
    return performance[: 1 + has_goal(environment.name)], [
        CurveMetric("Bonus", "bonus", progress("bonus"), "lines", applies=lambda r: r.run.agent.bonus != "none"),
        CurveMetric("Loss", "loss", progress("loss"), "lines"),
        CurveMetric("Value of rewards", "Q", progress("q_value"), "lines"),
        CurveMetric("Value of bonuses", "U", progress("u_value"), "lines", applies=lambda r: r.run.agent.bonus_head),
        CurveMetric("Q targets clipped", "%", progress("q_clipped"), "lines", 100, lambda r: r.run.agent.atoms > 0),
        CurveMetric("U targets clipped", "%", progress("u_clipped"), "lines", 100, lambda r: r.run.agent.bonus_head),
    ]


def _panel(environment: EnvironmentRuns, styles: dict[str, LineStyle], metric: CurveMetric, title: str = "") -> Panel:
    curves = []
    for agent in environment.agents:
        records = [record for record in agent.records if metric.applies(record)]
        if records:
            lines = [(record.finished, *metric.curve(record)) for record in records]
            frames = lines[0][1]
            finished = [metric.scale * values for done, _, values in lines if done]
            unfinished = [(x, metric.scale * values) for done, x, values in lines if not done]
            stacked = np.stack(finished) if finished else np.zeros((0, len(frames)))
            curves.append(AgentCurves(agent, frames, stacked, unfinished))
    return Panel(_alt_text(environment, metric, curves), _draw_curves(curves, styles, metric, title or metric.title))


def _alt_text(environment: EnvironmentRuns, metric: CurveMetric, curves: Sequence[AgentCurves]) -> str:
    ends = []
    for agent_curves in curves:
        values = agent_curves.mean[np.isfinite(agent_curves.mean)]
        end = f"{values[-1]:.3g}" if len(values) else "has no finished run"
        ends.append(f"{agent_curves.agent.title} {end}")
    return f"{metric.title} ({metric.axis}) over frames in {environment.name}. At the end: {', '.join(ends)}."


def _draw_curves(
    curves: Sequence[AgentCurves], styles: dict[str, LineStyle], metric: CurveMetric, title: str
) -> Callable[[Axes], None]:
    def draw(ax: Axes) -> None:
        drawn: list[np.ndarray] = []
        for agent_curves in curves:
            style, frames, mean = styles[agent_curves.agent.title], agent_curves.frames, agent_curves.mean
            ax.plot(frames, mean, color=style.colour, ls=style.line, lw=style.width)
            if len(agent_curves.finished) >= MIN_INTERVAL_RUNS:
                half = t_half_width(agent_curves.finished)
                ax.fill_between(frames, mean - half, mean + half, color=style.colour, alpha=0.16, lw=0)
            for values in agent_curves.single:
                ax.plot(frames, values, color=style.colour, ls=style.line, lw=0.8, alpha=0.7)
            for x, values in agent_curves.unfinished:
                end = np.flatnonzero(np.isfinite(values))[-1:].tolist()
                ax.plot(x, values, color=style.colour, ls=UNFINISHED, lw=1.3, marker="x", ms=5, markevery=end)
            drawn += [mean, *agent_curves.single, *(values for _, values in agent_curves.unfinished)]
        style_axes(ax, label_text(title), "frames", metric.axis)
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.set_xlim(0, max((agent_curves.frames[-1] for agent_curves in curves), default=1.0))
        _set_limits(ax, metric, drawn)

    return draw


def _set_limits(ax: Axes, metric: CurveMetric, lines: Sequence[np.ndarray]) -> None:
    values = np.concatenate([np.zeros(0), *(line[np.isfinite(line)] for line in lines)])
    if not len(values):
        ax.text(0.5, 0.5, "nothing yet", transform=ax.transAxes, ha="center", va="center", color=MUTED)
    if metric.limits == "shares" or not len(values):
        ax.set_ylim(-3, 103)
        return
    low, high = float(values.min()), float(values.max())
    if metric.limits == "lines" and low > 0 and high > LOG_RATIO * low:
        ax.set_yscale("log")
        ax.set_ylim(low / 1.5, high * 1.5)
        ax.minorticks_off()
    else:
        bottom, top = ax.get_ylim()
        margin = MARGINS[metric.limits] * ((high - low) or abs(high) or 1.0)
        ax.set_ylim(max(bottom, low - margin), min(top, high + margin))


def _legend(environments: Sequence[EnvironmentRuns], styles: dict[str, LineStyle]) -> list[Artist]:
    """Return an entry for each agent, with the number of seeds if there is one environment, and for unfinished runs."""
    agents = {agent.title: agent for environment in environments for agent in environment.agents}
    entries: list[Artist] = []
    for title, agent in agents.items():
        style, n = styles[title], len(agent.finished)
        seeds = {1: "1 seed, no interval", 2: "2 seeds, thin lines"}.get(n, f"{n} seeds")
        label = label_text(f"{title}, {seeds}" if len(environments) == 1 else title, 44)
        entries.append(Line2D([], [], color=style.colour, ls=style.line, lw=style.width, label=label))
    if any(agent.unfinished for environment in environments for agent in environment.agents):
        look: dict[str, Any] = {"color": MUTED, "ls": UNFINISHED, "lw": 1.3, "marker": "x", "ms": 5}
        entries.append(Line2D([], [], label="an unfinished run", **look))
    return entries


# Maps of visited places

MAPS = 5  # in a row
MAX_MAP_HEIGHT = 4.0  # in widths; a map of one column of cells would become a picture of gigabytes
MAP_GAP = 0.06  # between two maps, in widths
# Maps have a dark background on every page, to distinguish few visits from none.
BACKGROUND, WALLS, START, GOAL = "#10151b", "#7d8a97", "#ffffff", "#37e0a9"
START_MARKER: dict[str, Any] = {"marker": "o", "ms": 3.2, "mfc": START, "mec": INK}
GOAL_MARKER: dict[str, Any] = {"marker": "*", "ms": 8, "mfc": GOAL, "mec": INK}
HEAT = LinearSegmentedColormap.from_list("visits", matplotlib.colormaps["inferno"](np.linspace(0.3, 1, 256)))


class EnvironmentMap(NamedTuple):
    """The grid of an environment: the rows and columns to draw, the cells that can be visited, and the game's map."""

    rows: Bool[np.ndarray, " r"]
    columns: Bool[np.ndarray, " c"]
    floor: Bool[np.ndarray, "r c"]
    bounds: tuple[float, float, float, float]
    game_map: GameMap | None
    starts: list[tuple[float, float]]

    @property
    def aspect(self) -> float:
        """Height over width, in the environment's units."""
        left, bottom, right, top = self.bounds
        return (top - bottom) / (right - left)

    @property
    def is_line(self) -> bool:
        """Whether all places lie in one row, as in a chain."""
        return bool(self.rows.sum() == 1)

    def to_cells(self, points: np.ndarray) -> np.ndarray:
        """Return coordinates x, y, x, y, … in cells of the grid, [n, 2]."""
        left, bottom, right, top = self.bounds
        shape = np.array(self.floor.shape[::-1])
        return (points.reshape(-1, 2) - (left, bottom)) / (right - left, top - bottom) * shape


def environment_map(environment: EnvironmentRuns) -> EnvironmentMap | None:
    """Return the map of an environment; None if its runs recorded no visits."""
    records = environment.records
    visited = np.any([record.visits.any(0) for record in records], axis=0)
    if not visited.any():
        return None
    bounds, game_map = records[0].bounds, _game_map(environment.name)
    if game_map is None:
        return EnvironmentMap(visited.any(1), visited.any(0), visited, bounds, None, [])
    start = STARTS[DOOM_VARIANTS[environment.name]]  # pyright: ignore[reportArgumentType]
    starts = list(game_map.spots.values()) if start is None else [game_map.spots[start.spot]]
    all_cells = np.ones(len(visited), bool)
    floor = floor_cells(game_map.walls, bounds, visited.shape)
    return EnvironmentMap(all_cells, all_cells, floor, bounds, game_map, starts)


def _game_map(name: str) -> GameMap | None:
    """Return the map of MyWayHome; None for other environments and without the vizdoom package."""
    try:
        return read_map() if name in DOOM_VARIANTS else None
    except (FileError, MissingExtraError):
        return None


def floor_cells(
    walls: np.ndarray, bounds: tuple[float, float, float, float], shape: tuple[int, ...]
) -> Bool[np.ndarray, "r c"]:
    """Return the cells whose centre lies within the walls: a ray to the left crosses an odd number of walls."""
    left, bottom, right, top = bounds
    y = bottom + (np.arange(shape[0])[:, None] + 0.5) * (top - bottom) / shape[0]
    x = left + (np.arange(shape[1])[:, None] + 0.5) * (right - left) / shape[1]
    ax, ay, bx, by = walls.astype(np.float64).T
    horizontal = ay == by  # parallel to the ray, never crossed
    crossing = ax + (y - ay) * (bx - ax) / np.where(horizontal, 1.0, by - ay)
    crossed = ((ay > y) != (by > y))[:, None, :] & (crossing[:, None, :] < x[None])
    return crossed.sum(-1) % 2 == 1


def coverage_metric(grid: EnvironmentMap) -> CurveMetric:
    """Return the metric of the share of places that a run has visited so far."""

    def curve(record: RunRecord) -> Curve:
        frames = record.run.frames * np.arange(1, SLICES + 1) / SLICES
        visited = np.logical_or.accumulate(record.visits > 0) & grid.floor
        share = visited.sum((1, 2)) / max(1, grid.floor.sum())
        return frames, np.where(frames <= record.mapped_frames, share, np.nan)

    return CurveMetric("Places ever visited", "places, %", curve, "shares", 100)


class VisitFigures(NamedTuple):
    """The maps of an environment: one figure to save and, for the page, one figure per agent and one legend."""

    file: PanelFigure
    agents: list[tuple[str, PanelFigure]]
    legend: PanelFigure


class MapRow(NamedTuple):
    """The maps of an agent: mean visits of each cell in each slice of the frames."""

    title: str
    counts: Float64[np.ndarray, "t h w"]
    spans: list[str]


def visit_figures(environment: EnvironmentRuns, grid: EnvironmentMap, stem: str) -> VisitFigures:
    """Return maps in slices of time or, where the places lie in a line, places over time."""
    rows = [_map_row(agent, grid, SLICES if grid.is_line else MAPS) for agent in environment.agents]
    positive = np.concatenate([row.counts[row.counts > 0] for row in rows])
    low = float(positive.min(initial=1.0))
    norm = LogNorm(low, float(positive.max(initial=10 * low)))
    texts, legend_entries = (environment.name, "Where the agents went", _map_caption(grid)), _map_legend(norm, grid)
    legend = PanelFigure("", *texts, [], legend_entries)
    alts = [f"Places in {environment.name} that {row.title} visited" for row in rows]
    if grid.is_line:
        places_per_cell = max(1.0, (grid.bounds[2] - grid.bounds[0]) / grid.floor.shape[1])
        panels = [
            Panel(alt, _draw_line(row, places_per_cell, agent.run.frames, norm))
            for alt, row, agent in zip(alts, rows, environment.agents, strict=True)
        ]
        file = PanelFigure(f"visits_{stem}", *texts, panels, legend_entries)
        return VisitFigures(file, [("", PanelFigure("", *texts, panels, []))], legend)
    height = grid.floor.shape[1] / grid.floor.shape[0] * grid.rows.sum() / grid.columns.sum() * grid.aspect
    height = min(MAX_MAP_HEIGHT, height)
    size = (4.7, 0.2 + len(rows) * (0.3 + 9 / MAPS * height))
    file = PanelFigure(f"visits_{stem}", *texts, [Panel("", _draw_maps(rows, grid, norm))], legend_entries, size)
    agents = []
    for row, alt in zip(rows, alts, strict=True):
        maps = [MapRow("", row.counts[i : i + 1], [span]) for i, span in enumerate(row.spans)]
        panels = [Panel(f"{alt}, {single.spans[0]} frames", _draw_maps([single], grid, norm)) for single in maps]
        agents.append((row.title, PanelFigure("", *texts, panels, [], (2.1, 0.3 + 2 * height))))
    return VisitFigures(file, agents, legend)


def _map_row(agent: AgentRuns, grid: EnvironmentMap, times: int) -> MapRow:
    """Return the maps over finished runs; without any, over the unfinished ones, with a title that says so."""
    runs = agent.finished or agent.unfinished
    slices = np.mean([run.visits for run in runs], axis=0).reshape(times, SLICES // times, *grid.floor.shape)
    counts = slices.sum(1)[:, grid.rows][:, :, grid.columns]
    frames = EngFormatter(sep="")
    ends = [frames(agent.run.frames * i / times) for i in range(times + 1)]
    title = agent.title if agent.finished else f"unfinished: {agent.title}"
    return MapRow(title, counts, [f"{a}–{b}" for a, b in pairwise(ends)])


def _draw_maps(rows: Sequence[MapRow], grid: EnvironmentMap, norm: LogNorm) -> Callable[[Axes], None]:
    """Return a function that draws one row of maps per agent into one picture."""
    height, width = rows[0].counts.shape[1:]
    text_height = height * 0.16

    def draw(ax: Axes) -> None:
        row_height, column_width = height + text_height, width * (1 + MAP_GAP)
        for i, row in enumerate(rows):
            for j, (counts, span) in enumerate(zip(row.counts, row.spans, strict=True)):
                corner = np.array([j * column_width, (len(rows) - 1 - i) * row_height])
                _draw_map(ax, counts, corner, grid, norm)
                title = f"{label_text(row.title)}:  {span}" if row.title and j == 0 else span
                ax.text(corner[0], corner[1] + 1.03 * height, title, fontsize=7.5, color=INK, va="bottom")
        ax.set_xlim(0, column_width * len(rows[0].spans) - width * MAP_GAP)
        ax.set_ylim(0, row_height * len(rows))
        ax.set_aspect(grid.aspect * grid.floor.shape[1] / grid.floor.shape[0])
        ax.axis("off")

    return draw


def _draw_map(ax: Axes, counts: np.ndarray, corner: np.ndarray, grid: EnvironmentMap, norm: LogNorm) -> None:
    (height, width), (x, y), layer = counts.shape, corner, 1 + len(ax.images)
    ax.add_patch(Rectangle((x, y), width, height, color=BACKGROUND, lw=0, zorder=layer))
    # Its own layer: matplotlib would merge images of one layer and resample them.
    _draw_counts(ax, counts, (x, x + width, y, y + height), norm, layer + 0.2)
    if grid.game_map is not None:
        walls = grid.to_cells(grid.game_map.walls).reshape(-1, 2, 2) + corner
        ax.add_collection(LineCollection(list(walls), colors=WALLS, linewidths=0.6, zorder=layer + 0.4))
        for points, look in ((grid.starts, START_MARKER), ([grid.game_map.goal], GOAL_MARKER)):
            ax.plot(*(grid.to_cells(np.array(points)) + corner).T, ls="", mew=0.5, zorder=layer + 0.6, **look)


def _draw_counts(
    ax: Axes, counts: np.ndarray, extent: tuple[float, float, float, float], norm: LogNorm, layer: float = 1.0
) -> None:
    """Draw one pixel per cell: thousands of shapes would make the page large."""
    masked = np.ma.masked_equal(counts, 0)
    ax.imshow(masked, HEAT, norm, origin="lower", extent=extent, aspect="auto", interpolation="none", zorder=layer)


def _draw_line(row: MapRow, places_per_cell: float, frames: int, norm: LogNorm) -> Callable[[Axes], None]:
    """Return a function that draws places from left to right and time upwards."""

    def draw(ax: Axes) -> None:
        counts = row.counts[:, 0]
        _draw_counts(ax, counts, (-0.5, places_per_cell * counts.shape[1] - 0.5, 0, frames), norm)
        ax.set_facecolor(BACKGROUND)
        style_axes(ax, label_text(row.title), "place", "frames")
        ax.grid(visible=False)
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        ax.yaxis.set_major_formatter(EngFormatter(sep=""))

    return draw


def _map_legend(norm: LogNorm, grid: EnvironmentMap) -> list[Artist]:
    """Return colours at powers of ten, and the markers of a map."""
    low, high = norm.vmin or 1.0, norm.vmax or 1.0
    steps = (1, 3) if high < 300 * low else (1,)
    values = [step * 10.0**k for k in range(-3, 13) for step in steps if low <= step * 10.0**k <= high]
    entries: list[Artist] = [
        Patch(color=to_hex(HEAT(norm(value))), label=f"{value:,g} visit{'s' * (value != 1)}") for value in values
    ]
    if grid.game_map is not None:
        looks = (("start", START_MARKER), ("goal", GOAL_MARKER))
        entries += [Line2D([], [], ls="", mew=0.5, label=label, **look) for label, look in looks]
    return entries


def _map_caption(grid: EnvironmentMap) -> str:
    layout = (
        "Places from left to right, time upwards."
        if grid.is_line
        else "Each map covers one fifth of the frames, stated above it."
    )
    share = (
        "Walls are the game's; the share of places visited refers to the cells within them."
        if grid.game_map is not None
        else "The share of places visited refers to the places that any run here visited."
    )
    return f"{layout} Mean visits over finished runs, on a logarithmic scale; brighter is more often. {share}"
