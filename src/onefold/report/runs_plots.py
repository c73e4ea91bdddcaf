"""Curves of runs: returns, successes, coverage, and what goes on inside the agents."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float64
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from onefold.report.figures import (
    DASHES,
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
from onefold.report.runs_read import Record
from onefold.report.runs_table import RETURN, SUCCESS, Row, Table, World
from onefold.report.runs_text import made_by, seeds
from onefold.report.stats import on_grid, t_half
from onefold.rl.registry import has_goal

Curve: TypeAlias = tuple[Float64[np.ndarray, " b"], Float64[np.ndarray, " b"]]
"""Frames, and values at them; NaN where there is none."""

UNFINISHED = (0, (1, 1.6))
BEYOND = {"intervals": 0.25, "lines": 0.1}  # of the lines' height, above and below them
FEWEST = 3  # runs for an interval: that of two is six times as wide as they lie apart, and fills the picture
MOST = 5  # runs that are shown one by one: a mean says little of few that end at opposite ends
WIDE = 30  # values of which the largest is so many times the smallest are on a logarithmic axis
SHADED = (
    "Lines are means over whole runs: of each, the mean of the episodes that ended in every fiftieth of the frames. "
    "Shaded are 90 % intervals by Student's t, where an agent has three whole runs or more; thin lines are the runs "
    "themselves, where they are two to five."
)
INSIDE = (
    "From progress.csv, since learning began; intervals may run out of the picture. Bonus: before its weight. Loss: of "
    "the returns, by each agent's own measure, so not to be compared between agents. Off the support: the share of the "
    "target's distribution that lies beyond what the agent's distribution of returns can hold."
)


class Kind(NamedTuple):
    """What a panel shows: its name, its axis, a run's curve times `scale`, and which runs have one.

    Its height is for shares from 0 to 100 %, or for its lines and their intervals; but of those only so much that the
    lines can still be seen: over three runs, they may be very wide.
    """

    title: str
    axis: str
    curve: Callable[[Record], Curve]
    high: Literal["intervals", "shares", "lines"] = "intervals"
    scale: float = 1.0
    has: Callable[[Record], bool] = lambda _: True


class Lines(NamedTuple):
    """An agent's curves in one panel."""

    row: Row
    x: Float64[np.ndarray, " b"]
    whole: Float64[np.ndarray, "n b"]
    unfinished: list[Curve]

    @property
    def middle(self) -> Float64[np.ndarray, " b"]:
        """NaN where there is no whole run, or where one has no value yet."""
        return self.whole.mean(0) if len(self.whole) else np.full(len(self.x), np.nan)

    @property
    def alone(self) -> list[Float64[np.ndarray, " b"]]:
        """Runs that are shown one by one."""
        return list(self.whole) if 2 <= len(self.whole) <= MOST else []


def curve_plates(world: World, styles: dict[str, LineStyle], stem: str, coverage: Kind | None) -> list[PanelFigure]:
    """Of one world: how the agents did, and what went on inside them."""
    keys, (outside, inside) = _keys([world], styles), _kinds(world)
    first = [_panel(world, styles, kind) for kind in [*outside, *([coverage] if coverage else [])]]
    found = [PanelFigure(f"curves_{stem}", world.name, "Learning curves", f"{SHADED} {_makers(world)}", first, keys)]
    records = [record for row in world.rows for record in row.records]
    second = [_panel(world, styles, kind) for kind in inside if any(map(kind.has, records))]
    return [*found, PanelFigure(f"inside_{stem}", world.name, "Inside the agents", INSIDE, second, keys)]


def overviews(table: Table, styles: dict[str, LineStyle]) -> list[PanelFigure]:
    """Returns, and successes, with a panel for each world."""
    found = []
    for i, (stem, title) in enumerate((("returns", "Returns"), ("successes", "Episodes that reached the goal"))):
        worlds = [world for world in table.worlds if i < len(_kinds(world)[0])]
        panels = [_panel(world, styles, _kinds(world)[0][i], world.name) for world in worlds]
        keys, makers = _keys(worlds, styles), [f"{world.name}: {_makers(world)}" for world in worlds]
        found.append(PanelFigure(stem, "all worlds", title, " ".join([SHADED, *makers]), panels, keys))
    return [plate for plate in found if plate.panels]


def _makers(world: World) -> str:
    """Which curve is of how many seeds, from which commit, on which machine."""
    makers: dict[str, list[str]] = {}
    for row in world.rows:
        makers.setdefault(made_by(row.records), []).append(f"{row.title} {seeds(row)}")
    said = [f"{', '.join(rows)} (commit {maker})" for maker, rows in makers.items()]
    return f"Seeds: {'; '.join(said)}."


