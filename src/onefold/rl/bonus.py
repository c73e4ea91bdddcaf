"""Exploration bonuses for any agent: how unfamiliar its observations are.

    bonus = CSDBonus()
    reward = reward + 0.1 * bonus(next_observations)   # one number per observation; 0 is the running mean
    bonus.update(next_observations)                    # their bonus decreases

A bonus needs no environment. Observations come in batches: vectors [n, d], images [n, c, h, w] or [n, h, w, c], or
dicts or tuples of them.
"""

import abc
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from onefold.core import storage
from onefold.core.arguments import MAX_SIZE, check_integer, check_number, check_sizes
from onefold.core.batches import check_seed, pick_device
from onefold.core.moments import DecayingMoments
from onefold.core.optimisers import adam_to_tensors, restore_adam
from onefold.core.rng import generators
from onefold.core.storage import under_prefix, with_prefix
from onefold.errors import FileError, InputError, TrainingError
from onefold.nn.nets import Prior, random_network
from onefold.rl.bonus_networks import (
    CHANNELS,
    HIDDEN,
    OUTPUTS,
    CSDNetworks,
    RNDNetworks,
    WarmupStandardise,
    reset_generator,
)
from onefold.rl.observations import ObservationEntry, Observations, ObservationSpec, infer_spec

KIND = "exploration bonus"
VALUE_BATCH = 1024  # observations per pass without gradients
CONTEXT_NOISE = 4.0  # standard deviations, for vectors
RELATIVE_MEMORY, ABSOLUTE_MEMORY = 20, 1000  # minibatches; a mean must follow a bonus that fades, a deviation need not


@runtime_checkable
class BonusLike(Protocol):
    """Protocol of a bonus: all that the wrapper, the callback and the replay buffers use."""

    def __call__(self, observations: Observations) -> Float[Tensor, " n"]: ...

    def update(self, observations: Observations) -> float: ...


def check_bonus(bonus: Any) -> BonusLike:
    """Return `bonus` if it has `__call__` and `update`; refuse a class in place of an object."""
    if isinstance(bonus, type):
        raise InputError(f"bonus: {bonus.__name__} is a class. Pass an object: {bonus.__name__}().")
    if not isinstance(bonus, BonusLike):
        raise InputError(f"bonus: a {type(bonus).__name__} has no __call__ and update. Pass one such as CSDBonus().")
    return bonus


