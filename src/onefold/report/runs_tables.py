"""Runs as tables of text, remarks, Markdown and JSON."""

import json
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from onefold.errors import visible
from onefold.report.origins import count_origins
from onefold.report.runs_comparison import AgentRuns, EnvironmentRuns, PairComparison, RunComparison
from onefold.report.runs_data import RETURN, SUCCESS, RunCollection, RunRecord
from onefold.report.runs_stats import Interval, bin_means
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
    "Final metrics are means over the episodes that ended in the last tenth of a run's frames. If none did, the last "
    "episode of each environment copy counts. Only finished runs count. Returns are undiscounted sums of rewards.",
    "IQM: interquartile mean over runs, with a 95 % stratified bootstrap interval that samples runs within "
    "environments. There is no interval where an environment has a single run.",
    "Probability of improvement: that a run of the row's agent ends with a higher return than a run of the column's "
    "agent. Equal returns count one half (Mann and Whitney). It compares runs of equal length within environments and "
    "is averaged over environments. The 95 % bootstrap intervals need two runs of each agent; with few runs they are "
    "too narrow.",
    "First goal: frames at the end of the first episode that reached the goal, median over runs. Runs that never "
    "reached it count as later than all others.",
)
AGENT_HEADS = [
    "Agent", "Seeds", "Frames", "Return, mean", "Return, IQM", "Success %, mean", "Success %, IQM", "First goal",
    "Frames/s", "Time", "Replaced workers",
]  # fmt: skip
RUN_HEADS = [
    "Run", "Agent", "Seed", "State", "Return", "Success %", "First goal", "Frames/s", "Time", "Replaced workers",
    "Commit and machine",
]  # fmt: skip


def environment_tables(environment: EnvironmentRuns) -> list[TextTable]:
    """Return the tables of one environment: final performance, probabilities of improvement, and every run."""
    name = visible(environment.name)
    pairs = _pair_tables(environment.pairs, f"Probability of improvement in {name}")
    return [_agents_table(environment), *pairs, _runs_table(environment)]


def overall_tables(comparison: RunComparison) -> list[TextTable]:
    """Return the tables over all environments."""
    rows: list[tuple[str, list[str | Cell]]] = [
        ("", [visible(title), str(e.n), format_percent(e.mean), _with_interval(e.iqm, e.interval, format_percent)])
        for title, e in comparison.success.items()
    ]
    heads = ["Agent", "Runs", "Success %, mean", "Success %, IQM"]
    tables = [TextTable("Final success over all environments", heads, 1, rows)] if rows else []
    return [*tables, *_pair_tables(comparison.pairs, "Probability of improvement, averaged over environments")]


def _agents_table(environment: EnvironmentRuns) -> TextTable:
    rows = []
    for agent in environment.agents:
        cells = [visible(agent.title), format_seeds(agent), f"{agent.run.frames:,}"]
        for metric, text in ((RETURN, format_return), (SUCCESS, format_percent)):
            e = agent.estimate(metric)
            cells += [NO_VALUE, NO_VALUE] if e is None else [text(e.mean), _with_interval(e.iqm, e.interval, text)]
        cells.append(_format_first_goals(agent))
        speed, seconds, replaced = _cost(agent)
        cells.append(NO_VALUE if speed is None else format_number(speed, 0))
        cells.append(NO_VALUE if seconds is None else format_time(seconds))
        rows.append((_group(agent), [*cells, str(replaced)]))
    return TextTable(f"Final performance in {visible(environment.name)}", AGENT_HEADS, 1, rows)


def _cost(agent: AgentRuns) -> tuple[float | None, float | None, int]:
    """Return mean frames per second and mean seconds of finished runs, and the replaced workers of all runs."""
    speeds = [record.frames_per_second for record in agent.finished if record.frames_per_second is not None]
    seconds = [record.seconds for record in agent.finished]
    replaced = sum(record.replaced_workers for record in agent.records)
    return fmean(speeds) if speeds else None, fmean(seconds) if seconds else None, replaced


def _runs_table(environment: EnvironmentRuns) -> TextTable:
    rows = [(_group(agent), _run_cells(agent, record)) for agent in environment.agents for record in agent.records]
    return TextTable(f"Every run in {visible(environment.name)}", RUN_HEADS, 2, rows)


def _run_cells(agent: AgentRuns, record: RunRecord) -> list[Any]:
    final, success = record.final(RETURN), record.final(SUCCESS)
    return [
        visible(record.path),
        visible(agent.title),
        str(record.run.seed),
        _format_state(record),
        NO_VALUE if final is None else format_return(final),
        NO_VALUE if success is None else format_percent(success),
        _format_first_goal(record),
        NO_VALUE if record.frames_per_second is None else format_number(record.frames_per_second, 0),
        format_time(record.seconds),
        str(record.replaced_workers),
        format_makers([record]),
    ]


