"""The distribution-shift table as files: Markdown, LaTeX, and JSON for scripts."""

import json
import re
from typing import Any

from onefold.report.score_page import visible
from onefold.report.seeds import stat
from onefold.report.shift import FIGURES, Row, Section, Table
from onefold.report.shift_text import RULES, Cell, grids, kind, remarks, title_of
from onefold.report.shift_units import Collected, origins


def markdown(table: Table) -> str:
    """The tables for a README."""
    parts = ["# Distribution shift", *(md(rule) for rule in RULES)]
    for section in table.shown:
        parts += [f"## {md(title_of(section))}", *(md(visible(note)) for note in section.notes)]
        for grid in grids(section):
            rows = [list(map(md, grid.heads)), ["---"] * grid.words + ["---:"] * (len(grid.heads) - grid.words)]
            rows += [list(map(md, cells)) for _, cells in grid.rows]
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(parts) + "\n"


def md(text: str | Cell) -> str:
    if isinstance(text, Cell):
        figure = text.mean + (f" ± {text.sd}" if text.sd else "")
        return (f"**{figure}**" if text.best else figure) + (f" ({text.gap})" if text.gap else "")
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]|#~$!])", r"\\\1", text)


def latex(table: Table) -> str:
    """The tables for a paper, for the package booktabs."""
    parts = ["% Needs \\usepackage{booktabs}. In brackets: the gap to the paper's published figure."]
    parts += [f"% {rule}" for rule in RULES]
    for i, section in enumerate(table.shown):
        for grid in grids(section):
            parts += [
                "",
                "\\begin{table*}",
                "  \\centering\\small",
                f"  \\caption{{Distribution shift: {_tex(title_of(section))}. {grid.what}.}}",
                f"  \\label{{tab:shift-{i}-{grid.what.lower()}}}",
                f"  \\begin{{tabular}}{{{'l' * grid.words}{'r' * (len(grid.heads) - grid.words)}}}",
                "    \\toprule",
                f"    {' & '.join(map(_tex, grid.heads))} \\\\",
            ]
            before = ""
            for group, cells in grid.rows:
                parts += ["    \\midrule"] if group != before else []
                before = group
                parts.append(f"    {' & '.join(map(_tex, cells))} \\\\")
            parts += ["    \\bottomrule", "  \\end{tabular}", "\\end{table*}"]
    return "\n".join(parts) + "\n"


TEX = {
    "\\": "\\textbackslash{}", "{": "\\{", "}": "\\}", "$": "\\$", "&": "\\&", "#": "\\#", "_": "\\_", "%": "\\%",
    "^": "\\textasciicircum{}", "~": "\\textasciitilde{}", "<": "\\textless{}", ">": "\\textgreater{}",
    "|": "\\textbar{}", '"': "{\\char34}", "`": "\\textasciigrave{}", "−": "$-$", "±": "$\\pm$", "–": "--",
    "µ": "$\\mu$", "[": "{[}",
}  # fmt: skip


def _tex(text: str | Cell) -> str:
    if isinstance(text, Cell):
        mean = f"\\textbf{{{text.mean}}}" if text.best else _tex(text.mean)
        return mean + (f" $\\pm$ {text.sd}" if text.sd else "") + (f" ({_tex(text.gap)})" if text.gap else "")
    return "".join(TEX.get(letter, letter) for letter in text)


def as_json(table: Table, collected: Collected) -> dict[str, Any]:
    """Every figure of every section, unrounded, and where it comes from."""
    return {
        "settings": _strict(collected.about["settings"]),
        "data": _strict(collected.about["data"]),
        "remarks": remarks(collected),
        "units": len(collected.units),
        "sets": {section.name: _section(section) for section in table.sections},
        "average": _section(table.average),
        "origins": origins(collected.units),
        "failures": [failure._asdict() for failure in collected.failures],
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
