"""Outputs of a user's model for training samples and one augmented copy of each, computed once before a training."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from onefold.core.progress import show_progress
from onefold.core.runtime import available
from onefold.distil.contexts import Contexts
from onefold.errors import InputError
from onefold.nn.augment import UNIFORMS
from onefold.nn.cudnn import exact_float32
from onefold.types import Indexable

Outputs = tuple[Tensor, Tensor | None]
"""Encodings [N, D] and logits [N, classes] of a batch; None for a model without logits."""


class Encodings(NamedTuple):
    """Outputs of a model for N samples.

    Attributes:
        samples: Encodings of the samples [N, D].
        copies: Encodings of one augmented copy of each sample [N, D], or None.
        classes: Number of logits, or None for a model without logits.
        confidence: Mean over the samples of the largest softmax probability; 0 without logits.
    """

    samples: Float[Tensor, "n d"]
    copies: Float[Tensor, "n d"] | None
    classes: int | None
    confidence: float


def fits_in_memory(width: int, count: int, device: torch.device) -> bool:
    """Return True if encodings of this size take at most a quarter of the free memory."""
    return 4 * width * count <= available(device) // 4


@torch.no_grad()
def encode_samples(
    outputs: Callable[[Any], Outputs],
    x: Indexable,
    rows: Int[Tensor, " n"],
    *,
    copies: Contexts | None = None,
    generator: Generator | None = None,
    size: int = 64,
    show: bool | None = None,
) -> Encodings:
    """Return the encodings of samples, and of one copy of each sample if `copies` makes them.

    Args:
        outputs: Function from a batch to encodings and logits.
        x: Samples by index.
        rows: Numbers of the samples to encode, on the device of the samples.
        copies: Source of the copies; its random numbers are from `generator`.
        generator: Generator on the CPU.
        size: Samples per pass.
        show: Show progress; None shows it only on a terminal.

    Raises:
        InputError: Some encodings are not finite.
    """
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    total, classes = torch.zeros((), dtype=torch.float64), None
    with show_progress("encoding", len(rows), show=show) as display, exact_float32():
        done = 0
        for index in rows.split(size):
            batch = x[index]
            encodings, logits = outputs(batch)
            parts[0].append(encodings)
            if logits is not None:
                classes = logits.shape[1]
                total += logits.float().softmax(1).amax(1).double().sum().cpu()
            if copies is not None:
                integers = torch.randint(2**62, (len(index),), generator=generator)
                uniforms = torch.rand(len(index), UNIFORMS, generator=generator)
                parts[1].append(outputs(copies(batch, index, integers.to(index.device), uniforms.to(index.device)))[0])
            done += len(index)
            display.update(done, f"{done:,}/{len(rows):,}")
    samples = torch.cat(parts[0])
    augmented = torch.cat(parts[1]) if copies is not None else None
    for encodings in (samples, *([] if augmented is None else [augmented])):
        if not encodings.isfinite().all():
            raise InputError("the model's features of the train data are NaN or infinite. Check model and data.")
    return Encodings(samples, augmented, classes, float(total) / len(rows))