class Bonus(abc.ABC):
    """Base class of the exploration bonuses: reads observations, normalises values, trains in minibatches, saves.

    The running mean is subtracted from the values: otherwise a bonus that is never negative would make the end of an
    episode a loss. `CSDBonus` and `LastLayerGPBonus` return a share of the initial bonus, which fades as observations
    become familiar. The errors of `RNDBonus` have no natural unit and are divided by their running standard deviation.

    A subclass implements `make_networks`, `compute_values` and `train_step`. To save and load it, it also implements
    `settings`, `learning_state` and `load_learning_state`, and is added to `BONUSES`.

    Args:
        normalise: Whether values are relative to the running moments.
        keys: Entries of dict observations to use; positions such as "0" for tuples. None uses all.
        batch: Largest minibatch of an update.
        passes: Passes over the observations of one update.
        warmup: Number of observations whose mean and deviation standardise the inputs; fixed afterwards.
        seed: Seed of the weights and of the minibatches.
        device: "auto", "cpu", "cuda" or "cuda:1".

    Raises:
        InputError: An argument is out of range, or the device is not available.
    """

    is_relative: bool = True
    """Whether values are shares of the initial bonus: 1 for unfamiliar observations, 0 for familiar ones."""

    def __init__(
        self,
        *,
        normalise: bool = True,
        keys: Sequence[str] | None = None,
        batch: int = 256,
        passes: int = 1,
        warmup: int = 10_000,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        self.normalise, self.keys = bool(normalise), None if keys is None else tuple(keys)
        self.batch, self.passes = check_integer(batch, "batch"), check_integer(passes, "passes")
        self.warmup, self.seed = check_integer(warmup, "warmup"), check_seed(seed)
        self.device = pick_device(device)
        weight_generator, self.generator = generators(seed, 2)
        self._weight_generator: Generator | None = weight_generator
        self._spec: ObservationSpec | None = None

    @final
    def __call__(self, observations: Observations) -> Float[Tensor, " n"]:
        """Return the bonus of each observation; larger is less familiar.

        Args:
            observations: A batch: vectors, images, or a dict or tuple of them. The first batch fixes the shapes.

        Returns:
            One value per observation. With `normalise`, 0 is the running mean.

        Raises:
            InputError: The batch differs in structure from the first one, is not numeric, or has NaN or infinity.
        """
        x = self._to_tensor(observations)
        with torch.no_grad():
            values = torch.cat([self.compute_values(part) for part in x.split(VALUE_BATCH)]).float()
        if not self.normalise:
            return values
        moments = self.moments
        if moments.is_empty:
            moments = self._make_moments().to(values.device)
            moments.update(values)
        return moments.centre(values) if self.is_relative else moments.standardise(values)

    @final
    def update(self, observations: Observations) -> float:
        """Train on observations, so that their bonus decreases.

        Args:
            observations: A batch, as for a call.

        Returns:
            The mean loss over the minibatches; for `LastLayerGPBonus` the mean variance.

        Raises:
            InputError: The batch differs in structure from the first one, is not numeric, or has NaN or infinity.
            TrainingError: The loss is NaN.
        """
        x = self._to_tensor(observations)
        self.standardise.update(x)
        losses = []
        for _ in range(self.passes):
            order = torch.randperm(len(x), generator=self.generator).to(self.device)
            for rows in order.split(self.batch):
                values, loss = self.train_step(x[rows])
                self.moments.update(values.float())
                losses.append(loss)
        mean_loss = float(torch.stack(losses).mean())
        if math.isnan(mean_loss):
            raise TrainingError("bonus: loss is NaN. Create a new bonus with a smaller lr.")
        return mean_loss

    def save(self, path: str | Path) -> None:
        """Save networks, optimiser, statistics and random state to one file; see `load`.

        Args:
            path: File to write (safetensors with a JSON header).

        Raises:
            InputError: The bonus has processed no observations yet.
        """
        if self._spec is None:
            raise InputError("bonus: no observations yet, so there is nothing to save. Call it or update it first.")
        entries = [[entry.name, list(entry.shape)] for entry in self._spec.entries]
        header = {"bonus": type(self).__name__, "settings": self.settings(), "entries": entries}
        tensors = with_prefix("module", self.module.state_dict()) | with_prefix("learning", self.learning_state())
        storage.save(Path(path), KIND, {**tensors, "generator": self.generator.get_state()}, header)

    @final
    def restore(self, entries: Sequence[ObservationEntry], tensors: Mapping[str, Tensor]) -> None:
        """Restore what `save` wrote, into a bonus with the same settings; use `load` to read a file."""
        self._weight_generator = None  # the weights come from the file
        self._build(ObservationSpec(tuple(entries)))
        self.module.load_state_dict(under_prefix("module", tensors), assign=True)
        self.module.to(self.device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.prepare_training()
        self.load_learning_state(under_prefix("learning", tensors))
        self.generator.set_state(tensors["generator"])

    @final
    def _to_tensor(self, observations: Observations) -> Tensor:
        """Return observations as a tensor; the first batch fixes the shapes and builds the networks."""
        if self._spec is None:
            self._build(infer_spec(observations, self.keys))
        assert self._spec is not None
        return self._spec.tensor(observations, self.device)

    @final
    def _build(self, spec: ObservationSpec) -> None:
        """Make the modules; on the meta device if their weights are loaded afterwards."""
        with torch.device("cpu" if self._weight_generator is not None else "meta"):
            self.standardise, self.moments = WarmupStandardise(spec.shape, self.warmup), self._make_moments()
        self.networks: Any = self.make_networks(spec.shape, self._weight_generator)
        self.module = nn.ModuleDict({"standardise": self.standardise, "moments": self.moments})
        self.module["networks"] = self.networks
        self._spec = spec
        if self._weight_generator is not None:
            self.module.to(self.device)
            self.prepare_training()

    def _make_moments(self) -> DecayingMoments:
        return DecayingMoments(RELATIVE_MEMORY if self.is_relative else ABSOLUTE_MEMORY)

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the constructor, except the device.

        Returns:
            Arguments by name, as JSON content.
        """
        names = ("normalise", "keys", "batch", "passes", "warmup", "seed")
        return {name: getattr(self, name) for name in names}

    @abc.abstractmethod
    def make_networks(self, shape: tuple[int, ...], generator: Generator | None) -> nn.Module:
        """Return the networks for observations of this shape; they apply `self.standardise` to their inputs.

        Args:
            shape: Shape of an observation: (d,) or (c, h, w).
            generator: Source of the weights; None leaves them on the meta device, to be loaded.

        Returns:
            A module, available as `self.networks` afterwards.
        """

    @abc.abstractmethod
    def compute_values(self, x: Float[Tensor, "n *shape"]) -> Float[Tensor, " n"]:
        """Return the bonus of each observation before normalisation.

        Args:
            x: Observations as one tensor.

        Returns:
            Values of at least 0.
        """

    @abc.abstractmethod
    def train_step(self, x: Float[Tensor, "n *shape"]) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        """Train on a minibatch.

        Args:
            x: Observations as one tensor.

        Returns:
            The bonus of each observation before the step, and the loss.
        """

    def prepare_training(self) -> None:  # noqa: B027  (optional)
        """Make what training needs, such as an optimiser. `self.networks` is on its device by then."""

    def learning_state(self) -> dict[str, Tensor]:
        """Return the tensors that training needs to resume, besides the networks.

        Returns:
            Tensors by name.
        """
        return {}

    def load_learning_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `learning_state` returned.

        Args:
            tensors: Tensors by name.

        Raises:
            FileError: The tensors do not fit this bonus.
        """
        if tensors:
            raise FileError(f"bonus: {type(self).__name__} has no learning state.")


class GradientBonus(Bonus, abc.ABC):
    """Base class of the bonuses whose networks are trained by Adam.

    Args:
        lr: Learning rate.
        channels: Channels of the convolution stages; used for images only.
        hidden: Widths of the hidden layers.
        outputs: Number of outputs of the networks.
        reset_every: Number of observations after which the trained networks get new weights, for streams that drift;
            0 never resets. The random networks, the standardisation and the running moments stay.
        **kwargs: Arguments of `Bonus`.

    Raises:
        InputError: An argument is out of range, or the device is not available.
    """

    def __init__(
        self,
        *,
        lr: float = 1e-3,
        channels: Sequence[int] = CHANNELS,
        hidden: Sequence[int] = HIDDEN,
        outputs: int = OUTPUTS,
        reset_every: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.lr = check_number(lr, "lr")
        self.channels, self.hidden = check_sizes(channels, "channels"), check_sizes(hidden, "hidden")
        self.outputs = check_integer(outputs, "outputs", 1, MAX_SIZE)
        self.reset_every = check_integer(reset_every, "reset_every", 0)
        self._trained_on = 0  # observations

    def settings(self) -> dict[str, Any]:
        names = ("lr", "channels", "hidden", "outputs", "reset_every")
        return {**super().settings(), **{name: getattr(self, name) for name in names}}

    def compute_values(self, x: Float[Tensor, "n *shape"]) -> Float[Tensor, " n"]:
        return self.networks.value(x)

    def train_step(self, x: Float[Tensor, "n *shape"]) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        before, self._trained_on = self._trained_on, self._trained_on + len(x)
        if self.reset_every and before // self.reset_every < self._trained_on // self.reset_every:
            self.networks.reset(reset_generator(self.seed, self._trained_on // self.reset_every))
            self._optimiser.state.clear()
        pairs = x if len(x) > 1 else x.repeat_interleave(2, 0)  # the loss of CSD is over pairs
        uniforms = torch.rand(len(pairs), self.networks.uniforms, generator=self.generator).to(self.device)
        self._optimiser.zero_grad()
        values, loss = self.networks.value_and_loss(pairs, uniforms)
        loss.backward()
        self._optimiser.step()
        return values[: len(x)], loss.detach()

    def prepare_training(self) -> None:
        trainable = [p for p in self.networks.parameters() if p.requires_grad]
        self._optimiser = torch.optim.Adam(trainable, lr=self.lr)

    def learning_state(self) -> dict[str, Tensor]:
        return {"trained_on": torch.tensor(self._trained_on), **with_prefix("adam", adam_to_tensors(self._optimiser))}

    def load_learning_state(self, tensors: dict[str, Tensor]) -> None:
        self._trained_on = int(tensors["trained_on"])
        restore_adam(under_prefix("adam", tensors), self._optimiser)


@final
class CSDBonus(GradientBonus):
    """Exploration bonus by CSD: the variance of an infinite ensemble trained on the observations so far.

    Its value is the share of the prior variance that remains, 1 − φ̄(x)ᵀψ̄(x) (Eq. 12 and 27). Contexts are augmented
    frames for images (perspective, flip, crop), and vectors with noise.

    Args:
        lr: Learning rate of Adam; 0.001 by default.
        channels: Channels of the convolution stages; used for images only. (16, 16, 32) by default.
        hidden: Widths of the hidden layers; (256,) by default.
        outputs: Number of outputs of φ and ψ; 256 by default.
        reset_every: Number of observations after which φ and ψ get new weights, for streams that drift; 0, the default,
            never resets. The random prior, the standardisation and the running moments stay.
        **kwargs: Arguments of `Bonus`: normalise, keys, batch, passes, warmup, seed, device.

    Raises:
        InputError: An argument is out of range, or the device is not available.
    """

    def make_networks(self, shape: tuple[int, ...], generator: Generator | None) -> nn.Module:
        return CSDNetworks(
            shape, generator, channels=self.channels, hidden=self.hidden, outputs=self.outputs, noise=CONTEXT_NOISE,
            form="relative", standardise=self.standardise,
        )  # fmt: skip


@final
class RNDBonus(GradientBonus):
    """Exploration bonus by random network distillation: the error of a network that predicts a random one.

    The method is that of Burda et al. (2018).

    Args:
        lr: Learning rate of Adam; 0.001 by default.
        channels: Channels of the convolution stages; used for images only. (16, 16, 32) by default.
        hidden: Widths of the predictor's hidden layers; (256,) by default.
        outputs: Number of outputs of both networks; 256 by default.
        reset_every: Number of observations after which the predictor gets new weights, for streams that drift; 0, the
            default, never resets. The random network, the standardisation and the running moments stay.
        **kwargs: Arguments of `Bonus`: normalise, keys, batch, passes, warmup, seed, device.

    Raises:
        InputError: An argument is out of range, or the device is not available.
    """

    is_relative = False

    def make_networks(self, shape: tuple[int, ...], generator: Generator | None) -> nn.Module:
        return RNDNetworks(
            shape, generator, channels=self.channels, hidden=self.hidden, outputs=self.outputs,
            standardise=self.standardise,
        )  # fmt: skip


@final
class LastLayerGPBonus(Bonus):
    """Exploration bonus by a Gaussian process on random features, in closed form: √(λ φᵀ(ΦᵀΦ + λI)⁻¹φ).

    The features φ are unit vectors from a random network. Along each of their dimensions the bonus stays near 1 until
    there were about λ observations, and then falls as 1/√count. Nothing is trained by gradients.

    Args:
        ridge: λ, the noise variance of the process.
        features: Number of features.
        channels: Channels of the convolution stages; used for images only.
        **kwargs: Arguments of `Bonus`: normalise, keys, batch, passes, warmup, seed, device.

    Raises:
        InputError: An argument is out of range, or the device is not available.
    """

    def __init__(
        self, *, ridge: float = 1.0, features: int = 256, channels: Sequence[int] = CHANNELS, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.ridge, self.features = check_number(ridge, "ridge"), check_integer(features, "features", 1, MAX_SIZE)
        self.channels = check_sizes(channels, "channels")

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "ridge": self.ridge, "features": self.features, "channels": self.channels}

    def make_networks(self, shape: tuple[int, ...], generator: Generator | None) -> nn.Module:
        net = random_network(shape, generator, channels=self.channels, hidden=(self.features,))
        return Prior(self.standardise, net)

    def phi(self, x: Float[Tensor, "n *shape"]) -> Float[Tensor, "n features"]:
        """Return the features, unit vectors in float64."""
        return nn.functional.normalize(self.networks(x).double(), dim=1)

    def compute_values(self, x: Float[Tensor, "n *shape"]) -> Float[Tensor, " n"]:
        solution = torch.linalg.solve_triangular(self._cholesky, self.phi(x).T, upper=False)
        return (self.ridge * solution.square().sum(0)).sqrt()

    def train_step(self, x: Float[Tensor, "n *shape"]) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        values, phi = self.compute_values(x), self.phi(x)
        self._gram += phi.T @ phi
        self._factorise()
        return values, values.square().mean()

    def prepare_training(self) -> None:
        self._gram = torch.zeros(self.features, self.features, dtype=torch.float64, device=self.device)
        self._factorise()

    def learning_state(self) -> dict[str, Tensor]:
        return {"gram": self._gram}

    def load_learning_state(self, tensors: dict[str, Tensor]) -> None:
        self._gram.copy_(tensors["gram"])
        self._factorise()

    def _factorise(self) -> None:
        """Compute the Cholesky factor of ΦᵀΦ + λI."""
        eye = torch.eye(self.features, dtype=torch.float64, device=self.device)
        self._cholesky = torch.linalg.cholesky(self._gram + self.ridge * eye)


BONUSES: dict[str, type[Bonus]] = {kind.__name__: kind for kind in (CSDBonus, RNDBonus, LastLayerGPBonus)}


def load(path: str | Path, *, device: str = "auto") -> Bonus:
    """Return the bonus that `Bonus.save` wrote; further updates continue from there.

    Args:
        path: File of a bonus.
        device: "auto", "cpu", "cuda" or "cuda:1".

    Returns:
        A `CSDBonus`, `RNDBonus` or `LastLayerGPBonus`.

    Raises:
        FileError: The file is damaged, of another kind, or of another version.
    """
    path = Path(path)
    tensors, header = storage.load(path, KIND)
    try:
        bonus = BONUSES[header["bonus"]](**header["settings"], device=device)
        entries = [ObservationEntry(str(name), tuple(int(size) for size in shape)) for name, shape in header["entries"]]
        bonus.restore(entries, tensors)
    except Exception as error:  # a damaged file can cause any error
        raise FileError(f"{path}: damaged, or written by another version ({type(error).__name__})") from None
    return bonus
