"""Page of reinforcement-learning runs: one self-contained HTML file in which untrusted text cannot run."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from onefold.core.storage import write_bytes
from onefold.errors import visible
from onefold.report.figures import (
    PLOTS,
    PageFigure,
    PagePicture,
    PanelFigure,
    embed_panels,
    file_stems,
    page_figure,
    save_figure,
)
from onefold.report.html import render_page
from onefold.report.origins import describe_origins
from onefold.report.runs_comparison import (
    EnvironmentRuns,
    PairComparison,
    RunComparison,
    compare_runs,
    titles_of_ours,
)
from onefold.report.runs_data import RETURN, RunCollection
from onefold.report.runs_figures import (
    VisitFigures,
    agent_styles,
    coverage_metric,
    curve_figures,
    environment_map,
    overview_figures,
    visit_figures,
)
from onefold.report.runs_tables import (
    RULES,
    environment_tables,
    format_percent,
    format_probability,
    format_return,
    markdown,
    overall_tables,
    remarks,
    run_origins,
)
from onefold.report.tables import TextTable


class PageMaps(NamedTuple):
    """Visit maps on the page: a row of pictures for each agent, and the legend of the colours."""

    title: str
    caption: str
    agents: list[tuple[str, list[PagePicture]]]
    legend: list[PagePicture]


class BestAgents(NamedTuple):
    """The two best agents by a metric, and the probability that the first is better."""

    metric: str
    best: str
    next: str
    ours: bool
    figures: tuple[str, str, str]
    note: str


class PageSection(NamedTuple):
    """A section of the page: one environment, or the overview of all."""

    title: str
    headline: BestAgents | None
    curves: list[PageFigure]
    tables: list[TextTable]
    maps: PageMaps | None = None
    internals: Sequence[PageFigure] = ()
    runs: Sequence[TextTable] = ()


def write_report(collection: RunCollection, out: Path) -> list[Path]:
    """Write index.html, table.md and the plots to a folder; return the paths of the first two."""
    comparison = compare_runs(collection.records)
    files = {
        "index.html": render(collection, comparison, _sections(comparison, out / PLOTS)),
        "table.md": markdown(comparison),
    }
    for name, text in files.items():
        write_bytes(out / name, text.encode())
    return [out / name for name in files]


def _sections(comparison: RunComparison, folder: Path) -> list[PageSection]:
    """Draw all figures, save them to a folder and return the sections of the page."""
    styles, sections = agent_styles(comparison), []
    if len(comparison.environments) > 1:
        sections.append(_overview(comparison, overview_figures(comparison, styles), folder))
    stems = file_stems((environment.name for environment in comparison.environments), "environment")
    for environment, stem in zip(comparison.environments, stems, strict=True):
        grid = environment_map(environment)
        figures = curve_figures(environment, styles, stem, None if grid is None else coverage_metric(grid))
        maps = None if grid is None else visit_figures(environment, grid, stem)
        for figure in [*figures, *([maps.file] if maps else [])]:
            save_figure(figure, folder)
        curves, *internals = map(page_figure, figures)
        *tables, runs = environment_tables(environment)
        page_maps = None if maps is None else _page_maps(maps)
        title, headline = visible(environment.name), _headline_of(environment)
        sections.append(PageSection(title, headline, [curves], tables, page_maps, internals, [runs]))
    return sections


def _overview(comparison: RunComparison, figures: Sequence[PanelFigure], folder: Path) -> PageSection:
    for figure in figures:
        save_figure(figure, folder)
    scores = {title: (e.iqm, f"{format_percent(e.iqm)} %") for title, e in comparison.success.items()}
    metric = "IQM of success over all environments"
    headline = _headline(scores, titles_of_ours(comparison.environments), metric, comparison.pairs)
    return PageSection("All environments", headline, list(map(page_figure, figures)), overall_tables(comparison))


def _headline_of(environment: EnvironmentRuns) -> BestAgents | None:
    estimates = {agent.title: agent.estimate(RETURN) for agent in environment.agents}
    scores = {title: (e.iqm, format_return(e.iqm)) for title, e in estimates.items() if e is not None}
    metric = f"IQM of the final return in {visible(environment.name)}"
    return _headline(scores, titles_of_ours([environment]), metric, environment.pairs)


def _headline(
    scores: dict[str, tuple[float, str]], ours: set[str], metric: str, pairs: Sequence[PairComparison]
) -> BestAgents | None:
    """Return the two agents with the largest scores; None if they are not compared."""
    ranked = sorted(scores, key=lambda title: -scores[title][0])[:2]
    pair = next((pair for pair in pairs if [pair.first, pair.second] == ranked), None)
    if pair is None:
        return None
    note = "an agent has a single run: no interval"
    if pair.interval is not None:
        low, high = map(format_probability, pair.interval)
        note = f"95 % interval {low} to {high}"
    best, second = ranked
    figures = scores[best][1], scores[second][1], format_probability(pair.probability)
    return BestAgents(metric, visible(best), visible(second), best in ours, figures, note)


def _page_maps(maps: VisitFigures) -> PageMaps:
    agents = [(visible(title), embed_panels(figure)) for title, figure in maps.agents]
    return PageMaps(maps.file.title, visible(maps.file.caption), agents, embed_panels(maps.legend))


def render(collection: RunCollection, comparison: RunComparison, sections: Sequence[PageSection]) -> str:
    """Return the page as HTML."""
    total = len(comparison.records)
    return render_page(
        "runs_page.html.j2",
        ["report.css", "runs_page.css"],
        ["tabs.js"],
        runs=total,
        agents=len(comparison.agent_titles),
        environments=len(comparison.environments),
        remarks=remarks(collection, comparison),
        sections=sections,
        rules=RULES,
        origins=describe_origins(run_origins(comparison.records), total, "run"),
        skipped=collection.skipped,
        plots=PLOTS,
    )
