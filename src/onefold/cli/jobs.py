"""What the command line does with people's own files: fit a detector, score data, look at a detector."""

import math
import os
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onefold.core import storage
from onefold.core.batches import batch_length, batch_tensors
from onefold.core.memory import human, trim_memory
from onefold.core.progress import show_spinner, track_progress
from onefold.core.storage import write_bytes
from onefold.detectors import CSD, KNN, RND, LastLayerGP
from onefold.detectors.alarm import check_rate
from onefold.detectors.base import Detector, ExportMixin
from onefold.detectors.diagnosis import Diagnosis, Finding
from onefold.detectors.load import load
from onefold.errors import FileError, InputError, OnefoldWarning
from onefold.inputs import ImageFolder, IndexedSource, Picture, Source, form_of, open_source, split
from onefold.inputs.split import track
from onefold.kernels import from_model
from onefold.kernels.programs import check_takes, picture_for, program
from onefold.nn.train import CHECKPOINT
from onefold.report.score_table import check_table, write_table
from onefold.types import Model

METHODS = {"csd": CSD, "gp": LastLayerGP, "rnd": RND, "knn": KNN}
SET_APART = 0.2  # of the data, to calibrate on
FEW = 64  # samples that are read at once to count them


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
    samples: bool = True
    device: str = "auto"

    @property
    def part(self) -> Path:
        """Where the state of the training lies until the fit is complete."""
        return self.out.with_name(self.out.name + ".part")


@trim_memory()
def fit(job: FitJob) -> tuple[Detector, list[str]]:
    """Fit, calibrate and save; the detector and what there is to say about it.

    Where no calibration data is given, a fifth of the data is set apart for it. The training state lies beside the
    output, in a file that ends in .part, until the fit is complete: the same command goes on from there. Whatever can
    be found wrong beforehand is found before the data is read.
    """
    net = None if job.model is None else program(job.model)
    detector = _detector(job, net)
    _check_places([job.out], [job.data, job.context, job.calibrate, job.model])
    keywords: dict[str, Any] = {}
    if isinstance(detector, CSD | RND):
        _check_part(job.part)
        keywords["checkpoint"] = job.part
    given = _given(job, None if net is None else picture_for(net))
    if job.model is not None:
        check_takes(job.model, detector.kernel, given.train, job.data)
    _check_enough(given.held_out, job)
    if given.context is not None:
        keywords["context"] = given.context
    with _called(job.data), warnings.catch_warnings():
        # What a diagnosis finds is printed whole after the fit; once is enough.
        warnings.filterwarnings("ignore", "(signal|convergence|familiarity): ", OnefoldWarning)
        detector.fit(given.train, **keywords)
    with _called(job.calibrate or job.data):
        detector.calibrate(given.held_out, job.fpr)
        detector.save(job.out, samples=job.samples)
    if "checkpoint" in keywords:
        job.part.unlink(missing_ok=True)
    assert detector.alarm is not None
    notes = [
        f"fitted on {_count(detector)} samples, calibrated on {len(detector.alarm.scores)}: scores above "
        f"{detector.threshold:.4g} raise an alarm, as {job.fpr:.2%} of familiar inputs will",
        _contents(detector, samples=job.samples).message,
        *_name_skipped(given.sources, job.out),
    ]
    return detector, notes


