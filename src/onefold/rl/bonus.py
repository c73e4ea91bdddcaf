"""Exploration bonuses for agents that people already have: how new observations are, from nothing but observations.

    bonus = CSDBonus()
    reward = reward + 0.1 * bonus(next_observations)   # one number an observation: 0 is as new as usual
    bonus.update(next_observations)                    # what was seen is less new from now on

No environment is owned. Observations come in batches: vectors [n, d], images [n, c, h, w] or [n, h, w, c], or dicts
or tuples of them.
"""

import abc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from onefold.core import storage
from onefold.core.batches import check_seed, pick_device
from onefold.core.moments import DecayingMoments
from onefold.core.rng import generators
from onefold.errors import FileError, InputError, TrainingError
from onefold.nn.nets import Prior, random_network
from onefold.rl.bonus_networks import (
    CHANNELS,
    HIDDEN,
    OUTPUTS,
    CSDNetworks,
    RNDNetworks,
    Settling,
    reset_generator,
)
from onefold.rl.observations import Entry, Form, Observations, form_of

KIND = "exploration bonus"
NOISE = 4.0  # standard deviations, of contexts that are vectors
MEMORY, LONG_MEMORY = 20, 1000  # minibatches: a mean has to keep up with what fades, a deviation not to


@runtime_checkable
class Curious(Protocol):
    """What wrappers and buffers need of a bonus; one of your own will do."""

    def __call__(self, observations: Observations) -> Float[Tensor, " n"]: ...

    def update(self, observations: Observations) -> float: ...


def check_bonus(bonus: Any) -> Curious:
    """Return `bonus` if it can be called and updated; a class is not yet a bonus."""
    if isinstance(bonus, type):
        raise InputError(f"bonus: {bonus.__name__} is a class. Pass an object: {bonus.__name__}().")
    if not isinstance(bonus, Curious):
        raise InputError(f"bonus: a {type(bonus).__name__} cannot be called and updated. Pass one such as CSDBonus().")
    return bonus


