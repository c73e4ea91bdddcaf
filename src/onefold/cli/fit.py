"""`onefold fit`: fit a detector, calibrate it, and save it."""

import warnings
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from onefold.cli.console import print_lines
from onefold.cli.diagnose import describe_contents
from onefold.cli.files import check_outputs, max_count, with_progress, write_skipped
from onefold.cli.jobs import FIT_METHODS, Fit
from onefold.core import storage
from onefold.core.arguments import check_choice
from onefold.core.batches import batch_length
from onefold.core.progress import show_spinner, track_progress
from onefold.core.runtime import trim_memory
from onefold.detectors.alarm import check_rate, min_calibration_samples
from onefold.detectors.base import Detector
from onefold.detectors.registry import by_command
from onefold.errors import DiagnosisWarning, FileError, InputError, renamed_argument
from onefold.inputs import ImageFolder, Picture, Source, form_of, open_source, split
from onefold.kernels import from_model
from onefold.kernels.model import check_model_accepts_data, picture_for
from onefold.nn.programs import load_program
from onefold.nn.train import CHECKPOINT
from onefold.types import Model

CALIBRATION_SHARE = 0.2  # of the data, if --calibrate is not used
BATCH = 64  # samples per step when samples are only counted


class Sources(NamedTuple):
    """Data of a fit with progress displays, and the opened sources behind them."""

    train: Source
    calibration: Source
    context: Source | None
    opened: list[Source]


def run(job: Fit) -> None:
    """Fit, calibrate, save and diagnose a detector."""
    detector, notes = fit(job)
    print_lines(*notes)
    detector.diagnose()
    print_lines(f"Detector: {job.out}")


@trim_memory()
def fit(job: Fit) -> tuple[Detector, list[str]]:
    """Return the fitted, calibrated and saved detector, and lines for the user.

    Options are checked before the data is read. Until the fit is complete, the state of the training is in
    `job.checkpoint`, from which the same command resumes.
    """
    model_path = job.model.model
    model = None if model_path is None else load_program(model_path)
    detector = make_detector(job, model)
    check_outputs([job.out], [job.data, job.training.context, job.calibration.calibrate, model_path])
    keywords: dict[str, Any] = {}
    if by_command(job.method).trains:
        check_checkpoint(job.checkpoint)
        keywords["checkpoint"] = job.checkpoint
    sources = open_sources(job, None if model is None else picture_for(model))
    if model_path is not None:
        check_model_accepts_data(model_path, detector.kernel, sources.train, job.data)
    check_count(sources.calibration, job)
    if sources.context is not None:
        keywords["context"] = sources.context
    with renamed_argument("x", job.data), warnings.catch_warnings():
        warnings.simplefilter("ignore", DiagnosisWarning)  # the whole diagnosis is printed after the fit
        detector.fit(sources.train, **keywords)
    with renamed_argument("x", job.calibration.calibrate or job.data):
        detector.calibrate(sources.calibration, job.calibration.fpr)
    detector.save(job.out, samples=job.samples)
    if "checkpoint" in keywords:
        job.checkpoint.unlink(missing_ok=True)
    assert detector.alarm is not None
    notes = [
        f"fitted on {detector.state.samples_seen:,} samples, calibrated on {len(detector.alarm.scores):,}: threshold "
        f"{detector.threshold:.4g}, exceeded by {job.calibration.fpr:.2%} of familiar inputs",
        describe_contents(detector, samples=job.samples).message,
        *write_skipped(sources.opened, job.out),
    ]
    return detector, notes


def make_detector(job: Fit, model: Model | None) -> Any:
    """Return the unfitted detector; raise InputError for options that exclude each other."""
    check_rate(job.calibration.fpr)
    method = by_command(check_choice(job.method, "method", FIT_METHODS))
    steps, training = job.training.steps, job.training
    if training.context is not None and method.command != "csd":
        raise InputError(f"only csd uses it (--method is {method.command})", argument="context", hint="Leave it out.")
    if model is not None and not method.accepts_kernel:
        others = [name for name in FIT_METHODS if by_command(name).accepts_kernel]
        raise InputError(
            f"{method.command} cannot use a model", argument="model", hint=f"Use one of {', '.join(others)}."
        )
    if job.model.layer is not None and model is None:
        raise InputError("a layer belongs to a model", argument="layer", hint="Name the model with --model.")
    if steps is not None and not method.trains:
        raise InputError(f"{method.command} is fitted without training", argument="steps", hint="Leave it out.")
    keywords: dict[str, Any] = {"seed": training.seed, "device": training.device}
    if model is not None:
        keywords["kernel"] = from_model(model, job.model.layer)
    detector: Any = method.detector_class(**keywords)
    if steps is not None:
        detector.recipe = replace(detector.recipe, steps=steps, warmup=min(detector.recipe.warmup, steps // 4))
    return detector


def check_checkpoint(path: Path) -> None:
    """Raise FileError for an unreadable checkpoint. Call before reading the data."""
    if path.exists():
        try:
            storage.load(path, CHECKPOINT)
        except FileError as error:
            raise FileError(f"{error}. Delete the file to start again") from None


def open_sources(job: Fit, picture: Picture | None) -> Sources:
    """Open the data, the calibration data and the contexts; the latter two in the form of the data."""
    calibrate, context_path = job.calibration.calibrate, job.training.context
    with show_spinner("reading"):
        data = open_source(job.data, form=picture if Path(job.data).is_dir() else None)
        form = form_of(data)
        calibration = None if calibrate is None else open_source(calibrate, form=form, name=calibrate)
        context = None if context_path is None else open_source(context_path, form=form, name=context_path)
    opened = [source for source in (data, calibration, context) if source is not None]
    if calibration is None:
        if isinstance(data, ImageFolder):  # read all images once, so that unreadable ones are in neither part
            deque(track_progress(data.batches(BATCH), max_count(data), "looking at images"), maxlen=0)
        data, calibration = split(data, CALIBRATION_SHARE, job.training.seed)
    context = None if context is None else with_progress(context, "reading contexts")
    return Sources(with_progress(data, "reading"), with_progress(calibration, "calibrating"), context, opened)


def check_count(calibration: Source, job: Fit) -> None:
    """Raise InputError if there are too few samples to calibrate on, before the training."""
    fpr, path = job.calibration.fpr, job.calibration.calibrate
    needed, count = min_calibration_samples(fpr), 0
    for batch in calibration.batches(max(1, min(needed, BATCH))):
        count += batch_length(batch)
        if count >= needed:
            return
    samples = f"a fifth of {job.data} is {count} samples" if path is None else f"{path} has {count} samples"
    raise InputError(
        f"{samples}, and --fpr {fpr:g} needs {needed} to calibrate on",
        hint="Use more data, other familiar data with --calibrate, or a larger --fpr.",
    )
