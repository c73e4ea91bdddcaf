"""The page of a distribution-shift benchmark: one self-contained HTML file; whatever strangers wrote is inert text."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onefold.bench.results import Collected, UnitResult
from onefold.core.storage import write_bytes
from onefold.errors import visible
from onefold.report.figures import PLOTS, PageFigure, page_figure, save_figure
from onefold.report.html import render_page
from onefold.report.origins import count_origins, describe_origins, parse_origin
from onefold.report.seeds import Difference
from onefold.report.shift import TARGET_DATA, Duel, Section, Table, build
from onefold.report.shift_files import latex, markdown
from onefold.report.shift_plots import plates
from onefold.report.shift_text import (
    COST,
    MAIN,
    RULES,
    Line,
    difference_text,
    lines,
    remarks,
    title_of,
)
from onefold.report.tables import format_number, format_signed

NO_AVERAGE = "There is no average: no method was run on every set with the same seed."
GROUPS = {
    "rival": "Rivals, each at its best in hindsight",
    "ours": "CSD, by its default score, fixed beforehand",
    "ablation": "CSD, ablations",
    "paper": "CSD, by the paper's score",
}


class Headline(NamedTuple):
    """One form of ours, which saw nothing strange, the best rival, and what lies between them."""

    ours: str
    rival: str
    figures: tuple[str, str, str]
    note: str


def write(collected: Collected, out: Path) -> list[Path]:
    """Everything there is to look at: the page, the tables, the plots."""
    table = build(collected.units)
    shown: dict[int, list[PageFigure]] = {}
    for place, plate in plates(table):
        save_figure(plate, out / PLOTS)
        if plate.on_page:
            shown.setdefault(place, []).append(page_figure(plate))
    made = {"index.html": render(collected, table, shown), "table.md": markdown(table), "table.tex": latex(table)}
    for name, text in made.items():
        write_bytes(out / name, text.encode())
    return [out / name for name in made]


def render(collected: Collected, table: Table, shown: dict[int, list[PageFigure]]) -> str:
    """One HTML document that needs nothing but itself; only its own script, known by its hash, may run."""
    about, units = collected.manifest, collected.units
    return render_page(
        "shift_page.html.j2",
        ["report.css"],
        ["tabs.js"],
        preset=visible(str(about["settings"].get("name", "unnamed"))[:200]),
        units=units,
        methods=len({unit.family for unit in units}),
        sets=len(table.sections),
        seeds=max(len(row.seeds) for section in table.sections for row in section.rows),
        rules=RULES,
        remarks=[*remarks(collected), *([] if table.average.rows else [NO_AVERAGE])],
        headline=_headline(table.shown[0]),
        columns=MAIN,
        costs=COST,
        groups=GROUPS,
        panels=[_panel(section, shown.get(i, [])) for i, section in enumerate(table.shown)],
        settings={visible(str(key)[:200]): _said(value) for key, value in about["settings"].items()},
        origins=describe_origins(count_origins(parse_origin(unit.origin) for unit in units), len(units), "unit"),
        data=_data(about["data"], units),
        failures=collected.failures,
        skipped=collected.skipped,
        plots=PLOTS,
    )


def _panel(section: Section, shown: Sequence[PageFigure]) -> dict[str, Any]:
    main = lines(section, MAIN)
    return {
        "title": title_of(section),
        "tab": "Average" if section.of_all else visible(section.name),
        "notes": [visible(note) for note in section.notes],
        "foreign": [visible(name) for name in section.foreign],
        "main": _grouped(main),
        "cost": _grouped([line for line in lines(section, COST) if line.kind != "paper"]),
        "duels": _duels(section),
        "plates": shown,
    }


def _grouped(found: Iterable[Line]) -> dict[str, list[Line]]:
    groups: dict[str, list[Line]] = {}
    for line in found:
        groups.setdefault(line.kind, []).append(line)
    return groups


def _duels(section: Section) -> dict[str, list[dict[str, str]]]:
    """For each of our champions, every rival."""
    found: dict[str, list[dict[str, str]]] = {}
    for duel in section.duels:
        saw = ", which was shown unlabelled strange data" if duel.ours.method in TARGET_DATA else ""
        found.setdefault(f"{visible(duel.ours.title)}{saw}", []).append(
            {
                "rival": visible(duel.rival.title),
                "all": difference_text(duel.all),
                "all_trend": _trend(duel.all),
                "foreign": difference_text(duel.foreign),
                "foreign_trend": _trend(duel.foreign),
                "n": str(duel.all.n),
            }
        )
    return found


def _trend(found: Difference | None) -> str:
    """Up or down where it is more than two standard errors from nothing."""
    if found is None or found.se is None or abs(found.mean) <= 2 * found.se:
        return "even"
    return "up" if found.mean > 0 else "down"


def _headline(section: Section) -> Headline | None:
    fair = [duel for duel in section.duels if duel.ours.method not in TARGET_DATA]
    if not fair:
        return None
    best = max(fair, key=_rivals_auroc)
    ours, rival = best.ours.stat("auroc"), best.rival.stat("auroc")
    assert ours is not None
    assert rival is not None
    few = "one seed, so no standard error" if best.all.n else "no seed in common"
    note = few if best.all.se is None else f"± {best.all.se:.2f}, standard error over {best.all.n} seeds"
    figures = (format_number(ours.mean, 2), format_number(rival.mean, 2), format_signed(best.all.mean))
    return Headline(visible(best.ours.title), visible(best.rival.title), figures, note)


def _rivals_auroc(duel: Duel) -> float:
    found = duel.rival.stat("auroc")
    assert found is not None
    return found.mean


def _data(known: dict[str, Any], units: Sequence[UnitResult]) -> list[tuple[str, str, str, str]]:
    """Every set: its name, train and test images, and what its content is known by."""
    names = dict.fromkeys([*(unit.id_set for unit in units), *(name for unit in units for name in unit.tested), *known])
    found = []
    for name in names:
        train = sorted({unit.train for unit in units if unit.id_set == name})
        test = sorted({unit.tested[name] for unit in units if name in unit.tested})
        sizes = [" or ".join(f"{size:,}" for size in some) or "–" for some in (train, test)]
        digest = visible(str(known[name])[:16]) if name in known else "made from the familiar set"
        found.append((visible(name), *sizes, digest))
    return found


def _said(value: Any) -> str:
    return "no limit" if value is None else visible(str(value)[:200])
