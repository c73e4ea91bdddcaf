"""The distribution-shift table in numbers.

Unit files become one flat list of measurements. The rows of the table, their means and their comparisons are functions
of that list.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

from onefold.bench.grid import PAPER_SETS
from onefold.bench.results import COSTS, METRICS, TIMES, UnitResult
from onefold.bench.rows import ROWS
from onefold.bench.sets import PERTURBED, paper_set
from onefold.report.paper import AVERAGE, PAPER
from onefold.report.stats import Estimate, estimate, mean

PAPER_SCORE = "variance"
COMPARED = ("csd_post_hoc", "csd_default", "csd_aug", "csd")
"""Forms of CSD in order of preference: the first that was run is compared with the rivals."""
FIGURES = ("accuracy", *(f"{metric}{part}" for part in ("", "_other", "_clipped") for metric in METRICS), *COSTS)
"""Figures of a row. A metric alone is its mean over other sets and the unclipped perturbed one, as in the paper;
"_other" is the mean over other sets alone, "_clipped" is the clipped perturbed set."""

Values: TypeAlias = dict[int, float]
"""Values of a figure by seed."""
Kind: TypeAlias = Literal["rival", "ours", "ablation", "paper"]


class Measurement(NamedTuple):
    """One measured value.

    `score` is empty for the unit's default score, which is listed by its name as well. `score` and `ood` are empty for
    the accuracy (per cent) and the cost of a unit.
    """

    set: str
    row: str
    seed: int
    score: str
    ood: str
    metric: str
    value: float


@dataclass(frozen=True)
class TableRow:
    """A row of the table.

    Args:
        name: Name of the benchmark row, or of the row that stands for its family.
        title: Title.
        ours: True for a form of CSD.
        by_paper_score: True for a form of CSD ranked by the paper's score.
        forms: Description of the score and training that the row was ranked by, by ID set.
        best_of: Number of forms that the row is the best of in hindsight; 0 if its form was fixed beforehand.
        values: Values by figure.
        by_set: AUROC by OOD set.
        units: The units behind the row, for curves.
        paper: The paper's figures.
    """

    name: str
    title: str
    ours: bool
    by_paper_score: bool
    forms: dict[str, str]
    best_of: int
    values: dict[str, Values]
    by_set: dict[str, Values] = field(default_factory=dict)
    units: tuple[UnitResult, ...] = ()
    paper: dict[str, Estimate] | None = None

    def estimate(self, figure: str) -> Estimate | None:
        """Return the mean and standard deviation of a figure over seeds; None if it was not measured."""
        return estimate(self.values.get(figure, {}).values())

    @property
    def auroc(self) -> float:
        """Mean AUROC, which every row has."""
        return mean(self.values["auroc"].values())

    @property
    def kind(self) -> Kind:
        """Group of the table."""
        if self.by_paper_score:
            return "paper"
        if self.name in ROWS and ROWS[self.name].ablation:
            return "ablation"
        return "ours" if self.ours else "rival"

    @property
    def uses_ood(self) -> bool:
        """True if the row was fitted with unlabelled images of the OOD sets' training splits."""
        return self.name in ROWS and ROWS[self.name].uses_ood

    @property
    def seeds(self) -> list[int]:
        """Seeds with an AUROC."""
        return sorted(self.values["auroc"])

    @property
    def form(self) -> str:
        """Description of the score and training."""
        forms = list(dict.fromkeys(self.forms.values()))
        return forms[0] if len(forms) == 1 else "chosen set by set"


@dataclass(frozen=True)
class Section:
    """The table of one ID set, or of the average over all of them.

    Args:
        name: Name of the ID set. A set may be called "average", too.
        rows: Rivals, then forms of CSD.
        comparisons: Pairs of a form of CSD and a rival.
        other_sets: OOD sets without the perturbed ones.
        notes: What a reader must know about this section.
        is_average: True for the average.
    """

    name: str
    rows: list[TableRow]
    comparisons: list[tuple[TableRow, TableRow]]
    other_sets: list[str]
    notes: list[str]
    is_average: bool = False


def list_measurements(units: Iterable[UnitResult]) -> list[Measurement]:
    """Return every measured value. Times of units that shared the machine are left out."""
    measurements = []
    for unit in units:
        key = (unit.id_set, unit.row, unit.seed)
        cost = {name: value for name, value in unit.cost.items() if unit.alone or name not in TIMES}
        whole = {"accuracy": 100 * unit.accuracy, **cost}
        measurements += [Measurement(*key, "", "", metric, value) for metric, value in whole.items()]
        for score in ("", *unit.scores):
            for ood, figures in unit.scores[score or unit.default].items():
                measurements += [Measurement(*key, score, ood, metric, value) for metric, value in figures.items()]
    return measurements


