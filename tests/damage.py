"""Damage to files: at random, and by someone who knows the format and mends the checksum.

As a script it loads damaged files without the type checker of the tests, in bounded memory, and prints what went wrong.
"""

import copy
import json
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor

import onefold
from onefold.core import storage
from onefold.detectors.save import KIND
from onefold.errors import FileError, InputError

SLOWEST = 2.0  # seconds of computing for one file
ROOM = 512 * 2**20  # bytes that loading small files may take
JUNK: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2.5, 10**6, 10**12, 2**64, 10**40, -(10**12), 1e-320, 1e308, float("nan"),
    float("inf"), "", "x", "../../etc/passwd", "/dev/zero", "a\nb", "\ud800", "é" * 5000, [], [[]], [1] * 5000,
    [10**12], [None, {}], {}, {"a": {"b": [1]}}, {"": None},
)  # fmt: skip


def at_random(content: bytes, rng: np.random.Generator) -> bytes:
    """A cut, flipped bits, other bytes, more, fewer, swapped blocks or zeros, anywhere, or in the header alone."""
    damaged = bytearray(content)
    header = 8 + int.from_bytes(content[:8], "little")
    end = (len(content), header, 24)[rng.integers(3)]
    at, size = int(rng.integers(end)), int(rng.choice([1, 2, 8, 64, 1024]))
    match rng.integers(8):
        case 0:
            del damaged[at:]
        case 1:
            damaged[at] ^= 1 << int(rng.integers(8))
        case 2:
            damaged[at : at + size] = rng.bytes(len(damaged[at : at + size]))
        case 3:
            damaged[at:at] = rng.bytes(size)
        case 4:
            del damaged[at : at + size]
        case 5:
            other = int(rng.integers(end))
            damaged[at : at + size], damaged[other : other + size] = (
                damaged[other : other + size], damaged[at : at + size],
            )  # fmt: skip
        case 6:
            damaged[at : at + size] = bytes(len(damaged[at : at + size]))
        case _:
            damaged[at] = int(rng.choice(list(b'0123456789-.,:"{}[] \\nax')))
    return bytes(damaged)


def forged(tensors: dict[str, Tensor], header: Any, /, **about: Any) -> bytes:
    """A file with this content and the checksum that belongs to it."""
    digest = storage.fingerprint(header, sorted(tensors), *(tensors[name] for name in sorted(tensors)))
    content = {"format": storage.FORMAT, "kind": KIND, "sha256": digest, "header": header, **about}
    plain = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    return to_safetensors(plain, metadata={"onefold": json.dumps(content)})


def forged_headers(header: dict[str, Any]) -> Iterator[Any]:
    """The header with one part replaced by junk, left out, or given a sibling."""
    for place in _places(header):
        for junk in JUNK:
            yield _edited(header, place, lambda parent, key, junk=junk: parent.__setitem__(key, junk))
        yield _edited(header, place, lambda parent, key: parent.__delitem__(key))
        yield _edited(header, place, _with_sibling)


