"""Images from files: decoding of untrusted files to bytes, and folders of images as samples [C, H, W]."""

import contextlib
import os
import re
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from torch import Tensor

from onefold.errors import InputError
from onefold.inputs.source import check_batch_size, check_index

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
MOST_PIXELS = 64_000_000
LONGEST_SIDE = 4096
ORIENTATION_TAG = 0x0112
# EXIF orientation to the number of Pillow's Transpose that undoes it
TRANSPOSE_OF = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
GREY_MODES = ("1", "L", "I", "F", "LA")
PILLOW_FILTER: Any = ("ignore", None, Warning, re.compile(r"PIL\."), 0)


@dataclass(frozen=True)
class Picture:
    """Size and number of channels (1 grey, 3 colour) to which every image of a folder is converted."""

    height: int
    width: int
    channels: int

    def __post_init__(self) -> None:
        if not (1 <= self.height <= LONGEST_SIDE and 1 <= self.width <= LONGEST_SIDE):
            raise InputError(
                f"picture: size {self.height} × {self.width} is not supported. Use 1 to {LONGEST_SIDE} pixels."
            )
        if self.channels not in (1, 3):
            raise InputError(f"picture: {self.channels} channels are not supported. Use 1 (grey) or 3 (colour).")


@contextlib.contextmanager
def ignore_pillow_warnings() -> Iterator[None]:
    """Ignore warnings from Pillow's modules, in all threads.

    `warnings.catch_warnings` replaces the filters of every thread. Inside a generator it would also change those of
    the consumer. This context adds one filter for Pillow and removes it again.
    """
    current: Any = warnings.filters
    current.insert(0, PILLOW_FILTER)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # other code has reset the filters
            current.remove(PILLOW_FILTER)


def read_image_header(path: Path) -> tuple[bool, int, int] | None:
    """Return whether an image is grey, its height and its width from the header; None if unreadable."""
    try:
        with _open(path) as image:
            height, width = image.height, image.width
            if image.format != "TIFF" and _read_orientation(image) >= 5:
                height, width = width, height
            return image.mode in GREY_MODES or image.mode.startswith("I;16"), height, width
    except Exception:  # untrusted files fail in many ways; `decode` raises the reason
        return None


def decode(path: Path, picture: Picture) -> UInt8[np.ndarray, "c h w"]:
    """Return the first frame of an image file, upright, scaled to cover `picture` and cropped at the centre."""
    from PIL import Image, ImageOps

    with _open(path) as image:
        side = 2 * max(picture.height, picture.width)  # twice the size: the second half of the reduction is filtered
        image.draft(None, (side, side))
        image.load()
        transpose = TRANSPOSE_OF.get(_read_orientation(image))
        upright = image if transpose is None else image.transpose(Image.Transpose(transpose))
        size = (picture.width, picture.height)
        return to_bytes(ImageOps.fit(_to_plain_mode(upright), size, Image.Resampling.BILINEAR), picture.channels)


def to_bytes(image: "Image.Image", channels: int | None = None) -> UInt8[np.ndarray, "c h w"]:
    """Return a Pillow image as [C, H, W], transparency on black; without `channels`, grey stays grey."""
    from PIL import Image

    plain = _to_plain_mode(image)
    if plain.mode == "RGBA":
        black = Image.new("RGBA", plain.size, (0, 0, 0, 255))
        plain = Image.alpha_composite(black, plain).convert("RGB")
        if channels is None and image.mode in GREY_MODES:
            plain = plain.convert("L")
    if channels is not None:
        plain = plain.convert("L" if channels == 1 else "RGB")
    pixels = np.array(plain, np.uint8)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(np.moveaxis(pixels, 2, 0))


