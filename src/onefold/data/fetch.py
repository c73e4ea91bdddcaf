"""The public image sets, downloaded into a folder, checked, and left in a form that `read_set` reads."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from onefold.core.memory import human
from onefold.core.storage import file_lock
from onefold.data.catalogue import CATALOGUE, Known
from onefold.data.download import Patience, Watch, download, unwatched
from onefold.errors import FileError, InputError

PATIENCE = Patience()


def fetch(
    name: str,
    folder: Path,
    progress: Watch = unwatched,
    *,
    patience: Patience = PATIENCE,
    catalogue: Mapping[str, Known] = CATALOGUE,
) -> str:
    """Bring a known set into `folder`, from the internet if it is not there; one line on what is there now.

    What was interrupted goes on where it stopped. Files that are there and match their checksums are left alone, so a
    file that was put into folder/NAME by hand will do as well.
    """
    known = catalogue.get(name)
    if known is None:
        raise InputError(f"{name!r} is not a set that can be fetched: known are {', '.join(catalogue)}")
    finished = folder / f"{name}.npz"
    if finished.is_file():
        return f"{name}: there already, {finished} ({human(finished.stat().st_size)})"
    busy = FileError(f"{folder}: another process is fetching {name}: wait for it")
    with file_lock(folder / f".{name}.lock", busy):
        paths = [download(mirrors, folder / name, progress, patience) for mirrors in known.files]
        if known.letters:
            return _convert(name, paths[0], finished, progress)
    size = human(sum(path.stat().st_size for path in paths))
    return f"{name}: {len(paths)} files in {folder / name} ({size}), checksums match"


def _convert(name: str, archive: Path, target: Path, progress: Watch) -> str:
    """An archive of letters as an .npz, and the archive gone."""
    from onefold.data.notmnist import read_letters, write_npz

    letters = read_letters(archive, progress)
    write_npz(target, letters)
    archive.unlink()
    with contextlib.suppress(OSError):  # not empty
        archive.parent.rmdir()
    test = int(letters.is_test.sum())
    return (
        f"{name}: {len(letters.labels) - test:,} train and {test:,} test images in {target} "
        f"({human(target.stat().st_size)}); left out of {archive.name}: {letters.unreadable:,} unreadable files, "
        f"{letters.repeated:,} repeated images, {letters.disputed:,} in two classes"
    )