def build_table(units: Sequence[UnitResult]) -> list[Section]:
    """Return a section for each ID set, the paper's sets first, and the average as the last one.

    Args:
        units: At least one unit.
    """
    names = sorted({unit.id_set for unit in units}, key=lambda name: (_position(name), name))
    sections = [_build_section(name, [unit for unit in units if unit.id_set == name]) for name in names]
    return [*sections, _average(sections)]


def shown_sections(table: Sequence[Section]) -> list[Section]:
    """Return the average and then the sets; the sets alone if there is one or no row was run on all of them."""
    *sections, average = table
    return [average, *sections] if len(sections) > 1 and average.rows else sections


def _build_section(name: str, units: list[UnitResult]) -> Section:
    common = [ood for ood in units[0].ood_sets if all(ood in unit.ood_sets for unit in units)]
    other_sets = [ood for ood in common if ood not in PERTURBED]
    notes = [_note_on_paper(name, other_sets)]
    if missing := sorted({ood for unit in units for ood in unit.ood_sets} - set(common)):
        notes.append(f"Not every unit was measured against {', '.join(missing)}. No mean includes it.")
    rows = []
    for family in sorted({unit.family for unit in units}, key=lambda family: (_rank(family), family)):
        members = [unit for unit in units if unit.family == family]
        rows += _our_rows(members, other_sets) if members[0].ours else [_best_row(members, other_sets)]
    return _finish(Section(name, rows, [], other_sets, notes), PAPER[name] if name in PAPER_SETS else {})


def _our_rows(units: list[UnitResult], other_sets: list[str]) -> list[TableRow]:
    """Return a row by the score fixed beforehand and, where there is one, a row by the paper's score."""
    rows = [_table_row(units, list_measurements(units), "", other_sets)]
    scored = [unit for unit in units if PAPER_SCORE in unit.scores and unit.default != PAPER_SCORE]
    if scored:
        row = _table_row(scored, list_measurements(scored), PAPER_SCORE, other_sets)
        rows.append(replace(row, by_paper_score=True))
    return rows


def _best_row(units: list[UnitResult], other_sets: list[str]) -> TableRow:
    """Return the row of the highest mean AUROC among all scores of all rows of a rival's family."""
    measurements, candidates = list_measurements(units), []
    for name in sorted({unit.row for unit in units}):
        members = [unit for unit in units if unit.row == name]
        scores = [score for score in members[0].scores if all(score in unit.scores for unit in members)]
        candidates += [_table_row(members, measurements, score, other_sets) for score in scores or [""]]
    return replace(max(candidates, key=lambda row: row.auroc), best_of=len(candidates))


def _table_row(
    units: list[UnitResult], measurements: Iterable[Measurement], score: str, other_sets: list[str]
) -> TableRow:
    """Return the row of units of one benchmark row by one score.

    Its times are those of its own units, or of the rest of the family if all of its own units shared the machine.
    """
    first = units[0]
    family = sorted(measurements, key=lambda m: m.seed)
    of_row = [m for m in family if m.row == first.row and (m.score == score or not m.ood)]
    values = figure_values(of_row, other_sets)
    for figure in TIMES:
        if figure not in values:
            values[figure] = {m.seed: m.value for m in family if m.metric == figure}
    by_set: dict[str, Values] = {}
    for m in of_row:
        if m.metric == "auroc" and m.ood in (*other_sets, *PERTURBED):
            by_set.setdefault(m.ood, {})[m.seed] = m.value
    return TableRow(
        name=first.family,
        title=ROWS[first.family].title if first.family in ROWS else first.title,
        ours=first.ours,
        by_paper_score=False,
        forms={first.id_set: _describe_form(first, score or first.default)},
        best_of=0,
        values=values,
        by_set={ood: by_set[ood] for ood in (*other_sets, *PERTURBED) if ood in by_set},
        units=tuple(units),
    )