@trim_memory()
def score(file: Path, data: str, out: Path, *, model: Path | None, report: Path | None, device: str) -> list[str]:
    """Score data batch by batch and write a table, and a page if asked for; what there is to say."""
    check_table(out)
    _check_places([out] if report is None else [out, report], [file, data, model])
    detector = opened(file, model, device)
    with _called(data):
        with show_spinner("reading"):
            source = open_source(data, form=detector.reader.form, name=data)
        total, parts = _total(source), []
        inputs = None
        if report is not None:
            from onefold.report.shown import ShownInputs, most_shown  # only a page needs jinja2

            inputs = ShownInputs(detector, total) if total is not None and total <= most_shown(detector) else None
        for raw, part in track_progress(
            detector.scored_batches(source), total, "scoring", lambda scored: len(scored[1])
        ):
            parts.append(part)
            if inputs is not None:
                inputs.add(raw)
        scores = np.concatenate(parts)
        names = source.names if isinstance(source, ImageFolder) else [str(i) for i in range(len(scores))]
        columns: dict[str, Any] = {"name": names, "score": scores}
        if detector.alarm is not None:
            columns |= {"pvalue": detector.alarm.pvalues(scores), "is_ood": scores > detector.threshold}
        write_table(out, columns)
    skipped = _name_skipped([source], out)
    notes = [f"{len(scores)} scored: {out}", *skipped]
    if detector.alarm is not None:
        flagged, expected = int(columns["is_ood"].sum()), detector.alarm.fpr * len(scores)
        notes.append(f"{flagged} raise an alarm; of as many familiar inputs, about {expected:.0f} would")
    if report is not None:
        from onefold.report.score_page import render
        from onefold.report.shown import page_of

        with _called(data), show_spinner("drawing the page"):
            page = page_of(detector, source, names, scores, title=Path(data).name, notes=skipped, inputs=inputs)
            write_bytes(report, render(page).encode())
        notes.append(f"the page: {report}")
    return notes


@trim_memory()
def diagnose(file: Path, data: str | None, model: Path | None) -> Diagnosis:
    """What speaks for and against a detector, and what of the training data its file holds; printed too."""
    detector = opened(file, model)
    if data is None:
        diagnosis = detector.diagnose(show=False)
    else:
        with _called(data):
            source = open_source(data, form=detector.reader.form, name=data)
            diagnosis = detector.diagnose(_watched(source, "scoring"), show=False)
    diagnosis = Diagnosis((*diagnosis, _contents(detector)))
    print(diagnosis)
    return diagnosis


def export(file: Path, out: Path, model: Path | None) -> None:
    """Write a detector as a model that needs no onefold; the suffix of `out` says how."""
    _check_places([out], [file, model])
    detector = opened(file, model, "cpu")
    if not isinstance(detector, ExportMixin):
        raise InputError(f"a {type(detector).__name__} cannot be exported")
    with _called(str(file)):
        detector.export(out)


def opened(file: Path, model: Path | None, device: str = "auto") -> Detector:
    """The detector of a file, with the model that it was fitted on, if it was."""
    return load(file, model=None if model is None else program(model), device=device)


class _Given(NamedTuple):
    """What a fit is given: data to train and to calibrate on, perhaps contexts, and the sources behind them."""

    train: Source
    held_out: Source
    context: Source | None
    sources: list[Source]


def _given(job: FitJob, picture: Picture | None) -> _Given:
    """Open all that a job names; what is read beside the data is read in the form of the data."""
    with show_spinner("reading"):
        data = open_source(job.data, form=picture if Path(job.data).is_dir() else None)
        form = form_of(data)
        calibrate = None if job.calibrate is None else open_source(job.calibrate, form=form, name=job.calibrate)
        context = None if job.context is None else open_source(job.context, form=form, name=job.context)
    sources = [source for source in (data, calibrate, context) if source is not None]
    if calibrate is None:
        if isinstance(data, ImageFolder):  # those that can be read are only known when all have been
            deque(track_progress(data.batches(FEW), _total(data), "looking at images"), maxlen=0)
        data, calibrate = split(data, SET_APART, job.seed)
    context = None if context is None else _watched(context, "reading contexts")
    return _Given(_watched(data, "reading"), _watched(calibrate, "calibrating"), context, sources)


def _watched(source: Source, label: str) -> Source:
    return track(source, partial(track_progress, total=_total(source), label=label))


def _total(source: Source) -> int | None:
    """How many samples there will be at most, if that can be told without reading them."""
    if isinstance(source, ImageFolder):
        return len(source.files)
    return len(source) if isinstance(source, IndexedSource) else None


