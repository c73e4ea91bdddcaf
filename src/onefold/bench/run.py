"""A run: the units that are not done yet, through an engine, into a results folder."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onefold.bench.cell import run_unit
from onefold.bench.engines import engine
from onefold.bench.methods import Job
from onefold.bench.previews import preview
from onefold.bench.results import Results
from onefold.bench.sets import choose, familiar, identity, label
from onefold.bench.units import ABLATION, PRESETS, Unit, grid, settings_of
from onefold.data.sets import data_dir
from onefold.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run, and where to."""

    out: Path
    preset: str = "quick"
    methods: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    engine: str = "serial"
    workers: int | None = None
    data_dir: Path | None = None


class Progress(NamedTuple):
    """A unit that ended, or was there already: its result, or the reason why there is none."""

    unit: Unit
    result: dict[str, Any] | None
    reason: str = ""
    before: bool = False


def planned(plan: Plan) -> tuple[list[Job], Results]:
    """The jobs of a plan and the folder that they go to; whatever is wrong with it is found here."""
    if plan.preset not in PRESETS:
        raise InputError(f"there is no preset {plan.preset!r}; known are {', '.join(PRESETS)}")
    if plan.workers is not None and plan.workers < 1:
        raise InputError(f"at least 1 worker is needed, not {plan.workers}")
    engine(plan.engine)
    preset = PRESETS[plan.preset]
    folder = Path() if preset.small else data_dir(plan.data_dir)
    data = choose(preset, folder, plan.ids, plan.strange)
    for name in data.ids:
        familiar(data, name, preset)  # one without labels is no familiar set
    if len(data.names) < 2:
        raise InputError(f"{label(data.ids[0])} needs other sets to be told from: name them with --strange")
    units = grid(preset, data.ids, plan.methods, plan.seeds)
    results = Results(plan.out)
    return [Job(unit, preset, data, results.classifiers.absolute()) for unit in units], results


def run(plan: Plan) -> Iterator[Progress]:
    """Do what is not done; every unit of the plan comes by once."""
    jobs, results = planned(plan)
    with results.locked():
        settings = settings_of(jobs[0].preset)
        results.begin(settings, identity(jobs[0].data, jobs[0].preset))
        preview(jobs[0].data, jobs[0].preset, results.previews)
        waiting = []
        for job in jobs:
            result = results.read(job.unit, settings)
            if result is None:
                waiting.append(job)
            else:
                yield Progress(job.unit, result, before=True)
        yield from _worked(waiting, results, plan)


def ablation(plan: Plan) -> Iterator[Progress]:
    """What each choice in CSD is worth, on FashionMNIST and KMNIST unless other sets are named."""
    if not plan.ids and not PRESETS[plan.preset].small:
        found = choose(PRESETS[plan.preset], data_dir(plan.data_dir), (), ()).ids
        ids = tuple(name for name in found if name.startswith(("fashion_mnist", "kmnist")))
        plan = dataclasses.replace(plan, ids=ids)
    yield from run(dataclasses.replace(plan, methods=ABLATION))


def _worked(jobs: Sequence[Job], results: Results, plan: Plan) -> Iterator[Progress]:
    alone = plan.engine == "serial" or plan.workers == 1
    for done in engine(plan.engine)(run_unit, jobs, plan.workers):
        unit = jobs[done.place].unit
        if done.result is None:
            results.fail(unit, done.reason, done.trace)
        else:
            done.result["cost"]["alone"] = alone  # else its times are those of a shared machine
            results.write(unit, done.result)
        yield Progress(unit, done.result, done.reason)
