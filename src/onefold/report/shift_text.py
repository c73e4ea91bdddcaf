"""The distribution-shift table in words: cells, rows and what has to be said about them."""

from collections.abc import Sequence
from typing import NamedTuple

from onefold.bench.results import Collected
from onefold.errors import visible
from onefold.report.origins import count_origins, parse_origin
from onefold.report.seeds import Difference, Stat
from onefold.report.shift import Duel, Row, Section
from onefold.report.tables import NO_VALUE, Cell, TextTable, format_count, format_number, format_signed

RULES = (
    "Figures are per cent, mean ± standard deviation over seeds; means are over the foreign sets and the unclipped "
    "perturbed one, as in the paper. Precision-recall is at equal class weight.",
    "Rivals are shown at their best: of all their scores, with and without flips, whichever has the highest mean AUROC "
    "on that set in hindsight. CSD uses its default score, fixed beforehand; by the paper's score it has extra rows.",
)


class Column(NamedTuple):
    """A figure as it is shown; `digits` None is for what spans orders of magnitude."""

    figure: str
    head: str
    digits: int | None = 2
    lower: bool = False


MAIN = (
    Column("auroc", "AUROC"),
    Column("auroc_foreign", "AUROC, foreign"),
    Column("aupr_in", "AUPR-IN"),
    Column("aupr_out", "AUPR-OUT"),
    Column("fpr95", "FPR95", lower=True),
    Column("accuracy", "Accuracy"),
    Column("auroc_clipped", "AUROC, clipped"),
)
COST = (
    Column("fit_s", "Fit, s", None, lower=True),
    Column("score_us", "Score, µs per image", None, lower=True),
    Column("parameters", "Trained weights", 0, lower=True),
    Column("peak_mb", "Peak memory, MB", 0, lower=True),
)


class Line(NamedTuple):
    """A row of a table; `kind` is rival, ours, ablation or paper (ours by its score), `detail` has that in words."""

    title: str
    form: str
    detail: str
    kind: str
    seeds: int
    cells: list[Cell]


def remarks(collected: Collected) -> list[str]:
    """What a reader has to know of the whole run before its figures."""
    settings, found = collected.manifest["settings"], []
    if settings.get("name") != "paper":
        cut = [f"{settings[part]:,} {part}" for part in ("train", "test") if type(settings.get(part)) is int]
        most = f", with at most {' and '.join(cut)} images of every set" if cut else ""
        name = visible(str(settings.get("name"))[:40])
        found.append(f"The preset is {name}, not paper{most}: a gap to the paper is one between unlike runs.")
    made = count_origins(parse_origin(unit.origin) for unit in collected.units)
    if len(made["device"]) > 1:
        found.append("The units were run on different machines: what they cost cannot be compared.")
    if not all(unit.alone for unit in collected.units):
        found.append("Some units shared the machine: times are of those that had it to themselves.")
    if any(name.endswith("+") for name in made["commit"]):
        found.append("Some units were made from a source tree that had been changed since its commit (marked +).")
    if collected.failures:
        found.append(f"Failed, for the reasons listed below: {format_count(len(collected.failures), 'unit')}.")
    if collected.skipped:
        found.append(f"Left out, for the reasons listed below: {format_count(len(collected.skipped), 'file')}.")
    return found


def title_of(section: Section) -> str:
    return "Average over all sets" if section.of_all else visible(section.name)


def lines(section: Section, columns: Sequence[Column]) -> list[Line]:
    """The rows of a section; the best of a column, as it is shown, is marked."""
    by_column = [_cells(section.rows, column) for column in columns]
    return [
        Line(visible(row.title), form(row), detail(row), kind(row), len(row.seeds), [cells[i] for cells in by_column])
        for i, row in enumerate(section.rows)
    ]


def kind(row: Row) -> str:
    return "paper" if row.extra else "ablation" if row.ablation else "ours" if row.ours else "rival"


def form(row: Row) -> str:
    """What a row was ranked by."""
    return visible(row.form if row.ours or row.best_of > 1 else row.form.replace("default score", "its one score"))


def detail(row: Row) -> str:
    """The same, and how it came about."""
    if row.extra:
        return f"{form(row)}, the paper's score"
    return f"{form(row)}, fixed beforehand" if row.ours else form(row) + f", best of {row.best_of}" * (row.best_of > 1)


def _cells(rows: Sequence[Row], column: Column) -> list[Cell]:
    stats = [row.stat(column.figure) for row in rows]
    texts = [NO_VALUE if stat is None else format_number(stat.mean, column.digits) for stat in stats]
    known = [float(text.replace(",", "")) for text in texts if text != NO_VALUE]
    best = (min if column.lower else max)(known) if known else None
    return [
        _cell(row, column, stat, text, text != NO_VALUE and float(text.replace(",", "")) == best)
        for row, stat, text in zip(rows, stats, texts, strict=True)
    ]


def _cell(row: Row, column: Column, stat: Stat | None, text: str, best: bool) -> Cell:
    if stat is None:
        return Cell(text)
    sd = "" if stat.sd is None or column.digits == 0 else format_number(stat.sd, column.digits)
    paper = (row.paper or {}).get(column.figure)
    if paper is None:
        return Cell(text, sd, best)
    gap = round(stat.mean - paper.mean, 2)
    return Cell(text, sd, best, format_signed(gap), "up" if gap > 0 else "down" if gap < 0 else "even")


def difference_text(found: Difference | None) -> str:
    if found is None:
        return NO_VALUE
    return format_signed(found.mean) + (" (no s.e.)" if found.se is None else f" ± {found.se:.2f}")


def grids(section: Section) -> list[TextTable]:
    """What there is to say of a section: how well, at what cost, and ours against each rival."""
    found = []
    for what, columns in (("Detection", MAIN), ("Cost", COST)):
        rows = [
            (line.kind, [line.title, line.detail, str(line.seeds), *line.cells])
            for line in lines(section, columns)
            if what == "Detection" or line.kind != "paper"
        ]
        found.append(TextTable(what, ["Method", "Ranked by", "Seeds", *(column.head for column in columns)], 2, rows))
    rows = [(duel.ours.method, _duel(duel)) for duel in section.duels]
    heads = ["AUROC of", "less that of", "Difference", "Foreign sets only", "Seeds in common"]
    return [*found, *([TextTable("Differences", heads, 2, rows)] if rows else [])]


def _duel(duel: Duel) -> list[str | Cell]:
    return [
        visible(duel.ours.title),
        visible(duel.rival.title),
        difference_text(duel.all),
        difference_text(duel.foreign),
        str(duel.all.n),
    ]