def _detector(job: FitJob, net: Model | None) -> Any:
    """The detector of a job, before its data is looked at: options that do not go together are refused here."""
    check_rate(job.fpr)
    if job.method not in METHODS:
        raise InputError(f"method must be one of {', '.join(METHODS)}, not {job.method!r}")
    if job.context is not None and job.method != "csd":
        raise InputError(f"--context is for the method csd: {job.method} has no use for it")
    if job.model is not None and job.method == "rnd":
        raise InputError("--model is for the methods csd, gp and knn: rnd has networks of its own")
    if job.layer is not None and job.model is None:
        raise InputError("--layer is a layer of a model: name the model with --model")
    if job.steps is not None and job.method not in ("csd", "rnd"):
        raise InputError(f"--steps is for the methods csd and rnd: {job.method} is a closed form")
    keywords: dict[str, Any] = {"seed": job.seed, "device": job.device}
    if net is not None:
        keywords["kernel"] = from_model(net, job.layer)
    detector: Any = METHODS[job.method](**keywords)
    if job.steps is not None:
        warmup = min(detector.recipe.warmup, job.steps // 4)
        detector.recipe = replace(detector.recipe, steps=job.steps, warmup=warmup)
    return detector


def _check_places(outputs: Sequence[Path], inputs: Sequence[str | Path | None]) -> None:
    """Find out now, not after an hour, that a file cannot be written, or that it would replace what is read."""
    taken = {Path(given).resolve() for given in inputs if given is not None}
    for path in outputs:
        if path.is_dir():
            raise InputError(f"{path} is a folder: name a file")
        if path.resolve() in taken:
            raise InputError(f"{path} is read and written by this command: write to another file")
        taken.add(path.resolve())
        folder = storage.resolve_output(path).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise InputError(f"{path}: a file is in the place of its folder") from None
        if not os.access(folder, os.W_OK):
            raise InputError(f"{folder}: cannot be written to")


def _check_part(part: Path) -> None:
    """A state that cannot be gone on from is better known before the data is read."""
    if part.exists():
        try:
            storage.load(part, CHECKPOINT)
        except FileError as error:
            raise FileError(f"{error}; delete it to begin anew") from None


def _check_enough(held_out: Source, job: FitJob) -> None:
    """Enough samples to calibrate on, found out before the training."""
    needed, count = math.ceil(1 / job.fpr - 1e-9) - 1, 0
    for batch in held_out.batches(max(1, min(needed, FEW))):
        count += batch_length(batch)
        if count >= needed:
            return
    there = f"a fifth of {job.data} is" if job.calibrate is None else f"{job.calibrate} has"
    raise InputError(
        f"{there} {count} samples, and --fpr {job.fpr:g} needs {needed} to calibrate on: give more data, "
        "other familiar data with --calibrate, or a larger --fpr"
    )


@contextmanager
def _called(name: str) -> Iterator[None]:
    """Errors say x where the library cannot know that the data has a name."""
    try:
        yield
    except InputError as error:
        text = str(error)
        raise InputError(name + text[1:] if text.startswith("x: ") else text) from None


def _contents(detector: Detector, *, samples: bool = True) -> Finding:
    """What of the training data the file of a detector holds, saved with these `samples`."""
    state = detector.state
    raw = state.stored_samples if samples else []
    count, size = sum(map(batch_length, raw)), sum(t.nbytes for batch in raw for t in batch_tensors(batch))
    amount, more = (f"{count:,}", f" ({human(size)}; --no-samples leaves them out)") if raw else ("no", "")
    if state.stored_features:
        more += f", and the features of {state.stored_features:,} training samples"
    return Finding("samples", count, None, f"the file holds {amount} raw training samples{more}")


def _count(detector: Detector) -> int:
    return detector.state.samples_seen


def _name_skipped(sources: Sequence[Source], out: Path) -> list[str]:
    """Name the images that could not be read in a file beside the output, and say how many they were."""
    folders = [source for source in sources if isinstance(source, ImageFolder)]
    lines = [f"{str(folder.path / name)!r}: {why}\n" for folder in folders for name, why in folder.skipped.items()]
    log = out.with_name(out.name + ".skipped.txt")
    if not lines:
        log.unlink(missing_ok=True)  # of an earlier run: it would be wrong now
        return []
    write_bytes(log, "".join(lines).encode("utf-8", "backslashreplace"))
    return [f"{'1 image' if len(lines) == 1 else f'{len(lines)} images'} could not be read: named in {log}"]
