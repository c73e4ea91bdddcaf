"""The detector that suits data and a model, by what is known before any unfamiliar input is seen."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from onefold.core.arguments import check_choice
from onefold.core.batches import batch_length, check_seed, map_batch, pick_device
from onefold.detectors.csd import CONFIDENT, CSD
from onefold.detectors.csd_scorer import ROLES, Role, default_score, is_pretrained
from onefold.detectors.last_layer_gp import LastLayerGP
from onefold.detectors.local_gp import LocalGP
from onefold.errors import InputError, warn
from onefold.inputs import IndexedSource, Source, Table, form_of, open_source
from onefold.inputs.reader import Prepare, Reader
from onefold.kernels import ModelFeatures, from_model
from onefold.types import ArrayLike, Batch, Model

LARGEST_LOCAL = 50_000  # rows; LocalGP stores the embeddings of no more
EXAMINED = 1024  # samples on which the model's confidence is measured
SMALL_SIDE, MANY_IMAGES = 32, 5000  # CSD on a random network was ahead with so many images of so few pixels a side
RAW_WIDTH, RAW_CHANNELS, RAW_SIDE = 512, 16, 8  # of the random network on raw pixels; pixels a side at its dense layer
PRETRAINED = (
    'choose_detector(x, model=kernels.from_pretrained("dinov2-small")); without internet access, pass the folder of a '
    'model: from_pretrained("path/to/folder")'
)
"""Line that uses a pretrained encoder, online and offline."""


class Choice(NamedTuple):
    """A detector, not yet fitted, and the reason for it.

    Args:
        detector: The detector.
        reason: One line.
        advice: What would be more accurate, or empty.
    """

    detector: Any
    reason: str
    advice: str = ""


def choose_detector(
    x: ArrayLike,
    model: Model | ModelFeatures | None = None,
    *,
    role: Role | None = None,
    seed: int = 0,
    device: str = "auto",
    show: bool = True,
) -> Any:
    """Return the detector that suits these data and this model, not yet fitted, and print why.

    | data and model | detector |
    |---|---|
    | a classifier of these data | `CSD` on its logits and stages |
    | an encoder, up to 50,000 rows | `LocalGP` on its embeddings |
    | an encoder, more rows | `LastLayerGP` on its embeddings |
    | a table or vectors | `LastLayerGP` |
    | at least 5,000 images of at most 32 pixels a side, no model | `CSD` |
    | other images, no model | `LastLayerGP` with a small random network |

    For images without a model, it warns that a pretrained encoder would be more accurate, with the line that uses one.
    Unfamiliar inputs play no part in the choice.

    Args:
        x: Training data, as for `fit`. A few samples are read, and rows are counted.
        model: Trained model, or its kernel from `kernels.from_model`.
        role: "classifier" if the model's logits are of the classes of these data, "encoder" if not. By default it
            counts as a classifier if the mean of its largest softmax probability is at least ½ on 1,024 samples. A
            model of `kernels.from_pretrained` is an encoder.
        seed: Seed of the detector.
        device: "auto", "cpu", "cuda" or "cuda:1".
        show: Print the reason.

    Returns:
        A detector with default settings; call its `fit(x)`.

    Raises:
        InputError: Data or model cannot be used, or a role is passed without a model.
    """
    choice = explain_choice(x, model, role=role, seed=seed, device=device)
    if choice.advice:
        warn(f"x: {choice.advice}: {PRETRAINED}.")
    if show:
        print(f"{type(choice.detector).__name__}: {choice.reason}")
    return choice.detector


def explain_choice(
    x: ArrayLike, model: Model | ModelFeatures | None, *, role: Role | None, seed: int, device: str
) -> Choice:
    """Return the detector of `choose_detector` and the reason for it."""
    check_seed(seed)
    if role is not None:
        check_choice(role, "role", ROLES)
    source = open_source(x, form=getattr(model, "form", None))
    common: dict[str, Any] = {"seed": seed, "device": device}
    if model is not None:
        kernel = model if isinstance(model, ModelFeatures) else from_model(model)
        return _choose_on_model(source, kernel, role, common)
    if role is not None:
        raise InputError("a role belongs to a model", argument="role", hint="Pass model= as well, or leave it out.")
    first = next(source.batches(2))
    reader = Reader.infer(first, form_of(source))
    if reader.has_pictures:
        return _choose_on_pixels(source, reader.sample_shape, common)
    what = "a table" if isinstance(form_of(source), Table) else "vectors"
    return Choice(LastLayerGP(**common), f"{what}; the closed form is accurate on them and needs no training")


def _choose_on_model(source: Source, kernel: ModelFeatures, role: Role | None, common: dict[str, Any]) -> Choice:
    reason = f"role={role!r}"
    if role is None and kernel.pretrained is not None:
        role, reason = "encoder", "pretrained on other data"
    if role is None:
        role, reason = _find_role(source, kernel, common)
    if role == "classifier":
        settings: dict[str, Any] = {"role": role} if default_score(kernel) == "surprisal" else {}
        return Choice(CSD(kernel, **settings, **common), f"a classifier of these data ({reason})")
    if _has_more_rows(source, LARGEST_LOCAL):
        return Choice(LastLayerGP(kernel, **common), f"an encoder ({reason}) and more than {LARGEST_LOCAL:,} rows")
    return Choice(LocalGP(kernel, **common), f"an encoder ({reason}) and at most {LARGEST_LOCAL:,} rows")


def _choose_on_pixels(source: Source, shape: tuple[int, ...], common: dict[str, Any]) -> Choice:
    advice = "images without a model. A pretrained encoder is more accurate on photos"
    side = max(shape[1:])
    if side <= SMALL_SIDE and _has_more_rows(source, MANY_IMAGES - 1):
        reason = f"images of at most {SMALL_SIDE} pixels a side, {MANY_IMAGES:,} or more, and no model"
        return Choice(CSD(**common), reason, advice)
    stages = max(1, math.ceil(math.log2(side / RAW_SIDE)))
    detector = LastLayerGP(width=RAW_WIDTH, channels=(RAW_CHANNELS,) * stages, **common)
    return Choice(detector, "images and no model; a small random network in closed form needs no training", advice)


@torch.no_grad()
def _find_role(source: Source, kernel: ModelFeatures, common: dict[str, Any]) -> tuple[Role, str]:
    """Return the role of a model for these data, by its origin or its logits, and the reason."""
    if is_pretrained(kernel):
        return "encoder", "from_pretrained"
    total, count = 0.0, 0
    for batch in _examined_batches(source, common):
        logits = kernel.outputs(batch).logits
        if logits is None or logits.shape[1] < 2:
            return "encoder", "it has no logits"
        total += float(logits.softmax(1).amax(1).double().sum())
        count += len(logits)
    confidence = total / count
    text = f"mean largest probability {confidence:.2f}"
    return ("classifier", text) if confidence >= CONFIDENT else ("encoder", f"{text}, below {CONFIDENT:g}")


def _examined_batches(source: Source, common: dict[str, Any]) -> Iterator[Batch]:
    """Yield prepared samples, 1,024 in all: evenly spaced if the source can be read by index, else the first ones."""
    device, first = pick_device(common["device"]), next(source.batches(2))
    reader = Reader.infer(first, form_of(source), as_given=True)
    prepare = Prepare(reader).to(device)
    if isinstance(source, IndexedSource):
        rows = torch.linspace(0, len(source) - 1, min(len(source), EXAMINED)).round().long()
        parts = (source.take(part.numpy()) for part in rows.split(reader.batch_size))
    else:
        parts = source.batches(reader.batch_size)
    count = 0
    for raw in parts:
        yield prepare(map_batch(lambda t: t.to(device), reader.check(raw)))
        count += batch_length(raw)
        if count >= EXAMINED:
            return


def _has_more_rows(source: Source, limit: int) -> bool:
    """Return True if the source has more than `limit` samples; it is read if it has no length."""
    if isinstance(source, IndexedSource):
        return len(source) > limit
    count = 0
    for batch in source.batches(1024):
        count += batch_length(batch)
        if count > limit:
            return True
    return False
