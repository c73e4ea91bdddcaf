"""Moving pictures of what an agent saw: GIF, or MP4 as browsers play it."""

import io
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from onefold.errors import InputError, MissingExtraError
from onefold.store import write_bytes

RATE = Fraction(35)  # frames a second, those of the game
EVERY, SCALE = 2, 4  # every second frame is shown, four times as large
Frame = UInt8[np.ndarray, "h w"]


class Movie:
    """A movie's file, its kind by its name: refused before anything is played for it."""

    def __init__(self, path: Path) -> None:
        kinds = {".gif": _gif, ".mp4": _mp4}
        if path.suffix.lower() not in kinds:
            raise InputError(f"{path}: a movie's name ends in {' or '.join(kinds)}")
        self.path, self._encoded = path, kinds[path.suffix.lower()]
        if self._encoded is _mp4:
            _av()

    def write(self, frames: Sequence[np.ndarray]) -> None:
        """Grey frames, one after another."""
        if not frames or frames[0].ndim != 2:
            raise InputError("only worlds that are seen as grey images can be shown")
        shown = [frame.repeat(SCALE, 0).repeat(SCALE, 1) for frame in frames[::EVERY]]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(self.path, self._encoded(shown))


def _gif(frames: Sequence[Frame]) -> bytes:
    content, (first, *others) = io.BytesIO(), map(Image.fromarray, frames)
    duration = round(1000 * EVERY / RATE)
    first.save(content, "GIF", save_all=True, append_images=others, duration=duration, loop=0)
    return content.getvalue()


def _mp4(frames: Sequence[Frame]) -> bytes:
    """H.264 with half the resolution of colour, which is what browsers know."""
    av, content = _av(), io.BytesIO()
    with av.open(content, "w", format="mp4") as file:
        stream = file.add_stream("libx264", RATE / EVERY, {"crf": "18"})
        stream.height, stream.width = frames[0].shape
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "gray")))
        file.mux(stream.encode())
    return content.getvalue()


def _av() -> ModuleType:
    try:
        import av
    except ImportError:
        raise MissingExtraError("MP4 needs av: pip install 'onefold[video]'; a name in .gif does not") from None
    return av
