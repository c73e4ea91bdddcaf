"""Runs in words: tables as texts, what has to be said about them, and both as Markdown and as JSON."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from onefold.errors import visible
from onefold.report.origins import count_origins
from onefold.report.runs_read import Found, Record
from onefold.report.runs_table import RETURN, SUCCESS, Duel, Row, Table, World, titles
from onefold.report.seeds import mean
from onefold.report.stats import Interval, on_grid
from onefold.report.tables import (
    NO_VALUE,
    Cell,
    TextTable,
    escape_markdown,
    format_count,
    format_number,
    markdown_table,
)
from onefold.rl.registry import has_goal
from onefold.rl.visit_counts import SLICES

RULES = (
    "Final figures are over the episodes that ended in the last tenth of a run's frames (if none did, over the last of "
    "every environment), and over whole runs only. Returns are sums of rewards, not discounted.",
    "IQM: interquartile mean over runs, with a 95 % stratified bootstrap interval that draws runs within worlds. "
    "Where there is a single run of a world, there is none.",
    "Probability of improvement: that a run of the row's agent ends with a higher return than one of the column's, "
    "equal returns counting one half (Mann and Whitney), within worlds and averaged over them, among runs of as many "
    "frames; 95 % bootstrap intervals, where both have two runs or more. With few runs, a bootstrap's intervals are "
    "too narrow.",
    "First goal: frames at the end of the first episode that reached the goal, median over runs; those that never did "
    "count as later than all others.",
)
AGENT_HEADS = [
    "Agent", "Seeds", "Frames", "Return, mean", "Return, IQM", "Success %, mean", "Success %, IQM", "First goal",
    "Frames/s", "Time", "Replaced workers",
]  # fmt: skip
RUN_HEADS = [
    "Run", "Agent", "Seed", "State", "Return", "Success %", "First goal", "Frames/s", "Time", "Replaced workers",
    "Commit and machine",
]  # fmt: skip


def grids(world: World) -> list[TextTable]:
    """Of one world: how well the agents did, who beats whom, and every run."""
    found = [_agents(world), *_duels(world.duels, f"Probability of improvement in {visible(world.name)}")]
    return [*found, _runs(world)]


def shared_grids(table: Table) -> list[TextTable]:
    """Of all worlds together."""
    rows: list[tuple[str, list[str | Cell]]] = [
        ("", [visible(title), str(e.n), percent(e.mean), _ranged(e.iqm, e.interval, percent)])
        for title, e in table.shared.items()
    ]
    heads = ["Agent", "Runs", "Success %, mean", "Success %, IQM"]
    found = [TextTable("Final success over all worlds", heads, 1, rows)] if rows else []
    return [*found, *_duels(table.duels, "Probability of improvement, averaged over worlds")]


def _agents(world: World) -> TextTable:
    rows = []
    for row in world.rows:
        cells = [visible(row.title), seeds(row), f"{row.frames:,}"]
        for figure, said in ((RETURN, plain_number), (SUCCESS, percent)):
            e = world.estimate(row, figure)
            cells += [NO_VALUE, NO_VALUE] if e is None else [said(e.mean), _ranged(e.iqm, e.interval, said)]
        cells.append(_goals(row))
        speed, seconds, replaced = _cost(row)
        cells.append(NO_VALUE if speed is None else format_number(speed, 0))
        cells.append(NO_VALUE if seconds is None else clock(seconds))
        rows.append((kind(row), [*cells, str(replaced)]))
    return TextTable(f"Final performance in {visible(world.name)}", AGENT_HEADS, 1, rows)


def _cost(row: Row) -> tuple[float | None, float | None, int]:
    """Frames a second and seconds in the mean over whole runs; replaced workers of all runs together."""
    speeds = [record.speed for record in row.whole if record.speed is not None]
    seconds = [record.seconds for record in row.whole]
    replaced = sum(record.replaced for record in row.records)
    return mean(speeds) if speeds else None, mean(seconds) if seconds else None, replaced


def _runs(world: World) -> TextTable:
    rows = [(kind(row), _run(row, record)) for row in world.rows for record in row.records]
    return TextTable(f"Every run in {visible(world.name)}", RUN_HEADS, 2, rows)


def _run(row: Row, record: Record) -> list[Any]:
    final, success = record.final(RETURN), record.final(SUCCESS)
    return [
        visible(record.path),
        visible(row.title),
        str(record.run.seed),
        state(record),
        NO_VALUE if final is None else plain_number(final),
        NO_VALUE if success is None else percent(success),
        _goal(record),
        NO_VALUE if record.speed is None else format_number(record.speed, 0),
        clock(record.seconds),
        str(record.replaced),
        made_by([record]),
    ]


def _duels(duels: Sequence[Duel], what: str) -> list[TextTable]:
    if not duels:
        return []
    by_pair = {(duel.first, duel.second): duel for duel in duels}
    titles = list(dict.fromkeys(duel.first for duel in duels))
    rows = []
    for first in titles:
        found = [by_pair.get((first, second)) for second in titles]
        cells = [NO_VALUE if duel is None else _ranged(duel.probability, duel.interval, chance) for duel in found]
        rows.append(("", [visible(first), *cells]))
    return [TextTable(what, ["is better than …", *map(visible, titles)], 1, rows)]


def remarks(found: Found, table: Table) -> list[str]:
    """What a reader has to know before the figures."""
    said = [*_of_runs(table), *_of_origins(table), *_of_all_worlds(table)]
    if found.skipped:
        said.append(f"Left out, for the reasons listed below: {format_count(len(found.skipped), 'run')}.")
    return said


def _of_runs(table: Table) -> Iterator[str]:
    if open_ := [record for record in table.records if not record.whole]:
        yield (
            f"Unfinished: {format_count(len(open_), 'run')} of {len(table.records)}. Each is drawn alone, "
            "as a dotted line that ends in a cross, and is in no mean."
        )
    if partly := [f"{row.title} in {w.name}" for w in table.worlds for row in w.rows if row.whole and row.unfinished]:
        yield f"Final figures are of the runs that ended, and others may do worse: {visible(', '.join(partly))}."
    if any(len(row.whole) == 1 for world in table.worlds for row in world.rows):
        yield "Where an agent has one whole run only, there is no interval: nothing is known of the spread."
    if any(len({row.records[0].run.name for row in w.rows}) < len(w.rows) for w in table.worlds):
        yield "Runs of one agent with different settings are apart, named by what differs."
    if uneven := [w.name for w in table.worlds if len({row.frames for row in w.rows}) > 1]:
        yield (
            f"Some agents were given more frames than others in {visible(', '.join(uneven))}: final figures are of the "
            "end of each run, and who is better is said of runs of as many frames only."
        )
    for world in table.worlds:
        if world.unlike:
            yield visible(f"Agents also differ in how they learn in {world.name}: {'; '.join(world.unlike)}.")


def _of_origins(table: Table) -> Iterator[str]:
    made = origins(table.records)
    if len(made["device"]) > 1:
        yield "The runs were made on different machines: their speeds and times cannot be compared."
    if any(name.endswith("+") for name in made["commit"]):
        yield "Some runs were made from a source tree that had been changed since its commit (marked +)."
    if mingled := [f"{row.title} in {w.name}" for w in table.worlds for row in w.rows if len(_commits(row)) > 1]:
        yield (
            "Made by different commits, which may mean different things by the same settings: "
            f"{visible(', '.join(mingled))}."
        )


def _of_all_worlds(table: Table) -> Iterator[str]:
    left = [title for title in titles(table.worlds) if title not in (*table.shared, *table.mixed)]
    if len(table.worlds) > 1 and left:
        yield f"Not in the table of final success, for want of whole runs in each world: {visible(', '.join(left))}."
    if table.mixed:
        yield f"In no figure over all worlds, as settings differ between them: {visible(', '.join(table.mixed))}."


def _commits(row: Row) -> set[str]:
    return {record.origin["commit"] for record in row.whole}


def origins(records: Sequence[Record]) -> dict[str, dict[str, int]]:
    """Return how many runs each commit, machine, … made."""
    return count_origins(record.origin for record in records)


def markdown(table: Table) -> str:
    """The tables for a README."""
    parts = ["# Runs", *map(escape_markdown, RULES)]
    shared = [("All worlds", shared_grids(table))] if len(table.worlds) > 1 else []
    for title, some in [*shared, *((visible(world.name), grids(world)) for world in table.worlds)]:
        parts.append(f"## {escape_markdown(title)}")
        for grid in some:
            parts += [escape_markdown(grid.title), "\n".join(markdown_table(grid))]
    return "\n\n".join(parts) + "\n"


def as_json(found: Found, table: Table) -> dict[str, Any]:
    """Every figure of the tables and curves, unrounded, and where it comes from."""
    content = {
        "runs": len(table.records),
        "worlds": {
            world.name: {
                "agents": {row.title: _row(world, row) for row in world.rows},
                "improvement": [duel._asdict() for duel in world.duels],
            }
            for world in table.worlds
        },
        "success": {title: estimate._asdict() for title, estimate in table.shared.items()},
        "improvement": [duel._asdict() for duel in table.duels],
        "remarks": remarks(found, table),
        "origins": origins(table.records),
        "skipped": found.skipped,
    }
    return json.loads(json.dumps(content, allow_nan=False))


def _row(world: World, row: Row) -> dict[str, Any]:
    estimates = {name: world.estimate(row, figure) for name, figure in (("return", RETURN), ("success", SUCCESS))}
    return {
        "seeds": [record.run.seed for record in row.whole],
        "unfinished": [record.run.seed for record in row.unfinished],
        **{name: None if e is None else e._asdict() for name, e in estimates.items()},
        "first_goal_median": _median(row),
        "reached_in": sum(record.first_goal is not None for record in row.whole),
        **dict(zip(("frames_per_second", "seconds", "replaced"), _cost(row), strict=True)),
        "settings": {"frames": row.frames, "environments": row.records[0].run.num_envs},
        "runs": [
            {
                "path": record.path, "seed": record.run.seed, "frames": record.frames, "whole": record.whole,
                "return": record.final(RETURN), "success": record.final(SUCCESS), "first_goal": record.first_goal,
                "frames_per_second": record.speed, "seconds": record.seconds, "replaced": record.replaced,
                "curve": _curve(world, record), **record.origin,
            }
            for record in row.records
        ],
    }  # fmt: skip


def _curve(world: World, record: Record) -> dict[str, list[float | None]]:
    """Means of the episodes that ended by these frames since the last ones, and how many of the map's cells were seen
    by each twentieth of the frames."""
    episodes, edges = record.episodes, world.edges
    found = {"frames": edges[1:]}
    for name, figure in (("return", RETURN), ("success", SUCCESS)):
        found[name] = on_grid(episodes["frames"], episodes[figure], edges, record.frames)
    cells = np.logical_or.accumulate(record.visits > 0).sum((1, 2))
    slices = record.run.frames * np.arange(1, SLICES + 1) / SLICES
    found["cells"] = np.where(slices <= record.mapped, cells, np.nan)
    return {name: [None if value != value else value for value in part.tolist()] for name, part in found.items()}


def kind(row: Row) -> str:
    return "ours" if row.ours else "rival"


def seeds(row: Row) -> str:
    """How many, and whether any is unfinished."""
    return f"{len(row.whole)}" + (f" + {len(row.unfinished)} unfinished" if row.unfinished else "")


def state(record: Record) -> str:
    return "whole" if record.whole else f"unfinished, {record.frames / record.run.frames:.0%}"


def made_by(records: Sequence[Record]) -> str:
    """Commits and machines."""
    commits, machines = (", ".join(dict.fromkeys(r.origin[key] for r in records)) for key in ("commit", "device"))
    return visible(f"{commits} on {machines}")


def _median(row: Row) -> float | None:
    """Frames to the first goal, over whole runs; None if half of them or more never reached it."""
    frames = [np.inf if record.first_goal is None else record.first_goal for record in row.whole]
    middle = float(np.median(frames)) if frames else np.inf
    return middle if np.isfinite(middle) else None


def _goals(row: Row) -> str:
    if not row.whole or not has_goal(row.records[0].run.environment):
        return NO_VALUE
    median, count = _median(row), sum(record.first_goal is not None for record in row.whole)
    said = "not reached" if median is None else format_number(median, 0)
    return f"{said} ({count} of {len(row.whole)})"


def _goal(record: Record) -> str:
    if not has_goal(record.run.environment):
        return NO_VALUE
    if record.first_goal is None:
        return "not reached" if record.whole else "not reached yet"
    return format_number(record.first_goal, 0)


def _ranged(value: float, interval: Interval | None, said: Any) -> str:
    return said(value) + (f" [{said(interval.low)}, {said(interval.high)}]" if interval else "")


def plain_number(value: float) -> str:
    return format_number(value, 3).replace("-", "−")


def percent(share: float) -> str:
    return format_number(100 * share, 1)


def chance(probability: float) -> str:
    return format_number(probability, 2)


def clock(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