def _pair_tables(pairs: Sequence[PairComparison], title: str) -> list[TextTable]:
    if not pairs:
        return []
    by_titles = {(pair.first, pair.second): pair for pair in pairs}
    titles = list(dict.fromkeys(pair.first for pair in pairs))
    rows = []
    for first in titles:
        row = [by_titles.get((first, second)) for second in titles]
        cells = [
            NO_VALUE if pair is None else _with_interval(pair.probability, pair.interval, format_probability)
            for pair in row
        ]
        rows.append(("", [visible(first), *cells]))
    return [TextTable(title, ["is better than …", *map(visible, titles)], 1, rows)]


def remarks(collection: RunCollection, comparison: RunComparison) -> list[str]:
    """Return what limits the conclusions: unfinished runs, unequal settings and mixed provenance."""
    lines = [*_run_remarks(comparison), *_origin_remarks(comparison), *_overall_remarks(comparison)]
    if collection.skipped:
        lines.append(f"Left out, for the reasons listed below: {format_count(len(collection.skipped), 'run')}.")
    return lines


def _run_remarks(comparison: RunComparison) -> Iterator[str]:
    environments, records = comparison.environments, comparison.records
    if unfinished := [record for record in records if not record.finished]:
        yield (
            f"Unfinished: {format_count(len(unfinished), 'run')} of {len(records)}. Each is drawn as a separate dotted "
            "line that ends in a cross, and no mean includes it."
        )
    if partial := [f"{agent.title} in {e.name}" for e in environments for agent in e.agents if _is_partial(agent)]:
        yield f"Final metrics cover the finished runs only, and others may do worse: {visible(', '.join(partial))}."
    if any(len(agent.finished) == 1 for e in environments for agent in e.agents):
        yield "Agents with a single finished run have no interval: the spread between seeds is unknown."
    if any(len({agent.run.name for agent in e.agents}) < len(e.agents) for e in environments):
        yield "Runs of one agent with different settings are not averaged; their titles name the differing settings."
    if uneven := [e.name for e in environments if not e.equal_frames]:
        yield (
            f"Some agents have more frames than others in {visible(', '.join(uneven))}. Final metrics are of the end "
            "of each run; probabilities of improvement compare runs of equal length only."
        )
    for environment in environments:
        if differences := environment.learning_differences:
            yield visible(f"Learning settings differ between agents in {environment.name}: {'; '.join(differences)}.")


def _is_partial(agent: AgentRuns) -> bool:
    return bool(agent.finished and agent.unfinished)


def _origin_remarks(comparison: RunComparison) -> Iterator[str]:
    origins = run_origins(comparison.records)
    if len(origins["device"]) > 1:
        yield "The runs were made on different machines: speeds and times cannot be compared."
    if any(name.endswith("+") for name in origins["commit"]):
        yield "Some runs were made from a source tree with uncommitted changes (marked +)."
    mixed = [f"{a.title} in {e.name}" for e in comparison.environments for a in e.agents if len(_commits(a)) > 1]
    if mixed:
        yield (
            "Runs of different commits are averaged, and the same settings may mean different things in them: "
            f"{visible(', '.join(mixed))}."
        )


def _overall_remarks(comparison: RunComparison) -> Iterator[str]:
    mixed, success = comparison.mixed_settings, comparison.success
    incomplete = [title for title in comparison.agent_titles if title not in success and title not in mixed]
    if len(comparison.environments) > 1 and incomplete:
        yield (
            "Not in the table of final success, without finished runs in every environment: "
            f"{visible(', '.join(incomplete))}."
        )
    for title, settings in mixed.items():
        yield visible(
            f"{title} is not averaged over environments, as its settings differ between them: {'; '.join(settings)}."
        )


def _commits(agent: AgentRuns) -> set[str]:
    return {record.origin["commit"] for record in agent.finished}


def run_origins(records: Sequence[RunRecord]) -> dict[str, dict[str, int]]:
    """Return how many runs each commit, machine and version made."""
    return count_origins(record.origin for record in records)


def markdown(comparison: RunComparison) -> str:
    """Return all tables as Markdown."""
    sections = [(visible(e.name), environment_tables(e)) for e in comparison.environments]
    if len(comparison.environments) > 1:
        sections = [("All environments", overall_tables(comparison)), *sections]
    parts = ["# Runs", *map(escape_markdown, RULES)]
    for title, tables in sections:
        parts.append(f"## {escape_markdown(title)}")
        for table in tables:
            parts += [escape_markdown(table.title), "\n".join(markdown_table(table))]
    return "\n\n".join(parts) + "\n"


