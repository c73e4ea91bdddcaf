"""The paper's search for rates: first the learning rate, then the setting that only this method has."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onefold.bench.engines import Outcome, find_engine
from onefold.bench.evaluate import evaluate, mean_over_sets
from onefold.bench.grid import grid_points, point_name, rank
from onefold.bench.results import ResultsFolder
from onefold.bench.run import begin_folder, plan_units
from onefold.errors import InputError, MissingExtraError

JOURNAL = "search.journal"
LEARNING_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
DROPOUT = (0.05, 0.1, 0.15, 0.25, 0.5)

Point = dict[str, float]
Space = dict[str, tuple[float, ...]]

# The paper's Table "hpsearchspaceood". A method has one search space for each stage. A stage holds the rates that it
# does not list at the best values of the stages before it.
SPACES: dict[str, tuple[Space, ...]] = {
    "ens3": ({"classifier": LEARNING_RATES},),
    "laplace": ({"classifier": LEARNING_RATES},),
    "sgmcmc": ({"classifier": LEARNING_RATES},),
    "mcd": ({"mc_dropout": LEARNING_RATES, "dropout": (0.15,)}, {"dropout": DROPOUT}),
    "rnd": ({"rnd": LEARNING_RATES},),
    "csd": ({"csd": LEARNING_RATES},),
}


def search(
    out: Path,
    method: str,
    *,
    preset: str = "quick",
    ids: Sequence[str] = (),
    seeds: Sequence[int] = (),
    engine: str = "serial",
    workers: int | None = None,
    data_dir: Path | None = None,
) -> Iterator[Outcome[Point]]:
    """Try every point of every stage of a search space on one ID set and yield the outcome of each.

    A point that succeeded has `{"auroc": …}`, the mean over OOD sets as in the paper. Points are stored in the results
    folder, in one Optuna study per stage, and are not tried again.

    Args:
        out: Results folder. An existing folder is resumed.
        method: Name of a row with a search space.
        preset: Name of a preset.
        ids: The ID set, then OOD sets; empty for the paper's.
        seeds: The seed; empty for 0.
        engine: "serial", "processes" or "ray".
        workers: Number of points at a time; None for the engine's default.
        data_dir: Folder of the image sets; None for the default one.

    Raises:
        InputError: The method has no search space, or every point of a stage failed.
        MissingExtraError: Optuna is not installed.
    """
    if method not in SPACES:
        raise InputError(f"no search space for {method!r}. Use one of: {', '.join(SPACES)}.")
    evaluate_all = find_engine(engine)
    unit = plan_units(
        out, preset=preset, methods=(method,), ids=ids[:1], ood=ids[1:], seeds=seeds[:1] or (0,), data_dir=data_dir
    )[0]
    results, best = ResultsFolder(out), Point()
    with results.lock():
        begin_folder(results, [unit], search=True)
        for space in SPACES[method]:
            study = _Study(out, f"{method}/{point_name(best)}", space)
            points = grid_points(space)
            outcomes = [
                Outcome(point, {"auroc": study.values[name]}, resumed=True)
                for point in points
                if (name := point_name(point)) in study.values
            ]
            yield from outcomes
            waiting = [point for point in points if point_name(point) not in study.values]
            units = [replace(unit, rates={**best, **point}) for point in waiting]
            for tried in evaluate_all(evaluate, units, workers):
                point = {rate: tried.job.rates[rate] for rate in space}
                if tried.result is None:
                    outcomes.append(Outcome(point, None, tried.reason, tried.trace))
                else:
                    auroc = mean_over_sets(tried.result["scores"][tried.result["default"]], "auroc")[0]
                    study.add(point, auroc)
                    outcomes.append(Outcome(point, {"auroc": auroc}))
                yield outcomes[-1]
            ranked = rank((outcome.job, (outcome.result or {}).get("auroc")) for outcome in outcomes)
            if not ranked:
                raise InputError(f"{method}: every value of {', '.join(space)} failed ({outcomes[0].reason})")
            best |= ranked[0][0]


class _Study:
    """Optuna study of one stage in the folder's journal. `values` has the AUROC of each point by its name."""

    def __init__(self, folder: Path, name: str, space: Space) -> None:
        try:
            import optuna
            from optuna.storages import JournalStorage
            from optuna.storages.journal import JournalFileBackend
        except ImportError as error:
            raise MissingExtraError("a search needs Optuna: pip install 'onefold[search]'") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = folder / JOURNAL
        if journal.exists() and not (content := journal.read_bytes()).endswith(b"\n"):
            os.truncate(journal, content.rfind(b"\n") + 1)  # drop a line that was cut short, as on a full disk
        self._optuna: Any = optuna
        self._distributions = {
            rate: optuna.distributions.CategoricalDistribution(list(values)) for rate, values in space.items()
        }
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(journal))),
            study_name=f"{name}/{','.join(space)}",
            direction="maximize",
            sampler=optuna.samplers.GridSampler({rate: list(values) for rate, values in space.items()}, seed=0),
            load_if_exists=True,
        )
        self.values: dict[str, float] = {
            point_name({rate: trial.params[rate] for rate in space}): trial.value
            for trial in self._study.trials
            if trial.state.is_finished() and trial.value is not None
        }

    def add(self, point: Point, auroc: float) -> None:
        """Store the AUROC of a point."""
        trial = self._optuna.trial.create_trial(params=point, distributions=self._distributions, value=auroc)
        self._study.add_trial(trial)