def styles_of(table: Table) -> dict[str, LineStyle]:
    """CSD in full lines, rivals in broken ones, alike in all pictures."""
    rows = {row.title: row.ours for world in table.worlds for row in world.rows}
    ours, rivals = ([title for title, own in rows.items() if own == which] for which in (True, False))
    found = {}
    for i, title in enumerate(ours):
        line = "-" if i < len(OUR_COLOURS) else DASHES[i // len(OUR_COLOURS) % len(DASHES)]
        found[title] = LineStyle(OUR_COLOURS[i % len(OUR_COLOURS)], line, OUR_MARKERS[i % len(OUR_MARKERS)], 2.0)
    for i, title in enumerate(rivals):
        line = DASHES[(i + i // len(RIVAL_COLOURS)) % len(DASHES)]
        marker = RIVAL_MARKERS[i % len(RIVAL_MARKERS)]
        found[title] = LineStyle(RIVAL_COLOURS[i % len(RIVAL_COLOURS)], line, marker, 1.4)
    return found


def _kinds(world: World) -> tuple[list[Kind], list[Kind]]:
    """What is seen from outside, and what goes on inside, over one grid."""
    edges = world.edges

    def ended(figure: str) -> Callable[[Record], Curve]:
        return lambda r: (edges[1:], on_grid(r.episodes["frames"], r.episodes[figure], edges, r.frames))

    def learned(column: str) -> Callable[[Record], Curve]:
        def curve(record: Record) -> Curve:
            frames = record.progress["frames"]
            values = np.where(frames > record.run.learning.learning_starts, record.progress[column], np.nan)
            return edges[1:], on_grid(frames, values, edges, record.frames)

        return curve

    outside = [
        Kind("Return", "return", ended(RETURN)),
        Kind("Reached the goal", "episodes, %", ended(SUCCESS), "shares", 100),
    ]
    return outside[: 1 + has_goal(world.name)], [
        Kind("Bonus", "bonus", learned("bonus"), "lines", has=lambda r: r.run.agent.bonus != "none"),
        Kind("Loss", "loss", learned("loss"), "lines"),
        Kind("Value of rewards", "Q", learned("q_value"), "lines"),
        Kind("Value of bonuses", "U", learned("u_value"), "lines", has=lambda r: r.run.agent.bonus_head),
        Kind("Q targets clipped", "%", learned("q_clipped"), "lines", 100, lambda r: r.run.agent.atoms > 0),
        Kind("U targets clipped", "%", learned("u_clipped"), "lines", 100, lambda r: r.run.agent.bonus_head),
    ]


def _panel(world: World, styles: dict[str, LineStyle], kind: Kind, title: str = "") -> Panel:
    found = []
    for row in world.rows:
        own = [record for record in row.records if kind.has(record)]
        if own:
            curves = [(record.whole, *kind.curve(record)) for record in own]
            whole = [kind.scale * y for done, _, y in curves if done]
            stacked = np.stack(whole) if whole else np.zeros((0, len(curves[0][1])))
            found.append(Lines(row, curves[0][1], stacked, [(x, kind.scale * y) for done, x, y in curves if not done]))
    return Panel(_alt(world, kind, found), _drawing(found, styles, kind, title or kind.title))


def _alt(world: World, kind: Kind, found: Sequence[Lines]) -> str:
    ends = []
    for lines in found:
        known = lines.middle[np.isfinite(lines.middle)]
        ends.append(f"{lines.row.title} {known[-1]:.3g}" if len(known) else f"{lines.row.title} has no whole run")
    return f"{kind.title} ({kind.axis}) over frames in {world.name}. At the end: {', '.join(ends)}."


def _drawing(found: Sequence[Lines], styles: dict[str, LineStyle], kind: Kind, title: str) -> Callable[[Axes], None]:
    def draw(ax: Axes) -> None:
        for lines in found:
            style = styles[lines.row.title]
            ax.plot(lines.x, lines.middle, color=style.colour, ls=style.line, lw=style.width)
            if len(lines.whole) >= FEWEST:
                half = t_half(lines.whole)
                band = lines.middle - half, lines.middle + half
                ax.fill_between(lines.x, *band, color=style.colour, alpha=0.16, lw=0)
            for y in lines.alone:
                ax.plot(lines.x, y, color=style.colour, ls=style.line, lw=0.8, alpha=0.7)
            for x, y in lines.unfinished:
                end = np.flatnonzero(np.isfinite(y))[-1:].tolist()
                ax.plot(x, y, color=style.colour, ls=UNFINISHED, lw=1.3, marker="x", ms=5, markevery=end)
        style_axes(ax, label_text(title), "frames", kind.axis)
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.set_xlim(0, max((lines.x[-1] for lines in found), default=1.0))
        drawn = [[lines.middle, *lines.alone, *(y for _, y in lines.unfinished)] for lines in found]
        _heights(ax, kind, [y for part in drawn for y in part])

    return draw


def _heights(ax: Axes, kind: Kind, values: Sequence[np.ndarray]) -> None:
    known = np.concatenate([np.zeros(0), *(part[np.isfinite(part)] for part in values)])
    if not len(known):
        ax.text(0.5, 0.5, "nothing yet", transform=ax.transAxes, ha="center", va="center", color=MUTED)
    if kind.high == "shares" or not len(known):
        ax.set_ylim(-3, 103)
        return
    low, high = float(known.min()), float(known.max())
    if kind.high == "lines" and low > 0 and high > WIDE * low:
        ax.set_yscale("log")
        ax.set_ylim(low / 1.5, high * 1.5)
        ax.minorticks_off()
    else:
        bottom, top = ax.get_ylim()
        beyond = BEYOND[kind.high] * ((high - low) or abs(high) or 1.0)
        ax.set_ylim(max(bottom, low - beyond), min(top, high + beyond))


def _keys(worlds: Sequence[World], styles: dict[str, LineStyle]) -> list[Artist]:
    """Each agent and, where only one world is shown, how many seeds it has there."""
    rows = {row.title: row for world in worlds for row in world.rows}
    found: list[Artist] = []
    for title, row in rows.items():
        style, n = styles[title], len(row.whole)
        many = (
            f", {'1 seed, no interval' if n == 1 else '2 seeds, thin lines' if n == 2 else f'{n} seeds'}"
            if len(worlds) == 1
            else ""
        )
        found.append(
            Line2D([], [], color=style.colour, ls=style.line, lw=style.width, label=label_text(f"{title}{many}", 44))
        )
    if any(row.unfinished for world in worlds for row in world.rows):
        look = {"color": MUTED, "ls": UNFINISHED, "lw": 1.3, "marker": "x", "ms": 5}
        found.append(Line2D([], [], label="an unfinished run, alone", **look))
    return found
