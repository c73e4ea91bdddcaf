"""A folder of images as samples [C, H, W] of bytes, decoded a little ahead of their use."""

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

from onefold.errors import InputError
from onefold.inputs.decode import Picture, decode, look, pillow_quiet, reason
from onefold.inputs.source import check_index, check_size

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
LOOKED_AT = 64
LARGEST_KEPT = 128
FALLBACK = 64
WORKERS = 4
AHEAD = 16


class ImageFolder:
    """All images in a folder and the folders in it, by name; or one image file.

    Images become `picture`, which is chosen from a look at some of them unless it is given: grey if all of them are,
    and their common size if they have one of at most 128 pixels a side, else 64 × 64. Others are scaled to cover it and
    cropped about the centre. Transparent pixels lie on black. A file that cannot be read is skipped, and `skipped` says
    why. Hidden files, and links that lead out of the folder, are not looked at.
    """

    def __init__(self, path: Path, picture: Picture | None = None) -> None:
        self.path = path
        self._root, self.files = (path, _find(path)) if path.is_dir() else (path.parent, [path.name])
        self.picture = picture or self._choose()
        self._names: list[str] | None = None
        self._skipped: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """The files that could be read, in the order of the samples; read once for this if need be."""
        if self._names is None:
            for _ in self.batches(AHEAD):
                pass
        assert self._names is not None, "a full pass sets the names"
        return self._names

    @property
    def skipped(self) -> dict[str, str]:
        """The files that could not be read, and why; read once for this if need be."""
        _ = self.names
        return self._skipped

    def __len__(self) -> int:
        return len(self.names)

    def batches(self, size: int) -> Iterator[UInt8[Tensor, "n c h w"]]:
        check_size(size)
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
            first, why = next(iter(skipped.items()))
            raise InputError(f"{self.path}: none of its {len(skipped)} images can be read ({first}: {why})")
        self._names, self._skipped = names, skipped
        if batch:
            yield _stack(batch)

    def take(self, index: NDArray[np.int64]) -> UInt8[Tensor, "n c h w"]:
        check_index(index, len(self))
        batch: list[np.ndarray] = []
        for name, result in self._decode([self.names[i] for i in index]):
            if isinstance(result, str):
                raise InputError(f"{self._root / name}: could be read before, but now not ({result})")
            batch.append(result)
        return _stack(batch)

    def _decode(self, files: list[str]) -> Iterator[tuple[str, np.ndarray | str]]:
        """Each file with its pixels, or with the reason why there are none; at most AHEAD files are begun early."""
        queue: deque[tuple[str, Future[np.ndarray | str]]] = deque()
        waiting = iter(files)
        with pillow_quiet(), ThreadPoolExecutor(WORKERS, thread_name_prefix="onefold-images") as pool:
            try:
                for name in waiting:
                    queue.append((name, pool.submit(self._try, name)))
                    if len(queue) == AHEAD:
                        done, future = queue.popleft()
                        yield done, future.result()
                while queue:
                    done, future = queue.popleft()
                    yield done, future.result()
            finally:
                for _, future in queue:
                    future.cancel()

    def _try(self, name: str) -> np.ndarray | str:
        try:
            return decode(self._root / name, self.picture)
        except Exception as error:  # a stranger's file may fail in any way, and must not take the others with it
            return reason(error)

    def _choose(self) -> Picture:
        places = np.linspace(0, len(self.files) - 1, min(LOOKED_AT, len(self.files))).round().astype(int)
        with pillow_quiet():
            seen = [header for i in places if (header := look(self._root / self.files[i]))]
        channels = 1 if seen and all(grey for grey, _, _ in seen) else 3
        sizes = {(height, width) for _, height, width in seen}
        height, width = sizes.pop() if len(sizes) == 1 else (FALLBACK, FALLBACK)
        if max(height, width) > LARGEST_KEPT:
            height = width = FALLBACK
        return Picture(height, width, channels)


def _find(folder: Path) -> list[str]:
    """The image files below a folder, as sorted relative names with forward slashes."""
    found: list[str] = []
    inside = folder.resolve()
    try:
        for place, folders, files in os.walk(folder, onerror=_refuse):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in files:
                path = Path(place, name)
                if not name.startswith(".") and path.suffix.lower() in SUFFIXES and _belongs(path, inside):
                    found.append(path.relative_to(folder).as_posix())
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read ({error.strerror})") from None
    if not found:
        known = ", ".join(sorted(suffix[1:] for suffix in SUFFIXES))
        raise InputError(f"{folder}: has no images (files that end in {known})")
    return sorted(found)


def _refuse(error: OSError) -> None:
    raise error  # os.walk would go on without the folder, and its images would be missing without a word


def _belongs(path: Path, folder: Path) -> bool:
    """A regular file (opening a pipe could wait for ever) that lies in the folder, links followed."""
    return path.is_file() and (not path.is_symlink() or path.resolve().is_relative_to(folder))


def _stack(samples: list[np.ndarray]) -> UInt8[Tensor, "n c h w"]:
    return torch.from_numpy(np.stack(samples))
