"""Environments in a table: each has a row, with the action that it is sent and everything that it answers.

The table is all that a worker process shares with its owner.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float32, Shaped

from onefold.errors import InputError, OnefoldError
from onefold.rl.gymnasium_import import gymnasium

EnvFactory: TypeAlias = Callable[[int], gymnasium.Env]
"""The environment of a number; one of a module's own functions, or a `functools.partial` of one."""

MAX_ACTIONS = 256  # a replay has a byte for one
MAX_REASON = 300  # characters
RESET, SKIP = -1, -2  # in place of an action: begin the next episode; do nothing


class Steps(NamedTuple):
    """What all environments answered, in copies that the caller may keep."""

    frames: Shaped[np.ndarray, "e *frame"]
    """What is seen after the step; where an episode began, its first frame."""
    rewards: Float32[np.ndarray, " e"]
    terminated: Bool[np.ndarray, " e"]
    truncated: Bool[np.ndarray, " e"]
    began: Bool[np.ndarray, " e"]
    """This frame is the first of an episode: the action that was sent is ignored."""
    lost: Bool[np.ndarray, " e"]
    """… because its worker was lost: what the environment was doing has no outcome."""
    positions: Float32[np.ndarray, "e 2"]
    """NaN where an environment says nothing of it."""


class Spaces(NamedTuple):
    """What an environment sees and can do. Bytes are kept as bytes, all other numbers as float32."""

    frame: tuple[int, ...]
    dtype: np.dtype
    actions: int


def inspect_spaces(make: EnvFactory) -> Spaces:
    """The form of the environments that this makes; refused if they are not of a kind that can be trained on."""
    try:
        env = make(0)
    except OnefoldError:
        raise
    except (Exception, SystemExit) as error:
        raise OnefoldError(f"environment 0 cannot be made: {summarise_error(error)}") from error
    sight, choice = env.observation_space, env.action_space
    env.close()
    if not isinstance(sight, gymnasium.spaces.Box):
        flat = "Flatten them with gymnasium.wrappers.FlattenObservation"
        raise InputError(f"observations must be a Box, not {_describe(sight)}. {flat}.")
    if len(sight.shape) not in (1, 2) or 0 in sight.shape:
        grey = "Turn colours into grey with gymnasium.wrappers.GrayscaleObservation"
        raise InputError(f"observations must be vectors or grey images, not of shape {sight.shape}. {grey}.")
    if not isinstance(choice, gymnasium.spaces.Discrete) or choice.start != 0:
        raise InputError(f"actions must be Discrete and begin with 0, not {_describe(choice)}")
    if choice.n > MAX_ACTIONS:
        raise InputError(f"there may be at most {MAX_ACTIONS} actions, not {choice.n}")
    return Spaces(sight.shape, np.dtype(np.uint8 if sight.dtype == np.uint8 else np.float32), int(choice.n))


def _describe(space: gymnasium.Space) -> str:
    return " ".join(str(space).split())[:100]


def row_dtype(form: Spaces) -> np.dtype:
    """The table's row of one environment: `Steps`, and what its owner has to say."""
    steps = [
        ("frames", form.dtype, form.frame),
        ("rewards", np.float32),
        ("terminated", np.bool),
        ("truncated", np.bool),
        ("began", np.bool),
        ("lost", np.bool),
        ("positions", np.float32, 2),
    ]
    return np.dtype([*steps, *((name, np.int64) for name in ("actions", "episodes", "asked", "answered"))], align=True)


def episode_seed(seed: int, environment: int, episode: int) -> int:
    """A hash of the three."""
    return int(np.random.SeedSequence(seed, spawn_key=(environment, episode)).generate_state(1)[0])


def summarise_error(error: BaseException) -> str:
    """What went wrong; an error of ours says enough without its type."""
    name = "" if isinstance(error, OnefoldError) else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}".split())[:MAX_REASON].removesuffix(":")


class EnvGroup:
    """Some of the environments, one after the other; each reads and writes its own row."""

    def __init__(self, make: EnvFactory, rows: np.ndarray, first: int, seed: int) -> None:
        self._seed, self._first = seed, first
        self._steps = Steps(*(rows[name] for name in Steps._fields))
        self._actions, self._episodes = rows["actions"], rows["episodes"]
        self._over = [False] * len(rows)
        self._envs: list[gymnasium.Env] = []
        try:
            for i in range(len(rows)):
                self._envs.append(make(first + i))
        except BaseException:
            self.close()
            raise

    def answer(self) -> None:
        """Do in every environment what its row asks for."""
        for i, action in enumerate(self._actions.tolist()):
            if action == RESET or (action != SKIP and self._over[i]):
                self._episodes[i] += 1
                seed = episode_seed(self._seed, self._first + i, int(self._episodes[i]))
                frame, info = self._envs[i].reset(seed=seed)
                self._write(i, frame, 0.0, False, False, info, began=True)
            elif action != SKIP:
                self._write(i, *self._envs[i].step(action), began=False)

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _write(
        self, i: int, frame: Any, reward: Any, terminated: bool, truncated: bool, info: dict[str, Any], *, began: bool
    ) -> None:
        steps = self._steps
        steps.frames[i] = frame
        steps.rewards[i] = reward
        steps.terminated[i] = terminated
        steps.truncated[i] = truncated
        steps.began[i] = began
        position = info.get("position")
        is_place = isinstance(position, np.ndarray) and position.shape == (2,) and position.dtype.kind in "fiu"
        steps.positions[i] = position if is_place else np.nan
        self._over[i] = bool(terminated or truncated)
