"""Videos of an episode in MyWayHome, as GIF or MP4: the game's screen beside a map of the maze."""

import io
import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import chain, repeat
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import numpy as np
from jaxtyping import Float32
from PIL import Image, ImageChops, ImageDraw, ImageFont

from onefold.core.storage import write_bytes
from onefold.errors import InputError, MissingExtraError
from onefold.rl.play import Rollout
from onefold.rl.tasks import read_map

Colour: TypeAlias = tuple[int, int, int]
Point: TypeAlias = tuple[float, float]

FRAME_STEP = 2  # the video shows every second frame of the game
RATE = Fraction(35, FRAME_STEP)  # frames per second: the game's speed
HOLD_SECONDS = 1  # duration of the last frame
SCREEN, SIDE = (480, 360), 360  # pixels of the game's screen, enlarged three times, and of the map to its right
MARGIN = 22  # pixels around the maze
OVERSAMPLING = 3  # PIL does not antialias lines: the map is drawn larger and reduced

# The colours of the report's maps of visits. Marks also differ in shape and brightness.
BACKGROUND, WALL, PATH, PLAYER, GOAL = (16, 21, 27), (125, 138, 151), (86, 180, 233), (255, 255, 255), (55, 224, 169)

# The palette of a GIF: greys of the screen (twice as many would double the file), the map's colours with their shades
# at antialiased edges, and a colour for transparent pixels that is far from all others.
GREYS = [17 * i for i in range(16)]
ROUNDED = [GREYS[round(grey / 17)] for grey in range(256)]
EDGES = [np.linspace(BACKGROUND, colour, 7)[1:].round().astype(int).tolist() for colour in (WALL, PATH, PLAYER, GOAL)]
COLOURS = [*((grey, grey, grey) for grey in GREYS), BACKGROUND, *chain(*EDGES), (255, 0, 255)]


class VideoFile:
    """A video file, whose format follows from its suffix; an unsupported format is an error before any episode."""

    def __init__(self, path: Path) -> None:
        encoders = {".gif": _encode_gif, ".mp4": _encode_mp4}
        if path.suffix.lower() not in encoders:
            raise InputError(f"{path}: the suffix must be {' or '.join(encoders)}.")
        self.path, self._encode = path, encoders[path.suffix.lower()]
        if self._encode is _encode_mp4:
            _import_av()

    def write(self, rollout: Rollout) -> None:
        """Write an episode that was recorded with its views."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(self.path, self._encode(render_frames(rollout)))


def render_frames(rollout: Rollout) -> Iterator[Image.Image]:
    """Yield a picture of every second view, counted from the end: the last view shows whether the goal is reached."""
    maze, last = MazePicture(), len(rollout.views) - 1
    for step, (screen, position, angle) in enumerate(rollout.views):
        maze.move(position)
        if (last - step) % FRAME_STEP == 0:
            picture = Image.new("RGB", (SCREEN[0] + SIDE, SIDE))
            picture.paste(Image.fromarray(screen).resize(SCREEN, Image.Resampling.NEAREST))
            picture.paste(maze.picture(angle), (SCREEN[0], 0))
            _caption(picture, step, rollout.reached and step == last)
            yield picture


class MazePicture:
    """The maze from above, with the player's path so far."""

    def __init__(self) -> None:
        walls, _, goal = read_map()
        low, high = walls.reshape(-1, 2).min(0), walls.reshape(-1, 2).max(0)
        self._middle, self._scale = (low + high) / 2, OVERSAMPLING * (SIDE - 2 * MARGIN) / (high - low).max()
        self._picture = Image.new("RGB", (OVERSAMPLING * SIDE, OVERSAMPLING * SIDE), BACKGROUND)
        for x1, y1, x2, y2 in walls.tolist():
            _line(self._picture, self._pixel(x1, y1), self._pixel(x2, y2), WALL, 2)
        (x, y), spokes = self._pixel(*goal), [(OVERSAMPLING * (10, 4)[i % 2], math.pi * i / 5) for i in range(10)]
        star = [(x + length * math.sin(a), y - length * math.cos(a)) for length, a in spokes]
        ImageDraw.Draw(self._picture).polygon(star, GOAL)
        self._player: Point | None = None

    def move(self, position: Float32[np.ndarray, "2"]) -> None:
        """Extend the path to the player's new position."""
        point = self._pixel(*position.tolist())
        _line(self._picture, self._player or point, point, PATH, 3)
        self._player = point

    def picture(self, angle: float) -> Image.Image:
        """Return the map with the player, who looks in this direction: degrees counterclockwise from east."""
        if self._player is None:
            raise ValueError("maze picture: has no player. Call move() first.")
        picture, (x, y), a = self._picture.copy(), self._player, math.radians(angle)
        _line(picture, (x, y), (x + 17 * OVERSAMPLING * math.cos(a), y - 17 * OVERSAMPLING * math.sin(a)), PLAYER, 3)
        ImageDraw.Draw(picture).circle((x, y), 6 * OVERSAMPLING, PLAYER)
        return picture.reduce(OVERSAMPLING)

    def _pixel(self, x: float, y: float) -> Point:
        """Return the pixel of a position in the game; y points down in the picture."""
        right, up = self._scale * (np.array([x, y]) - self._middle)
        return OVERSAMPLING * SIDE / 2 + float(right), OVERSAMPLING * SIDE / 2 - float(up)


