"""Runs: the units without a result, through an engine, into a results folder."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from onefold.bench.engines import Outcome, find_engine
from onefold.bench.evaluate import evaluate
from onefold.bench.grid import PRESETS, Unit, order_units, set_name
from onefold.bench.results import ResultsFolder
from onefold.bench.rows import ABLATION, seeds_by_row
from onefold.bench.sets import choose_sets, fingerprint_sets, load_id_set, paper_set, write_previews
from onefold.core.arguments import check_integer
from onefold.data.sets import data_dir as find_data_dir
from onefold.errors import InputError

ABLATION_SETS = ("fashion_mnist", "kmnist")


def plan_units(
    out: Path,
    *,
    preset: str = "quick",
    methods: Sequence[str] = (),
    ids: Sequence[str] = (),
    ood: Sequence[str] = (),
    seeds: Sequence[int] = (),
    data_dir: Path | None = None,
) -> list[Unit]:
    """Return the units of a run, seed by seed. Everything that is wrong with the arguments is reported here.

    Args:
        out: Results folder; trained classifiers are stored in it.
        preset: Name of a preset.
        methods: Names of rows; empty for the main table.
        ids: ID sets; empty for the paper's sets that are in the data folder.
        ood: Sets that are OOD sets only.
        seeds: Seeds; empty for those of the preset.
        data_dir: Folder of the image sets; None for the default one.

    Raises:
        InputError: A name is unknown, a set is missing or has no labels, or there is no OOD set.
    """
    if preset not in PRESETS:
        raise InputError(f"no preset {preset!r}. Use one of: {', '.join(PRESETS)}.")
    chosen = PRESETS[preset]
    folder = None if chosen.small else find_data_dir(data_dir)
    id_sets, every_set = choose_sets(chosen, folder or Path(), ids, ood)
    for name in id_sets:
        load_id_set(name, folder, chosen)
    if len(every_set) < 2:
        raise InputError(f"{set_name(id_sets[0])}: no OOD set to compare with. Pass --ood NAME.")
    return [
        Unit(
            row=row,
            id_set=id_set,
            seed=seed,
            preset=chosen,
            ood_sets=tuple(name for name in every_set if name != id_set),
            data_dir=folder,
            classifiers=ResultsFolder(out).classifiers.absolute(),
        )
        for row, id_set, seed in order_units(seeds_by_row(chosen, methods, seeds), id_sets)
    ]


def run(
    out: Path,
    *,
    preset: str = "quick",
    methods: Sequence[str] = (),
    ids: Sequence[str] = (),
    ood: Sequence[str] = (),
    seeds: Sequence[int] = (),
    engine: str = "serial",
    workers: int | None = None,
    data_dir: Path | None = None,
) -> Iterator[Outcome[Unit]]:
    """Evaluate the units that have no result and yield the outcome of every unit once.

    Args:
        out: Results folder. An existing folder is resumed.
        preset: Name of a preset.
        methods: Names of rows; empty for the main table.
        ids: ID sets; empty for the paper's sets that are in the data folder.
        ood: Sets that are OOD sets only.
        seeds: Seeds; empty for those of the preset.
        engine: "serial", "processes" or "ray".
        workers: Number of units at a time; None for the engine's default.
        data_dir: Folder of the image sets; None for the default one.

    Raises:
        InputError: An argument cannot be used, or the folder belongs to other settings or data.
    """
    evaluate_all = find_engine(engine)
    if workers is not None:
        check_integer(workers, "workers")
    units = plan_units(out, preset=preset, methods=methods, ids=ids, ood=ood, seeds=seeds, data_dir=data_dir)
    results = ResultsFolder(out)
    with results.lock():
        begin_folder(results, units)
        write_previews(units, results.previews)
        waiting = []
        for unit in units:
            if (result := results.read(unit)) is None:
                waiting.append(unit)
            else:
                yield Outcome(unit, result, resumed=True)
        alone = engine == "serial" or workers == 1
        for outcome in evaluate_all(evaluate, waiting, workers):
            if outcome.result is None:
                results.fail(outcome.job, outcome.reason, outcome.trace)
            else:
                outcome.result["cost"]["alone"] = alone  # other units at the same time distort the times
                results.write(outcome.job, outcome.result)
            yield outcome


def begin_folder(results: ResultsFolder, units: Sequence[Unit], **settings: object) -> None:
    """Create or check the folder for these units; `settings` are stored beside those of the preset."""
    first = units[0]
    names = dict.fromkeys((*(unit.id_set for unit in units), *(name for unit in units for name in unit.ood_sets)))
    data = fingerprint_sets(names, first.data_dir, first.preset)
    results.begin({**first.preset.settings(), **settings}, data)


def run_ablation(
    out: Path,
    *,
    preset: str = "ablate",
    ids: Sequence[str] = (),
    seeds: Sequence[int] = (),
    engine: str = "serial",
    workers: int | None = None,
    data_dir: Path | None = None,
) -> Iterator[Outcome[Unit]]:
    """Evaluate every form of CSD, on FashionMNIST and KMNIST (or the available part of them) by default.

    Args:
        out: Results folder. An existing folder is resumed.
        preset: Name of a preset.
        ids: Other ID sets.
        seeds: Seeds; empty for those of the preset.
        engine: "serial", "processes" or "ray".
        workers: Number of units at a time; None for the engine's default.
        data_dir: Folder of the image sets; None for the default one.
    """
    if not ids and preset in PRESETS and not PRESETS[preset].small:
        available, _ = choose_sets(PRESETS[preset], find_data_dir(data_dir), (), ())
        ids = tuple(name for name in available if paper_set(name) in ABLATION_SETS)
    yield from run(
        out, preset=preset, methods=ABLATION, ids=ids, seeds=seeds, engine=engine, workers=workers, data_dir=data_dir
    )