class Bonus(abc.ABC):
    """How new observations are, and learning what has been seen. The first batch tells what observations look like.

    A value is above the running mean, so that the end of an episode is neither gain nor loss, and has a scale that
    suits every environment: CSD and LastLayerGP tell the *share* of what was unknown at first that still is, which
    fades where all has been seen; RND's errors have no scale of their own, and are in running standard deviations.
    `normalise=False` leaves values as they are. `update` goes `passes` times through what it is given, in minibatches
    of at most `batch`. Observations are standardised by the first `settle` of them. `keys` chooses entries of dicts,
    and of tuples by their places: "0", "1", …
    """

    share = True
    """Whether values are 1 where nothing is known and 0 where all is."""

    def __init__(
        self,
        *,
        normalise: bool = True,
        keys: Sequence[str] | None = None,
        batch: int = 256,
        passes: int = 1,
        settle: int = 10_000,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        if min(batch, passes, settle) < 1:
            raise InputError(f"batch, passes and settle are at least 1, not {batch}, {passes} and {settle}")
        self.normalise, self.keys = bool(normalise), None if keys is None else tuple(keys)
        self.batch, self.passes, self.settle, self.seed = batch, passes, settle, check_seed(seed)
        self.device = pick_device(device)
        weights, chance = generators(seed, 2)
        self._weights: Generator | None = weights
        self._chance = chance
        self._form: Form | None = None

    @final
    def __call__(self, observations: Observations) -> Float[Tensor, " n"]:
        """How new each observation is: bigger is newer."""
        x = self._read(observations)
        with torch.no_grad():
            values = torch.cat([self._value(part) for part in x.split(1024)]).float()
        if not self.normalise:
            return values
        scale = self.scale
        if scale.is_empty:
            scale = self._scale().to(values.device)
            scale.update(values)
        return scale.centre(values) if self.share else scale.standardise(values)

    @final
    def update(self, observations: Observations) -> float:
        """Learn that these have been seen; the mean loss, which for LastLayerGP is the mean variance."""
        x = self._read(observations)
        self.first.take(x)
        losses = []
        for _ in range(self.passes):
            order = torch.randperm(len(x), generator=self._chance).to(self.device)
            for part in order.split(self.batch):
                value, loss = self._learn(x[part])
                self.scale.update(value.float())
                losses.append(loss)
        mean = float(torch.stack(losses).mean())
        if mean != mean:
            raise TrainingError("the bonus's loss is no number any more; use a smaller learning rate")
        return mean

    def save(self, path: str | Path) -> None:
        """One file, safetensors and JSON: networks, optimiser, statistics and random numbers."""
        if self._form is None:
            raise InputError("a bonus that has seen nothing cannot be saved")
        entries = [[entry.name, list(entry.shape)] for entry in self._form.entries]
        header = {"bonus": type(self).__name__, "settings": self._settings(), "entries": entries}
        tensors = {f"module.{name}": tensor for name, tensor in self._module.state_dict().items()}
        tensors |= {f"learned.{name}": tensor for name, tensor in self._learned().items()}
        storage.save(Path(path), KIND, {**tensors, "chance": self._chance.get_state()}, header)

    @final
    def _read(self, observations: Observations) -> Tensor:
        if self._form is None:
            self._made(form_of(observations, self.keys))
        assert self._form is not None
        return self._form.tensor(observations, self.device)

    @final
    def _made(self, form: Form) -> None:
        with torch.device("cpu" if self._weights is not None else "meta"):
            self.first, self.scale = Settling(form.shape, self.settle), self._scale()
        self._module = nn.ModuleDict({"first": self.first, "scale": self.scale})
        self._module["networks"] = self._network(form.shape, self._weights)
        self._form = form
        if self._weights is not None:
            self._module.to(self.device)
            self._ready()

    @final
    def _restored(self, form: Form, tensors: dict[str, Tensor]) -> None:
        self._weights = None  # empty networks, to be filled
        self._made(form)
        own = {name.removeprefix("module."): t for name, t in tensors.items() if name.startswith("module.")}
        self._module.load_state_dict(own, assign=True)
        self._module.to(self.device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self._ready()
        self._relearned({n.removeprefix("learned."): t for n, t in tensors.items() if n.startswith("learned.")})
        self._chance.set_state(tensors["chance"])

    def _scale(self) -> DecayingMoments:
        return DecayingMoments(MEMORY if self.share else LONG_MEMORY)

    def _settings(self) -> dict[str, Any]:
        names = ("normalise", "keys", "batch", "passes", "settle", "seed")
        return {name: getattr(self, name) for name in names}

    @abc.abstractmethod
    def _network(self, shape: tuple[int, ...], generator: Generator | None) -> nn.Module:
        """What it judges by; empty without a generator."""

    @abc.abstractmethod
    def _ready(self) -> None:
        """The network is on its device: whatever learning needs is made of it."""

    @abc.abstractmethod
    def _value(self, x: Tensor) -> Float[Tensor, " n"]: ...

    @abc.abstractmethod
    def _learn(self, x: Tensor) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        """How new these were, and the loss; they are less new afterwards."""

    @abc.abstractmethod
    def _learned(self) -> dict[str, Tensor]:
        """What learning goes on from, besides the network."""

    @abc.abstractmethod
    def _relearned(self, tensors: dict[str, Tensor]) -> None: ...


class _Distilled(Bonus, abc.ABC):
    """A bonus whose networks learn by Adam.

    With `reset_every`, the networks start anew after that many observations, against the drift of long streams; the
    random target, the standardisation and the running scale stay.
    """

    def __init__(
        self,
        *,
        lr: float = 1e-3,
        channels: Sequence[int] = CHANNELS,
        hidden: Sequence[int] = HIDDEN,
        outputs: int = OUTPUTS,
        reset_every: int = 0,
        **how: Any,
    ) -> None:
        super().__init__(**how)
        if not 0 < lr < float("inf"):
            raise InputError(f"lr: must be positive (got {lr})")
        if reset_every < 0:
            raise InputError(f"reset_every: must be at least 0 (got {reset_every})")
        self.lr, self.channels, self.hidden, self.outputs = lr, tuple(channels), tuple(hidden), outputs
        self.reset_every, self._learned_from = reset_every, 0

    def _settings(self) -> dict[str, Any]:
        names = ("lr", "channels", "hidden", "outputs", "reset_every")
        return {**super()._settings(), **{name: getattr(self, name) for name in names}}

    def _sizes(self) -> dict[str, Any]:
        return {"channels": self.channels, "hidden": self.hidden, "outputs": self.outputs, "first": self.first}

    def _ready(self) -> None:
        self._networks: Any = self._module["networks"]
        self._own = [p for p in self._networks.parameters() if p.requires_grad]
        self._optimiser = torch.optim.Adam(self._own, lr=self.lr)

    def _reset(self) -> None:
        """Start the trained networks and their optimiser anew; the random target, standardisation and scale stay."""
        self._networks.reset(reset_generator(self.seed, self._learned_from // self.reset_every))
        self._optimiser.state.clear()

    def _value(self, x: Tensor) -> Tensor:
        return self._networks.value(x)

    def _learn(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before, self._learned_from = self._learned_from, self._learned_from + len(x)
        if self.reset_every and before // self.reset_every < self._learned_from // self.reset_every:
            self._reset()
        x = x if len(x) > 1 else x.repeat_interleave(2, 0)  # CSD's loss is over pairs
        uniforms = torch.rand(len(x), self._networks.uniforms, generator=self._chance).to(self.device)
        self._optimiser.zero_grad()
        value, loss = self._networks.value_and_loss(x, uniforms)
        loss.backward()
        self._optimiser.step()
        return value, loss.detach()

    def _learned(self) -> dict[str, Tensor]:
        adam = {f"{i}.{key}": t for i, p in enumerate(self._own) for key, t in self._optimiser.state[p].items()}
        return {**adam, "learned_from": torch.tensor(self._learned_from)}

    def _relearned(self, tensors: dict[str, Tensor]) -> None:
        self._learned_from = int(tensors["learned_from"])
        for i, parameter in enumerate(self._own):
            own = {name.split(".", 1)[1]: t for name, t in tensors.items() if name.startswith(f"{i}.")}
            moments = ("exp_avg", "exp_avg_sq")
            if own and (set(own) != {"step", *moments} or any(own[m].shape != parameter.shape for m in moments)):
                raise FileError("what Adam had learned is not that of these networks")
            if own:
                self._optimiser.state[parameter] = {n: t.to(self.device) if n in moments else t for n, t in own.items()}


@final
class CSDBonus(_Distilled):
    """The variance of an infinite ensemble of networks trained on what was seen, as a share of what it was before, by
    CSD: 1 − φ̄(x)ᵀψ̄(x) (Eq. 12 and 27, over the prior's variance).

    Contexts are other views of images (perspective, flips, crops), and vectors with noise.
    """

    def _network(self, shape: tuple[int, ...], generator: Generator | None) -> nn.Module:
        return CSDNetworks(shape, generator, noise=NOISE, form="relative", **self._sizes())


@final
class RNDBonus(_Distilled):
    """How badly a network predicts a random one (Burda et al., 2018)."""

    share = False

    def _network(self, shape: tuple[int, ...], generator: Generator | None) -> nn.Module:
        return RNDNetworks(shape, generator, **self._sizes())


@final
class LastLayerGPBonus(Bonus):
    """√(λ φᵀ(ΦᵀΦ + λI)⁻¹φ) with unit vectors φ of a random network: the closed form, and nothing to be trained.

    Every direction of the `features` dimensions is new until it was seen about λ times; so a bonus fades as 1/√count.
    """

    def __init__(
        self, *, ridge: float = 1.0, features: int = 256, channels: Sequence[int] = CHANNELS, **how: Any
    ) -> None:
        super().__init__(**how)
        if not 0 < ridge < float("inf") or features < 1:
            raise InputError(f"the ridge must be positive and features at least 1, not {ridge} and {features}")
        self.ridge, self.features, self.channels = ridge, features, tuple(channels)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "ridge": self.ridge, "features": self.features, "channels": self.channels}

    def _network(self, shape: tuple[int, ...], generator: Generator | None) -> nn.Module:
        net = random_network(shape, generator, channels=self.channels, hidden=(self.features,))
        return Prior(self.first, net)

    def _ready(self) -> None:
        self._gram = torch.zeros(self.features, self.features, dtype=torch.float64, device=self.device)
        self._factored()

    def _factored(self) -> None:
        eye = torch.eye(self.features, dtype=torch.float64, device=self.device)
        self._factor = torch.linalg.cholesky(self._gram + self.ridge * eye)

    def _phi(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(self._module["networks"](x).double(), dim=1)

    def _value(self, x: Tensor) -> Tensor:
        solved = torch.linalg.solve_triangular(self._factor, self._phi(x).T, upper=False)
        return (self.ridge * solved.square().sum(0)).sqrt()

    def _learn(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value, phi = self._value(x), self._phi(x)
        self._gram += phi.T @ phi
        self._factored()
        return value, value.square().mean()

    def _learned(self) -> dict[str, Tensor]:
        return {"gram": self._gram}

    def _relearned(self, tensors: dict[str, Tensor]) -> None:
        self._gram.copy_(tensors["gram"])
        self._factored()


def load(path: str | Path, *, device: str = "auto") -> Bonus:
    """The bonus that `save` wrote; it goes on learning from there. A damaged file is refused by name."""
    path = Path(path)
    tensors, header = storage.load(path, KIND)
    kinds = {kind.__name__: kind for kind in (CSDBonus, RNDBonus, LastLayerGPBonus)}
    try:
        bonus = kinds[header["bonus"]](**header["settings"], device=device)
        entries = [Entry(str(name), tuple(int(size) for size in shape)) for name, shape in header["entries"]]
        bonus._restored(Form(tuple(entries)), tensors)
    except Exception as error:  # whatever is wrong with it, it is refused by name
        raise FileError(f"{path}: damaged, or made by another version ({type(error).__name__})") from None
    return bonus
