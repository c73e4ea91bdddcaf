"""Deep ensembles (Lakshminarayanan et al., 2017): several networks, and how much they disagree."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Generator, Tensor, nn

from onefold.core.arguments import check_choice, check_instance, check_integer, check_sizes
from onefold.core.batches import check_seed, pick_device
from onefold.core.rng import generators
from onefold.detectors._classifier import TASKS, Augmentation, Task, check_augmentation, targets_of, train_together
from onefold.detectors._members import (
    Disagreement,
    MemberDetector,
    MembersScorer,
    Several,
    check_count,
    check_disagreement,
)
from onefold.detectors._random_features import empty_standardise
from onefold.inputs.reader import Reader
from onefold.inputs.samples import read_train_data
from onefold.nn.nets import backbone
from onefold.nn.train import Recipe
from onefold.types import ArrayLike


class DeepEnsemble(MemberDetector):
    """M networks from independent initialisations, each on its own minibatches, trained together.

    Whole-number labels 0, 1, 2 … make classifiers, which disagree by `score`; other targets, or task="regression", make
    regressors, which disagree by their variance. `augment` changes train images: "crops" zooms into them at random,
    "flips" also mirrors them, as the paper does.
    """

    def __init__(
        self,
        members: int = 5,
        *,
        channels: tuple[int, ...] = (32, 64),
        hidden: tuple[int, ...] = (256, 256),
        score: Disagreement = "mutual_information",
        task: Task = "auto",
        augment: Augmentation = "none",
        recipe: Recipe | None = None,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        self.kernel = None
        self.task: Task = check_choice(task, "task", TASKS)
        self.members = check_integer(members, "members", 2)
        self.channels, self.hidden = check_sizes(channels, "channels"), check_sizes(hidden, "hidden")
        self.score_kind: Disagreement = check_disagreement(score)
        self.augment: Augmentation = check_augmentation(augment)
        self.recipe = check_instance(recipe or Recipe(steps=2000), "recipe", Recipe)
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
        learned = read_train_data(x, self.device, self.seed)
        targets = targets_of(x, y, len(learned.samples), self.task, self.device)
        streams = generators(self.seed, self.members + 1)
        scorer = self._scorer(
            learned.reader.sample_shape, learned.standardise, streams[:-1], targets.outputs, targets.regression
        ).to(self.device)
        assert isinstance(scorer.members, Several)
        train_together(
            [lambda x, _, net=net: net(x) for net in scorer.members.nets],
            [p for p in scorer.members.parameters() if p.requires_grad],
            learned, targets, self.recipe,
            seed=streams[-1].initial_seed(), label=f"ensemble of {self.members}", augment=self.augment,
            settings=self._settings(), checkpoint=checkpoint, progress=progress,
        )  # fmt: skip
        self._settle(learned, targets, scorer)
        return self

    def _scorer(
        self,
        shape: tuple[int, ...],
        first: nn.Module,
        streams: Sequence[Generator | None],
        outputs: int,
        regression: bool,
    ) -> MembersScorer:
        sizes = {"channels": self.channels, "hidden": self.hidden, "outputs": outputs}
        members = Several([nn.Sequential(first, backbone(shape, generator=s, **sizes)) for s in streams])
        return MembersScorer(members, self.score_kind, outputs, regression=regression)

    def _settings(self) -> dict[str, Any]:
        sizes = {"channels": list(self.channels), "hidden": list(self.hidden)}
        return {
            "members": self.members,
            "task": self.task, **sizes, "score": self.score_kind, "augment": self.augment,
            "recipe": asdict(self.recipe), "seed": self.seed,
        }  # fmt: skip

    def _empty(self, reader: Reader, about: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
        shape = reader.sample_shape
        check_count(self.members, self.hidden, weights)
        first = empty_standardise(shape)
        return self._scorer(shape, first, [None] * self.members, about["outputs"], about["regression"])
