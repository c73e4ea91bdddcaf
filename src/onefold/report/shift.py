"""The distribution-shift table, in numbers: who is compared, by which score, over which sets and seeds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from onefold.bench.grid import PAPER_SETS as FAMILIES
from onefold.bench.results import COSTS, METRICS, TIMES, UnitResult
from onefold.bench.rows import ROWS
from onefold.bench.sets import PERTURBED
from onefold.report.paper import AVERAGE, PAPER, Published
from onefold.report.seeds import Difference, Stat, difference, mean, stat

PAPERS_SCORE = "variance"
TARGET_DATA = ("csd_ood",)  # fitted with unlabelled images like the strange ones: a rival has none
CHAMPIONS = ("csd_post_hoc", "csd_default", "csd_aug", "csd")  # who is compared with rivals: the first that was run
FIGURES = ("accuracy", *(f"{metric}{part}" for part in ("", "_foreign", "_clipped") for metric in METRICS), *COSTS)


@dataclass(frozen=True)
class Row:
    """A line of the table. `best_of` is the number of forms it was the best of in hindsight, 0 if fixed beforehand."""

    method: str
    title: str
    ours: bool
    extra: bool
    """Ours by the paper's score."""
    forms: dict[str, str]
    """What it was ranked by, and how its classifier was trained, on each set."""
    best_of: int
    values: dict[str, dict[int, float]]
    """A figure's values by seed."""
    pairs: dict[str, dict[int, float]] = field(default_factory=dict)
    """AUROC against each strange set, by seed."""
    units: tuple[UnitResult, ...] = ()
    paper: dict[str, Published] | None = None

    def stat(self, figure: str) -> Stat | None:
        return stat(self.values.get(figure, {}).values())

    @property
    def ablation(self) -> bool:
        """A form of CSD that shows what a part is good for."""
        return self.method in ROWS and ROWS[self.method].ablation

    @property
    def seeds(self) -> list[int]:
        return sorted(self.values["auroc"])

    @property
    def form(self) -> str:
        """By which score, in words."""
        found = list(dict.fromkeys(self.forms.values()))
        return found[0] if len(found) == 1 else "chosen set by set"


@dataclass(frozen=True)
class Duel:
    """One of ours against a rival: AUROC over foreign and perturbed sets, and over foreign ones alone."""

    ours: Row
    rival: Row
    all: Difference
    foreign: Difference | None


@dataclass(frozen=True)
class Section:
    """The table of one familiar set, or of the average over all of them."""

    name: str
    rows: list[Row]
    duels: list[Duel]
    foreign: list[str]
    notes: list[str]
    of_all: bool = False
    """Whether it is the average: a set may have that name too."""


@dataclass(frozen=True)
class Table:
    sections: list[Section]
    average: Section

    @property
    def shown(self) -> list[Section]:
        """The average first, unless it is over one set, or over methods that no set shares."""
        return [self.average, *self.sections] if len(self.sections) > 1 and self.average.rows else self.sections


def build(units: Sequence[UnitResult]) -> Table:
    """The table of these units; there is at least one."""
    names = sorted({unit.id_set for unit in units}, key=lambda name: (_place(name), name))
    sections = [_section(name, [unit for unit in units if unit.id_set == name]) for name in names]
    return Table(sections, _average(sections))


def _section(name: str, units: list[UnitResult]) -> Section:
    """All rows of one familiar set, over the strange sets that every unit was measured against."""
    sets = [unit.ood_sets for unit in units]
    common = [other for other in sets[0] if all(other in those for those in sets)]
    foreign = [other for other in common if other not in PERTURBED]
    notes = [_about_the_paper(name, foreign)]
    if left := sorted({other for those in sets for other in those} - set(common)):
        notes.append(f"Not every unit was measured against {_listed(left)}: left out of all means.")
    rows = []
    for method in sorted({unit.family for unit in units}, key=lambda method: (_order(method), method)):
        own = [unit for unit in units if unit.family == method]
        rows += _ours(own, foreign) if own[0].ours else [_rival(own, foreign)]
    return _finished(Section(name, rows, [], foreign, notes), PAPER[name] if name in FAMILIES else {})


def _ours(units: list[UnitResult], foreign: list[str]) -> list[Row]:
    """By the score fixed beforehand and, in a row of its own, by the paper's."""
    rows = [_row(units, lambda unit: unit.default, foreign)]
    by_paper = [unit for unit in units if PAPERS_SCORE in unit.scores and unit.default != PAPERS_SCORE]
    if by_paper:
        rows.append(_row(by_paper, lambda _: PAPERS_SCORE, foreign, extra=True))
    return rows


def _rival(units: list[UnitResult], foreign: list[str]) -> Row:
    """The best, by mean AUROC, of all its scores, with and without flips."""
    candidates = []
    for variant in sorted({unit.row for unit in units}):
        own = [unit for unit in units if unit.row == variant]
        kinds = [kind for kind in own[0].scores if all(kind in unit.scores for unit in own)]
        candidates += [(own, lambda _, kind=kind: kind) for kind in kinds] or [(own, lambda unit: unit.default)]
    rows = [_row(own, kind, foreign, best_of=len(candidates), family=units) for own, kind in candidates]
    return max(rows, key=_auroc)


