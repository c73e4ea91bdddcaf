"""Random network distillation (Burda et al., 2018): how badly a network predicts a random one."""

from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from onefold.inputs import Reader, check_seed, in_batches, pick_device, to_device
from onefold.methods.prior import fitted, generators, random_network
from onefold.nets import Standardise, backbone
from onefold.train import Draws, Recipe, Training, run
from onefold.types import ArrayLike, Scores


class _Fitted(NamedTuple):
    reader: Reader
    predictor: nn.Module
    target: nn.Module

    def error(self, x: Tensor) -> Tensor:
        return 0.5 * (self.predictor(x) - self.target(x)).float().square().mean(1)


class RND:
    """Squared error of a trained predictor against a frozen random target; sizes and rate are the paper's."""

    def __init__(
        self,
        *,
        channels: tuple[int, ...] = (16,),
        hidden: tuple[int, ...] = (256, 256),
        target_hidden: tuple[int, ...] = (256,),
        outputs: int = 256,
        recipe: Recipe | None = None,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        check_seed(seed)
        self.channels, self.hidden, self.target_hidden, self.outputs = channels, hidden, target_hidden, outputs
        self.recipe = recipe or Recipe(steps=2000, lr=3e-3)
        self.seed = seed
        self.device = pick_device(device)
        self._state: _Fitted | None = None

    def fit(self, x: ArrayLike, *, checkpoint: str | Path | None = None, progress: bool | None = None) -> "RND":
        """Learn what is familiar from `x`, unlabelled."""
        reader, data = Reader.learn(x)
        data = to_device(data, self.device)
        shape, first = reader.sample_shape, Standardise(data)
        target_stream, predictor_stream, draw_stream = generators(self.seed, 3)
        sizes = {"channels": self.channels, "outputs": self.outputs}
        random = random_network(shape, target_stream, hidden=self.target_hidden, **sizes)
        trained = backbone(shape, hidden=self.hidden, generator=predictor_stream, **sizes)
        predictor, target = (nn.Sequential(first, net).to(self.device) for net in (trained, random))
        state = _Fitted(reader, predictor, target)

        def loss(integers: Tensor, uniforms: Tensor) -> Tensor:
            del uniforms
            return state.error(data[integers[:, 0] % len(data)]).mean()

        draws = Draws(self.recipe.batch, 1, 0, draw_stream.initial_seed(), self.device)
        training = Training(list(trained.parameters()), loss, self.recipe, draws)
        settings = [asdict(self.recipe), self.channels, self.hidden, self.target_hidden, self.outputs, self.seed]
        run(training, "RND", checkpoint=checkpoint, identity=[settings, data], show=progress)
        self._state = state
        return self

    def score(self, x: ArrayLike) -> Scores:
        """Half the mean squared error over the outputs; bigger is stranger."""
        state = fitted(self._state, "RND")
        return in_batches(state.error, state.reader.read(x), self.device)
