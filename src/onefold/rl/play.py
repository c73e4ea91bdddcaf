"""A trained agent at play, from the networks alone: how well it does, and what it saw."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from onefold import store
from onefold.errors import FileError, InputError
from onefold.methods.prior import generators
from onefold.rl.folder import LIGHT, NETWORKS
from onefold.rl.light import unpacked
from onefold.rl.loop import GOAL
from onefold.rl.rows import form
from onefold.rl.settings import Run, from_plain
from onefold.rl.values import Values, preferences
from onefold.rl.worlds import world


class Played(NamedTuple):
    """An episode, and what it looked like if that was asked for."""

    length: int
    reward: float
    reached: bool
    pictures: list[np.ndarray]


class Player:
    """What a run's networks do, greedily but for a share `epsilon` of random actions."""

    def __init__(self, path: Path, seed: int, epsilon: float) -> None:
        if not 0 <= epsilon <= 1:
            raise InputError(f"epsilon is a share between 0 and 1, not {epsilon}")
        path = path / NETWORKS if path.is_dir() else path
        tensors, header = store.load(path, LIGHT)
        try:
            self.run = from_plain(Run, header["run"])
            self.frames = int(header["frames"])
            self.make = world(self.run.environment, self.run.frames).make
            self.form = form(self.make)
            shape = self.run.learning.memory.shape(self.form.frame)
            weights, *_ = generators(self.run.seed, 3)
            self.values = Values(self.run.agent, self.run.learning, shape, self.form.actions, weights)
            own = {name.removeprefix("values."): tensor for name, tensor in unpacked(tensors).items()}
            given = {name: t for name, t in self.values.state_dict().items() if name.startswith("prior.")}
            self.values.load_state_dict({**given, **own})  # priors come from the seed
        except (KeyError, RuntimeError, TypeError, InputError) as error:
            raise FileError(f"{path}: damaged, or not of an agent ({type(error).__name__})") from None
        self.values.requires_grad_(False)
        self.rng, self.epsilon = np.random.default_rng(seed), epsilon

    def play(self, episodes: int, *, pictures: bool = False) -> Iterator[Played]:
        """So many episodes, one after another."""
        env = self.make(0)
        try:
            for _ in range(episodes):
                yield self._episode(env, pictures)
        finally:
            env.close()

    def _episode(self, env: Any, pictures: bool) -> Played:
        frame, _ = env.reset(seed=int(self.rng.integers(2**31)))
        stack = [frame] * self.run.learning.memory.stack
        member = torch.tensor([int(self.rng.integers(max(1, self.run.agent.members)))])
        seen, length, total, best, over = [frame], 0, 0.0, 0.0, False
        while not over:
            frame, reward, terminated, truncated, _ = env.step(self._action(np.stack(stack), member))
            stack, over = [*stack[1:], frame], terminated or truncated
            length, total, best = length + 1, total + float(reward), max(best, float(reward))
            if pictures:
                seen.append(frame)
        return Played(length, total, best >= GOAL, seen if pictures else [])

    def _action(self, stack: np.ndarray, member: torch.Tensor) -> int:
        if self.rng.random() < self.epsilon:
            return int(self.rng.integers(self.form.actions))
        x = torch.from_numpy(stack).flatten() if stack.ndim == 2 else torch.from_numpy(stack).flatten(0, -3)
        x = (x.float() / 255 if stack.dtype == np.uint8 else x)[None]
        said = self.values(x)
        return int(preferences(self.run.agent, said, member, self.run.agent.weight.at(self.frames)).argmax())
