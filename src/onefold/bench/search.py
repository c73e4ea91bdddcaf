"""The paper's search for rates: first the learning rate of the classifier, then what is a method's own."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from onefold.bench.cell import means, run_unit
from onefold.bench.engines import engine
from onefold.bench.methods import Job
from onefold.bench.results import Results
from onefold.bench.run import Plan, planned
from onefold.bench.sets import identity
from onefold.bench.units import Rates, settings_of
from onefold.errors import InputError, MissingExtraError

LEARNING_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
DROPOUT = (0.05, 0.1, 0.15, 0.25, 0.5)


class Stage(NamedTuple):
    """One rate to be searched for, the others held at what was found or, in italics in the paper, given."""

    rate: str
    values: tuple[float, ...]
    held: dict[str, float]


# The paper's Table "hpsearchspaceood": learning rates for all; in parentheses there, the methods' own.
SPACES: dict[str, tuple[Stage, ...]] = {
    "ens3": (Stage("classifier", LEARNING_RATES, {}),),
    "laplace": (Stage("classifier", LEARNING_RATES, {}),),
    "sgmcmc": (Stage("classifier", LEARNING_RATES, {}),),
    "mcd": (Stage("mcd", LEARNING_RATES, {"dropout": 0.15}), Stage("dropout", DROPOUT, {})),
    "rnd": (Stage("rnd", LEARNING_RATES, {}),),
    "csd": (Stage("csd", LEARNING_RATES, {}),),
}


class Tried(NamedTuple):
    """One value of one rate, its AUROC (mean over the paper's strange sets), and whether it was there before."""

    method: str
    rate: str
    value: float
    auroc: float | None
    reason: str = ""


def search(plan: Plan, method: str) -> Iterator[Tried]:
    """Try every value of every stage on one set, by the mean AUROC, as the paper did; the best goes on to the next.

    Trials lie in the results folder, one Optuna study for each stage; what is done is not done again.
    """
    if method not in SPACES:
        raise InputError(f"there is no search space for {method!r}; there are those of {', '.join(SPACES)}")
    sets = {"ids": plan.ids[:1], "strange": plan.ids[1:]}
    jobs, results = planned(dataclasses.replace(plan, **sets, methods=(method,), seeds=plan.seeds[:1] or (0,)))
    job, held = jobs[0], {}
    with results.locked():
        results.begin({**settings_of(job.preset), "search": True}, identity(job.data, job.preset))
        for stage in SPACES[method]:
            tried = []
            for trial in _stage(plan, method, stage, job, {**stage.held, **held}, results):
                tried.append(trial)
                yield trial
            done = [trial for trial in tried if trial.auroc is not None]
            if not done:
                raise InputError(f"no value of {stage.rate} could be tried for {method}: {tried[0].reason}")
            held[stage.rate] = max(done, key=lambda trial: trial.auroc or 0.0).value


def _stage(
    plan: Plan, method: str, stage: Stage, job: Job, held: dict[str, float], results: Results
) -> Iterator[Tried]:
    study, optuna = _study(results.folder, "/".join([method, stage.rate, *_found(stage, held)]), stage)
    known = {
        float(trial.params[stage.rate]): trial.value
        for trial in study.trials
        if trial.state.is_finished() and trial.value
    }
    waiting = [value for value in stage.values if value not in known]
    rates = [dataclasses.replace(Rates(), **{**held, stage.rate: value}) for value in waiting]
    distribution = {stage.rate: optuna.distributions.CategoricalDistribution(list(stage.values))}
    yield from (Tried(method, stage.rate, value, known[value]) for value in stage.values if value in known)
    for done in engine(plan.engine)(run_unit, [dataclasses.replace(job, rates=r) for r in rates], plan.workers):
        value = waiting[done.place]
        if done.result is None:
            yield Tried(method, stage.rate, value, None, done.reason)
            continue
        auroc = means(done.result["scores"][done.result["default"]], "auroc")[0]
        study.add_trial(optuna.trial.create_trial(params={stage.rate: value}, distributions=distribution, value=auroc))
        yield Tried(method, stage.rate, value, auroc)


def _found(stage: Stage, held: dict[str, float]) -> list[str]:
    """What an earlier stage found, which trials of this one depend on."""
    return [f"{rate}={value:g}" for rate, value in held.items() if rate not in stage.held]


def _study(folder: Path, name: str, stage: Stage) -> tuple[Any, Any]:
    """The study of a stage, in a journal; of a line that was cut short, as on a full disk, nothing is kept."""
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError as error:
        raise MissingExtraError("a search needs Optuna: pip install 'onefold[search]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    journal = folder / "search.journal"
    if journal.exists() and not (content := journal.read_bytes()).endswith(b"\n"):
        os.truncate(journal, content.rfind(b"\n") + 1)
    storage = JournalStorage(JournalFileBackend(str(journal)))
    sampler = optuna.samplers.GridSampler({stage.rate: list(stage.values)}, seed=0)
    study = optuna.create_study(
        storage=storage, study_name=name, direction="maximize", sampler=sampler, load_if_exists=True
    )
    return study, optuna
