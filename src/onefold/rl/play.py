"""Episodes of a trained agent, from the networks of its run alone."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, UInt8

from onefold.core import storage
from onefold.core.batches import check_seed
from onefold.core.rng import generators
from onefold.errors import FileError, InputError, warn
from onefold.rl.compression import decompress
from onefold.rl.env_table import inspect_spaces
from onefold.rl.loop import GOAL_REWARD
from onefold.rl.registry import DOOM_VARIANTS, find_environment, has_goal
from onefold.rl.run_folder import NETWORKS, NETWORKS_KIND
from onefold.rl.settings import parse_run
from onefold.rl.td import QNetwork, action_values


class GameView(NamedTuple):
    """The game's screen after a step in MyWayHome, and the player's position and angle in degrees."""

    screen: UInt8[np.ndarray, "120 160"]
    position: Float32[np.ndarray, "2"]
    angle: float


class Rollout(NamedTuple):
    """An episode of a trained agent; `views` has the start and every step, if they were recorded."""

    length: int
    reward: float
    reached: bool
    views: list[GameView]


class Player:
    """A trained agent: greedy actions from a run's networks, and a share `epsilon` of random actions."""

    def __init__(self, path: Path, seed: int, epsilon: float) -> None:
        if not 0 <= epsilon <= 1:
            raise InputError(f"must be between 0 and 1 (got {epsilon})", argument="epsilon")
        path = path / NETWORKS if path.is_dir() else path
        tensors, header = storage.load(path, NETWORKS_KIND)
        try:
            self.run = parse_run(header["run"])
            self.frames = int(header["frames"])
        except (KeyError, TypeError, ValueError, InputError) as error:
            raise FileError(f"{path}: damaged, or not the networks of a run ({type(error).__name__}).") from None
        self.make = find_environment(self.run.environment, self.run.frames).make
        self.spaces = inspect_spaces(self.make)
        try:
            shape = self.run.learning.replay.shape(self.spaces.frame)
            weights, *_ = generators(self.run.seed, 3)
            self.network = QNetwork(self.run.agent, self.run.learning, shape, self.spaces.actions, weights)
            trained = {name.removeprefix("online."): tensor for name, tensor in decompress(tensors).items()}
            priors = {name: t for name, t in self.network.state_dict().items() if name.startswith("prior.")}
            self.network.load_state_dict({**priors, **trained})  # the file has no priors: they follow from the seed
        except (KeyError, RuntimeError, TypeError, InputError) as error:  # sizes that do not fit the environment
            raise FileError(f"{path}: damaged, or not the networks of this run ({type(error).__name__}).") from None
        self.network.requires_grad_(False)
        if self.frames < self.run.frames:
            warn(f"{path}: the networks were trained for {self.frames:,} of {self.run.frames:,} frames.")
        self.rng, self.epsilon = np.random.default_rng(check_seed(seed)), epsilon

    def play(self, episodes: int, *, views: bool = False) -> Iterator[Rollout]:
        """Yield episodes. With `views`, raise InputError at once if the environment has no screen."""
        if views and self.run.environment not in DOOM_VARIANTS:
            raise InputError(f"{self.run.environment}: has no screen to record. Only MyWayHome has one.")
        return self._episodes(episodes, views)

    def _episodes(self, episodes: int, views: bool) -> Iterator[Rollout]:
        env = self.make(0)
        try:
            for _ in range(episodes):
                with single_thread():
                    rollout = self._episode(env, views)
                yield rollout
        finally:
            env.close()

    def _episode(self, env: Any, views: bool) -> Rollout:
        if views:
            env.render_mode = "rgb_array"
        frame, info = env.reset(seed=int(self.rng.integers(2**31)))
        stack = [frame] * self.run.learning.replay.stack
        member = torch.tensor([int(self.rng.integers(max(1, self.run.agent.members)))])
        recorded, length, total, largest, ended = [_game_view(env, info)] if views else [], 0, 0.0, 0.0, False
        while not ended:
            frame, reward, terminated, truncated, info = env.step(
                self._action(np.stack(stack).astype(self.spaces.dtype, copy=False), member)
            )
            stack, ended = [*stack[1:], frame], terminated or truncated
            length, total, largest = length + 1, total + float(reward), max(largest, float(reward))
            if views:
                recorded.append(_game_view(env, info))
        return Rollout(length, total, has_goal(self.run.environment) and largest >= GOAL_REWARD, recorded)

    def _action(self, stack: np.ndarray, member: torch.Tensor) -> int:
        if self.rng.random() < self.epsilon:
            return int(self.rng.integers(self.spaces.actions))
        x = torch.from_numpy(stack).flatten() if stack.ndim == 2 else torch.from_numpy(stack).flatten(0, -3)
        x = (x.float() / 255 if stack.dtype == np.uint8 else x)[None]
        weight = self.run.agent.bonus_weight.at(self.frames)
        return int(action_values(self.run.agent, self.network(x), member, weight).argmax())


@contextlib.contextmanager
def single_thread() -> Iterator[None]:
    """Run torch in one thread: for small networks, more threads gain nothing and slow down a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _game_view(env: Any, info: dict[str, Any]) -> GameView:
    return GameView(env.render()[:, :, 0].copy(), info["position"], info["angle"])  # grey: the three channels are equal
