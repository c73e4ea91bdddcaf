"""What the command line does with people's own files: fit a detector, score data, lay out what was found."""

import csv
import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import onefold
from onefold.detector import Detector
from onefold.errors import InputError, MissingExtraError
from onefold.files import load
from onefold.kernels import from_model
from onefold.methods import CSD, KNN, RND, LastLayerGP
from onefold.provenance import provenance
from onefold.report.score_page import ScorePage, render
from onefold.report.shown import pictures_of, texts_of
from onefold.sources import ImageFolder, Indexed, Source, Table, open_source, picked, split
from onefold.store import write_bytes
from onefold.train import Recipe
from onefold.types import Scores

METHODS = {"csd": CSD, "gp": LastLayerGP, "rnd": RND, "knn": KNN}
SHOWN = 10_000  # inputs on a page
NEAREST = 6
REMARKABLE = 2.0  # standard deviations, or a category that one in a hundred has


@dataclass(frozen=True, kw_only=True)
class FitJob:
    """Everything that a fit from the command line depends on."""

    data: str
    out: Path
    method: str = "csd"
    context: str | None = None
    model: Path | None = None
    layer: str | None = None
    calibrate: str | None = None
    fpr: float = 0.05
    steps: int | None = None
    seed: int = 0
    device: str = "auto"


def fit(job: FitJob) -> tuple[Detector, list[str]]:
    """Fit, calibrate and save; the detector and what there is to say about it.

    Where no calibration data is given, a fifth of the data is set apart for it. The training state lies beside the
    output, in a file that ends in .part, until the fit is complete: the same command goes on from there.
    """
    _writable(job.out)
    source = open_source(job.data)
    train, held_out = split(source, 0.2, job.seed) if job.calibrate is None else (source, open_source(job.calibrate))
    detector = _detector(job)
    part = job.out.with_name(job.out.name + ".part")
    keywords: dict[str, Any] = {"checkpoint": part} if isinstance(detector, CSD | RND) else {}
    if job.context is not None:
        if not isinstance(detector, CSD):
            raise InputError("--context is for the method csd")
        keywords["context"] = job.context
    detector.fit(train, **keywords)  # pyright: ignore[reportAttributeAccessIssue]
    detector.calibrate(held_out, job.fpr)
    detector.save(job.out)
    part.unlink(missing_ok=True)
    assert detector.alarm is not None
    notes = [
        f"fitted on {_count(detector)} samples, calibrated on {len(detector.alarm.scores)}: scores above "
        f"{detector.threshold:.4g} raise an alarm for {job.fpr:.1%} of familiar inputs",
        *_skipped(source, job.out),
    ]
    return detector, notes


def score(file: Path, data: str, out: Path, *, model: Path | None, report: Path | None, device: str) -> list[str]:
    """Score data batch by batch and write a table, and a page if asked for; what there is to say."""
    detector = load(file, model=None if model is None else program(model), device=device)
    for path in (out, report):
        if path is not None:
            _writable(path)
    if out.suffix not in (".csv", ".parquet"):
        raise InputError(f"{out.name}: scores are written as .csv or .parquet")
    source = open_source(data, form=detector.reader.form)
    total = (
        len(source.files) if isinstance(source, ImageFolder) else len(source) if isinstance(source, Indexed) else None
    )
    scores = np.concatenate(list(shown(detector.score_batches(source), total, "scoring")))
    names = list(source.names) if isinstance(source, ImageFolder) else [str(i) for i in range(len(scores))]
    columns: dict[str, Any] = {"name": names, "score": scores}
    if detector.alarm is not None:
        columns |= {"pvalue": detector.alarm.pvalues(scores), "is_ood": scores > detector.threshold}
    _write_table(out, columns)
    skipped = _skipped(source, out)
    notes = [f"{len(scores)} scored: {out}", *skipped]
    if detector.alarm is not None:
        flagged = int((scores > detector.threshold).sum())
        expected = detector.alarm.fpr * len(scores)
        notes.append(f"{flagged} raise an alarm; of as many familiar inputs, about {expected:.0f} would")
    if report is not None:
        page = page_of(detector, source, names, scores, title=Path(data).name, notes=skipped)
        write_bytes(report, render(page).encode())
        notes.append(f"the page: {report}")
    return notes


