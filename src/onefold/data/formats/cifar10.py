"""The binary version of CIFAR-10: one label byte and 3 × 32 × 32 pixel bytes per image, in a .tar.gz archive."""

import re
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from onefold.data.formats.tar_files import TAR_ERRORS, damaged_archive, is_plain_file, open_tar
from onefold.errors import FileError

MEMBER = re.compile(r"(?:.*/)?(data_batch_[1-5]|test_batch)\.bin")
TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST = "test_batch"
SIDE, CHANNELS, CLASSES = 32, 3, 10
RECORD = 1 + CHANNELS * SIDE * SIDE  # bytes
MOST_RECORDS = 10_000  # in one member
MOST_INFLATED = 2**28  # bytes; the published archive has 184 million


def read_cifar10(path: Path) -> dict[str, UInt8[np.ndarray, "..."]]:
    """Return x_train [N, 3, 32, 32], y_train [N], x_test and y_test from cifar-10-binary.tar.gz."""
    try:
        batches = _read_batches(path)
    except FileError:
        raise
    except TAR_ERRORS as error:
        raise damaged_archive(path, error) from None
    if missing := [name for name in (*TRAIN, TEST) if name not in batches]:
        raise FileError(f"{path}: {missing[0]}.bin is missing. Use the binary version, cifar-10-binary.tar.gz.")
    arrays: dict[str, np.ndarray] = {}
    for part, names in (("train", TRAIN), ("test", (TEST,))):
        records = np.frombuffer(b"".join(batches[name] for name in names), np.uint8).reshape(-1, RECORD)
        arrays[f"x_{part}"] = records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE)
        arrays[f"y_{part}"] = records[:, 0]
        if records[:, 0].max() >= CLASSES:
            raise FileError(f"{path}: label {records[:, 0].max()} in the {part} set. Labels are 0 to {CLASSES - 1}.")
    return arrays


def _read_batches(path: Path) -> dict[str, bytes]:
    """Return the records of each batch by the name of its member."""
    batches: dict[str, bytes] = {}
    with open_tar(path, MOST_INFLATED) as archive:
        for member in archive:
            if not (match := MEMBER.fullmatch(member.name)):
                continue
            name = match[1]
            if not is_plain_file(member) or not 0 < member.size <= MOST_RECORDS * RECORD or member.size % RECORD:
                raise FileError(f"{path}: {name}.bin has {member.size:,} bytes, not records of {RECORD:,}")
            if name in batches:
                raise FileError(f"{path}: contains {name}.bin twice")
            file = archive.extractfile(member)
            batches[name] = b"" if file is None else file.read()
            if len(batches[name]) != member.size:
                raise FileError(f"{path}: damaged, {name}.bin ends too early. Delete it and download it again.")
    return batches
