"""MyWayHome, ViZDoom's maze with one distant goal, as a Gymnasium environment."""

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
START_LOCK = threading.Lock()  # starting a game changes the working folder of the process


class MyWayHome(gymnasium.Env[UInt8[np.ndarray, "42 42"], np.int64]):
    """ViZDoom's scenario "My Way Home": reach the armour for a reward of 1.

    The episode ends at the armour, or is truncated after 2,100 steps. Each step costs 0.0001. The five actions are to
    turn left or right, to move forward, and to strafe left or right, each for one frame of the game. The observation is
    the screen, 42 × 42 in grey; `info` has the player's position and angle in degrees. The game is a separate process
    that runs from the first reset to `close`.

    Args:
        variant: Where episodes start. "dense": at a random spot; "sparse": in a distant room; "very_sparse": in the
            most distant room.
        render_mode: "rgb_array" makes `render` return the screen, 120 × 160.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 35}  # noqa: RUF012

    def __init__(self, variant: Variant = "sparse", *, render_mode: str | None = None) -> None:
        check_variant(variant)
        import_vizdoom()
        if render_mode not in (None, "rgb_array"):
            raise InputError(f"render_mode: must be None or 'rgb_array' (got {render_mode!r}).")
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
        if self._game is None or not self._game.is_running():  # it has not started, or it has crashed
            self.close()
            self._game = start_game(self.variant)
        self._game.set_seed(int(self.np_random.integers(2**31)))
        self._game.new_episode()
        self._steps_left = STEPS
        return self._observe()

    def step(self, action: int | np.integer) -> tuple[UInt8[np.ndarray, "42 42"], float, bool, bool, dict[str, Any]]:
        if self._steps_left == 0:
            raise InputError("step: no episode is running. Call reset() first.")
        if not 0 <= action < len(BUTTONS):
            raise InputError(f"action: must be 0 to {len(BUTTONS) - 1} (got {action}).")
        # ViZDoom reports the end one step after the +1; end the episode with the reward.
        reached = self._game.make_action(BUTTONS[action]) > 0.5
        self._steps_left = 0 if reached else self._steps_left - 1
        frame, info = self._observe()
        reward = float(reached) - LIVING_COST
        return frame, reward, reached, not reached and self._steps_left == 0, info

    def render(self) -> UInt8[np.ndarray, "120 160 3"] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return np.repeat(self._screen[:, :, None], 3, axis=2) if self.render_mode else None

    def close(self) -> None:
        if self._game is not None:
            self._game.close()
        self._game, self._steps_left = None, 0

    def _observe(self) -> tuple[UInt8[np.ndarray, "42 42"], dict[str, Any]]:
        state = self._game.get_state()
        if state is None:
            raise OnefoldError("MyWayHome: the game has ended unexpectedly. Call reset() to start another.")
        self._screen = state.screen_buffer
        x_y_angle = state.game_variables.astype(np.float32)
        return downscale(self._screen), {"position": x_y_angle[:2], "angle": float(x_y_angle[2])}


def _register() -> None:
    """Register the three variants, with stacks of 6 frames, as onefold/MyWayHomeSparse-v0 and so on."""
    stack = gymnasium.wrappers.FrameStackObservation.wrapper_spec(stack_size=STACK)
    for variant, name in NAMES.items():
        gymnasium.register(
            f"onefold/MyWayHome{name}-v0", entry_point="onefold.rl.doom:MyWayHome", kwargs={"variant": variant},
            additional_wrappers=(stack,),
        )  # fmt: skip


def start_game(variant: Variant) -> Any:
    """Return a running game that leaves no files behind, however it ends.

    The files in its working folder and its shared memory are unlinked as soon as the game runs. The system frees them
    with the last process that uses them. On Linux the game is killed when the process that started it dies.
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
        raise OnefoldError(f"MyWayHome: the game does not start ({reason}).") from None
    for name in Path("/dev/shm").glob(f"ViZDoom*{game.get_instance_id()}"):
        name.unlink(missing_ok=True)
    return game


@functools.cache
def _check_engine(path: str) -> None:
    """Raise RuntimeError if ViZDoom's program cannot run; ViZDoom itself would crash this process.

    Without a game file, the program exits with a message and exit code 255.
    """
    command = [path, "-norun", "-iwad", os.devnull, "-config", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode not in (0, 255):
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"{path} ended with exit code {done.returncode}")


def _tie_to_parent(path: str, folder: Path) -> str:
    """Return a script that starts the program such that it is killed when this process dies; `path` if that fails.

    Without that, a game whose owner has died waits for ever, and ignores other signals.
    """
    script, prefix = folder / "engine", "setpriv --pdeathsig KILL --"
    engine = f'{shlex.quote(path)} "$@"'
    script.write_text(f"#!/bin/sh\n{prefix} true 2> /dev/null && exec {prefix} {engine}\nexec {engine}\n")
    script.chmod(0o700)
    return str(script) if sys.platform == "linux" and os.access(script, os.X_OK) else path


def _configure_game() -> Any:
    """Return a game with the settings of ViZDoom's scenario, the smallest screen, and grey pixels."""
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
    game.set_episode_timeout(0)  # `step` counts the steps, so that the last frame is observed
    return game


def _overlaps(inputs: int, outputs: int) -> Float32[np.ndarray, "{outputs} {inputs}"]:
    """Return the overlap of each output pixel with each input pixel, in units of 1 / `outputs` of an input pixel."""
    start = np.arange(outputs)[:, None] * inputs
    pixel = np.arange(inputs)[None] * outputs
    overlap = np.minimum(start + inputs, pixel + outputs) - np.maximum(start, pixel)
    return np.maximum(overlap, 0).astype(np.float32)


# 120 : 42 = 20 : 7 and 160 : 42 = 80 : 21: six equal bands of rows and two of columns are scaled in the same way.
ROWS = _overlaps(20, 7)
COLUMNS = _overlaps(80, 21).T.copy()


def downscale(screen: UInt8[np.ndarray, "120 160"]) -> UInt8[np.ndarray, "42 42"]:
    """Return rounded area averages. The sums are integers below 2²⁴, which float32 represents exactly."""
    bands = ROWS @ screen.astype(np.float32).reshape(6, 20, 160)
    sums = bands.reshape(84, 80) @ COLUMNS
    return np.rint(sums / 1600).astype(np.uint8).reshape(SIDE, SIDE)


_register()  # Gymnasium's convention: importing a module registers its environments
