"""The distribution-shift table as text: cells, remarks, Markdown, LaTeX, and JSON for scripts."""

import json
from collections.abc import Sequence
from typing import Any

from onefold.bench.results import COSTS, Collected
from onefold.errors import visible
from onefold.report.bench_table import FIGURES, Section, TableRow, shown_sections
from onefold.report.origins import count_origins, parse_origin
from onefold.report.stats import Estimate, difference, estimate
from onefold.report.tables import (
    NO_VALUE,
    Cell,
    TextTable,
    escape_markdown,
    format_count,
    format_number,
    format_signed,
    latex_table,
    markdown_table,
)

RULES = (
    "Figures are per cent, mean ± standard deviation over seeds. Means are over other sets and the unclipped perturbed "
    "one, as in the paper. Precision-recall is at equal class weight.",
    "Each rival is shown at its best: of all its scores, with and without flips, the one with the highest mean AUROC "
    "on that set, chosen in hindsight. CSD uses its default score, fixed beforehand, and has extra rows by the paper's "
    "score.",
)
DETECTION = ("auroc", "auroc_other", "aupr_in", "aupr_out", "fpr95", "accuracy", "auroc_clipped")
COST = tuple(COSTS)
HEADS = {
    "auroc": "AUROC", "auroc_other": "AUROC, other sets", "aupr_in": "AUPR-IN", "aupr_out": "AUPR-OUT",
    "fpr95": "FPR95", "accuracy": "Accuracy", "auroc_clipped": "AUROC, clipped", "fit_s": "Fit, s",
    "score_us": "Score, µs per image", "parameters": "Trained weights", "peak_mb": "Peak memory, MB",
}  # fmt: skip
LOWER_IS_BETTER = ("fpr95", *COST)
DIGITS = {"fit_s": None, "score_us": None, "parameters": 0, "peak_mb": 0}
"""Decimals of a figure, 2 by default; None for three significant digits."""


def list_remarks(collected: Collected) -> list[str]:
    """Return what a reader must know about the whole run before its figures."""
    settings, remarks = collected.manifest["settings"], []
    if settings.get("name") != "paper":
        limits = [f"{settings[part]:,} {part}" for part in ("train", "test") if type(settings.get(part)) is int]
        data = f", with at most {' and '.join(limits)} images of every set" if limits else ""
        name = visible(str(settings.get("name"))[:40])
        remarks.append(f"The preset is {name}, not paper{data}. Gaps to the paper are between different settings.")
    origins = count_origins(parse_origin(unit.origin) for unit in collected.units)
    if len(origins["device"]) > 1:
        remarks.append("The units ran on different machines. Their costs cannot be compared.")
    if not all(unit.alone for unit in collected.units):
        remarks.append("Some units shared the machine. Times are those of units that did not.")
    if any(commit.endswith("+") for commit in origins["commit"]):
        remarks.append("Some units come from a source tree with changes after its commit (marked +).")
    if collected.failures:
        remarks.append(f"Failed, with reasons below: {format_count(len(collected.failures), 'unit')}.")
    if collected.skipped:
        remarks.append(f"Left out, with reasons below: {format_count(len(collected.skipped), 'file')}.")
    return remarks


def section_title(section: Section) -> str:
    """Return the title of a section."""
    return "Average over all sets" if section.is_average else visible(section.name)


def describe_row(row: TableRow) -> str:
    """Return the score and training that a row was ranked by."""
    return visible(row.form if row.ours or row.best_of > 1 else row.form.replace("default score", "its one score"))


def _describe_choice(row: TableRow) -> str:
    """Return what a row was ranked by and how that was chosen."""
    if row.by_paper_score:
        return f"{describe_row(row)}, the paper's score"
    if row.ours:
        return f"{describe_row(row)}, fixed beforehand"
    return describe_row(row) + (f", best of {row.best_of}" if row.best_of > 1 else "")


def format_column(rows: Sequence[TableRow], figure: str, digits: int | None = 2) -> list[Cell]:
    """Return the cells of a figure, with the best of the column marked after rounding.

    Args:
        rows: Rows of a section.
        figure: One of `FIGURES`.
        digits: Decimals; None for three significant digits.
    """
    estimates = [row.estimate(figure) for row in rows]
    texts = [NO_VALUE if e is None else format_number(e.mean, digits) for e in estimates]
    values = [float(text.replace(",", "")) for text in texts if text != NO_VALUE]
    best = (min if figure in LOWER_IS_BETTER else max)(values) if values else None
    return [
        _format_cell(row, figure, e, text, digits, text != NO_VALUE and float(text.replace(",", "")) == best)
        for row, e, text in zip(rows, estimates, texts, strict=True)
    ]


def _format_cell(row: TableRow, figure: str, e: Estimate | None, text: str, digits: int | None, best: bool) -> Cell:
    if e is None:
        return Cell(text)
    sd = "" if e.spread is None or digits == 0 else format_number(e.spread, digits)
    paper = (row.paper or {}).get(figure)
    if paper is None:
        return Cell(text, sd, best)
    gap = round(e.mean - paper.mean, 2)
    return Cell(text, sd, best, format_signed(gap), "up" if gap > 0 else "down" if gap < 0 else "even")


