"""Random network distillation (Burda et al., 2018): the error of a network that predicts a random one."""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from onefold.core.arguments import MAX_SIZE, check_instance, check_integer, check_sizes
from onefold.core.batches import check_seed, named, pick_device
from onefold.core.rng import generators
from onefold.detectors.base import Detector, ExportMixin
from onefold.detectors.build import Spec, initial_standardise, set_standardisation, streams
from onefold.detectors.state import DetectorState
from onefold.detectors.streaming import balanced_samples, update_recipe
from onefold.inputs.reservoir import Reservoir
from onefold.inputs.samples import Samples, read_train_data
from onefold.nn.nets import RNDScorer, backbone, finished, random_network
from onefold.nn.train import Draws, Recipe, Training, run
from onefold.types import ArrayLike


@dataclass(frozen=True, kw_only=True)
class RNDSpec(Spec):
    """Settings of `RND`."""

    channels: tuple[int, ...]
    hidden: tuple[int, ...]
    target_hidden: tuple[int, ...]
    width: int
    recipe: Recipe


class RND(Detector, ExportMixin):
    """Squared error of a trained predictor against a frozen random network; default sizes and rate are the paper's.

    Args:
        channels: Channels of the convolutional stages, for images.
        hidden: Hidden layers of the predictor.
        target_hidden: Hidden layers of the random network.
        width: Number of outputs of both networks.
        recipe: Steps, batch size and learning rate.
        seed: Seed of all random numbers.
        device: "auto", "cpu", "cuda" or "cuda:1".

    Raises:
        InputError: An argument is out of range.
    """

    spec_class = RNDSpec

    def __init__(
        self,
        *,
        channels: tuple[int, ...] = (16,),
        hidden: tuple[int, ...] = (256, 256),
        target_hidden: tuple[int, ...] = (256,),
        width: int = 256,
        recipe: Recipe | None = None,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        self.channels, self.hidden = check_sizes(channels, "channels"), check_sizes(hidden, "hidden")
        self.target_hidden = check_sizes(target_hidden, "target_hidden")
        self.width = check_integer(width, "width", 1, MAX_SIZE)
        self.recipe = check_instance(recipe or Recipe(steps=2000, lr=3e-3), "recipe", Recipe)
        self.seed = check_seed(seed)
        self.device = pick_device(device)

    def fit(self, x: ArrayLike, *, checkpoint: str | Path | None = None, progress: bool | None = None) -> "RND":
        """Fit on in-distribution data without labels.

        Args:
            x: Training data, as in `CSD.fit`.
            checkpoint: File to resume from, as in `CSD.fit`.
            progress: Show a progress bar; by default only on a terminal.

        Returns:
            This detector.

        Raises:
            InputError: The data cannot be used.
            TrainingError: The training diverged.
        """
        data = read_train_data(x, self.device, self.seed)
        spec = RNDSpec(**self.settings, inputs=data.reader.sample_shape)
        scorer = self.build(spec)
        set_standardisation(scorer, data.standardise)
        identity = [asdict(spec), len(data.samples), *named(data.reservoir.samples).values()]
        self._train(
            scorer.to(self.device), data.samples, self.recipe, self.seed,
            checkpoint=checkpoint, identity=identity, progress=progress,
        )  # fmt: skip
        self._set_state(DetectorState.from_data(data, scorer, spec, self.device))
        return self

    def update(self, x: ArrayLike, *, half_life: float | None = None, progress: bool | None = None) -> "RND":
        """Continue the fit on new in-distribution data, in bounded memory; afterwards calibrate again.

        Args:
            x: New data.
            half_life: Number of samples after which a sample is half as likely to be stored. By default samples of all
                ages are stored with equal probability.
            progress: Show a progress bar; by default only on a terminal.

        Returns:
            This detector.

        Raises:
            InputError: The data does not have the layout of the training data, or the detector was saved without
                samples.
            TrainingError: The training diverged.
        """
        state = self.state
        reservoir, new = state.reservoir.copy(), Reservoir(state.reservoir.capacity, self.seed)
        for raw in state.reader.batches(x):
            reservoir.add(raw, half_life)
            new.add(raw)
        train = balanced_samples(reservoir, new, state.prepare, self.device)
        scorer = copy.deepcopy(state.scorer)
        assert isinstance(scorer, RNDScorer)
        scorer.predictor[1].requires_grad_(True)
        self._train(scorer, train, update_recipe(self.recipe, new.seen), reservoir.seen, progress=progress)
        self._set_state(replace(state, scorer=scorer, reservoir=reservoir))
        return self

    def build(self, spec: RNDSpec, *, meta: bool = False) -> RNDScorer:
        """Return predictor and random network: with initial weights, or on the meta device."""
        target_stream, predictor_stream = streams(spec.seed, 2, meta=meta)
        sizes = {"channels": spec.channels, "outputs": spec.width}
        target = random_network(spec.inputs, target_stream, hidden=spec.target_hidden, **sizes)
        predictor = backbone(spec.inputs, hidden=spec.hidden, generator=predictor_stream, **sizes)
        first = initial_standardise(spec.inputs, meta=meta)
        return RNDScorer(nn.Sequential(first, predictor), nn.Sequential(first, target))

    def _train(
        self,
        scorer: RNDScorer,
        train: Samples,
        recipe: Recipe,
        seed: int,
        *,
        checkpoint: str | Path | None = None,
        identity: Sequence[Any] = (),
        progress: bool | None = None,
    ) -> None:
        """Train the predictor."""

        def loss(integers: Tensor, uniforms: Tensor) -> Tensor:
            del uniforms
            return scorer(train[integers[:, 0] % len(train)]).mean()

        draws = Draws(recipe.batch, 1, 0, generators(seed, 3)[2].initial_seed(), self.device)
        parameters = [p for p in scorer.predictor.parameters() if p.requires_grad]
        training = Training(parameters, loss, recipe, draws, captured=train.in_memory)
        run(training, "RND", checkpoint=checkpoint, identity=identity, show=progress)
        finished(scorer, self.device)
