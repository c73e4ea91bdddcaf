"""Moving pictures of an agent in MyWayHome, GIF or MP4: the game's screen, and the way through the maze."""

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

EVERY = 2  # every second of the game's frames is shown
RATE = Fraction(35, EVERY)  # of them a second: the game's own pace
HOLD = 1  # second that the last one stays
SCREEN, SIDE = (480, 360), 360  # pixels of the game's screen, three times as large, and of the map at its right
MARGIN = 22  # pixels around the maze
FINE = 3  # times as large is the map drawn, and shrunk then: PIL's lines have no smooth edges

# As on the report's maps of visits; what is marked differs in shape and brightness, too.
NIGHT, WALL, WAY, PLAYER, GOAL = (16, 21, 27), (125, 138, 151), (86, 180, 233), (255, 255, 255), (55, 224, 169)

# A GIF's palette: greys of the screen, where more of them would make the file twice as large; the map's colours, with
# their shades at smooth edges; and one that nothing is near to, for what is clear.
GREYS = [17 * i for i in range(16)]
ROUNDED = [GREYS[round(grey / 17)] for grey in range(256)]
EDGES = [np.linspace(NIGHT, colour, 7)[1:].round().astype(int).tolist() for colour in (WALL, WAY, PLAYER, GOAL)]
COLOURS = [*((grey, grey, grey) for grey in GREYS), NIGHT, *chain(*EDGES), (255, 0, 255)]


class VideoFile:
    """A movie's file, its kind by its name: refused before anything is played for it."""

    def __init__(self, path: Path) -> None:
        kinds = {".gif": _encode_gif, ".mp4": _encode_mp4}
        if path.suffix.lower() not in kinds:
            raise InputError(f"{path}: a movie's name ends in {' or '.join(kinds)}")
        self.path, self._encoded = path, kinds[path.suffix.lower()]
        if self._encoded is _encode_mp4:
            _import_av()

    def write(self, played: Rollout) -> None:
        """An episode with its views."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(self.path, self._encoded(render_frames(played)))


def render_frames(played: Rollout) -> Iterator[Image.Image]:
    """Every second view, counted from the end, so that the last one is among them: it is where the goal is."""
    plan, last = MazePicture(), len(played.views) - 1
    for step, (screen, position, angle) in enumerate(played.views):
        plan.walk(position)
        if (last - step) % EVERY == 0:
            picture = Image.new("RGB", (SCREEN[0] + SIDE, SIDE))
            picture.paste(Image.fromarray(screen).resize(SCREEN, Image.Resampling.NEAREST))
            picture.paste(plan.picture(angle), (SCREEN[0], 0))
            _caption(picture, step, played.reached and step == last)
            yield picture


class MazePicture:
    """The maze from above, and the way walked so far."""

    def __init__(self) -> None:
        walls, _, goal = read_map()
        low, high = walls.reshape(-1, 2).min(0), walls.reshape(-1, 2).max(0)
        self._middle, self._scale = (low + high) / 2, FINE * (SIDE - 2 * MARGIN) / (high - low).max()
        self._picture = Image.new("RGB", (FINE * SIDE, FINE * SIDE), NIGHT)
        for x1, y1, x2, y2 in walls.tolist():
            _line(self._picture, self._at(x1, y1), self._at(x2, y2), WALL, 2)
        (x, y), spokes = self._at(*goal), [(FINE * (10, 4)[i % 2], math.pi * i / 5) for i in range(10)]
        star = [(x + length * math.sin(a), y - length * math.cos(a)) for length, a in spokes]
        ImageDraw.Draw(self._picture).polygon(star, GOAL)
        self._player: Point | None = None

    def walk(self, position: Float32[np.ndarray, "2"]) -> None:
        """The player is there now."""
        there = self._at(*position.tolist())
        _line(self._picture, self._player or there, there, WAY, 3)
        self._player = there

    def picture(self, angle: float) -> Image.Image:
        """The map now, with the player, who looks that way: degrees from the east, against the clock."""
        if self._player is None:
            raise ValueError("nobody has walked yet")
        picture, (x, y), a = self._picture.copy(), self._player, math.radians(angle)
        _line(picture, (x, y), (x + 17 * FINE * math.cos(a), y - 17 * FINE * math.sin(a)), PLAYER, 3)
        ImageDraw.Draw(picture).circle((x, y), 6 * FINE, PLAYER)
        return picture.reduce(FINE)

    def _at(self, x: float, y: float) -> Point:
        """Where a place of the game's is on the map, which has y downwards."""
        right, up = self._scale * (np.array([x, y]) - self._middle)
        return FINE * SIDE / 2 + float(right), FINE * SIDE / 2 - float(up)


def _line(picture: Image.Image, start: Point, end: Point, colour: Colour, width: int) -> None:
    """With round ends, so that corners close and a way has no gaps."""
    draw = ImageDraw.Draw(picture)
    draw.line([start, end], colour, width * FINE)
    for point in (start, end):
        draw.circle(point, width * FINE / 2, colour)


def _caption(picture: Image.Image, step: int, reached: bool) -> None:
    """At the foot of the map, which is less high than wide."""
    draw, font, foot = ImageDraw.Draw(picture), ImageFont.load_default(17), SIDE - 14
    draw.text((SCREEN[0] + MARGIN, foot), f"step {step:,}", PLAYER, font, "ls")
    if reached:
        draw.text((SCREEN[0] + SIDE - MARGIN, foot), "goal reached", GOAL, font, "rs")


def _encode_gif(frames: Iterator[Image.Image]) -> bytes:
    """Without "optimize": it would leave out all that does not change, single pixels of a screen in motion, too."""
    content, (first, *others) = io.BytesIO(), _changed_pixels(frames)
    times = [10 * round(100 / RATE)] * len(others) + [1000 * HOLD]  # in steps of 10 ms
    settings = {"duration": times, "loop": 0, "transparency": len(COLOURS) - 1, "optimize": False}
    first.save(content, "GIF", save_all=True, append_images=others, **settings)
    return content.getvalue()


def _changed_pixels(frames: Iterator[Image.Image]) -> Iterator[Image.Image]:
    """Frames in the palette's colours, and clear where the map is as before: a sixth less to store."""
    palette, before = Image.new("P", (1, 1)), None
    palette.putpalette([part for colour in COLOURS for part in colour])
    for frame in frames:  # some of the map's shades are near to greys, so the screen is rounded to these by itself
        frame.paste(frame.crop((0, 0, *SCREEN)).convert("L").point(ROUNDED))
        now = frame.quantize(palette=palette, dither=Image.Dither.NONE)
        changed = now.copy()
        if before is not None:
            same = ImageChops.subtract_modulo(now, before).point([255] + [0] * 255, "1")
            same.paste(0, (0, 0, *SCREEN))
            changed.paste(len(COLOURS) - 1, mask=same)
        before = now
        yield changed


def _encode_mp4(frames: Iterator[Image.Image]) -> bytes:
    """H.264 with half the resolution of colour, which is what browsers know."""
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
    """The frames, and the last one again until it has stayed long enough."""
    frame = next(frames)
    yield frame
    for frame in frames:
        yield frame
    yield from repeat(frame, round(HOLD * RATE) - 1)


def _import_av() -> ModuleType:
    try:
        import av
    except ImportError:
        raise MissingExtraError("MP4 needs av: pip install 'onefold[video]'; a name in .gif does not") from None
    return av
