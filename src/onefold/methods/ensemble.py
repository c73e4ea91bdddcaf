"""Deep ensembles (Lakshminarayanan et al., 2017): several classifiers, and how much they disagree."""

from dataclasses import asdict
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.errors import InputError
from onefold.inputs import Reader, as_labels, check_seed, pick_device, to_device
from onefold.methods.prior import fitted, generators
from onefold.nets import Standardise, backbone
from onefold.train import Draws, Recipe, Training, run
from onefold.types import ArrayLike, Scores

Disagreement: TypeAlias = Literal["mutual_information", "entropy", "variance"]


class _Fitted(NamedTuple):
    reader: Reader
    members: nn.ModuleList


class DeepEnsemble:
    """M classifiers from independent initialisations, each on its own minibatches, trained together."""

    def __init__(
        self,
        members: int = 5,
        *,
        channels: tuple[int, ...] = (32, 64),
        hidden: tuple[int, ...] = (256, 256),
        score: Disagreement = "mutual_information",
        recipe: Recipe | None = None,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        if members < 2:
            raise InputError(f"an ensemble needs at least 2 members, not {members}")
        if score not in _DISAGREEMENTS:
            raise InputError(f"score is one of {', '.join(_DISAGREEMENTS)}, not {score!r}")
        check_seed(seed)
        self.members, self.channels, self.hidden = members, channels, hidden
        self.score_kind: Disagreement = score
        self.recipe = recipe or Recipe(steps=2000)
        self.seed = seed
        self.device = pick_device(device)
        self._state: _Fitted | None = None

    def fit(
        self, x: ArrayLike, y: ArrayLike, *, checkpoint: str | Path | None = None, progress: bool | None = None
    ) -> "DeepEnsemble":
        """Train on samples and class labels 0, 1, 2 …"""
        reader, data = Reader.learn(x)
        labels = as_labels(y, len(data)).to(self.device)
        data = to_device(data, self.device)
        first = Standardise(data)
        *streams, draw_stream = generators(self.seed, self.members + 1)
        nets = nn.ModuleList(
            nn.Sequential(
                first,
                backbone(
                    reader.sample_shape,
                    channels=self.channels,
                    hidden=self.hidden,
                    outputs=int(labels.max()) + 1,
                    generator=stream,
                ),
            )
            for stream in streams
        ).to(self.device)

        def loss(integers: Tensor, uniforms: Tensor) -> Tensor:
            del uniforms
            index = integers % len(data)
            losses = [F.cross_entropy(net(data[i]), labels[i]) for net, i in zip(nets, index.unbind(1), strict=True)]
            return torch.stack(losses).sum()

        draws = Draws(self.recipe.batch, self.members, 0, draw_stream.initial_seed(), self.device)
        training = Training(list(nets.parameters()), loss, self.recipe, draws)
        settings = [asdict(self.recipe), self.members, self.channels, self.hidden, self.seed]
        name = f"ensemble of {self.members}"
        run(training, name, checkpoint=checkpoint, identity=[settings, data, labels], show=progress)
        self._state = _Fitted(reader, nets)
        return self

    def probabilities(self, x: ArrayLike) -> NDArray[np.float64]:
        """Class probabilities of every member, [M, N, classes]."""
        state = fitted(self._state, "DeepEnsemble")
        data = state.reader.read(x)
        with torch.no_grad():
            parts = [
                torch.stack([F.softmax(net(part.to(self.device)).double(), dim=1).cpu() for net in state.members])
                for part in data.split(1024)
            ]
        return torch.cat(parts, dim=1).numpy()

    def predict(self, x: ArrayLike) -> NDArray[np.int64]:
        """The class that the members find likeliest together."""
        return self.probabilities(x).mean(0).argmax(1)

    def score(self, x: ArrayLike) -> Scores:
        """The members' disagreement; bigger is stranger."""
        return _DISAGREEMENTS[self.score_kind](self.probabilities(x))


def entropy(p: Float[np.ndarray, "m n k"]) -> Scores:
    """Entropy of the mean prediction, in nats: what nobody is sure about, for whatever reason."""
    return _entropy(p.mean(0))


def mutual_information(p: Float[np.ndarray, "m n k"]) -> Scores:
    """Entropy of the mean prediction less the members' mean entropy: what they disagree about."""
    return np.maximum(_entropy(p.mean(0)) - _entropy(p).mean(0), 0)


def variance(p: Float[np.ndarray, "m n k"]) -> Scores:
    """Variance of the class probabilities over the members, summed over the classes."""
    return p.var(0).sum(-1)


def _entropy(p: NDArray[np.float64]) -> NDArray[np.float64]:
    return -(p * np.log(np.maximum(p, 1e-300))).sum(-1)


_DISAGREEMENTS = {"mutual_information": mutual_information, "entropy": entropy, "variance": variance}