def forged_tensors(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors with one left out, renamed, doubled, of another type or shape, or of values that make no sense."""
    for name, tensor in tensors.items():
        rest = {other: t for other, t in tensors.items() if other != name}
        yield rest
        for other in ("../../etc/passwd", "/" + name, name + ".", "x" * 10**5, "", "scorer.", f"{name}.{name}"):
            yield {**rest, other: tensor}
            yield {**tensors, other: tensor}
        for dtype in (
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.int64,
            torch.uint8,
            torch.bool,
        ):
            if tensor.dtype != dtype:
                yield {**rest, name: tensor.to(dtype)}
        for shaped in (tensor.flatten(), tensor[None], tensor[..., None], tensor.flatten()[:1], tensor.flatten()[:0]):
            if shaped.shape != tensor.shape:
                yield {**rest, name: shaped}
        if tensor.ndim and len(tensor) > 1:
            yield {**rest, name: tensor[:-1]}
            yield {**rest, name: torch.cat([tensor, tensor])}
        for value in (float("nan"), float("inf"), -1.0, 0.0, 3e38):
            if tensor.is_floating_point():
                yield {**rest, name: torch.full_like(tensor, value)}


def _places(node: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = list(node) if isinstance(node, dict) else range(min(len(node), 2)) if isinstance(node, list) else ()
    for key in keys:
        yield (*place, key)
        yield from _places(node[key], (*place, key))


def _edited(header: dict[str, Any], place: tuple[Any, ...], edit: Any) -> dict[str, Any]:
    changed = copy.deepcopy(header)
    parent: Any = changed
    for key in place[:-1]:
        parent = parent[key]
    edit(parent, place[-1])
    return changed


def _with_sibling(parent: Any, key: Any) -> None:
    if isinstance(parent, dict):
        parent[f"{key} "] = copy.deepcopy(parent[key])
    else:
        parent.insert(key, copy.deepcopy(parent[key]))


class Trial:
    """Loads damaged copies of good files and keeps what should not have happened."""

    def __init__(self, folder: Path) -> None:
        from test_files import CASES

        self.path = folder / "damaged.onefold"
        self.files = sorted(path for path in folder.glob("*.onefold") if path != self.path)
        self.models = {path: CASES[path.stem].model() for path in self.files}
        self.queries = {path: CASES[path.stem].query(folder) for path in self.files}
        self.good = {path: self._answers(path, onefold.load(path, model=self.models[path])) for path in self.files}
        self.wrong: list[str] = []
        self.counts: dict[str, int] = {}

    def _answers(self, path: Path, detector: Any) -> bytes:
        threshold = 0.0 if detector.alarm is None else detector.threshold
        return np.append(detector.score(self.queries[path]), threshold).tobytes()

    def _use(self, path: Path, detector: Any) -> None:
        """Whatever was forged, the detector works: it scores, or says what is wrong with scores or data."""
        try:
            assert np.isfinite(np.frombuffer(self._answers(path, detector))[:-1]).all()
        except InputError as error:
            known = ("no finite score", "the table has other columns")
            assert any(words in str(error) for words in known), error  # noqa: PT017

    def attempt(self, path: Path, content: bytes, what: str, *, consistent: bool) -> None:
        """Refused by name, or as good as undamaged; what is `consistent` may give other scores, but finite ones."""
        self.path.write_bytes(content)
        start, outcome = time.process_time(), "loaded"
        try:
            detector = onefold.load(self.path, model=self.models[path])
            if not consistent and self._answers(path, detector) != self.good[path]:
                outcome = "WRONG: loaded with other scores"
            elif consistent:
                self._use(path, detector)
        except (FileError, InputError) as error:
            outcome = "refused" if isinstance(error, FileError) else "asked for another model"
            if not _is_readable(error, self.path):
                outcome = f"WRONG: {error!r}"
            elif _out_of_memory(error):
                outcome = "WRONG: tried to allocate too much"
        except BaseException as error:
            outcome = f"WRONG: {type(error).__name__}: {error}"
        if time.process_time() - start > SLOWEST:
            outcome = "WRONG: took too long"
        self.counts[outcome[:5]] = self.counts.get(outcome[:5], 0) + 1
        if outcome.startswith("WRONG"):
            self.wrong.append(f"{path.stem}, {what}: {outcome}")


def _is_readable(error: Exception, path: Path) -> bool:
    """One line that begins with the file, and where it asks the caller for something, for a model."""
    text = str(error)
    asks = not isinstance(error, InputError) or "model" in text
    return text.startswith(f"{path}: ") and "\n" not in text and len(text) < 1000 and asks


def _out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError) or "allocate" in str(error):
            return True
        error = error.__context__
    return False


def random_trial(trial: Trial, count: int, seed: int) -> None:
    contents = {path: path.read_bytes() for path in trial.files}
    for i in range(count):
        path = trial.files[i % len(trial.files)]
        damaged = at_random(contents[path], np.random.default_rng([seed, i]))
        trial.attempt(path, damaged, f"damage {i}", consistent=False)


def forged_trial(trial: Trial, count: int, seed: int) -> None:
    """As many forged headers and tensors of every file, or if there are no more, all."""
    rng = np.random.default_rng(seed)
    for path in trial.files:
        tensors, header = storage.load(path, KIND)
        headers, others = list(forged_headers(header)), list(forged_tensors(tensors))
        for i in rng.permutation(len(headers))[:count]:
            trial.attempt(path, forged(tensors, headers[i]), f"header {i}", consistent=True)
        for i in rng.permutation(len(others))[:count]:
            trial.attempt(path, forged(others[i], header), f"tensors {i}", consistent=True)


def main() -> None:
    folder, seed, damages, forgeries = Path(sys.argv[1]), *map(int, sys.argv[2:])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trial = Trial(folder)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    random_trial(trial, damages, seed)
    by_chance, trial.counts = trial.counts, {}
    forged_trial(trial, forgeries, seed)
    wrong = {"wrong": trial.wrong[:20], "total": len(trial.wrong)}
    print(json.dumps({"random": by_chance, "forged": trial.counts, **wrong}))


if __name__ == "__main__":
    main()
