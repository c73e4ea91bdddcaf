"""MyWayHome's three tasks, from the map inside the vizdoom package: only where an episode starts differs.

The map's compiled script has a routine that places the player. It is exchanged, within its length, for what the public
sparse and very sparse maps of Pathak et al. (2017) do; nothing else is touched, and nobody's map has to be shipped. The
file must be the one that is known, to the last byte: results on another map could not be compared.
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

VIZDOOM_VERSION = "1.3.2"  # the version whose map is known
SIZE = 28_469
SHA256 = "18e98ff4c9186808eb00696b799cfe88a79e7486429c1692aafbed8ef359c0b1"
TEXT = slice(12, 25_358)  # the part of the file that describes the map, in words
MAP_SPOT, GREEN_ARMOUR = "9001", "2018"  # types of things in it

# The script in compiled form. Numbers are fixed-point, with 16 bits behind the point; 1.0 is the whole circle.
CIRCLE = 2**16
PUSH_NUMBER, PUSH_ZERO, PUSH_TWO_BYTES, RANDOM, NO_OPERATION = b"\x03", b"\xa7\x00", b"\xb0", b"\x39", b"\x00"
ANY_SPOT = bytes.fromhex("1d02 1d02 1d03 0e a701 0f")  # from the first spot to the last
PLACE = bytes.fromhex("1900 a700 1c00c4 1c00c5 b00000 f02b36")  # it = …; SetActorPosition(0, GetActorX(it), …)
FACE = bytes.fromhex("f024")  # SetActorAngle
FINISH = bytes.fromhex("a700b500 8e 01")  # reward = 0; ClearInventory(); the end
ENTER = ANY_SPOT + RANDOM + PLACE + bytes.fromhex("b00000 0300000100") + RANDOM + FACE + FINISH


class Start(NamedTuple):
    """Where an episode starts: on which spot, and between which two angles, as shares of the circle."""

    spot: int
    low: float
    high: float


STARTS: dict[Variant, Start | None] = {  # None: on any spot, at any angle, as the packaged map has it
    "dense": None,
    "sparse": Start(10, 0.0, 0.01),
    "very_sparse": Start(15, 0.49, 0.51),
}


class GameMap(NamedTuple):
    """The map from above, in the game's units."""

    walls: Float32[np.ndarray, "k 4"]
    """x and y of one end, x and y of the other."""
    spots: dict[int, tuple[float, float]]
    """Where episodes may start, by the spot's id."""
    goal: tuple[float, float]


def import_vizdoom() -> ModuleType:
    """The package, imported when it is needed; one line if it is not there."""
    try:
        import vizdoom
    except ImportError:
        raise MissingExtraError("MyWayHome needs vizdoom: pip install 'onefold[rl]'") from None
    return vizdoom


def packaged_map() -> Path:
    """The map inside the vizdoom package."""
    return Path(import_vizdoom().scenarios_path) / "my_way_home.wad"


def check_variant(variant: str) -> None:
    """Refuse what is not one of the three."""
    if variant not in STARTS:
        raise InputError(f"MyWayHome is {', '.join(STARTS)}; not {variant!r}")


def write_scenario(variant: Variant, folder: Path, wad: Path | None = None) -> Path:
    """Put the variant's map into the folder, whole or not at all; made of `wad`, or of the packaged map."""
    check_variant(variant)
    content, start = _read_checked(wad or packaged_map()), STARTS[variant]
    if start is not None:
        content = content.replace(ENTER, _enter(start))
    path = folder / f"my_way_home_{variant}.wad"
    part = path.with_suffix(".part")
    part.write_bytes(content)
    return part.replace(path)


def walls() -> Float32[np.ndarray, "k 4"]:
    """The map's walls, a line each: x and y of one end, x and y of the other."""
    return read_map().walls.copy()


@functools.cache
def read_map(wad: Path | None = None) -> GameMap:
    """Walls, starts and goal, from the map's text: blocks of a name and, in braces, `key = value;`."""
    text = _read_checked(wad or packaged_map())[TEXT].decode("ascii")
    blocks: dict[str, list[dict[str, str]]] = {}
    for name, body in re.findall(r"(\w+)[^{}=;]*\{([^{}]*)\}", text):
        blocks.setdefault(name, []).append(dict(re.findall(r"(\w+) = ([^;]*);", body)))
    corners = [_position(corner) for corner in blocks["vertex"]]
    solid = [line for line in blocks["linedef"] if "sideback" not in line]  # the others are open passages
    ends = [(*corners[int(line["v1"])], *corners[int(line["v2"])]) for line in solid]
    spots = {int(thing["id"]): _position(thing) for thing in blocks["thing"] if thing["type"] == MAP_SPOT}
    goal = next(_position(thing) for thing in blocks["thing"] if thing["type"] == GREEN_ARMOUR)
    return GameMap(np.array(ends, np.float32), dict(sorted(spots.items())), goal)


def _position(block: dict[str, str]) -> tuple[float, float]:
    return float(block["x"]), float(block["y"])


def _read_checked(path: Path) -> bytes:
    """The content of the file, if it is the map that the tasks are made of."""
    try:
        with path.open("rb") as file:
            content = file.read(SIZE + 1)
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror})") from None
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise FileError(
            f"{path}: is not the map of vizdoom {VIZDOOM_VERSION}: "
            f"pip install --force-reinstall vizdoom=={VIZDOOM_VERSION}"
        )
    return content


def _enter(start: Start) -> bytes:
    """The routine that places the player on one spot: still a random draw, between the spot and itself."""
    spot = PUSH_TWO_BYTES + bytes([start.spot, start.spot]) + RANDOM
    low, high = (PUSH_NUMBER + struct.pack("<i", int(share * CIRCLE)) for share in (start.low, start.high))
    code = spot + PLACE + PUSH_ZERO + low + high + RANDOM + FACE + FINISH
    return code.ljust(len(ENTER), NO_OPERATION)
