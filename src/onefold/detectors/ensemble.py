"""Deep ensembles (Lakshminarayanan et al., 2017): the disagreement of several networks."""

from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn

from onefold.core.arguments import check_choice, check_instance, check_integer, check_sizes
from onefold.core.batches import check_seed, pick_device
from onefold.core.rng import generators
from onefold.detectors.build import initial_standardise, streams
from onefold.detectors.members import (
    TASKS,
    Augmentation,
    Disagreement,
    MemberDetector,
    MemberSpec,
    MembersScorer,
    Parallel,
    Task,
    check_augmentation,
    check_disagreement,
    make_targets,
    train_networks,
)
from onefold.inputs.samples import read_train_data
from onefold.nn.nets import backbone
from onefold.nn.train import Recipe
from onefold.types import ArrayLike


@dataclass(frozen=True, kw_only=True)
class DeepEnsembleSpec(MemberSpec):
    """Settings of `DeepEnsemble`."""

    members: int
    task: Task
    recipe: Recipe

    @property
    def networks(self) -> int:
        """Number of networks."""
        return self.members


class DeepEnsemble(MemberDetector):
    """Networks from independent initialisations, each trained on minibatches of its own.

    Args:
        members: Number of networks, at least 2.
        channels: Channels of the convolutional stages, for images.
        hidden: Hidden layers.
        score: Measure of disagreement of classifiers. Regressors disagree by their variance.
        task: "classification", "regression", or "auto": whole numbers 0, 1, 2 … are classes.
        augment: Augmentation of training images: "crops" enlarges a random part, "flips" also mirrors it.
        recipe: Steps, batch size and learning rate.
        seed: Seed of all random numbers.
        device: "auto", "cpu", "cuda" or "cuda:1".

    Raises:
        InputError: An argument is out of range.
    """

    spec_class = DeepEnsembleSpec

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
        """Train the networks on samples and targets.

        Args:
            x: Training data, as in `CSD.fit`.
            y: Class labels 0, 1, 2 …, or real targets. A Dataset of pairs (x, y) needs no `y`.
            checkpoint: File to resume from, as in `CSD.fit`.
            progress: Show a progress bar; by default only on a terminal.

        Returns:
            This detector.

        Raises:
            InputError: The data or the targets cannot be used.
            TrainingError: The training diverged.
        """
        data = read_train_data(x, self.device, self.seed)
        targets = make_targets(x, y, len(data.samples), self.task, self.device)
        spec = DeepEnsembleSpec(
            **self.settings,
            inputs=data.reader.sample_shape,
            outputs=targets.outputs,
            regression=targets.regression,
        )
        scorer = self._initial_scorer(spec, data).to(self.device)
        assert isinstance(scorer.members, Parallel)
        train_networks(
            [lambda x, _, net=net: net(x) for net in scorer.members.nets],
            [p for p in scorer.members.parameters() if p.requires_grad],
            data, targets, self.recipe,
            seed=generators(self.seed, self.members + 1)[-1].initial_seed(), label=f"ensemble of {self.members}",
            augment=self.augment, settings=asdict(spec), checkpoint=checkpoint, progress=progress,
        )  # fmt: skip
        self._finish(data, targets, scorer, spec)
        return self

    def build(self, spec: DeepEnsembleSpec, *, meta: bool = False) -> MembersScorer:
        """Return the members: with initial weights, or on the meta device."""
        first = initial_standardise(spec.inputs, meta=meta)
        sizes = {"channels": spec.channels, "hidden": spec.hidden, "outputs": spec.outputs}
        weights = streams(spec.seed, spec.members + 1, meta=meta)[:-1]
        nets: list[nn.Module] = [
            nn.Sequential(first, backbone(spec.inputs, generator=stream, **sizes)) for stream in weights
        ]
        return MembersScorer(Parallel(nets), spec, meta=meta)