def figure_values(measurements: Iterable[Measurement], other_sets: Sequence[str]) -> dict[str, Values]:
    """Return the values of `FIGURES` for the measurements of one row and score.

    Args:
        measurements: Values of one row on one ID set by one score, and of whole units.
        other_sets: OOD sets that means are over, without the perturbed ones.
    """
    values: dict[str, Values] = {}
    by_ood: dict[tuple[str, int], dict[str, float]] = {}
    for m in measurements:
        if m.ood:
            by_ood.setdefault((m.metric, m.seed), {})[m.ood] = m.value
        else:
            values.setdefault(m.metric, {})[m.seed] = m.value
    for (metric, seed), figures in by_ood.items():
        means = {"": [*other_sets, PERTURBED[0]], "_other": other_sets, "_clipped": PERTURBED[1:]}
        for part, names in means.items():
            if names and all(name in figures for name in names):
                values.setdefault(f"{metric}{part}", {})[seed] = mean(figures[name] for name in names)
    return values


def _average(sections: list[Section]) -> Section:
    """Return the section of rows that all sets have, averaged seed by seed."""
    complete = sorted(section.name for section in sections) == sorted(PAPER_SETS)
    notes = [
        "All four sets are the paper's. Gaps are to its main table."
        if complete
        else f"No gaps: the paper's average is over {', '.join(PAPER_SETS)}, and this one is over other sets."
    ]
    rows, missing = [], []
    for name, by_paper_score in dict.fromkeys((r.name, r.by_paper_score) for section in sections for r in section.rows):
        by_section = [
            row
            for section in sections
            for row in section.rows
            if (row.name, row.by_paper_score) == (name, by_paper_score)
        ]
        row = _average_row(by_section)
        if len(by_section) == len(sections) and row.values.get("auroc"):
            rows.append(row)
        elif not by_paper_score:
            missing.append(row.title)
    if missing:
        notes.append(f"Without an average, because no seed was run on every set: {', '.join(missing)}.")
    return _finish(Section(AVERAGE, rows, [], [], notes, is_average=True), PAPER[AVERAGE] if complete else {})


def _average_row(rows: list[TableRow]) -> TableRow:
    values = {
        figure: {seed: mean(row.values[figure][seed] for row in rows) for seed in seeds}
        for figure in FIGURES
        if (seeds := sorted(set.intersection(*(set(row.values.get(figure, {})) for row in rows))))
    }
    forms = {name: form for row in rows for name, form in row.forms.items()}
    return replace(
        rows[0], forms=forms, best_of=max(row.best_of for row in rows), values=values, by_set={}, units=(), paper=None
    )


def _finish(section: Section, published: Mapping[str, dict[str, Estimate]]) -> Section:
    """Return the section with its rows in order, the paper's figures and the comparisons."""
    ordered = sorted(section.rows, key=lambda row: (row.ours, row.by_paper_score, row.kind == "ablation"))
    rows = [replace(row, paper=published.get(row.title)) for row in ordered]
    return replace(section, rows=rows, comparisons=_compare(rows))


def _compare(rows: list[TableRow]) -> list[tuple[TableRow, TableRow]]:
    """Return pairs with each rival: of forms that were fitted with OOD images, and of one form that was not."""
    ours = {row.name: row for row in rows if row.kind == "ours"}
    informed = [row for row in ours.values() if row.uses_ood]
    champion = [ours[name] for name in COMPARED if name in ours][:1]
    return [(row, rival) for row in (*informed, *champion) for rival in rows if rival.kind == "rival"]


def _note_on_paper(name: str, other_sets: list[str]) -> str:
    if name in PAPER_SETS:
        paper_ood = [paper for paper in PAPER_SETS if paper != name]
        if sorted(other_sets) == sorted(paper_ood):
            return f"Gaps are to the paper's table for {name}, with the same OOD sets."
        return (
            f"Gaps are to the paper's table for {name}. Its OOD sets are {', '.join(paper_ood)} and perturbed images."
        )
    if paper := paper_set(name):
        return f"No gaps: {name} is not the whole {paper} of the paper but other data."
    return f"No gaps: {name} is not among the paper's sets."


def _describe_form(unit: UnitResult, score: str) -> str:
    name = "default score" if score == "score" else score.replace("_", " ")
    return ", ".join(part for part in (name, unit.variant) if part)


def _position(name: str) -> int:
    """Return the position of a set in the paper's order; other sets come last."""
    paper = paper_set(name)
    return len(PAPER_SETS) if paper is None else PAPER_SETS.index(paper)


def _rank(name: str) -> int:
    return list(ROWS).index(name) if name in ROWS else len(ROWS)
