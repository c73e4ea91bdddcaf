"""The training of CSD: data, labels, contexts and loss for the loop in `nn.train`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from onefold.core.runtime import available
from onefold.distil.contexts import Contexts, CopiedContexts, TrainContexts
from onefold.distil.model import Similarity, unit
from onefold.errors import InputError
from onefold.nn.augment import UNIFORMS
from onefold.nn.cuda_graphs import side_by_side
from onefold.nn.train import Draws, Recipe, Training
from onefold.types import FeatureKernel, Indexable, Kernel

SLICE = 1024  # samples per pass through a frozen network


def iterate_slices(x: Indexable, device: torch.device) -> Iterator[Any]:
    """Yield all samples in order, 1,024 at a time."""
    if isinstance(x, Tensor):
        yield from x.split(SLICE)
    else:
        yield from (x[part] for part in torch.arange(len(x), device=device).split(SLICE))


class Encoded:
    """Samples after a frozen encoder.

    The encodings are kept if `cache` is set and they fit into a quarter of the free memory; else they are computed on
    access.
    """

    @torch.no_grad()
    def __init__(
        self, x: Indexable, encode: Callable[[Any], Tensor], device: torch.device, *, cache: bool = True
    ) -> None:
        self.x, self.encode = x, encode
        few = encode(x[torch.arange(min(2, len(x)), device=device)])
        self.kept: Tensor | None = None
        if cache and few.nbytes // len(few) * len(x) < available(device) // 4:
            self.kept = torch.cat([encode(part) for part in iterate_slices(x, device)])
        self.in_memory = self.kept is not None

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any, /) -> Tensor:
        return self.encode(self.x[index]) if self.kept is None else self.kept[index]


class Labels:
    """Kernel values Θ(x, c) for a minibatch, with a unit diagonal if `normalise` is set.

    Features of the train set, and of `CopiedContexts`, are computed once if `cache` is set and they fit into a quarter
    of the free memory.
    """

    @torch.no_grad()
    def __init__(
        self,
        kernel: Kernel,
        x_train: Indexable,
        *,
        normalise: bool,
        device: torch.device = torch.device("cpu"),  # noqa: B008
        cache: bool = True,
        contexts: Contexts | None = None,
    ) -> None:
        self.kernel, self.normalise = kernel, normalise
        self.features = kernel.features if isinstance(kernel, FeatureKernel) else None
        self.cache = self._compute_all(x_train, device) if cache else None
        if self.cache is not None and not (self.cache.isfinite().all() and self.cache.any()):
            raise InputError(
                "kernel: features of the train data are NaN, infinite, or all zero. Check for constant data."
            )
        self.contexts: CopiedContexts | None = None  # of features
        if self.cache is not None and isinstance(contexts, CopiedContexts):
            copies = self._compute_all(contexts.copies, device)
            self.contexts = None if copies is None else replace(contexts, copies=copies)

    @torch.no_grad()
    def __call__(
        self, index: Int[Tensor, " n"], x: Tensor, c: Tensor, context_features: Tensor | None = None
    ) -> Float[Tensor, "n n"]:
        """Return the labels of train samples x and contexts c; their features are computed if they are not passed."""
        with torch.autocast(x.device.type, enabled=False):
            if self.features is None:
                return self._from_kernel(x, c)
            left = self._normalise(self.features(x)) if self.cache is None else self.cache[index]
            if context_features is not None:
                return left @ context_features.T
            right = left if c is x else self._normalise(self.features(c))
            return left @ right.T

    def context_features(self, index: Tensor, integers: Tensor, uniforms: Tensor) -> Float[Tensor, "n d"] | None:
        """Return the stored features of the contexts that these random numbers draw, or None if none are stored."""
        if self.contexts is None or self.cache is None:
            return None
        return self.contexts(self.cache[index], index, integers, uniforms)

    def _compute_all(self, x: Indexable, device: torch.device) -> Tensor | None:
        """Return the features of all samples, or None if there are none or they do not fit into memory."""
        if self.features is None:
            return None
        few = self.features(x[torch.arange(min(2, len(x)), device=device)])
        if few.nbytes // len(few) * len(x) >= available(device) // 4:
            return None
        return torch.cat([self._normalise(self.features(part)) for part in iterate_slices(x, device)])

    def _from_kernel(self, x: Tensor, c: Tensor) -> Tensor:
        theta = self.kernel(x, c)
        if self.normalise:
            left, right = [theta.diagonal()] * 2 if c is x else [self.kernel.diag(side) for side in (x, c)]
            scale = (left[:, None] * right[None, :]).sqrt()
            theta = torch.where(scale > 0, theta / scale, 0.0)
        return theta.to(x.device, torch.float32)

    def _normalise(self, z: Tensor) -> Tensor:
        return unit(z) if self.normalise else z.float()


def distillation(
    model: Similarity,
    x: Indexable,
    kernel: Kernel,
    contexts: Contexts,
    recipe: Recipe,
    seed: int,
    *,
    encode: Callable[[Any], Tensor] | None = None,
    device: torch.device | None = None,
    compiled: bool | None = None,
    capturable: bool = True,
) -> Training:
    """Return the training of a contextual model on minibatches of train samples and contexts (Section 3.3).

    Args:
        model: Model to train, in place.
        x: N train samples by index.
        kernel: Kernel Θ of the labels.
        contexts: Source of contexts.
        recipe: Steps, batch size and learning rate.
        seed: Seed of minibatches and contexts.
        encode: Frozen encoder of a user. Model and kernel receive encoded samples; contexts are made before it.
        device: Device of the training; None uses that of a tensor `x`, else the CPU.
        compiled: Compile the step on a GPU; None compiles long trainings only.
        capturable: False if the kernel cannot be part of a CUDA graph. Steps that call it are then not captured.

    Returns:
        The training: iterate it, or pass it to `nn.train.run`.

    Raises:
        InputError: If the kernel's features of the train data are NaN, infinite or all zero.
    """
    device = x.device if device is None and isinstance(x, Tensor) else device or torch.device("cpu")
    cache = recipe.steps * recipe.batch >= len(x)  # else most samples would never be used
    inputs = x if encode is None else Encoded(x, encode, device, cache=cache)
    labels = Labels(kernel, inputs, normalise=model.normalise, device=device, cache=cache, contexts=contexts)
    same = isinstance(contexts, TrainContexts)  # contexts are the samples
    calls_kernel = labels.cache is None or not (same or labels.contexts is not None)
    in_memory = getattr(x if encode is None or not same else inputs, "in_memory", True)

    def loss(integers: Tensor, uniforms: Tensor) -> Tensor:
        index = integers[:, 0] % len(x)
        batch = inputs[index]
        if same:
            context = batch
        else:
            context = contexts(batch if encode is None else x[index], index, integers[:, 1], uniforms)
            context = context if encode is None else encode(context)
        stored = labels.context_features(index, integers[:, 1], uniforms)
        left, right, theta = side_by_side(
            [
                partial(model.left, batch),
                partial(model.right, context),
                partial(labels, index, batch, context, stored),
            ],
            device,
        )
        return model.loss(left, right, theta)

    draws = Draws(recipe.batch, 2, UNIFORMS, seed, device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    captured = in_memory and (capturable or not calls_kernel)
    return Training(parameters, loss, recipe, draws, captured=captured, compiled=compiled, bf16=True)