def describe_error(error: Exception) -> str:
    """Return in one short line, without paths, why an image could not be read."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "not an image, or damaged"
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {MOST_PIXELS:,} pixels"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__


def _open(path: Path) -> "Image.Image":
    """Open an image without decoding it; raise InputError if it has too many pixels."""
    from PIL import Image

    image = Image.open(path, formats=FORMATS)
    if not 0 < image.width * image.height <= MOST_PIXELS:
        image.close()
        raise InputError(f"more than {MOST_PIXELS:,} pixels" if image.width * image.height else "no pixels")
    return image


def _read_orientation(image: "Image.Image") -> int:
    """Return the EXIF orientation; 1 (upright) if absent or damaged."""
    try:
        return int(image.getexif().get(ORIENTATION_TAG, 1))
    except Exception:  # an image with damaged EXIF data is still usable
        return 1


def _to_plain_mode(image: "Image.Image") -> "Image.Image":
    """Return the image in mode L, RGB or RGBA."""
    if image.mode in ("L", "RGB") and "transparency" not in image.info:
        return image
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _to_eight_bits(image)
    if image.mode in ("RGBA", "RGBa", "LA", "PA") or "transparency" in image.info:
        return image.convert("RGBA")
    return image.convert("L" if image.mode == "1" else "RGB")


def _to_eight_bits(image: "Image.Image") -> "Image.Image":
    """Return deep grey as 8 bits from integers 0 … 65535, floats 0 … 1, or floats 0 … 255 if any exceeds 1."""
    from PIL import Image

    deep = np.asarray(image)
    if image.mode == "F":
        if not np.isfinite(deep).all():
            raise InputError("pixels are NaN or infinite")
        grey = np.clip(np.rint(deep * 255 if deep.max() <= 1 else deep), 0, 255)
    else:
        grey = (np.clip(deep, 0, 65535).astype(np.uint32) + 128) // 257
    return Image.fromarray(grey.astype(np.uint8))


SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
EXAMINED_FILES = 64
LARGEST_COMMON_SIDE = 128
DEFAULT_SIDE = 64
WORKERS = 4
AHEAD = 16


class ImageFolder:
    """All images in a folder and its subfolders, sorted by name; or one image file.

    Images are converted to `picture`. Without it, the headers of up to 64 files decide: grey if all are grey, and
    their common size if it is at most 128 pixels a side, else 64 × 64. Images of other sizes are scaled to cover it and
    cropped at the centre. Transparent pixels become black. Unreadable files are skipped; `skipped` holds the reasons.
    Hidden files and links out of the folder are ignored.
    """

    def __init__(self, path: Path, picture: Picture | None = None) -> None:
        self.path = path
        self._root, self.files = (path, _list_images(path)) if path.is_dir() else (path.parent, [path.name])
        self.picture = picture or self._choose_picture()
        self._names: list[str] | None = None
        self._skipped: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """Readable files in the order of the samples; the first access may read the folder."""
        if self._names is None:
            for _ in self.batches(AHEAD):
                pass
        assert self._names is not None, "a full pass sets the names"
        return self._names

    @property
    def skipped(self) -> dict[str, str]:
        """Unreadable files and the reasons; the first access may read the folder."""
        _ = self.names
        return self._skipped

    def __len__(self) -> int:
        return len(self.names)

    def batches(self, size: int) -> Iterator[UInt8[Tensor, "n c h w"]]:
        check_batch_size(size)
        names: list[str] = []
        skipped: dict[str, str] = {}
        batch: list[np.ndarray] = []
        for name, result in self._decode(self.files):
            if isinstance(result, str):
                skipped[name] = result
                continue
            names.append(name)
            batch.append(result)
            if len(batch) == size:
                yield _stack(batch)
                batch = []
        if not names:
            first, reason = next(iter(skipped.items()))
            raise InputError(
                f"{self.path}: none of its {len(skipped)} images can be read ({first}: {reason}). Check the files."
            )
        self._names, self._skipped = names, skipped
        if batch:
            yield _stack(batch)

    def take(self, index: NDArray[np.int64]) -> UInt8[Tensor, "n c h w"]:
        check_index(index, len(self))
        batch: list[np.ndarray] = []
        for name, result in self._decode([self.names[i] for i in index]):
            if isinstance(result, str):
                raise InputError(
                    f"{self._root / name}: could be read before, but not now ({result}). Do not change it during a fit."
                )
            batch.append(result)
        return _stack(batch)

    def _decode(self, files: list[str]) -> Iterator[tuple[str, np.ndarray | str]]:
        """Yield each file with its pixels or the reason of a failure; decode at most AHEAD files in advance."""
        queue: deque[tuple[str, Future[np.ndarray | str]]] = deque()
        waiting = iter(files)
        with ignore_pillow_warnings(), ThreadPoolExecutor(WORKERS, thread_name_prefix="onefold-images") as pool:
            try:
                for name in waiting:
                    queue.append((name, pool.submit(self._try_decode, name)))
                    if len(queue) == AHEAD:
                        done, future = queue.popleft()
                        yield done, future.result()
                while queue:
                    done, future = queue.popleft()
                    yield done, future.result()
            finally:
                for _, future in queue:
                    future.cancel()

    def _try_decode(self, name: str) -> np.ndarray | str:
        try:
            return decode(self._root / name, self.picture)
        except Exception as error:  # untrusted files fail in many ways, and the other files must still be read
            return describe_error(error)

    def _choose_picture(self) -> Picture:
        indices = np.linspace(0, len(self.files) - 1, min(EXAMINED_FILES, len(self.files))).round().astype(int)
        with ignore_pillow_warnings():
            headers = [header for i in indices if (header := read_image_header(self._root / self.files[i]))]
        channels = 1 if headers and all(grey for grey, _, _ in headers) else 3
        sizes = {(height, width) for _, height, width in headers}
        height, width = sizes.pop() if len(sizes) == 1 else (DEFAULT_SIDE, DEFAULT_SIDE)
        if max(height, width) > LARGEST_COMMON_SIDE:
            height = width = DEFAULT_SIDE
        return Picture(height, width, channels)


def _list_images(folder: Path) -> list[str]:
    """Return the image files below a folder, as sorted relative names with forward slashes."""
    names: list[str] = []
    resolved = folder.resolve()
    try:
        for parent, folders, files in os.walk(folder, onerror=_reraise):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in files:
                path = Path(parent, name)
                if not name.startswith(".") and path.suffix.lower() in SUFFIXES and _is_inside(path, resolved):
                    names.append(path.relative_to(folder).as_posix())
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read ({error.strerror}). Check its permissions.") from None
    if not names:
        suffixes = ", ".join(sorted(suffix[1:] for suffix in SUFFIXES))
        raise InputError(f"{folder}: no images. Pass a folder of files that end in {suffixes}.")
    return sorted(names)


def _reraise(error: OSError) -> None:
    raise error  # by default os.walk silently skips folders that it cannot list


def _is_inside(path: Path, folder: Path) -> bool:
    """Return True for a regular file inside the folder, links resolved; opening a pipe could block forever."""
    return path.is_file() and (not path.is_symlink() or path.resolve().is_relative_to(folder))


def _stack(samples: list[np.ndarray]) -> UInt8[Tensor, "n c h w"]:
    return torch.from_numpy(np.stack(samples))
