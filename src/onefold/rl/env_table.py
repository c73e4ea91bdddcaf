"""A table with one row per environment: the action to take, and the outcome of the step.

Worker processes share this table, in memory, with the process that trains. Nothing else is shared.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float32, Shaped

from onefold.errors import InputError, OnefoldError
from onefold.rl.gymnasium_import import gymnasium

EnvFactory: TypeAlias = Callable[[int], gymnasium.Env]
"""A function that makes the environment with this index. Processes import it, so it is a module's function or a
`functools.partial` of one."""

MAX_ACTIONS = 256  # the replay stores an action in one byte
MAX_REASON = 300  # characters of an error message
RESET, SKIP = -1, -2  # instead of an action: start the next episode; do nothing


class Steps(NamedTuple):
    """The outcome of one step of all environments, as copies."""

    frames: Shaped[np.ndarray, "e *frame"]
    """Observations after the step; the first observation where an episode started."""
    rewards: Float32[np.ndarray, " e"]
    terminated: Bool[np.ndarray, " e"]
    truncated: Bool[np.ndarray, " e"]
    began: Bool[np.ndarray, " e"]
    """True where an episode started: the action was ignored."""
    lost: Bool[np.ndarray, " e"]
    """True where an episode started because the worker was restarted: the previous episode has no outcome."""
    positions: Float32[np.ndarray, "e 2"]
    """`info["position"]`, or NaN without it."""


class Spaces(NamedTuple):
    """Observation and action space. Observations of bytes stay bytes; other numbers become float32."""

    frame: tuple[int, ...]
    dtype: np.dtype
    actions: int


def inspect_spaces(make: EnvFactory) -> Spaces:
    """Make environment 0 and return its spaces; raise InputError if the agents do not support them."""
    try:
        env = make(0)
    except OnefoldError:
        raise
    except (Exception, SystemExit) as error:
        raise OnefoldError(f"environment 0: cannot be made ({summarise_error(error)}).") from error
    observations, actions = env.observation_space, env.action_space
    env.close()
    if not isinstance(observations, gymnasium.spaces.Box):
        raise InputError(
            f"observations: must be a Box (got {_describe(observations)}). "
            "Flatten them with gymnasium.wrappers.FlattenObservation."
        )
    if len(observations.shape) not in (1, 2) or 0 in observations.shape:
        raise InputError(
            f"observations: must be vectors or grey images (got shape {observations.shape}). "
            "Convert colour images with gymnasium.wrappers.GrayscaleObservation."
        )
    if not isinstance(actions, gymnasium.spaces.Discrete) or actions.start != 0:
        raise InputError(f"actions: must be Discrete and start at 0 (got {_describe(actions)}).")
    if actions.n > MAX_ACTIONS:
        raise InputError(f"actions: must be at most {MAX_ACTIONS} (got {actions.n}).")
    dtype = np.dtype(np.uint8 if observations.dtype == np.uint8 else np.float32)
    return Spaces(observations.shape, dtype, int(actions.n))


def _describe(space: gymnasium.Space) -> str:
    return " ".join(str(space).split())[:100]


def row_dtype(spaces: Spaces) -> np.dtype:
    """Return the dtype of a row: the fields of `Steps`, then those that the owner of the table writes."""
    outcome = [
        ("frames", spaces.dtype, spaces.frame),
        ("rewards", np.float32),
        ("terminated", np.bool),
        ("truncated", np.bool),
        ("began", np.bool),
        ("lost", np.bool),
        ("positions", np.float32, 2),
    ]
    control = [(name, np.int64) for name in ("actions", "episodes", "requested", "completed")]
    return np.dtype([*outcome, *control], align=True)


def episode_seed(seed: int, environment: int, episode: int) -> int:
    """Return the seed of one episode of one environment: a hash of the three numbers."""
    return int(np.random.SeedSequence(seed, spawn_key=(environment, episode)).generate_state(1)[0])


def summarise_error(error: BaseException) -> str:
    """Return an error in one line, with its type unless it is an error of onefold."""
    name = "" if isinstance(error, OnefoldError) else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}".split())[:MAX_REASON].removesuffix(":")


class EnvGroup:
    """Environments that step one after the other; each reads and writes its row of the table."""

    def __init__(self, make: EnvFactory, rows: np.ndarray, first: int, seed: int) -> None:
        self._seed, self._first = seed, first
        self._steps = Steps(*(rows[name] for name in Steps._fields))
        self._actions, self._episodes = rows["actions"], rows["episodes"]
        self._ended = [False] * len(rows)
        self._envs: list[gymnasium.Env] = []
        try:
            for i in range(len(rows)):
                self._envs.append(make(first + i))
        except BaseException:
            self.close()
            raise

    def step(self) -> None:
        """Step or reset every environment as its row requests."""
        for i, action in enumerate(self._actions.tolist()):
            if action == RESET or (action != SKIP and self._ended[i]):
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
        is_point = isinstance(position, np.ndarray) and position.shape == (2,) and position.dtype.kind in "fiu"
        steps.positions[i] = position if is_point else np.nan
        self._ended[i] = bool(terminated or truncated)
