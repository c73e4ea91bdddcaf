"""The distribution-shift table as files: Markdown, LaTeX, and JSON for scripts."""

import json
from typing import Any

from onefold.bench.results import Collected
from onefold.errors import visible
from onefold.report.origins import count_origins, parse_origin
from onefold.report.seeds import stat
from onefold.report.shift import FIGURES, Row, Section, Table
from onefold.report.shift_text import RULES, grids, kind, remarks, title_of
from onefold.report.tables import escape_markdown, latex_table, markdown_table


def markdown(table: Table) -> str:
    """The tables for a README."""
    parts = ["# Distribution shift", *(escape_markdown(rule) for rule in RULES)]
    for section in table.shown:
        parts += [
            f"## {escape_markdown(title_of(section))}",
            *(escape_markdown(visible(note)) for note in section.notes),
        ]
        parts += ["\n".join(markdown_table(grid)) for grid in grids(section)]
    return "\n\n".join(parts) + "\n"


def latex(table: Table) -> str:
    """The tables for a paper, for the package booktabs."""
    parts = ["% Needs \\usepackage{booktabs}. In brackets: the gap to the paper's published figure."]
    parts += [f"% {rule}" for rule in RULES]
    for i, section in enumerate(table.shown):
        for grid in grids(section):
            caption = f"Distribution shift: {title_of(section)}. {grid.title}."
            parts += ["", *latex_table(grid, caption, f"tab:shift-{i}-{grid.title.lower()}")]
    return "\n".join(parts) + "\n"


def as_json(table: Table, collected: Collected) -> dict[str, Any]:
    """Every figure of every section, unrounded, and where it comes from."""
    return {
        "settings": _strict(collected.manifest["settings"]),
        "data": _strict(collected.manifest["data"]),
        "remarks": remarks(collected),
        "units": len(collected.units),
        "sets": {section.name: _section(section) for section in table.sections},
        "average": _section(table.average),
        "origins": count_origins(parse_origin(unit.origin) for unit in collected.units),
        "failures": collected.failures,
        "skipped": collected.skipped,
    }


def _section(section: Section) -> dict[str, Any]:
    return {
        "foreign": section.foreign,
        "notes": section.notes,
        "rows": [_row(row) for row in section.rows],
        "differences": [
            {
                "ours": duel.ours.method,
                "rival": duel.rival.method,
                "auroc": duel.all._asdict(),
                "auroc_foreign": None if duel.foreign is None else duel.foreign._asdict(),
            }
            for duel in section.duels
        ],
    }


def _row(row: Row) -> dict[str, Any]:
    stats = {figure: row.stat(figure) for figure in FIGURES}
    paper = row.paper or {}
    return {
        "method": row.method,
        "title": row.title,
        "kind": kind(row),
        "ranked_by": row.forms,
        "best_of": row.best_of,
        "seeds": row.seeds,
        "figures": {name: None if found is None else found._asdict() for name, found in stats.items()},
        "auroc_by_set": {name: found._asdict() for name, pair in row.pairs.items() if (found := stat(pair.values()))},
        "paper": {
            name: {**published._asdict(), "gap": found.mean - published.mean}
            for name, published in paper.items()
            if (found := stats[name])
        }
        or None,
    }


def _strict(content: Any) -> Any:
    """Without NaN and infinity, which are not JSON."""
    return json.loads(json.dumps(content), parse_constant=str)
