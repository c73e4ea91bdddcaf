"""The page of reinforcement-learning runs: one self-contained HTML file; whatever strangers wrote is inert text."""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import jinja2
from markupsafe import Markup

from onefold.core.storage import write_bytes
from onefold.report.plates import Picture, Plate, pictures, save
from onefold.report.runs_maps import Maps, coverage, map_plates, places
from onefold.report.runs_plots import curve_plates, overviews, stems_of, styles_of
from onefold.report.runs_read import Found
from onefold.report.runs_table import RETURN, Duel, Table, World, build, ours_of
from onefold.report.runs_text import (
    RULES,
    chance,
    counted,
    grids,
    markdown,
    origins,
    percent,
    plain_number,
    remarks,
    shared_grids,
)
from onefold.report.score_page import visible
from onefold.report.shift_page import ORIGINS, PLOTS, Shown
from onefold.report.shift_text import Grid

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
    curves: list[Shown]
    grids: list[Grid]
    maps: ShownMaps | None = None
    inside: Sequence[Shown] = ()
    runs: Sequence[Grid] = ()


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
            save(plate, folder)
        best = {title: (e.iqm, f"{percent(e.iqm)} %") for title, e in table.shared.items()}
        first = _headline(best, ours_of(table.worlds), "IQM of success over all worlds", table.duels)
        found.append(Part(ALL, first, [_shown(plate) for plate in overall], shared_grids(table)))
    for world, stem in zip(table.worlds, stems_of(table), strict=True):
        where = places(world)
        plates = curve_plates(world, styles, stem, None if where is None else coverage(where))
        maps = None if where is None else map_plates(world, where, stem)
        for plate in [*plates, *([maps.file] if maps else [])]:
            save(plate, folder)
        curves, *inside = map(_shown, plates)
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


def _shown(plate: Plate) -> Shown:
    return Shown(visible(plate.title), visible(plate.caption), pictures(plate))


def _maps(maps: Maps) -> ShownMaps:
    rows = [(visible(title), pictures(plate)) for title, plate in maps.rows]
    return ShownMaps(maps.file.title, visible(maps.file.caption), rows, pictures(maps.legend))


def render(found: Found, table: Table, parts: Sequence[Part]) -> str:
    """One HTML document that needs nothing but itself; only its own script, known by its hash, may run."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    style, style_hash = _inline("shift_page.css", "runs_page.css")
    script, script_hash = _inline("shift_page.js")
    made, total = origins(table.records), len(table.records)
    return environment.from_string(_inline("runs_page.html.j2")[0]).render(
        runs=total,
        agents=len({row.title for world in table.worlds for row in world.rows}),
        worlds=len(table.worlds),
        remarks=remarks(found, table),
        parts=parts,
        rules=RULES,
        origins={
            title: [
                visible(value) if n == total else f"{visible(value)} ({counted(n, 'run')})"
                for value, n in made[name].items()
            ]
            for name, title in ORIGINS.items()
        },
        skipped=found.skipped,
        plots=PLOTS,
        style=style,
        script=script,
        style_hash=style_hash,
        script_hash=script_hash,
    )


def _inline(*names: str) -> tuple[Markup, str]:
    """Files of ours as one text, and what a content security policy knows it by."""
    text = "".join(files("onefold.report").joinpath(name).read_text("utf-8") for name in names)
    return Markup(text), "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