def page_of(
    detector: Detector, source: Source, names: list[str], scores: Scores, *, title: str, notes: list[str]
) -> ScorePage:
    """What the page shows: the strangest inputs, what they look like, and what is familiar beside them."""
    order = np.sort(np.argsort(-scores, kind="stable")[:SHOWN])
    if len(order) < len(scores):
        notes = [*notes, f"the page shows the {len(order)} strangest of {len(scores)}"]
    alarm, reader, remembered = detector.alarm, detector.reader, detector.remembered
    chosen: dict[str, Any] = {}
    rows = source if len(order) == len(scores) else picked(source, order)
    if reader.has_pictures and remembered is not None:
        chosen["pictures"] = np.concatenate([pictures_of(reader, raw) for raw in reader.batches(rows)])
        chosen["familiar_pictures"] = pictures_of(reader, remembered)
        chosen["nearest"] = detector.neighbours(rows, NEAREST)
    elif isinstance(reader.form, Table):
        codes = np.concatenate([np.asarray(raw) for raw in reader.batches(rows)])
        chosen["columns"], chosen["values"] = texts_of(reader.form, codes)
        standout = reader.form.standout(codes)
        chosen["standout"] = np.where(standout >= REMARKABLE, standout, 0.0)
    made = provenance(detector.device)
    return ScorePage(
        title=title,
        method=type(detector).__name__,
        familiar=np.zeros(0) if alarm is None else alarm.scores,
        scores=scores[order],
        names=[names[i] for i in order],
        pvalues=None if alarm is None else alarm.pvalues(scores[order]),
        threshold=None if alarm is None else detector.threshold,
        fpr=None if alarm is None else alarm.fpr,
        notes=notes,
        about={"onefold": str(onefold.__version__), "date": str(made["date"]), "data": title},
        **chosen,
    )


def program(path: Path) -> torch.export.ExportedProgram:
    """A user's own exported model; such a file can hold code, so it is only read when it is named."""
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    try:
        return torch.export.load(path)
    except Exception as error:  # whatever is wrong with it
        raise InputError(f"{path}: is no model that torch.export.save wrote ({type(error).__name__})") from None


def shown(scores: Iterator[Scores], total: int | None, label: str) -> Iterator[Scores]:
    """Iterate with a progress bar where a person watches."""
    if not sys.stderr.isatty():
        yield from scores
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        for part in scores:
            bar.advance(task, len(part))
            yield part


def _detector(job: FitJob) -> Any:
    if job.method not in METHODS:
        raise InputError(f"the method is one of {', '.join(METHODS)}, not {job.method!r}")
    method, keywords = METHODS[job.method], {"seed": job.seed, "device": job.device}
    if job.model is not None:
        if job.method == "rnd":
            raise InputError("--model is for the methods csd, gp and knn: rnd has networks of its own")
        keywords["kernel"] = from_model(program(job.model), job.layer)
    detector: Any = method(**keywords)
    if job.steps is not None:
        if not isinstance(detector, CSD | RND):
            raise InputError(f"--steps is for the methods csd and rnd: {job.method} is a closed form")
        recipe: Recipe = detector.recipe
        detector.recipe = replace(recipe, steps=job.steps, warmup=min(recipe.warmup, job.steps // 4))
    return detector


def _count(detector: Detector) -> int:
    return detector._fitted().reservoir.seen


def _skipped(source: Source, out: Path) -> list[str]:
    """Name the images that could not be read in a file beside the output, and say how many they were."""
    skipped = source.skipped if isinstance(source, ImageFolder) else {}
    if not skipped:
        return []
    log = out.with_name(out.name + ".skipped.txt")
    write_bytes(log, "".join(f"{name!r}: {why}\n" for name, why in skipped.items()).encode("utf-8", "backslashreplace"))
    what = "1 image" if len(skipped) == 1 else f"{len(skipped)} images"
    return [f"{what} could not be read: named in {log}"]


def _writable(path: Path) -> None:
    """Find out now, not after an hour, that a file cannot be written."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path.parent}: cannot be written to")


def _write_table(path: Path, columns: dict[str, Any]) -> None:
    if path.suffix == ".parquet":
        write_bytes(path, _parquet(columns))
        return
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    values = [
        [format(v, ".9g") for v in c] if isinstance(c, np.ndarray) and c.dtype.kind == "f"
        else c.astype(int) if isinstance(c, np.ndarray) else c
        for c in columns.values()
    ]  # fmt: skip
    writer.writerows(zip(*values, strict=True))
    write_bytes(path, text.getvalue().encode("utf-8", "backslashreplace"))


def _parquet(columns: dict[str, Any]) -> bytes:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError('.parquet needs one more package: pip install "onefold[tables]"') from None
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()
