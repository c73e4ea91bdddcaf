"""Random network distillation (Burda et al., 2018): how badly a network predicts a random one."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Generator, Tensor, nn

from onefold.core.arguments import MAX_SIZE, check_instance, check_integer, check_sizes
from onefold.core.batches import check_seed, named, pick_device
from onefold.core.rng import generators
from onefold.detectors._random_features import empty_standardise
from onefold.detectors._streaming import both_halves, update_recipe
from onefold.detectors.base import Detector, ExportMixin
from onefold.detectors.export import copied
from onefold.detectors.state import DetectorState
from onefold.inputs.reader import Reader
from onefold.inputs.reservoir import Reservoir
from onefold.inputs.samples import Samples, read_train_data
from onefold.nn.nets import RNDScorer, backbone, finished, random_network
from onefold.nn.train import Draws, Recipe, Training, run
from onefold.types import ArrayLike


class RND(Detector, ExportMixin):
    """Squared error of a trained predictor against a frozen random target; sizes and rate are the paper's."""

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
        self.kernel = None
        self.channels, self.hidden = check_sizes(channels, "channels"), check_sizes(hidden, "hidden")
        self.target_hidden = check_sizes(target_hidden, "target_hidden")
        self.width = check_integer(width, "width", 1, MAX_SIZE)
        self.recipe = check_instance(recipe or Recipe(steps=2000, lr=3e-3), "recipe", Recipe)
        self.seed = check_seed(seed)
        self.device = pick_device(device)

    def fit(self, x: ArrayLike, *, checkpoint: str | Path | None = None, progress: bool | None = None) -> "RND":
        """Learn what is familiar from `x`, unlabelled."""
        learned = read_train_data(x, self.device, self.seed)
        scorer = self._scorer(learned.reader.sample_shape, learned.standardise, generators(self.seed, 2))
        identity = [self._settings(), len(learned.samples), *named(learned.reservoir.samples).values()]
        self._train(
            scorer.to(self.device), learned.samples, self.recipe, self.seed,
            checkpoint=checkpoint, identity=identity, progress=progress,
        )  # fmt: skip
        return self._settled(
            DetectorState(reader=learned.reader, prepare=learned.prepare, scorer=scorer, reservoir=learned.reservoir)
        )

    def update(self, x: ArrayLike, *, half_life: float | None = None, progress: bool | None = None) -> "RND":
        """Take in more data as it comes, in bounded memory; see `CSD.update`."""
        state = self._fitted()
        reservoir, fresh = state.reservoir.copy(), Reservoir(state.reservoir.capacity, self.seed)
        for raw in state.reader.batches(x):
            reservoir.add(raw, half_life)
            fresh.add(raw)
        train = both_halves(reservoir, fresh, state.prepare, self.device)
        scorer = copied(state.scorer)
        assert isinstance(scorer, RNDScorer)
        scorer.predictor[1].requires_grad_(True)
        recipe = update_recipe(self.recipe, fresh.seen)
        self._train(scorer, train, recipe, reservoir.seen, progress=progress)
        return self._settled(replace(state, scorer=scorer, reservoir=reservoir))

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
        def loss(integers: Tensor, uniforms: Tensor) -> Tensor:
            del uniforms
            return scorer(train[integers[:, 0] % len(train)]).mean()

        draws = Draws(recipe.batch, 1, 0, generators(seed, 3)[2].initial_seed(), self.device)
        parameters = [p for p in scorer.predictor.parameters() if p.requires_grad]
        training = Training(parameters, loss, recipe, draws, captured=train.in_memory)
        run(training, "RND", checkpoint=checkpoint, identity=identity, show=progress)
        finished(scorer, self.device)

    def _settled(self, state: DetectorState) -> "RND":
        self._became(state)
        return self

    def _scorer(self, shape: tuple[int, ...], first: nn.Module, streams: Sequence[Generator | None]) -> RNDScorer:
        sizes = {"channels": self.channels, "outputs": self.width}
        target = random_network(shape, streams[0], hidden=self.target_hidden, **sizes)
        predictor = backbone(shape, hidden=self.hidden, generator=streams[1], **sizes)
        return RNDScorer(*(nn.Sequential(first, net) for net in (predictor, target)))

    def _settings(self) -> dict[str, Any]:
        sizes = {name: list(getattr(self, name)) for name in ("channels", "hidden", "target_hidden")}
        return {**sizes, "width": self.width, "recipe": asdict(self.recipe), "seed": self.seed}

    def _empty(self, reader: Reader, about: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
        del about, weights
        shape = reader.sample_shape
        return self._scorer(shape, empty_standardise(shape), [None, None])
