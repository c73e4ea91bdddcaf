"""MyWayHome: rooms and corridors seen through the player's eyes, and one far goal."""

import contextlib
import functools
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from onefold.errors import InputError, OnefoldError
from onefold.rl.gymnasium_import import gymnasium
from onefold.rl.tasks import Variant, check_variant, import_vizdoom, write_scenario

SIDE = 42  # pixels of an observation
STACK = 6  # observations of the registered environments
STEPS = 2100  # of an episode
LIVING_COST = 0.0001
ACTIONS = ("turn left", "turn right", "move forward", "strafe left", "strafe right")
BUTTONS = [[int(i == j) for j in range(len(ACTIONS))] for i in range(len(ACTIONS))]
GAME_BUTTONS = ("TURN_LEFT", "TURN_RIGHT", "MOVE_FORWARD", "MOVE_LEFT", "MOVE_RIGHT")
NAMES: dict[Variant, str] = {"dense": "Dense", "sparse": "Sparse", "very_sparse": "VerySparse"}
START_LOCK = threading.Lock()  # a game starts in the process's working folder


class MyWayHome(gymnasium.Env[UInt8[np.ndarray, "42 42"], np.int64]):
    """Reach the armour for a reward of 1; the episode ends there, or is truncated after 2,100 steps.

    Each step costs 0.0001. The five actions are to turn left or right, to move forward, and to strafe left or right,
    for one frame of the game each. These are the rewards and actions of ViZDoom's own scenario. The game is a separate
    process that runs from the first reset to `close`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 35}  # noqa: RUF012

    def __init__(self, variant: Variant = "sparse", *, render_mode: str | None = None) -> None:
        check_variant(variant)
        import_vizdoom()
        if render_mode not in (None, "rgb_array"):
            raise InputError(f"render_mode is None or 'rgb_array', not {render_mode!r}")
        self.variant: Variant = variant
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Box(0, 255, (SIDE, SIDE), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(BUTTONS))
        self._game: Any = None
        self._steps_left = 0
        self._screen = np.zeros((120, 160), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[UInt8[np.ndarray, "42 42"], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        if self._game is None or not self._game.is_running():  # it may have crashed
            self.close()
            self._game = start_game(self.variant)
        self._game.set_seed(int(self.np_random.integers(2**31)))
        self._game.new_episode()
        self._steps_left = STEPS
        return self._look()

    def step(self, action: int | np.integer) -> tuple[UInt8[np.ndarray, "42 42"], float, bool, bool, dict[str, Any]]:
        if self._steps_left == 0:
            raise InputError("the episode is over, or none has begun: reset() comes first")
        if not 0 <= action < len(BUTTONS):
            raise InputError(f"action: must be 0 to {len(BUTTONS) - 1} (got {action})")
        # The game gives the +1 and finishes one action later. Nothing is left to do then, so the episode ends here.
        reached = self._game.make_action(BUTTONS[action]) > 0.5
        self._steps_left = 0 if reached else self._steps_left - 1
        frame, info = self._look()
        reward = float(reached) - LIVING_COST
        return frame, reward, reached, not reached and self._steps_left == 0, info

    def render(self) -> UInt8[np.ndarray, "120 160 3"] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return np.repeat(self._screen[:, :, None], 3, axis=2) if self.render_mode else None

    def close(self) -> None:
        if self._game is not None:
            self._game.close()
        self._game, self._steps_left = None, 0

    def _look(self) -> tuple[UInt8[np.ndarray, "42 42"], dict[str, Any]]:
        state = self._game.get_state()
        if state is None:
            raise OnefoldError("MyWayHome: the game has ended by itself")
        self._screen = state.screen_buffer
        place = state.game_variables.astype(np.float32)
        return downscale(self._screen), {"position": place[:2], "angle": float(place[2])}


def _register() -> None:
    """Make the three known to `gymnasium.make`, with stacks of 6 frames: onefold/MyWayHomeSparse-v0 and its like."""
    stack = gymnasium.wrappers.FrameStackObservation.wrapper_spec(stack_size=STACK)
    for variant, name in NAMES.items():
        entry, settings = "onefold.rl.doom:MyWayHome", {"variant": variant}
        known = f"onefold/MyWayHome{name}-v0"
        gymnasium.register(known, entry_point=entry, kwargs=settings, additional_wrappers=(stack,))


def start_game(variant: Variant) -> Any:
    """A running game, which leaves nothing behind however it ends.

    What it puts into its working folder, and the shared memory through which it talks, lose their names as soon as it
    runs: then they vanish with the last process that uses them. The game itself ends with whoever has started it.
    """
    game = _configure_game()
    try:
        with START_LOCK, tempfile.TemporaryDirectory(prefix="onefold-") as folder, contextlib.chdir(folder):
            engine = game.get_vizdoom_path()
            _check_engine(engine)
            game.set_vizdoom_path(_tie_to_parent(engine, Path(folder)))
            game.set_doom_scenario_path(str(write_scenario(variant, Path(folder))))
            game.init()
    except OnefoldError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise OnefoldError(f"MyWayHome: the game does not start ({reason})") from None
    for name in Path("/dev/shm").glob(f"ViZDoom*{game.get_instance_id()}"):
        name.unlink(missing_ok=True)
    return game


@functools.cache
def _check_engine(path: str) -> None:
    """An engine that cannot run would take this process down with it, by a fault of ViZDoom's: so let it show that it
    can. Asked for a game that is not there, it gives up with a message and 255."""
    command = [path, "-norun", "-iwad", os.devnull, "-config", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode not in (0, 255):
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"{path} ends with exit code {done.returncode}")


def _tie_to_parent(path: str, folder: Path) -> str:
    """The engine, to be killed as soon as this process is no more, where the system can do that: left alone, a game
    waits for its next step for ever, and ends by no other signal."""
    script, leash = folder / "engine", "setpriv --pdeathsig KILL --"
    engine = f'{shlex.quote(path)} "$@"'
    script.write_text(f"#!/bin/sh\n{leash} true 2> /dev/null && exec {leash} {engine}\nexec {engine}\n")
    script.chmod(0o700)
    return str(script) if sys.platform == "linux" and os.access(script, os.X_OK) else path


def _configure_game() -> Any:
    """Return ViZDoom's own scenario with the smallest screen, in grey."""
    vzd: Any = import_vizdoom()
    game, variables = vzd.DoomGame(), vzd.GameVariable
    game.set_vizdoom_path(str(Path(vzd.__file__).with_name("vizdoom")))
    game.set_doom_map("map01")
    game.set_doom_skill(5)
    game.set_doom_config_path(os.devnull)
    game.set_window_visible(False)
    game.set_sound_enabled(False)
    game.set_screen_resolution(vzd.ScreenResolution.RES_160X120)
    game.set_screen_format(vzd.ScreenFormat.GRAY8)
    game.set_render_hud(False)
    game.set_available_buttons([getattr(vzd.Button, name) for name in GAME_BUTTONS])
    game.set_available_game_variables([variables.POSITION_X, variables.POSITION_Y, variables.ANGLE])
    game.set_episode_start_time(10)
    game.set_episode_timeout(0)  # steps are counted here, so that the last frame can be seen
    return game


def _overlaps(inputs: int, outputs: int) -> Float32[np.ndarray, "{outputs} {inputs}"]:
    """How much of each input pixel lies in each output pixel, in whole numbers: 1 is an `outputs`-th of an input."""
    start = np.arange(outputs)[:, None] * inputs
    pixel = np.arange(inputs)[None] * outputs
    overlap = np.minimum(start + inputs, pixel + outputs) - np.maximum(start, pixel)
    return np.maximum(overlap, 0).astype(np.float32)


# 120 : 42 = 20 : 7 and 160 : 42 = 80 : 21, so six equal bands of rows and two of columns shrink alike.
ROWS = _overlaps(20, 7)
COLUMNS = _overlaps(80, 21).T.copy()


def downscale(screen: UInt8[np.ndarray, "120 160"]) -> UInt8[np.ndarray, "42 42"]:
    """Area averages, rounded. The sums are whole numbers below 2²⁴, so float32 has them exactly, on every machine."""
    bands = ROWS @ screen.astype(np.float32).reshape(6, 20, 160)
    sums = bands.reshape(84, 80) @ COLUMNS
    return np.rint(sums / 1600).astype(np.uint8).reshape(SIDE, SIDE)


_register()  # as Gymnasium has it: to import a module is to know its environments