def as_json(collection: RunCollection, comparison: RunComparison) -> dict[str, Any]:
    """Return all figures of the tables and curves, unrounded, with the provenance of the runs."""
    content = {
        "runs": len(comparison.records),
        "environments": {
            environment.name: {
                "agents": {agent.title: _agent_json(environment, agent) for agent in environment.agents},
                "improvement": [pair._asdict() for pair in environment.pairs],
            }
            for environment in comparison.environments
        },
        "success": {title: estimate._asdict() for title, estimate in comparison.success.items()},
        "improvement": [pair._asdict() for pair in comparison.pairs],
        "remarks": remarks(collection, comparison),
        "origins": run_origins(comparison.records),
        "skipped": collection.skipped,
    }
    return json.loads(json.dumps(content, allow_nan=False))


def _agent_json(environment: EnvironmentRuns, agent: AgentRuns) -> dict[str, Any]:
    estimates = {metric: agent.estimate(metric) for metric in (RETURN, SUCCESS)}
    return {
        "seeds": [record.run.seed for record in agent.finished],
        "unfinished": [record.run.seed for record in agent.unfinished],
        **{metric: None if e is None else e._asdict() for metric, e in estimates.items()},
        "first_goal_median": _median_first_goal(agent),
        "reached_in": sum(record.first_goal is not None for record in agent.finished),
        **dict(zip(("frames_per_second", "seconds", "replaced_workers"), _cost(agent), strict=True)),
        "settings": {"frames": agent.run.frames, "num_envs": agent.run.num_envs},
        "runs": [
            {
                "path": record.path, "seed": record.run.seed, "frames": record.frames, "finished": record.finished,
                "return": record.final(RETURN), "success": record.final(SUCCESS), "first_goal": record.first_goal,
                "frames_per_second": record.frames_per_second, "seconds": record.seconds,
                "replaced_workers": record.replaced_workers, "curve": _curve_json(environment, record),
                **record.origin,
            }
            for record in agent.records
        ],
    }  # fmt: skip


def _curve_json(environment: EnvironmentRuns, record: RunRecord) -> dict[str, list[float | None]]:
    """Return binned means of the episodes, and the visited cells of the map after each slice of the frames."""
    episodes, edges = record.episodes, environment.edges
    curve = {"frames": edges[1:]}
    for metric in (RETURN, SUCCESS):
        curve[metric] = bin_means(episodes["frames"], episodes[metric], edges, record.frames)
    cells = np.logical_or.accumulate(record.visits > 0).sum((1, 2))
    frames = record.run.frames * np.arange(1, SLICES + 1) / SLICES
    curve["cells"] = np.where(frames <= record.mapped_frames, cells, np.nan)
    return {name: [None if value != value else value for value in part.tolist()] for name, part in curve.items()}


def _group(agent: AgentRuns) -> str:
    return "ours" if agent.ours else "rival"


def format_seeds(agent: AgentRuns) -> str:
    """Return the number of finished and unfinished runs."""
    return f"{len(agent.finished)}" + (f" + {len(agent.unfinished)} unfinished" if agent.unfinished else "")


def _format_state(record: RunRecord) -> str:
    return "finished" if record.finished else f"unfinished, {record.frames / record.run.frames:.0%}"


def format_makers(records: Sequence[RunRecord]) -> str:
    """Return the commits and machines of runs."""
    commits, machines = (", ".join(dict.fromkeys(r.origin[key] for r in records)) for key in ("commit", "device"))
    return visible(f"{commits} on {machines}")


def _median_first_goal(agent: AgentRuns) -> float | None:
    """Return the median over finished runs of the first goal's frames; None if half of them never reached it."""
    frames = [np.inf if record.first_goal is None else record.first_goal for record in agent.finished]
    median = float(np.median(frames)) if frames else np.inf
    return median if np.isfinite(median) else None


def _format_first_goals(agent: AgentRuns) -> str:
    if not agent.finished or not has_goal(agent.run.environment):
        return NO_VALUE
    median, count = _median_first_goal(agent), sum(record.first_goal is not None for record in agent.finished)
    missing = "no median" if count else "not reached"
    text = missing if median is None else format_number(median, 0)
    return f"{text} ({count} of {len(agent.finished)})"


def _format_first_goal(record: RunRecord) -> str:
    if not has_goal(record.run.environment):
        return NO_VALUE
    if record.first_goal is None:
        return "not reached" if record.finished else "not reached yet"
    return format_number(record.first_goal, 0)


def _with_interval(value: float, interval: Interval | None, text: Callable[[float], str]) -> str:
    return text(value) + (f" [{text(interval.low)}, {text(interval.high)}]" if interval else "")


def format_return(value: float) -> str:
    """Return the value with three decimals."""
    return format_number(value, 3).replace("-", "−")


def format_percent(share: float) -> str:
    """Return the share in per cent with one decimal, without the sign."""
    return format_number(100 * share, 1)


def format_probability(probability: float) -> str:
    """Return the probability with two decimals."""
    return format_number(probability, 2)


def format_time(seconds: float) -> str:
    """Return the time in seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
