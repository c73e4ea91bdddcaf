"""The page of reinforcement-learning runs: one self-contained HTML file; whatever strangers wrote is inert text."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from onefold.core.storage import write_bytes
from onefold.errors import visible
from onefold.report.figures import PLOTS, PageFigure, Picture, embed_panels, file_stems, page_figure, save_figure
from onefold.report.html import render_page
from onefold.report.origins import describe_origins
from onefold.report.runs_maps import Maps, coverage, map_plates, places
from onefold.report.runs_plots import curve_plates, overviews, styles_of
from onefold.report.runs_read import Found
from onefold.report.runs_table import RETURN, Duel, Table, World, build, ours_of
from onefold.report.runs_text import (
    RULES,
    chance,
    grids,
    markdown,
    origins,
    percent,
    plain_number,
    remarks,
    shared_grids,
)
from onefold.report.tables import TextTable

ALL = "All worlds"


class ShownMaps(NamedTuple):
    """A row of maps for each agent, and what their colours mean."""

    title: str
    caption: str
    rows: list[tuple[str, list[Picture]]]
    legend: list[Picture]


class Headline(NamedTuple):
    """The two best agents by a figure, and the probability that the first is the better one."""

    what: str
    best: str
    next: str
    ours: bool
    figures: tuple[str, str, str]
    note: str


class Part(NamedTuple):
    """What the page shows of one world, or of all."""

    title: str
    headline: Headline | None
    curves: list[PageFigure]
    grids: list[TextTable]
    maps: ShownMaps | None = None
    inside: Sequence[PageFigure] = ()
    runs: Sequence[TextTable] = ()


def write(found: Found, out: Path) -> list[Path]:
    """Everything there is to look at: the page, the table, the plots."""
    table = build(found.records)
    made = {"index.html": render(found, table, _parts(table, out / PLOTS)), "table.md": markdown(table)}
    for name, text in made.items():
        write_bytes(out / name, text.encode())
    return [out / name for name in made]


def _parts(table: Table, folder: Path) -> list[Part]:
    """Draw everything, into files and for the page."""
    styles, found = styles_of(table), []
    if len(table.worlds) > 1:
        overall = overviews(table, styles)
        for plate in overall:
            save_figure(plate, folder)
        best = {title: (e.iqm, f"{percent(e.iqm)} %") for title, e in table.shared.items()}
        first = _headline(best, ours_of(table.worlds), "IQM of success over all worlds", table.duels)
        found.append(Part(ALL, first, [page_figure(plate) for plate in overall], shared_grids(table)))
    for world, stem in zip(table.worlds, file_stems((world.name for world in table.worlds), "world"), strict=True):
        where = places(world)
        plates = curve_plates(world, styles, stem, None if where is None else coverage(where))
        maps = None if where is None else map_plates(world, where, stem)
        for plate in [*plates, *([maps.file] if maps else [])]:
            save_figure(plate, folder)
        curves, *inside = map(page_figure, plates)
        *tables, runs = grids(world)
        shown = None if maps is None else _maps(maps)
        found.append(Part(visible(world.name), _best(world), [curves], tables, shown, inside, [runs]))
    return found


def _best(world: World) -> Headline | None:
    estimates = {row.title: world.estimate(row, RETURN) for row in world.rows}
    best = {title: (e.iqm, plain_number(e.iqm)) for title, e in estimates.items() if e is not None}
    return _headline(best, ours_of([world]), f"IQM of the final return in {visible(world.name)}", world.duels)


def _headline(best: dict[str, tuple[float, str]], ours: set[str], what: str, duels: Sequence[Duel]) -> Headline | None:
    """The two best agents, and how sure it is that the first is the better one."""
    ranked = sorted(best, key=lambda title: -best[title][0])[:2]
    duel = next((duel for duel in duels if [duel.first, duel.second] == ranked), None)
    if duel is None:
        return None
    sure = duel.interval
    note = (
        "a single run among them: no interval"
        if sure is None
        else f"95 % interval {chance(sure.low)} to {chance(sure.high)}"
    )
    values = best[ranked[0]][1], best[ranked[1]][1], chance(duel.probability)
    return Headline(what, visible(ranked[0]), visible(ranked[1]), ranked[0] in ours, values, note)


def _maps(maps: Maps) -> ShownMaps:
    rows = [(visible(title), embed_panels(plate)) for title, plate in maps.rows]
    return ShownMaps(maps.file.title, visible(maps.file.caption), rows, embed_panels(maps.legend))


def render(found: Found, table: Table, parts: Sequence[Part]) -> str:
    """One HTML document that needs nothing but itself; only its own script, known by its hash, may run."""
    total = len(table.records)
    return render_page(
        "runs_page.html.j2",
        ["report.css", "runs_page.css"],
        ["tabs.js"],
        runs=total,
        agents=len({row.title for world in table.worlds for row in world.rows}),
        worlds=len(table.worlds),
        remarks=remarks(found, table),
        parts=parts,
        rules=RULES,
        origins=describe_origins(origins(table.records), total, "run"),
        skipped=found.skipped,
        plots=PLOTS,
    )