def _row(
    units: list[UnitResult],
    kind: Callable[[UnitResult], str],
    foreign: list[str],
    best_of: int = 0,
    extra: bool = False,
    family: Sequence[UnitResult] = (),
) -> Row:
    """Times are those of units that had the machine to themselves, these or others of the family."""
    first = units[0]
    values: dict[str, dict[int, float]] = {}
    pairs: dict[str, dict[int, float]] = {}
    for unit in sorted(units, key=lambda unit: unit.seed):
        strange = unit.scores[kind(unit)]
        for figure, value in _figures(unit, strange, foreign).items():
            values.setdefault(figure, {})[unit.seed] = value
        for other in [*foreign, *(name for name in PERTURBED if name in strange)]:
            pairs.setdefault(other, {})[unit.seed] = strange[other]["auroc"]
    lone = [unit for unit in units if unit.alone] or [unit for unit in family if unit.alone]
    values |= {figure: {unit.seed: unit.cost[figure] for unit in lone} for figure in TIMES}
    known = ROWS.get(first.family)
    return Row(
        method=first.family,
        title=first.title if known is None else known.title,
        ours=first.ours,
        extra=extra,
        forms={first.id_set: _form(first, kind(first))},
        best_of=best_of,
        values=values,
        pairs=pairs,
        units=tuple(units),
    )


def _figures(unit: UnitResult, strange: Mapping[str, Mapping[str, float]], foreign: list[str]) -> dict[str, float]:
    """Means over the foreign sets and the perturbed one, as in the paper; over foreign ones; the clipped one apart."""
    found = {"accuracy": 100 * unit.accuracy, **unit.cost}
    for metric in METRICS:
        far = [strange[name][metric] for name in foreign]
        found[metric] = mean([*far, strange[PERTURBED[0]][metric]])
        if far:
            found[f"{metric}_foreign"] = mean(far)
        if PERTURBED[1] in strange:
            found[f"{metric}_clipped"] = strange[PERTURBED[1]][metric]
    return found


def _average(sections: list[Section]) -> Section:
    """Every row that all sets have, averaged seed by seed."""
    names = [section.name for section in sections]
    complete = sorted(names) == sorted(FAMILIES)
    notes = [
        "All four sets are the paper's: gaps are to its main table."
        if complete
        else "The paper's average is over fashion_mnist, mnist, kmnist and notmnist; this one is not: no gaps."
    ]
    rows, absent = [], []
    for method, extra in dict.fromkeys((row.method, row.extra) for section in sections for row in section.rows):
        found = [row for section in sections for row in section.rows if (row.method, row.extra) == (method, extra)]
        row = _averaged(found)
        if len(found) == len(sections) and row.values.get("auroc"):
            rows.append(row)
        elif not extra:
            absent.append(row.title)
    if absent:
        notes.append(f"Without an average, for no seed was run on every set: {_listed(absent)}.")
    return _finished(Section(AVERAGE, rows, [], [], notes, of_all=True), PAPER[AVERAGE] if complete else {})


def _averaged(rows: list[Row]) -> Row:
    values = {
        figure: {seed: mean([row.values[figure][seed] for row in rows]) for seed in seeds}
        for figure in FIGURES
        if (seeds := sorted(set.intersection(*(set(row.values.get(figure, {})) for row in rows))))
    }
    first, forms = rows[0], {name: form for row in rows for name, form in row.forms.items()}
    return Row(first.method, first.title, first.ours, first.extra, forms, max(row.best_of for row in rows), values)


def _finished(section: Section, published: Mapping[str, dict[str, Published]]) -> Section:
    """Rivals, ours, ours by the paper's score; the paper's figures where it has them; who beats whom."""
    ordered = sorted(section.rows, key=lambda row: (row.ours, row.extra, row.ablation))
    rows = [replace(row, paper=published.get(row.title)) for row in ordered]
    return replace(section, rows=rows, duels=_duels(rows))


def _duels(rows: list[Row]) -> list[Duel]:
    """Ours that saw images like the strange ones, and one form of ours that did not, fixed beforehand, against each."""
    ours = {row.method: row for row in rows if row.ours and not row.extra}
    informed = [ours[name] for name in TARGET_DATA if name in ours]
    champions = [*informed, *[ours[name] for name in CHAMPIONS if name in ours][:1]]
    duels = []
    for champion in champions:
        for rival in (row for row in rows if not row.ours):
            four, three = (
                difference(champion.values.get(figure, {}), rival.values.get(figure, {}))
                for figure in ("auroc", "auroc_foreign")
            )
            if four is not None:
                duels.append(Duel(champion, rival, four, three))
    return duels


def _about_the_paper(name: str, foreign: list[str]) -> str:
    if name in FAMILIES:
        others = [family for family in FAMILIES if family != name]
        if sorted(foreign) == sorted(others):
            return f"Gaps are to the paper's table for {name}, with the same strange sets."
        return (
            f"Gaps are to the paper's table for {name}; its strange sets were {_listed(others)}, whole, and perturbed."
        )
    family = next((family for family in FAMILIES if name.startswith(f"{family}_")), None)
    if family:
        return f"{name} is not the whole {family} that the paper has, but other data: no gaps."
    return f"{name} is not among the paper's sets: no gaps."


def _form(unit: UnitResult, kind: str) -> str:
    known, score = ROWS.get(unit.row), kind.replace("_", " ")
    parts = ["default score" if score == "score" else score]
    if known is not None:
        parts.append(known.variant)
    return ", ".join(part for part in parts if part)


def _place(name: str) -> int:
    """The paper's sets, and parts of them, in the paper's order; others after them."""
    places = [i for i, family in enumerate(FAMILIES) if name == family or name.startswith(f"{family}_")]
    return places[0] if places else len(FAMILIES)


def _order(method: str) -> int:
    return list(ROWS).index(method) if method in ROWS else len(ROWS)


def _auroc(row: Row) -> float:
    return mean(row.values["auroc"].values())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
