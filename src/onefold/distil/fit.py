"""CSD's training, put together: networks, labels, contexts and loss, for the loop in `train`."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.distil.augment import UNIFORMS
from onefold.distil.contexts import Contexts, TrainContexts
from onefold.distil.loss import similarity_loss
from onefold.distil.model import Similarity
from onefold.errors import InputError
from onefold.memory import available
from onefold.nets import backbone
from onefold.train import Draws, Recipe, Training
from onefold.types import FeatureKernel, Kernel


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes of φ and ψ (paper, Table "hpsettingsood"); `channels` matter for images only."""

    channels: tuple[int, ...] = (32,)
    hidden: tuple[int, ...] = (256, 256)
    outputs: int = 256
    normalise: bool = True
    small_init: bool = False


class Labels:
    """Θ(x, c) for a minibatch, of unit diagonal if `normalise`; features of the train set are computed once."""

    @torch.no_grad()
    def __init__(self, kernel: Kernel, x_train: Float[Tensor, "n *sample"], *, normalise: bool) -> None:
        self.kernel, self.normalise = kernel, normalise
        self.features = kernel.features if isinstance(kernel, FeatureKernel) else None
        self.cache: Tensor | None = None
        if self.features is not None:
            size = self.features(x_train[:2]).nbytes // 2 * len(x_train)
            if size < available(x_train.device) // 4:
                self.cache = self._prepared(self.features(x_train))
                if not self.cache.isfinite().all() or not self.cache.any():
                    raise InputError(
                        "the kernel's features of the train data are NaN, infinite, or all zero (is the data constant?)"
                    )

    @torch.no_grad()
    def __call__(self, index: Int[Tensor, " n"], x: Tensor, c: Tensor) -> Float[Tensor, "n n"]:
        with torch.autocast(x.device.type, enabled=False):
            if self.features is None:
                return self._from_kernel(x, c)
            left = self._prepared(self.features(x)) if self.cache is None else self.cache[index]
            right = left if c is x else self._prepared(self.features(c))
            return left @ right.T

    def _from_kernel(self, x: Tensor, c: Tensor) -> Tensor:
        theta = self.kernel(x, c)
        if self.normalise:
            scale = (self.kernel.diag(x)[:, None] * self.kernel.diag(c)[None, :]).sqrt()
            theta = torch.where(scale > 0, theta / scale, 0.0)
        return theta.to(x.device, torch.float32)

    def _prepared(self, z: Tensor) -> Tensor:
        return F.normalize(z.float(), dim=1) if self.normalise else z.float()


def similarity_model(
    shape: tuple[int, ...], first: nn.Module, architecture: Architecture, generator: Generator
) -> Similarity:
    """φ and ψ for samples of this shape, each after the fixed module `first` (the standardisation)."""
    towers = [
        backbone(
            shape,
            channels=architecture.channels,
            hidden=architecture.hidden,
            outputs=architecture.outputs,
            generator=generator,
        )
        for _ in range(2)
    ]
    phi, psi = (nn.Sequential(first, tower) for tower in towers)
    return Similarity(phi, psi, normalise=architecture.normalise, small_init=architecture.small_init)


def distillation(
    model: Similarity,
    x: Float[Tensor, "n *sample"],
    kernel: Kernel,
    contexts: Contexts,
    recipe: Recipe,
    seed: int,
    *,
    compiled: bool = True,
    capturable: bool = True,
) -> Training:
    """The training of `model` on the data `x`, where they lie: minimise the loss over minibatches of x and contexts.

    A kernel that is not `capturable` (a user's may do what no graph can hold) keeps steps that call it from being
    compiled; with contexts from the train set its features are computed once, before the first step.
    """
    labels = Labels(kernel, x, normalise=model.normalise)
    calls_kernel = labels.cache is None or not isinstance(contexts, TrainContexts)

    def loss(integers: Tensor, uniforms: Tensor) -> Tensor:
        index = integers[:, 0] % len(x)
        batch = x[index]
        context = contexts(batch, integers[:, 1], uniforms)
        return similarity_loss(model(batch, context), labels(index, batch, context))

    draws = Draws(recipe.batch, 2, UNIFORMS, seed, x.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return Training(parameters, loss, recipe, draws, compiled=compiled and (capturable or not calls_kernel), bf16=True)
