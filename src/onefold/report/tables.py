"""Tables of text cells as Markdown and LaTeX."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

NO_VALUE = "–"


class Cell(NamedTuple):
    """A figure in a table: its mean, standard deviation and gap to a published figure, as text.

    `best` marks the best figure of a column; `trend` is the direction of the gap: "up", "down" or "even".
    """

    mean: str
    sd: str = ""
    best: bool = False
    gap: str = ""
    trend: str = ""


class TextTable(NamedTuple):
    """A table of text. A row is its group and its cells; consecutive rows of one group stand together.

    The first `text_columns` columns hold words and are left-aligned; the others hold numbers.
    """

    title: str
    heads: list[str]
    text_columns: int
    rows: list[tuple[str, list[str | Cell]]]


def markdown_table(table: TextTable) -> list[str]:
    """Return the lines of a Markdown table, with heads and cells escaped."""
    rows = (map(escape_markdown, cells) for _, cells in table.rows)
    return markdown_rows(list(map(escape_markdown, table.heads)), rows, table.text_columns)


def markdown_rows(heads: Sequence[str], rows: Iterable[Iterable[str]], text_columns: int = 1) -> list[str]:
    """Return the lines of a Markdown table whose heads and cells are Markdown already."""
    rule = ["---"] * text_columns + ["---:"] * (len(heads) - text_columns)
    return [f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows)]


def escape_markdown(text: str | Cell) -> str:
    """Return Markdown that shows the text or cell literally."""
    if isinstance(text, Cell):
        figure = text.mean + (f" ± {text.sd}" if text.sd else "")
        return (f"**{figure}**" if text.best else figure) + (f" ({text.gap})" if text.gap else "")
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]|#~$!])", r"\\\1", text)


def latex_table(table: TextTable, caption: str, label: str) -> list[str]:
    """Return the lines of a LaTeX table for the package booktabs, with caption, heads and cells escaped."""
    lines = [
        "\\begin{table*}",
        "  \\centering\\small",
        f"  \\caption{{{escape_latex(caption)}}}",
        f"  \\label{{{label}}}",
        f"  \\begin{{tabular}}{{{'l' * table.text_columns}{'r' * (len(table.heads) - table.text_columns)}}}",
        "    \\toprule",
        f"    {' & '.join(map(escape_latex, table.heads))} \\\\",
    ]
    previous_group = ""
    for group, cells in table.rows:
        if group != previous_group:
            lines.append("    \\midrule")
        previous_group = group
        lines.append(f"    {' & '.join(map(escape_latex, cells))} \\\\")
    return [*lines, "    \\bottomrule", "  \\end{tabular}", "\\end{table*}"]


_LATEX = {
    "\\": "\\textbackslash{}", "{": "\\{", "}": "\\}", "$": "\\$", "&": "\\&", "#": "\\#", "_": "\\_", "%": "\\%",
    "^": "\\textasciicircum{}", "~": "\\textasciitilde{}", "<": "\\textless{}", ">": "\\textgreater{}",
    "|": "\\textbar{}", '"': "{\\char34}", "`": "\\textasciigrave{}", "−": "$-$", "±": "$\\pm$", "–": "--",
    "µ": "$\\mu$", "[": "{[}",
}  # fmt: skip


def escape_latex(text: str | Cell) -> str:
    """Return LaTeX that shows the text or cell literally."""
    if isinstance(text, Cell):
        mean = f"\\textbf{{{text.mean}}}" if text.best else escape_latex(text.mean)
        return mean + (f" $\\pm$ {text.sd}" if text.sd else "") + (f" ({escape_latex(text.gap)})" if text.gap else "")
    return "".join(_LATEX.get(letter, letter) for letter in text)


def format_number(value: float, digits: int | None) -> str:
    """Return the number with so many decimals; with None, with three significant digits."""
    if digits is None:
        digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def format_signed(value: float) -> str:
    """Return the number with a sign and two decimals."""
    return f"{value:+.2f}".replace("-", "−")


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun, as in "3 runs"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
