"""Deep ensembles (Lakshminarayanan et al., 2017): several classifiers, and how much they disagree."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.detector import Detector
from onefold.errors import InputError
from onefold.fitted import Fitted
from onefold.inputs import as_labels, as_tensor, check_seed, named, pick_device
from onefold.methods.prior import empty_standardise, generators
from onefold.nets import backbone, finished
from onefold.reader import Reader
from onefold.samples import learn
from onefold.sources import open_source
from onefold.train import Draws, Recipe, Training, run
from onefold.types import ArrayLike

Disagreement: TypeAlias = Literal["mutual_information", "entropy", "variance"]
Task: TypeAlias = Literal["auto", "classification", "regression"]
TASKS: tuple[Task, ...] = ("auto", "classification", "regression")


class EnsembleScorer(nn.Module):
    """The members, and how much they disagree."""

    shift: Tensor
    scale: Tensor

    def __init__(self, members: nn.ModuleList, kind: Disagreement, outputs: int, *, regression: bool) -> None:
        super().__init__()
        self.members, self.regression = members, regression
        self.kind: Disagreement = kind
        self.register_buffer("shift", torch.zeros(outputs, dtype=torch.float32))
        self.register_buffer("scale", torch.ones(outputs, dtype=torch.float32))

    def outputs(self, x: Any) -> Tensor:
        """[M, N, outputs]: class probabilities, or predicted values."""
        raw = torch.stack([member(x).double() for member in self.members])
        return raw * self.scale + self.shift if self.regression else F.softmax(raw, dim=-1)

    def forward(self, x: Any) -> Tensor:
        return _DISAGREEMENTS[self.kind](self.outputs(x))


class DeepEnsemble(Detector):
    """M networks from independent initialisations, each on its own minibatches, trained together.

    Whole-number labels 0, 1, 2 … make classifiers, which disagree by `score`; other targets, or task="regression", make
    regressors, which disagree by their variance.
    """

    about_like: ClassVar[dict[str, Any]] = {"outputs": 0, "regression": False}

    def __init__(
        self,
        members: int = 5,
        *,
        channels: tuple[int, ...] = (32, 64),
        hidden: tuple[int, ...] = (256, 256),
        score: Disagreement = "mutual_information",
        task: Task = "auto",
        recipe: Recipe | None = None,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        if members < 2:
            raise InputError(f"an ensemble needs at least 2 members, not {members}")
        if score not in _DISAGREEMENTS:
            raise InputError(f"score is one of {', '.join(_DISAGREEMENTS)}, not {score!r}")
        if task not in TASKS:
            raise InputError(f"task is one of {', '.join(TASKS)}, not {task!r}")
        self.kernel = None
        self.task: Task = task
        self.members, self.channels, self.hidden = members, channels, hidden
        self.score_kind: Disagreement = score
        self.recipe = recipe or Recipe(steps=2000)
        self.seed = check_seed(seed)
        self.device = pick_device(device)

    def fit(
        self,
        x: ArrayLike,
        y: ArrayLike | None = None,
        *,
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
    ) -> "DeepEnsemble":
        """Train on samples and class labels 0, 1, 2 …, or real targets; a Dataset of pairs brings its own."""
        learned = learn(x, self.device, self.seed)
        targets, regression = as_targets(labels_of(x) if y is None else y, len(learned.samples), self.task)
        targets = targets.to(self.device)
        outputs = targets.shape[1] if regression else int(targets.max()) + 1
        scorer = self._scorer(
            learned.reader.sample_shape, learned.standardise, generators(self.seed, self.members), outputs, regression
        ).to(self.device)
        if regression:  # networks learn standardised targets; what they say is in the targets' own scale
            scorer.shift.copy_(targets.mean(0))
            scorer.scale.copy_(targets.std(0, correction=0).clamp(min=1e-12))
            targets = (targets - scorer.shift) / scorer.scale

        def loss(integers: Tensor, uniforms: Tensor) -> Tensor:
            del uniforms
            losses = []
            for member, i in zip(scorer.members, (integers % len(learned.samples)).unbind(1), strict=True):
                found, wanted = member(learned.samples[i]), targets[i]
                losses.append(F.mse_loss(found, wanted) if regression else F.cross_entropy(found, wanted))
            return torch.stack(losses).sum()

        seed = generators(self.seed, self.members + 1)[-1].initial_seed()
        draws = Draws(self.recipe.batch, self.members, 0, seed, self.device)
        parameters = [p for p in scorer.members.parameters() if p.requires_grad]
        training = Training(parameters, loss, self.recipe, draws, captured=learned.samples.in_memory)
        identity = [self._settings(), targets, *named(learned.reservoir.samples).values()]
        run(training, f"ensemble of {self.members}", checkpoint=checkpoint, identity=identity, show=progress)
        finished(scorer, self.device)
        state = Fitted(
            reader=learned.reader,
            prepare=learned.prepare,
            scorer=scorer,
            reservoir=learned.reservoir,
            about={"outputs": outputs, "regression": regression},
        )
        self._became(state)
        return self

    def probabilities(self, x: ArrayLike) -> NDArray[np.float64]:
        """What every member says, [M, N, outputs]: class probabilities, or predicted values of regressors."""
        state = self._fitted()
        parts = [
            state.scorer.outputs(batch).cpu()  # pyright: ignore[reportCallIssue]
            for raw in state.reader.batches(x)
            for batch in self._prepared(state, raw)
        ]
        return torch.cat(parts, dim=1).detach().numpy()

    def predict(self, x: ArrayLike) -> NDArray[Any]:
        """The class that the members find likeliest together, or the mean of their values [N, outputs]."""
        mean = self.probabilities(x).mean(0)
        return mean if self._fitted().about["regression"] else mean.argmax(1)

    def _scorer(
        self,
        shape: tuple[int, ...],
        first: nn.Module,
        streams: Sequence[Generator | None],
        outputs: int,
        regression: bool,
    ) -> EnsembleScorer:
        sizes = {"channels": self.channels, "hidden": self.hidden, "outputs": outputs}
        members = nn.ModuleList(nn.Sequential(first, backbone(shape, generator=s, **sizes)) for s in streams)
        kind: Disagreement = "variance" if regression else self.score_kind
        return EnsembleScorer(members, kind, outputs, regression=regression)

    def _settings(self) -> dict[str, Any]:
        sizes = {"channels": list(self.channels), "hidden": list(self.hidden)}
        return {
            "members": self.members,
            "task": self.task, **sizes, "score": self.score_kind,
            "recipe": asdict(self.recipe), "seed": self.seed,
        }  # fmt: skip

    @classmethod
    def _from_settings(cls, settings: dict[str, Any]) -> dict[str, Any]:
        sizes = {key: tuple(value) for key, value in settings.items() if isinstance(value, list)}
        return {**settings, **sizes, "recipe": Recipe(**settings["recipe"])}

    def _empty(self, reader: Reader, about: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
        shape = reader.sample_shape
        if self.members * (4 + 2 * len(self.hidden)) > len(weights):
            raise ValueError("no ensemble of this size")
        first = empty_standardise(shape)
        return self._scorer(shape, first, [None] * self.members, about["outputs"], about["regression"])


def labels_of(x: ArrayLike) -> Tensor:
    """The labels that a Dataset of pairs brings."""
    labels = getattr(open_source(x), "labels", lambda: None)()
    if labels is None:
        raise InputError("an ensemble learns from labels: call fit(x, y), or give a Dataset of pairs (x, y)")
    return labels


def as_targets(y: ArrayLike, n: int, task: Task) -> tuple[Tensor, bool]:
    """Class labels as int64 [N], or real targets as float32 [N, outputs] and True."""
    given = as_tensor(y, "y")
    fractions = given.is_floating_point() and not torch.equal(given, given.round())
    if task == "regression" or (task == "auto" and fractions):
        targets = given.float().reshape(len(given), -1)
        if len(targets) != n or not targets.isfinite().all():
            raise InputError(f"y has shape {tuple(given.shape)}: a finite target for each of the {n} samples is needed")
        return targets, True
    return as_labels(given, n), False


def entropy(p: Float[Tensor, "m n k"]) -> Float[Tensor, " n"]:
    """Entropy of the mean prediction, in nats: what nobody is sure about, for whatever reason."""
    return _entropy(p.mean(0))


def mutual_information(p: Float[Tensor, "m n k"]) -> Float[Tensor, " n"]:
    """Entropy of the mean prediction less the members' mean entropy: what they disagree about."""
    return (_entropy(p.mean(0)) - _entropy(p).mean(0)).clamp(min=0)


def variance(p: Float[Tensor, "m n k"]) -> Float[Tensor, " n"]:
    """Variance of the class probabilities, or of the predicted values, over the members, summed over the outputs."""
    return p.var(0, correction=0).sum(-1)


def _entropy(p: Tensor) -> Tensor:
    return -torch.special.xlogy(p, p).sum(-1)


_DISAGREEMENTS = {"mutual_information": mutual_information, "entropy": entropy, "variance": variance}
