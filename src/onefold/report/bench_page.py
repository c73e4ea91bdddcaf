"""The page of a distribution-shift benchmark: one self-contained HTML file, with the tables and figures as files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onefold.bench.results import Collected, UnitResult
from onefold.core.storage import write_bytes
from onefold.errors import visible
from onefold.report.bench_figures import draw_figures
from onefold.report.bench_table import Section, TableRow, build_table, shown_sections
from onefold.report.bench_text import (
    COST,
    DETECTION,
    HEADS,
    LOWER_IS_BETTER,
    RULES,
    compare,
    describe_row,
    format_columns,
    format_difference,
    list_remarks,
    section_title,
    to_latex,
    to_markdown,
)
from onefold.report.figures import PLOTS, PageFigure, page_figure, save_figure
from onefold.report.html import render_page
from onefold.report.origins import count_origins, describe_origins, parse_origin
from onefold.report.stats import Estimate
from onefold.report.tables import NO_VALUE, format_number, format_signed

NO_AVERAGE = "There is no average, because no method was run on every set with the same seed."
GROUPS = {
    "rival": "Rivals, each at its best in hindsight",
    "ours": "CSD, by its default score, fixed beforehand",
    "ablation": "CSD, ablations",
    "paper": "CSD, by the paper's score",
}
MAX_VALUE = 200  # characters of a setting


def write_report(collected: Collected, out: Path) -> list[Path]:
    """Write the page, the tables and the figures.

    Args:
        collected: Contents of a results folder.
        out: Folder to write to.

    Returns:
        Paths of the page and of the tables.
    """
    table = build_table(collected.units)
    figures: dict[int, list[PageFigure]] = {}
    for index, figure in draw_figures(table):
        save_figure(figure, out / PLOTS)
        if figure.on_page:
            figures.setdefault(index, []).append(page_figure(figure))
    texts = {
        "index.html": render_bench_page(collected, table, figures),
        "table.md": to_markdown(table),
        "table.tex": to_latex(table),
    }
    for name, text in texts.items():
        write_bytes(out / name, text.encode())
    return [out / name for name in texts]


def render_bench_page(
    collected: Collected, table: Sequence[Section], figures: Mapping[int, Sequence[PageFigure]]
) -> str:
    """Return the page as HTML, with every text from files escaped.

    Args:
        collected: Contents of a results folder.
        table: Sections of `build_table`.
        figures: Figures by the index of their section among those shown.
    """
    manifest, units, shown = collected.manifest, collected.units, shown_sections(table)
    return render_page(
        "bench_page.html.j2",
        ["report.css"],
        ["tabs.js"],
        preset=visible(str(manifest["settings"].get("name", "unnamed"))[:MAX_VALUE]),
        units=units,
        methods=len({unit.family for unit in units}),
        sets=len(table) - 1,
        seeds=max(len(row.seeds) for section in table[:-1] for row in section.rows),
        rules=RULES,
        remarks=[*list_remarks(collected), *([] if table[-1].rows else [NO_AVERAGE])],
        headline=_headline(shown[0]),
        detection=_columns(DETECTION),
        cost=_columns(COST),
        groups=GROUPS,
        panels=[_panel(section, figures.get(i, [])) for i, section in enumerate(shown)],
        settings={visible(str(key)[:MAX_VALUE]): _setting(value) for key, value in manifest["settings"].items()},
        origins=describe_origins(count_origins(parse_origin(unit.origin) for unit in units), len(units), "unit"),
        data=_data(manifest["data"], units),
        failures=collected.failures,
        skipped=collected.skipped,
        plots=PLOTS,
    )


def _columns(figures: Sequence[str]) -> list[dict[str, Any]]:
    return [{"head": HEADS[figure], "lower": figure in LOWER_IS_BETTER} for figure in figures]


def _panel(section: Section, figures: Sequence[PageFigure]) -> dict[str, Any]:
    return {
        "title": section_title(section),
        "tab": "Average" if section.is_average else visible(section.name),
        "notes": [visible(note) for note in section.notes],
        "other_sets": [visible(name) for name in section.other_sets],
        "detection": _grouped_lines(section.rows, DETECTION),
        "cost": _grouped_lines([row for row in section.rows if row.kind != "paper"], COST),
        "comparisons": _comparisons(section),
        "figures": figures,
    }


def _grouped_lines(rows: Sequence[TableRow], figures: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of a table by group."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row, cells in zip(rows, format_columns(rows, figures), strict=True):
        line = {"title": visible(row.title), "form": describe_row(row), "seeds": len(row.seeds), "cells": cells}
        groups.setdefault(row.kind, []).append(line)
    return groups


def _comparisons(section: Section) -> dict[str, list[dict[str, str]]]:
    """Return the differences to every rival by form of CSD."""
    groups: dict[str, list[dict[str, str]]] = {}
    for row, rival in section.comparisons:
        e, other = (compare(row, rival, figure) for figure in ("auroc", "auroc_other"))
        suffix = ", fitted with unlabelled OOD images" if row.uses_ood else ""
        groups.setdefault(f"{visible(row.title)}{suffix}", []).append(
            {
                "rival": visible(rival.title),
                "all": format_difference(e),
                "all_trend": _trend(e),
                "other": format_difference(other),
                "other_trend": _trend(other),
                "n": NO_VALUE if e is None else str(e.n),
            }
        )
    return groups


def _trend(e: Estimate | None) -> str:
    """Return "up" or "down" for a difference of more than two standard errors."""
    if e is None or e.spread is None or abs(e.mean) <= 2 * e.spread:
        return "even"
    return "up" if e.mean > 0 else "down"


def _headline(section: Section) -> dict[str, Any] | None:
    """Return the form of CSD that saw no OOD images, the best rival, and their difference."""
    pairs = [(row, rival) for row, rival in section.comparisons if not row.uses_ood]
    if not pairs:
        return None
    row, rival = max(pairs, key=lambda pair: pair[1].auroc)
    e = compare(row, rival, "auroc")
    assert e is not None
    note = "one seed, so no standard error" if e.n else "no seed in common"
    if e.spread is not None:
        note = f"± {e.spread:.2f}, standard error over {e.n} seeds"
    figures = (format_number(row.auroc, 2), format_number(rival.auroc, 2), format_signed(e.mean))
    return {"ours": visible(row.title), "rival": visible(rival.title), "figures": figures, "note": note}


def _data(hashes: Mapping[str, Any], units: Sequence[UnitResult]) -> list[tuple[str, str, str, str]]:
    """Return the name, the training and test images and the hash of every set."""
    names = dict.fromkeys(
        [*(unit.id_set for unit in units), *(name for unit in units for name in unit.tested), *hashes]
    )
    lines = []
    for name in names:
        train = sorted({unit.train for unit in units if unit.id_set == name})
        test = sorted({unit.tested[name] for unit in units if name in unit.tested})
        sizes = [" or ".join(f"{size:,}" for size in counts) or NO_VALUE for counts in (train, test)]
        digest = visible(str(hashes[name])[:16]) if name in hashes else "made from the ID set"
        lines.append((visible(name), *sizes, digest))
    return lines


def _setting(value: Any) -> str:
    return "no limit" if value is None else visible(str(value)[:MAX_VALUE])
