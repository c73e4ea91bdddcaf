"""Folders of images as samples [C, H, W] of bytes, decoded a few files ahead."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from torch import Tensor

from onefold.decode import Picture, decode, describe_error, ignore_pillow_warnings, read_image_header
from onefold.errors import InputError
from onefold.inputs.source import check_batch_size, check_index

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
    Hidden files and folders, linked folders, and links to files outside the folder are ignored.
    """

    def __init__(self, path: Path, picture: Picture | None = None) -> None:
        self.path = path
        self.root, self.files = (path, _list_images(path)) if path.is_dir() else (path.parent, [path.name])
        self.picture = picture or self._choose_picture()
        self._names: list[str] | None = None
        self._skipped: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """Readable files in the order of the samples; the first access decodes all images."""
        if self._names is None:
            for _ in self.batches(AHEAD):
                pass
        assert self._names is not None, "a full pass sets the names"
        return self._names

    @property
    def skipped(self) -> dict[str, str]:
        """Unreadable files and the reasons; the first access decodes all images."""
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
                    f"{self.root / name}: could be read before, but not now ({result}). Do not change it during a fit."
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
            return decode(self.root / name, self.picture)
        except Exception as error:  # untrusted files fail in many ways, and the other files must still be read
            return describe_error(error)

    def _choose_picture(self) -> Picture:
        indices = np.linspace(0, len(self.files) - 1, min(EXAMINED_FILES, len(self.files))).round().astype(int)
        with ignore_pillow_warnings():
            headers = [header for i in indices if (header := read_image_header(self.root / self.files[i]))]
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