def format_columns(rows: Sequence[TableRow], figures: Sequence[str]) -> list[list[Cell]]:
    """Return the cells of each row."""
    columns = [format_column(rows, figure, DIGITS.get(figure, 2)) for figure in figures]
    return [list(cells) for cells in zip(*columns, strict=True)]


def format_difference(e: Estimate | None) -> str:
    """Return a difference with its standard error."""
    if e is None:
        return NO_VALUE
    return format_signed(e.mean) + (" (no s.e.)" if e.spread is None else f" ± {e.spread:.2f}")


def compare(row: TableRow, rival: TableRow, figure: str) -> Estimate | None:
    """Return a figure of a row less that of a rival, paired over common seeds."""
    return difference(row.values.get(figure, {}), rival.values.get(figure, {}))


def text_tables(section: Section) -> list[TextTable]:
    """Return the tables of a section: detection, cost, and the differences to each rival if there are any."""
    tables = []
    for title, figures in (("Detection", DETECTION), ("Cost", COST)):
        rows = [
            (row.kind, [visible(row.title), _describe_choice(row), str(len(row.seeds)), *cells])
            for row, cells in zip(section.rows, format_columns(section.rows, figures), strict=True)
            if title == "Detection" or row.kind != "paper"
        ]
        heads = ["Method", "Ranked by", "Seeds", *(HEADS[figure] for figure in figures)]
        tables.append(TextTable(title, heads, 2, rows))
    differences = [(row.name, _comparison_cells(row, rival)) for row, rival in section.comparisons]
    heads = ["AUROC of", "less that of", "Difference", "Other sets only", "Seeds in common"]
    return [*tables, *([TextTable("Differences", heads, 2, differences)] if differences else [])]


def _comparison_cells(row: TableRow, rival: TableRow) -> list[str | Cell]:
    e, other = (compare(row, rival, figure) for figure in ("auroc", "auroc_other"))
    seeds = str(e.n) if e is not None else NO_VALUE
    return [visible(row.title), visible(rival.title), format_difference(e), format_difference(other), seeds]


def to_markdown(table: Sequence[Section]) -> str:
    """Return the tables as Markdown."""
    parts = ["# Distribution shift", *(escape_markdown(rule) for rule in RULES)]
    for section in shown_sections(table):
        parts.append(f"## {escape_markdown(section_title(section))}")
        parts += [escape_markdown(visible(note)) for note in section.notes]
        parts += ["\n".join(markdown_table(text_table)) for text_table in text_tables(section)]
    return "\n\n".join(parts) + "\n"


def to_latex(table: Sequence[Section]) -> str:
    """Return the tables as LaTeX for the package booktabs."""
    parts = ["% Needs \\usepackage{booktabs}. In brackets: the gap to the paper's published figure."]
    parts += [f"% {rule}" for rule in RULES]
    for i, section in enumerate(shown_sections(table)):
        for text_table in text_tables(section):
            caption = f"Distribution shift: {section_title(section)}. {text_table.title}."
            parts += ["", *latex_table(text_table, caption, f"tab:shift-{i}-{text_table.title.lower()}")]
    return "\n".join(parts) + "\n"


def to_json(table: Sequence[Section], collected: Collected) -> dict[str, Any]:
    """Return every figure of every section, unrounded, and the provenance of the units.

    Args:
        table: Sections of `build_table`.
        collected: Results folder behind them.
    """
    *sections, average = table
    return {
        "settings": _without_nan(collected.manifest["settings"]),
        "data": _without_nan(collected.manifest["data"]),
        "remarks": list_remarks(collected),
        "units": len(collected.units),
        "sets": {section.name: _section_json(section) for section in sections},
        "average": _section_json(average),
        "origins": count_origins(parse_origin(unit.origin) for unit in collected.units),
        "failures": collected.failures,
        "skipped": collected.skipped,
    }


def _section_json(section: Section) -> dict[str, Any]:
    return {
        "other_sets": section.other_sets,
        "notes": section.notes,
        "rows": [_row_json(row) for row in section.rows],
        "differences": [
            {
                "ours": row.name,
                "rival": rival.name,
                **{name: _estimate_json(compare(row, rival, name), "se") for name in ("auroc", "auroc_other")},
            }
            for row, rival in section.comparisons
        ],
    }


def _row_json(row: TableRow) -> dict[str, Any]:
    estimates = {figure: row.estimate(figure) for figure in FIGURES}
    paper = {
        name: {"mean": published.mean, "sd": published.spread, "gap": e.mean - published.mean}
        for name, published in (row.paper or {}).items()
        if (e := estimates[name])
    }
    return {
        "method": row.name,
        "title": row.title,
        "kind": row.kind,
        "ranked_by": row.forms,
        "best_of": row.best_of,
        "seeds": row.seeds,
        "figures": {name: _estimate_json(e, "sd") for name, e in estimates.items()},
        "auroc_by_set": {name: _estimate_json(estimate(values.values()), "sd") for name, values in row.by_set.items()},
        "paper": paper or None,
    }


def _estimate_json(e: Estimate | None, spread: str) -> dict[str, Any] | None:
    return None if e is None else {"mean": e.mean, spread: e.spread, "n": e.n}


def _without_nan(content: Any) -> Any:
    """Return the content with NaN and infinity as text, because JSON has neither."""
    return json.loads(json.dumps(content), parse_constant=str)
