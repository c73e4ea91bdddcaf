"""CSD: the variance of an infinite ensemble by one regression, for any query, in one forward pass."""

from dataclasses import asdict
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from onefold.distil import (
    Architecture,
    AugmentedContexts,
    Chain,
    ExtraContexts,
    Mixture,
    Similarity,
    TrainContexts,
    distillation,
    similarity_model,
)
from onefold.distil.contexts import Contexts
from onefold.errors import InputError
from onefold.inputs import Reader, check_seed, in_batches, pick_device, to_device
from onefold.methods.prior import check_kernel, fitted, generators, prior_kernel, random_network
from onefold.nets import Standardise
from onefold.train import Recipe, run
from onefold.types import ArrayLike, Kernel, Scores

Score: TypeAlias = Literal["variance", "relative"]
PRIOR_WIDTH = 256


class _Fitted(NamedTuple):
    reader: Reader
    kernel: Kernel
    model: Similarity

    def variance(self, x: Tensor) -> Tensor:
        prior = self.kernel.diag(x)
        gap = prior * self.model.gap(x) if self.model.normalise else prior - self.model.confidence(x)
        return gap.clamp(min=0)

    def relative(self, x: Tensor) -> Tensor:
        if self.model.normalise:
            return self.model.gap(x).clamp(min=0)
        return self.variance(x) / self.kernel.diag(x).clamp(min=torch.finfo(torch.float32).tiny)


class CSD:
    """Contextual Similarity Distillation (Section 3).

    `kernel` gives the labels: by default the last-layer kernel of a random network that suits the data (Eq. 14).
    `augment` is the share of contexts that go through the paper's augmentations (images only; the paper uses 0.25).
    `score` is what `score(x)` returns: the variance of Eq. 12, or the variance relative to its prior, which ranks
    better on small data. `recipe` is how long and how fast to train, `architecture` the sizes of φ and ψ. After `fit`,
    `loss` is the mean loss over the last tenth of the steps.

    A kernel of the user's own sees samples as float32, [N, D] or [N, C, H, W], uint8 images scaled to [0, 1] and
    otherwise as given: a model that expects another scale or layout must be wrapped to make it itself.
    """

    def __init__(
        self,
        kernel: Kernel | None = None,
        *,
        augment: float = 0.0,
        score: Score = "variance",
        recipe: Recipe | None = None,
        architecture: Architecture | None = None,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        if not 0 <= augment <= 1:
            raise InputError(f"augment is a share between 0 and 1, not {augment}")
        if score not in ("variance", "relative"):
            raise InputError(f"score is 'variance' or 'relative', not {score!r}")
        check_kernel(kernel, Kernel)
        check_seed(seed)
        self.kernel = kernel
        self.augment = augment
        self.score_kind: Score = score
        self.recipe = recipe or Recipe(steps=2000, batch=64, lr=3e-3, warmup=100)
        self.architecture = architecture or Architecture()
        self.seed = seed
        self.device = pick_device(device)
        self.loss = float("nan")
        self._state: _Fitted | None = None

    def fit(
        self,
        x: ArrayLike,
        *,
        context: ArrayLike | None = None,
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
    ) -> "CSD":
        """Learn what is familiar from `x`, unlabelled. `context` is unlabelled data of the target domain, if any.

        With `checkpoint`, a file that is written every 30 seconds, a killed fit goes on from there when it is called
        again with the same data and settings. `progress` shows a bar, by default where a person watches.
        """
        reader, data = Reader.learn(x)
        extra = None if context is None else reader.read(context, "context")
        data = to_device(data, self.device)
        standardise = Standardise(data).to(self.device)
        prior_stream, model_stream, draw_stream = generators(self.seed, 3)
        if self.kernel is None:
            net = random_network(reader.sample_shape, prior_stream, channels=(32,), hidden=(PRIOR_WIDTH,))
            kernel: Kernel = prior_kernel(standardise, net.to(self.device))
        else:
            kernel = self.kernel
        model = similarity_model(reader.sample_shape, standardise, self.architecture, model_stream).to(self.device)
        contexts, seed = self._contexts(reader, extra), draw_stream.initial_seed()
        training = distillation(model, data, kernel, contexts, self.recipe, seed, capturable=self.kernel is None)
        settings = [asdict(self.recipe), asdict(self.architecture), self.seed, self.augment]
        identity = [settings, data, extra]
        if self.kernel is not None:  # three digits: threads and devices may round differently
            identity.append(f"{float(kernel(data[:8], data[:8]).double().sum()):.2e}")
        self.loss = run(training, "CSD", checkpoint=checkpoint, identity=identity, show=progress)
        self._state = _Fitted(reader, kernel, model.eval())
        return self

    def variance(self, x: ArrayLike) -> Scores:
        """The ensemble's variance, Θ(x, x) − g(x, x) (Eq. 12; Eq. 27 for a normalised g); never negative."""
        state = fitted(self._state, "CSD")
        return in_batches(state.variance, state.reader.read(x), self.device)

    def relative(self, x: ArrayLike) -> Scores:
        """The variance as a share of its prior, 1 − g(x, x)/Θ(x, x): free of the scale of the features."""
        state = fitted(self._state, "CSD")
        return in_batches(state.relative, state.reader.read(x), self.device)

    def score(self, x: ArrayLike) -> Scores:
        """What inputs are ranked by; bigger is stranger."""
        return self.variance(x) if self.score_kind == "variance" else self.relative(x)

    def _contexts(self, reader: Reader, extra: Tensor | None) -> Contexts:
        own: Contexts = TrainContexts()
        if self.augment > 0:
            if not reader.is_image:
                raise InputError("augmented contexts are for images; for vectors give unlabelled data as context=…")
            own = AugmentedContexts(Chain(apply=self.augment), reader.low, reader.high)
        if extra is None:
            return own
        return Mixture((own, ExtraContexts(to_device(extra, self.device))), (0.5, 0.5))