def _line(picture: Image.Image, start: Point, end: Point, colour: Colour, width: int) -> None:
    """Draw a line with round ends, so that corners close and a path has no gaps."""
    draw = ImageDraw.Draw(picture)
    draw.line([start, end], colour, width * OVERSAMPLING)
    for point in (start, end):
        draw.circle(point, width * OVERSAMPLING / 2, colour)


def _caption(picture: Image.Image, step: int, reached: bool) -> None:
    """Write the step below the map, which is wider than high."""
    draw, font, foot = ImageDraw.Draw(picture), ImageFont.load_default(17), SIDE - 14
    draw.text((SCREEN[0] + MARGIN, foot), f"step {step:,}", PLAYER, font, "ls")
    if reached:
        draw.text((SCREEN[0] + SIDE - MARGIN, foot), "goal reached", GOAL, font, "rs")


def _encode_gif(frames: Iterator[Image.Image]) -> bytes:
    """Return a GIF.

    PIL's "optimize" would also drop single unchanged pixels of a moving screen, which enlarges the file.
    """
    content, (first, *others) = io.BytesIO(), _changed_pixels(frames)
    times = [10 * round(100 / RATE)] * len(others) + [1000 * HOLD_SECONDS]  # multiples of 10 ms
    settings = {"duration": times, "loop": 0, "transparency": len(COLOURS) - 1, "optimize": False}
    first.save(content, "GIF", save_all=True, append_images=others, **settings)
    return content.getvalue()


def _changed_pixels(frames: Iterator[Image.Image]) -> Iterator[Image.Image]:
    """Yield frames in the palette's colours, transparent where the map has not changed: a sixth less to store."""
    palette, previous = Image.new("P", (1, 1)), None
    palette.putpalette([part for colour in COLOURS for part in colour])
    for frame in frames:  # round the screen's greys separately, as some shades of the map are close to them
        frame.paste(frame.crop((0, 0, *SCREEN)).convert("L").point(ROUNDED))
        current = frame.quantize(palette=palette, dither=Image.Dither.NONE)
        changed = current.copy()
        if previous is not None:
            same = ImageChops.subtract_modulo(current, previous).point([255] + [0] * 255, "1")
            same.paste(0, (0, 0, *SCREEN))
            changed.paste(len(COLOURS) - 1, mask=same)
        previous = current
        yield changed


def _encode_mp4(frames: Iterator[Image.Image]) -> bytes:
    """Return an H.264 video with 4:2:0 chroma subsampling, which all browsers play."""
    av, content = _import_av(), io.BytesIO()
    with av.open(content, "w", format="mp4") as file:
        stream = file.add_stream("libx264", RATE, {"crf": "18", "preset": "veryfast"})
        stream.width, stream.height = SCREEN[0] + SIDE, SIDE
        stream.pix_fmt = "yuv420p"
        for picture in _hold_last(frames):
            file.mux(stream.encode(av.VideoFrame.from_image(picture)))
        file.mux(stream.encode())
    return content.getvalue()


def _hold_last(frames: Iterator[Image.Image]) -> Iterator[Image.Image]:
    """Yield the frames, then repeat the last one for `HOLD_SECONDS`."""
    frame = next(frames)
    yield frame
    for frame in frames:
        yield frame
    yield from repeat(frame, round(HOLD_SECONDS * RATE) - 1)


def _import_av() -> ModuleType:
    try:
        import av
    except ImportError:
        raise MissingExtraError("MP4 needs av: pip install 'onefold[video]'. A .gif file needs nothing.") from None
    return av
