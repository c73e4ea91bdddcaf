"""The three tasks of MyWayHome, made from the map in the vizdoom package; they differ in where an episode starts.

The map's compiled script has a routine that places the player. For the sparse and the very sparse task, it is replaced
by a routine of the same length with the start of the public maps of Pathak et al. (2017). Nothing else is changed, and
onefold ships no map. The packaged map must have a fixed checksum, since results on another map are not comparable.
"""

import functools
import hashlib
import re
import struct
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float32

from onefold.errors import FileError, InputError, MissingExtraError

Variant: TypeAlias = Literal["dense", "sparse", "very_sparse"]

VIZDOOM_VERSION = "1.3.2"  # the version with this map
SIZE = 28_469
SHA256 = "18e98ff4c9186808eb00696b799cfe88a79e7486429c1692aafbed8ef359c0b1"
TEXT = slice(12, 25_358)  # the part of the file that describes the map as text
MAP_SPOT, GREEN_ARMOUR = "9001", "2018"  # types of objects in the map

# Bytecode of the script. Angles are fixed-point numbers with 16 fractional bits; 1.0 is a full turn.
FULL_TURN = 2**16
PUSH_NUMBER, PUSH_ZERO, PUSH_TWO_BYTES, RANDOM, NO_OPERATION = b"\x03", b"\xa7\x00", b"\xb0", b"\x39", b"\x00"
ANY_SPOT = bytes.fromhex("1d02 1d02 1d03 0e a701 0f")  # a random spot between the first and the last
SET_POSITION = bytes.fromhex("1900 a700 1c00c4 1c00c5 b00000 f02b36")  # it = …; SetActorPosition(0, GetActorX(it), …)
SET_ANGLE = bytes.fromhex("f024")  # SetActorAngle
FINISH = bytes.fromhex("a700b500 8e 01")  # reward = 0; ClearInventory(); the end
ENTER = ANY_SPOT + RANDOM + SET_POSITION + bytes.fromhex("b00000 0300000100") + RANDOM + SET_ANGLE + FINISH


class Start(NamedTuple):
    """The start of an episode: a spot, and the range of the player's angle in turns."""

    spot: int
    low: float
    high: float


STARTS: dict[Variant, Start | None] = {  # None: a random spot and angle, as in the packaged map
    "dense": None,
    "sparse": Start(10, 0.0, 0.01),
    "very_sparse": Start(15, 0.49, 0.51),
}


class GameMap(NamedTuple):
    """Walls, start spots and goal, in the game's units."""

    walls: Float32[np.ndarray, "k 4"]
    """A wall per row: x and y of one end, x and y of the other."""
    spots: dict[int, tuple[float, float]]
    """Positions where an episode can start, by the id of the spot."""
    goal: tuple[float, float]


def import_vizdoom() -> ModuleType:
    """Import vizdoom on first use; raise MissingExtraError if it is not installed."""
    try:
        import vizdoom
    except ImportError:
        raise MissingExtraError("MyWayHome needs vizdoom: pip install 'onefold[rl]'") from None
    return vizdoom


def packaged_map() -> Path:
    """Return the path of the map in the vizdoom package."""
    return Path(import_vizdoom().scenarios_path) / "my_way_home.wad"


def check_variant(variant: str) -> None:
    """Raise InputError unless this is one of the three variants."""
    if variant not in STARTS:
        raise InputError(f"variant: {variant!r} is not one of {', '.join(STARTS)}.")


def write_scenario(variant: Variant, folder: Path, wad: Path | None = None) -> Path:
    """Write the variant's map into the folder atomically, and return its path; `wad` replaces the packaged map."""
    check_variant(variant)
    content, start = _read_checked(wad or packaged_map()), STARTS[variant]
    if start is not None:
        content = content.replace(ENTER, _enter_routine(start))
    path = folder / f"my_way_home_{variant}.wad"
    part = path.with_suffix(".part")
    part.write_bytes(content)
    return part.replace(path)


@functools.cache
def read_map(wad: Path | None = None) -> GameMap:
    """Return the map. Its text has blocks of a name and, in braces, entries `key = value;`."""
    text = _read_checked(wad or packaged_map())[TEXT].decode("ascii")
    blocks: dict[str, list[dict[str, str]]] = {}
    for name, body in re.findall(r"(\w+)[^{}=;]*\{([^{}]*)\}", text):
        blocks.setdefault(name, []).append(dict(re.findall(r"(\w+) = ([^;]*);", body)))
    corners = [_position(corner) for corner in blocks["vertex"]]
    solid = [line for line in blocks["linedef"] if "sideback" not in line]  # other lines are open passages
    ends = [(*corners[int(line["v1"])], *corners[int(line["v2"])]) for line in solid]
    spots = {int(thing["id"]): _position(thing) for thing in blocks["thing"] if thing["type"] == MAP_SPOT}
    goal = next(_position(thing) for thing in blocks["thing"] if thing["type"] == GREEN_ARMOUR)
    walls = np.array(ends, np.float32)
    walls.setflags(write=False)  # the map is cached
    return GameMap(walls, dict(sorted(spots.items())), goal)


def _position(block: dict[str, str]) -> tuple[float, float]:
    return float(block["x"]), float(block["y"])


def _read_checked(path: Path) -> bytes:
    """Return the content of the map file; raise FileError if its checksum differs."""
    try:
        with path.open("rb") as file:
            content = file.read(SIZE + 1)
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror}).") from None
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise FileError(
            f"{path}: is not the map of vizdoom {VIZDOOM_VERSION}. "
            f"Run pip install --force-reinstall vizdoom=={VIZDOOM_VERSION}."
        )
    return content


def _enter_routine(start: Start) -> bytes:
    """Return the routine that places the player: a random draw between the spot and itself."""
    spot = PUSH_TWO_BYTES + bytes([start.spot, start.spot]) + RANDOM
    low, high = (PUSH_NUMBER + struct.pack("<i", int(turn * FULL_TURN)) for turn in (start.low, start.high))
    code = spot + SET_POSITION + PUSH_ZERO + low + high + RANDOM + SET_ANGLE + FINISH
    return code.ljust(len(ENTER), NO_OPERATION)
