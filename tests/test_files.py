"""Saved detectors come back as they were, in a fresh process too; files that are not whole are refused by name."""

import errno
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import forged
from safetensors.torch import save as to_safetensors
from test_methods import LABELLED, MAKERS, SHORT, SMALL, Classifier, fit, pictures, vectors
from torch import nn
from users_models import TextClassifier

import onefold
from onefold.cli import main
from onefold.core import storage
from onefold.detectors import METHODS
from onefold.detectors.save import KIND
from onefold.distil import Architecture
from onefold.errors import FileError, InputError, NotEnoughMemoryError
from onefold.kernels import from_model, infinite
from onefold.nn.train import Recipe

HERE = Path(__file__).parent
TINY = Architecture(channels=(2,), hidden=(4,), outputs=3)
BRIEF = Recipe(steps=3, batch=4)


def network(seed: int = 0) -> nn.Module:
    """Somebody's trained network for vectors of 5."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


def reader_of_texts() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TextClassifier()


def texts(n: int = 40, seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 9, n)
    return {
        "input_ids": rng.integers(0, 50, (n, 8)),
        "attention_mask": (np.arange(8) < lengths[:, None]).astype(np.int64),
    }


def table(folder: Path) -> str:
    rng, path = np.random.default_rng(0), folder / "table.csv"
    if not path.exists():
        rows = [f"{rng.normal():.4f},{('red', 'green', 'blue')[i % 3]},{'' if i % 9 == 0 else i}" for i in range(60)]
        path.write_text("\n".join(["size,colour,amount", *rows]))
    return str(path)


@dataclass(frozen=True)
class Case:
    """A detector to be fitted, the data for it and the model that it looks through."""

    detector: Callable[[Any], Any]
    data: Callable[[Path], Any]
    query: Callable[[Path], Any]
    model: Callable[[], Any] = lambda: None
    targets: Any = None

    def fitted(self, folder: Path) -> Any:
        detector = self.detector(self.model())
        return detector.fit(self.data(folder), *([] if self.targets is None else [self.targets]))


def on_vectors(detector: Callable[[Any], Any], **keywords: Any) -> Case:
    return Case(detector, lambda _: vectors(), lambda _: vectors(20, seed=1), **keywords)


def on_pictures(detector: Callable[[Any], Any], **keywords: Any) -> Case:
    return Case(detector, lambda _: pictures(40, 8, 8), lambda _: pictures(9, 8, 8, seed=1), **keywords)


LABELS = {name: {"targets": np.arange(60) % 3} for name in LABELLED}
PICTURE_LABELS = {name: {"targets": np.arange(40) % 3} for name in LABELLED}
CASES: dict[str, Case] = {
    **{
        f"{name} on vectors": on_vectors(lambda _, name=name: MAKERS[name](), **LABELS.get(name, {}))
        for name in METHODS
        if name != "Energy"
    },
    **{
        f"{name} on images": on_pictures(lambda _, name=name: MAKERS[name](), **PICTURE_LABELS.get(name, {}))
        for name in METHODS
        if name != "Energy"
    },
    "Energy on vectors": on_vectors(onefold.Energy, model=Classifier),
    "Energy on images": on_pictures(onefold.Energy, model=Classifier),
    "CSD on a table": Case(lambda _: MAKERS["CSD"](), table, table),
    "GP on a table": Case(lambda _: MAKERS["LastLayerGP"](), table, table),
    "CSD not normalised": on_vectors(
        lambda _: onefold.CSD(
            recipe=SHORT, architecture=Architecture(hidden=(8,), outputs=4, normalise=False, small_init=True)
        )
    ),
    "CSD of a kernel": on_vectors(
        lambda kernel: onefold.CSD(kernel, recipe=SHORT, architecture=SMALL), model=lambda: infinite(1, b_std=0.5)
    ),
    "CSD of a model": on_vectors(
        lambda net: onefold.CSD(from_model(net, "1", 16, seed=3), recipe=SHORT, architecture=SMALL), model=network
    ),
    "KNN of a model": on_vectors(lambda net: onefold.KNN(from_model(net, width=None), k=2), model=network),
    "GP of texts": Case(
        lambda net: onefold.LastLayerGP(from_model(net, width=16)),
        lambda _: texts(), lambda _: texts(9, seed=2), reader_of_texts,
    ),
    "KNN of one named array": Case(
        lambda net: onefold.KNN(from_model(net)), lambda _: {"x": vectors()}, lambda _: {"x": vectors(9, seed=1)},
        lambda: _Named(network()),
    ),
    "regression": on_vectors(
        lambda _: onefold.DeepEnsemble(2, hidden=(8,), recipe=SHORT), targets=vectors(60, 2, seed=3).astype(np.float64)
    ),
    # small ones, for damage
    "tiny CSD": on_vectors(lambda _: onefold.CSD(recipe=BRIEF, architecture=TINY)),
    "tiny GP": on_vectors(lambda _: onefold.LastLayerGP(width=8)),
    "tiny RND": on_pictures(
        lambda _: onefold.RND(channels=(2,), hidden=(4,), target_hidden=(4,), width=3, recipe=BRIEF)
    ),
    "tiny ensemble": on_vectors(
        lambda _: onefold.DeepEnsemble(2, hidden=(4,), recipe=BRIEF), targets=np.arange(60) % 3
    ),
    "tiny KNN": on_vectors(lambda net: onefold.KNN(from_model(net, width=4), k=2, bank=8), model=network),
    "tiny Energy": on_vectors(onefold.Energy, model=network),
    "tiny table": Case(lambda _: onefold.LastLayerGP(width=4), table, table),
}  # fmt: skip
UPDATED = (
    "CSD on vectors", "CSD on images", "CSD of a model", "LastLayerGP on vectors", "RND on images", "KNN on vectors",
)  # fmt: skip


class _Named(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


every_case = pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("tiny")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("detectors")


@pytest.fixture(scope="module")
def detectors(folder: Path) -> dict[str, Any]:
    """Every case fitted, some calibrated, all saved with samples and without."""
    fitted = {}
    for i, (name, case) in enumerate(CASES.items()):
        detector = fitted[name] = case.fitted(folder)
        if i % 3 or name.startswith("tiny"):
            detector.calibrate(case.query(folder), fpr=0.125)
        detector.save(folder / f"{name}.onefold")
        detector.save(folder / f"{name}.bare", samples=False)
    return fitted


def answers(detector: Any, x: Any) -> dict[str, Any]:
    """All that a detector says, exactly."""
    said = {"score": detector.score(x).tolist(), "alarm": detector.alarm is not None}
    if detector.alarm is not None:
        said |= {"threshold": detector.threshold, "p": detector.pvalue(x).tolist(), "ood": detector.is_ood(x).tolist()}
    if detector.remembered is not None:
        said["neighbours"] = detector.neighbours(x, 3).tolist()
        said["findings"] = [str(finding) for finding in detector.diagnose(x, show=False)]
    return said


def said_by_all(folder: Path, suffix: str) -> dict[str, Any]:
    return {
        name: answers(onefold.load(folder / f"{name}{suffix}", model=case.model()), case.query(folder))
        for name, case in CASES.items()
    }


def outside(folder: Path) -> dict[str, Any]:
    """What happens in a process that has never seen the detectors and where no type checker helps."""
    said: dict[str, Any] = {suffix: said_by_all(folder, suffix) for suffix in (".onefold", ".bare")}
    knn: Any = onefold.KNN
    knn = knn(k=np.int64(2), bank=np.int64(9)).fit(vectors()).calibrate(vectors(), np.float32(0.1))
    knn.save(folder / "numpy")
    again: Any = onefold.load(folder / "numpy")
    said["numpy"] = [again.threshold == knn.threshold, type(again.k).__name__]
    with pytest.raises(InputError) as error:
        onefold.load(folder / "Energy on vectors.onefold", model="net.pt")  # pyright: ignore[reportArgumentType]
    said["model"] = str(error.value)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
    before = _peak()
    _ = onefold.load(folder / "large")
    said["peak"] = _peak() - before
    events: set[tuple[str, str]] = set()
    files = [str(folder / f"{name}.onefold") for name, case in CASES.items() if case.model() is None]
    sys.addaudithook(lambda event, args: events.add((event, str(args[0]) if args else "")))
    for file in files:
        onefold.load(file)
    opened = {what for event, what in list(events) if event == "open"} - set(files)
    return {**said, "events": sorted({event for event, _ in events}), "opened": sorted(opened)}


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


# --- round trips -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh(detectors: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the files say in a fresh process."""
    assert detectors
    onefold.KNN().fit(vectors(6000)).save(folder / "large")
    code = (
        "import json, sys, warnings, torch, test_files; from pathlib import Path; warnings.simplefilter('ignore');"
        f"torch.set_num_threads({torch.get_num_threads()}); print(json.dumps(test_files.outside(Path(sys.argv[1]))))"
    )
    return json.loads(_run(["-c", code, str(folder)]))


def _run(arguments: list[str], timeout: float = 500) -> str:
    """A fresh interpreter that finds the modules of the tests and the onefold of this process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE, Path(onefold.__file__).parents[1])))}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@every_case
def test_a_fresh_process_says_exactly_the_same(
    name: str, detectors: dict[str, Any], fresh: dict[str, Any], folder: Path
) -> None:
    expected = json.loads(json.dumps(answers(detectors[name], CASES[name].query(folder))))
    assert fresh[".onefold"][name] == expected
    bare = {key: value for key, value in expected.items() if key not in ("neighbours", "findings")}
    assert fresh[".bare"][name] == bare


BRIEFLY: dict[str, dict[str, Any]] = {
    **{name: {"recipe": BRIEF} for name in ("CSD", "RND", "DeepEnsemble", "MCDropout", "Laplace")},
    "SGMCMC": {"epochs": 1, "burn_in": 1},
    "Energy": {"kernel": Classifier()},
}


@pytest.mark.filterwarnings("ignore::onefold.errors.OnefoldWarning")
@pytest.mark.parametrize("kind", ["vectors", "images", "table"])
@pytest.mark.parametrize("name", METHODS)
def test_default_settings_survive_a_round_trip(name: str, kind: str, tmp_path: Path) -> None:
    """Defaults, except for the number of training steps."""
    if name == "Energy" and kind == "table":
        pytest.skip("no model takes a table with words")
    x: Any = {"vectors": vectors(40), "images": pictures(40, 8, 8), "table": table(tmp_path)}[kind]
    labels = [np.arange(60 if kind == "table" else 40) % 3] if name in LABELLED else []
    make: Any = METHODS[name].detector_class
    detector = make(**BRIEFLY.get(name, {})).fit(x, *labels)
    detector.save(tmp_path / "x.onefold")
    again = onefold.load(tmp_path / "x.onefold", model=Classifier() if name == "Energy" else None)
    np.testing.assert_array_equal(again.score(x), detector.score(x))


@pytest.mark.usefixtures("detectors")
@every_case
def test_a_second_file_is_the_first(name: str, folder: Path, tmp_path: Path) -> None:
    for suffix, samples in ((".onefold", True), (".bare", False)):
        path = folder / f"{name}{suffix}"
        onefold.load(path, model=CASES[name].model()).save(tmp_path / "again", samples=samples)
        assert (tmp_path / "again").read_bytes() == path.read_bytes()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@every_case
def test_another_device_says_nearly_the_same(name: str, detectors: dict[str, Any], folder: Path) -> None:
    case = CASES[name]
    here, there = (
        onefold.load(folder / f"{name}.onefold", model=case.model(), device=device) for device in ("cpu", "cuda")
    )
    assert there.device.type == "cuda"
    x = case.query(folder)
    np.testing.assert_allclose(there.score(x), here.score(x), rtol=1e-5, atol=1e-5)
    assert detectors[name].reader == there.reader


@pytest.mark.parametrize("name", UPDATED)
def test_updates_go_on_as_if_nothing_had_been_saved(name: str, folder: Path, tmp_path: Path) -> None:
    case, more = CASES[name], CASES[name].query(folder)
    here = case.fitted(folder)
    here.save(tmp_path / "x")
    there: Any = onefold.load(tmp_path / "x", model=case.model())
    for detector in (here, there):
        for _ in range(2):
            detector.update(more, half_life=50)
    assert answers(here, more) == answers(there, more)
    assert here.reader == there.reader
    assert here.alarm is None
    assert there.alarm is None


@pytest.mark.usefixtures("detectors")
def test_without_samples_the_file_has_none_of_the_data(folder: Path) -> None:
    for name, case in CASES.items():
        data = case.data(folder)
        if isinstance(data, str):
            continue
        content = (folder / f"{name}.bare").read_bytes()
        arrays = data.values() if isinstance(data, dict) else [data]
        assert not any(row.tobytes() in content for array in arrays for row in array if len(row.tobytes()) > 8), name
        whole = (folder / f"{name}.onefold").read_bytes()
        assert all(row.tobytes() in whole for array in arrays for row in array), "the search finds what is there"


@pytest.mark.usefixtures("detectors")
def test_without_samples_updates_are_refused_or_forget_no_statistics(folder: Path) -> None:
    x = vectors(30, seed=5)
    for name in ("CSD on vectors", "RND on vectors"):
        unable: Any = onefold.load(folder / f"{name}.bare")
        with pytest.raises(InputError, match="saved without samples: it cannot be updated"):
            unable.update(x)
    for name in ("LastLayerGP on vectors", "KNN on vectors"):
        bare: Any = onefold.load(folder / f"{name}.bare")
        whole: Any = onefold.load(folder / f"{name}.onefold")
        for detector in (bare, whole):
            detector.update(x)
        assert bare.remembered is None
        with pytest.raises(InputError, match="no training samples in this detector"):
            bare.neighbours(x)
        measure = "relative" if name.startswith("Last") else "score"
        np.testing.assert_array_equal(getattr(bare, measure)(x), getattr(whole, measure)(x))
        assert abs(np.median(bare.score(x))) < 10  # standard deviations, still of many samples
        assert np.isfinite(bare.score(x)).all()


def test_numbers_of_numpy_are_saved_as_numbers(fresh: dict[str, Any]) -> None:
    """Annotations do not allow them, but they work until they meet JSON."""
    assert fresh["numpy"] == [True, "int"]


def test_nothing_in_a_file_is_run(fresh: dict[str, Any]) -> None:
    """By the interpreter's own record: loading opens the file, and imports, compiles and starts nothing."""
    assert not [
        event
        for event in fresh["events"]
        if not event.startswith(("open", "object.", "builtins.id", "cpython.", "sys._getframe"))
    ]
    assert all(name.startswith(("/proc/", "/sys/fs/cgroup/")) for name in fresh["opened"])


def test_loading_takes_little_more_memory_than_twice_the_file(fresh: dict[str, Any], folder: Path) -> None:
    assert fresh["peak"] < 2.3 * (folder / "large").stat().st_size


def test_a_gaussian_process_is_saved_as_half_of_one_matrix(tmp_path: Path) -> None:
    """Of S = Φ̄ᵀΦ̄ the lower triangle, row by row; the root is computed from it again."""
    width, path = 96, tmp_path / "x.onefold"
    kernel = from_model(nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 1)), width=None)
    gp = onefold.LastLayerGP(kernel, score="relative").fit(vectors())
    gp.save(path, samples=False)
    z = torch.nn.functional.normalize(kernel.features(torch.from_numpy(vectors())), dim=1).double()
    rows, columns = np.tril_indices(width)
    tensors, _ = storage.load(path, KIND)
    np.testing.assert_allclose(tensors["scorer.triangle"], (z.T @ z)[rows, columns], rtol=1e-12)
    assert path.stat().st_size < 8 * width * (width + 1) / 2 + 8192
    again: Any = onefold.load(path, model=kernel)
    np.testing.assert_array_equal(again.score(vectors(20, seed=1)), gp.score(vectors(20, seed=1)))


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("detectors")
@pytest.mark.parametrize("suffix", [".onefold", ".bare"])
@pytest.mark.parametrize("name", ["CSD of a model", "KNN of a model", "Energy on vectors", "CSD of a kernel"])
def test_another_model_is_refused_by_name(name: str, suffix: str, folder: Path) -> None:
    path = folder / f"{name}{suffix}"
    others = {
        "CSD of a model": (network(1), from_model(network(), "1", 16), from_model(network(), "1", 15, seed=3)),
        "KNN of a model": (network(1), from_model(network(), "0", None)),
        "Energy on vectors": (Classifier(1), network()),
        "CSD of a kernel": (infinite(2), infinite(1), network()),
    }
    for other in others[name]:
        with pytest.raises(FileError, match="the kernel is not the one that this detector was fitted with") as error:
            onefold.load(path, model=other)
        assert str(error.value).startswith(f"{path}: ")
    with pytest.raises(FileError, match="the kernel is not the one"):
        onefold.load(path, model=nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)))
    with pytest.raises(InputError, match=r"was fitted on a model or kernel that is not in the file\. Pass it"):
        onefold.load(path)


def test_models_that_lack_the_layer_or_are_not_needed_are_refused(folder: Path, fresh: dict[str, Any]) -> None:
    with pytest.raises(
        FileError, match=r"CSD of a model.onefold: was fitted on another model: Linear has no layer '1'"
    ):
        onefold.load(folder / "CSD of a model.onefold", model=nn.Linear(5, 2))
    with pytest.raises(InputError, match=r"RND on vectors.onefold was not fitted on a model"):
        onefold.load(folder / "RND on vectors.onefold", model=network())
    assert fresh["model"] == "model: a str is not supported. Pass the model of the fit."


@pytest.mark.usefixtures("detectors")
def test_texts_without_samples_go_unchecked_and_work(folder: Path) -> None:
    """Random whole numbers would be no tokens, so there is nothing that the model could be known by."""
    assert "similarity" not in storage.load(folder / "GP of texts.bare", KIND)[0]
    assert "similarity" in storage.load(folder / "GP of texts.onefold", KIND)[0]


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(detectors: dict[str, Any], folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files."""
    assert detectors
    place = tmp_path_factory.mktemp("tiny")
    table(place)
    for name in CASES:
        if name.startswith("tiny"):
            (place / f"{name}.onefold").write_bytes((folder / f"{name}.onefold").read_bytes())
    return place


def trial(folder: Path, seed: int, damages: int, forgeries: int) -> tuple[dict[str, int], dict[str, int]]:
    """What became of random damages, and of forged headers and tensors; nothing may have gone wrong."""
    said = json.loads(_run([str(HERE / "damage.py"), str(folder), *map(str, (seed, damages, forgeries))], 3000))
    assert said["wrong"] == [], f"{said['total']} went wrong"
    return said["random"], said["forged"]


def test_damage_is_refused(tiny: Path) -> None:
    random, forgeries = trial(tiny, 0, 350, 12)
    assert sum(random.values()) == 350
    assert random["refus"] > 320
    assert forgeries["refus"] > 120


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_much_damage_is_refused(tiny: Path, seed: int) -> None:
    random, _ = trial(tiny, seed, 6000, 1)
    assert random["refus"] > 5500


@pytest.mark.slow
def test_every_forgery_is_refused(tiny: Path) -> None:
    _, forgeries = trial(tiny, 0, 1, 10**6)
    assert forgeries["refus"] > 8000


def raw(header: Any, data: bytes = b"") -> bytes:
    """A file in the layout of safetensors with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def about(**entries: Any) -> dict[str, dict[str, str]]:
    content = {"format": 1, "kind": KIND, "sha256": "", "header": {}, **entries}
    return {"__metadata__": {"onefold": json.dumps(content)}}


def with_tensor(shape: list[int], offsets: list[int], dtype: str = "F32", name: str = "scorer.x") -> dict[str, Any]:
    return {name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}, **about()}


DEEP = b"[" * 100_000
HOSTILE = {
    "nothing": b"",
    "seven bytes": b"1234567",
    "a header of no length": bytes(8),
    "a header longer than the file": (1000).to_bytes(8, "little") + b"{}",
    "a header longer than the world": (2**63 - 1).to_bytes(8, "little") + b"{}",
    "no JSON": raw(b"not JSON at all"),
    "no UTF-8": raw(b'{"\xff\xfe": 1}'),
    "JSON too deep": raw(DEEP),
    "JSON too deep inside": raw({"__metadata__": {"onefold": DEEP.decode()}}),
    "lists all the way": raw(b'{"__metadata__": {"onefold": ' + DEEP + b"}}"),
    "a list": raw([1, 2]),
    "no metadata": raw({}),
    "metadata of a number": raw({"__metadata__": 3}),
    "metadata without onefold": raw({"__metadata__": {"format": "pt"}}),
    "a number of 5,000 digits": raw({"__metadata__": {"onefold": "9" * 5000}}),
    "not a number": raw({"__metadata__": {"onefold": '{"format": 1, "header": NaN}'}}),
    "infinity in disguise": raw({"__metadata__": {"onefold": '{"format": 1, "header": 1e999}'}}),
    "a header that is a list": raw(about(header=[])),
    "a huge shape": raw(with_tensor([10**12], [0, 4]), bytes(4)),
    "a shape that overflows": raw(with_tensor([2**62, 2**62, 2**62], [0, 4]), bytes(4)),
    "an empty huge shape": raw(with_tensor([0, 2**62, 2**62], [0, 0])),
    "a negative shape": raw(with_tensor([-1], [0, 4]), bytes(4)),
    "a tensor outside of the file": raw(with_tensor([1], [2**40, 2**40 + 4]), bytes(4)),
    "a tensor that ends before it begins": raw(with_tensor([1], [4, 0]), bytes(4)),
    "tensors in one place": raw(
        {**with_tensor([1], [0, 4]), "y": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)
    ),
    "an unknown type": raw(with_tensor([1], [0, 4], "F33"), bytes(4)),
    "a type that nobody writes": raw(with_tensor([4], [0, 4], "F8_E4M3"), bytes(4)),
    "a name like a path": raw(with_tensor([1], [0, 4], name="../../etc/passwd"), bytes(4)),
    "two of a name": raw(b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],'
                         b'"data_offsets":[1,2]},' + json.dumps(about()).encode()[1:], bytes(2)),
    "more than it says": raw(about(), b"more"),
    "eight million lists": raw(b"[" + b"[]," * 2**23 + b"1]"),
    "100,000 tensors": raw(
        {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)} | about()
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile"
    path.write_bytes(HOSTILE[case])
    start = time.process_time()
    with pytest.raises(FileError, match=r"hostile: damaged, (or not a file of onefold|its content does not)") as error:
        onefold.load(path)
    assert time.process_time() - start < 2
    assert "\n" not in str(error.value)


def test_an_endless_header_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse files of sizes that nobody has: what cannot be right, or cannot fit, is not even read."""
    path = tmp_path / "hostile"
    with path.open("wb") as file:
        file.write((storage.LARGEST_HEADER + 1).to_bytes(8, "little"))
        file.truncate(2**40)
    with pytest.raises(FileError, match="damaged, or not a file of onefold"):
        onefold.load(path)
    with path.open("r+b") as file:
        file.write((100).to_bytes(8, "little"))
    with pytest.raises(NotEnoughMemoryError, match=r"reading .*hostile needs 2.0 TiB of memory"):
        onefold.load(path)
    monkeypatch.setattr(storage, "LARGEST_HEADER", 100)
    with pytest.raises(InputError, match=r"cannot be saved, its header has .* files have at most 100 B"):
        fit("RND", vectors()).save(tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("absent", "No such file"), ("", "not a file"), ("pipe", "not a file")):
        with pytest.raises(FileError, match=rf"cannot be read \({reason}"):
            onefold.load(tmp_path / name)


@pytest.mark.parametrize(
    ("entries", "message"),
    [({"format": 2}, "has format 2, this version of onefold reads format 1. A newer onefold wrote it; upgrade"),
     ({"format": 3, "header": None, "sha256": 1}, "has format 3, this version of onefold reads format 1. A newer"),
     ({"kind": "training checkpoint"}, "is of kind 'training checkpoint', and 'detector' was expected"),
     ({"kind": "a\nb"}, "is of kind 'unknown', and 'detector' was expected"),
     ({"kind": "x" * 10**6}, "is of kind 'unknown', and 'detector' was expected"),
     ({"kind": ["detector"]}, "is of kind 'unknown', and 'detector' was expected"),
     *[({"format": value}, "damaged, or not a file of onefold") for value in (0, -1, "1", True, 1.0, None, 10**100)],
     ({"sha256": "0" * 64}, "damaged, its content does not match its checksum"),
     ({"sha256": None}, "damaged, its content does not match its checksum")],
)  # fmt: skip
def test_other_versions_and_kinds_are_named(entries: dict[str, Any], message: str, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.onefold"
    path.write_bytes(forged(*storage.load(tiny / "tiny RND.onefold", KIND), **entries))
    with pytest.raises(FileError) as error:
        onefold.load(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)


def test_unknown_methods_are_named(tiny: Path, tmp_path: Path) -> None:
    tensors, header = storage.load(tiny / "tiny RND.onefold", KIND)
    (tmp_path / "x").write_bytes(forged(tensors, {**header, "method": "os.system"}))
    with pytest.raises(
        FileError, match=r"made by the method 'os.system'; this version of onefold has CSD, LastLayerGP"
    ):
        onefold.load(tmp_path / "x")


def test_files_of_other_layouts_are_refused(tiny: Path, tmp_path: Path) -> None:
    tensors, header = storage.load(tiny / "tiny RND.onefold", KIND)
    before_layouts = {key: value for key, value in header.items() if key != "layout"}
    for content, message in (
        (before_layouts, r"an older onefold wrote it \(layout 1; this version reads 3\). Fit the detector again."),
        ({**header, "layout": 4}, r"a newer onefold wrote it \(layout 4; this version reads 3\). Upgrade with pip"),
        ({**header, "layout": "3"}, "damaged, or not a file of onefold"),
    ):
        (tmp_path / "x").write_bytes(forged(tensors, content))
        with pytest.raises(FileError, match=f"x: {message}"):
            onefold.load(tmp_path / "x")


@pytest.mark.parametrize(
    ("name", "changes"),
    [("tiny RND", {"inputs": [1, 8, 9]}), ("tiny RND", {"inputs": []}), ("tiny RND", {"inputs": [10**9, 8, 8]}),
     ("tiny ensemble", {"members": 10**9}), ("tiny GP", {"features": 10**12}), ("tiny GP", {"features": 7}),
     ("tiny KNN", {"shape": [10**9, 6]}), ("tiny KNN", {"bank": 9}), ("tiny CSD", {"centre": 256}),
     ("tiny CSD", {"seed": -1}), ("tiny Energy", {"temperature": 0.0})],
)  # fmt: skip
def test_specs_that_do_not_fit_the_file_are_refused(
    name: str, changes: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    tensors, header = storage.load(tiny / f"{name}.onefold", KIND)
    (tmp_path / "x").write_bytes(forged(tensors, {**header, "spec": {**header["spec"], **changes}}))
    start = time.process_time()
    with pytest.raises(FileError, match="x: damaged"):
        onefold.load(tmp_path / "x", model=CASES[name].model())
    assert time.process_time() - start < 2


def test_booleans_are_booleans(tmp_path: Path) -> None:
    """A byte of 2 in a boolean tensor is undefined behaviour in torch."""
    content = to_safetensors({"x": torch.tensor([True])}, metadata={})
    broken = torch.tensor([2], dtype=torch.uint8).view(torch.bool)
    assert content.endswith(b"\x01")
    (tmp_path / "x").write_bytes(forged({"x": broken}, {}))
    with pytest.raises(FileError, match="damaged"):
        storage.load(tmp_path / "x", KIND)


# --- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["write", "fsync", "replace", "open"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rnd = tmp_path / "x.onefold", fit("RND", vectors())
    rnd.save(path)
    before = path.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if broken == "write":
            patch.setattr(Path, "open", lambda self, mode: _FullFile(self, mode))
        else:
            patch.setattr(os if broken == "fsync" else Path, broken, full)
        with pytest.raises(OSError, match=r"No space left on device: '.*x.onefold'$") as error:
            fit("RND", vectors(seed=2)).save(path)
    assert error.value.filename == str(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.onefold"]
    np.testing.assert_array_equal(onefold.load(path).score(vectors()), rnd.score(vectors()))


class _FullFile:
    """A file on a disk that fills up after the first bytes."""

    def __init__(self, path: Path, mode: str) -> None:
        self.file = open(path, mode)  # noqa: PTH123, SIM115

    def __enter__(self) -> "_FullFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, content: bytes) -> None:
        self.file.write(content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")


def test_any_interruption_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        storage.write_bytes(tmp_path / "x", b"content")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", vectors(120))
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    out = tmp_path / "model.onefold"
    assert main(["fit", str(tmp_path / "x.npy"), "--out", str(out), "--method", "gp"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" not in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"onefold: {out}: No space left on device")
    assert not out.exists()


def test_places_that_cannot_be_written_to_are_named(tmp_path: Path) -> None:
    rnd = fit("RND", vectors())
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for place, kind, named in (
        ("folder", IsADirectoryError, "folder"),
        ("file/x", NotADirectoryError, "file"),
        ("file/deep/x", NotADirectoryError, "x"),
    ):
        with pytest.raises(kind) as error:
            rnd.save(tmp_path / place)
        assert Path(error.value.filename).name == named
    with pytest.raises(IsADirectoryError):
        rnd.save("/")
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_what_is_not_a_regular_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link"):
        with pytest.raises(InputError, match="not a regular file"):
            storage.write_bytes(path, b"content")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    np.save(tmp_path / "x.npy", vectors(120))
    assert main(["fit", str(tmp_path / "x.npy"), "--out", str(pipe), "--method", "gp"]) == 2
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "x.npy"]


def test_links_stay_and_what_they_point_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link, new = tmp_path / "folder" / "target", tmp_path / "link", tmp_path / "new"
    target.write_bytes(b"old")
    link.symlink_to("folder/target")
    new.symlink_to("folder/made")
    for path in (link, new):
        storage.write_bytes(path, b"content")
        assert path.is_symlink()
        assert path.read_bytes() == b"content"
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["made", "target"]
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="circle"):
        storage.write_bytes(tmp_path / "circle", b"content")


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664])
def test_a_file_keeps_its_mode(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    path.chmod(mode)
    storage.write_bytes(path, b"content")
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_bytes() == b"content"


def test_new_files_have_the_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    storage.write_bytes(tmp_path / "new", b"content")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_folders_without_permission_are_named(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(PermissionError, match=r"Permission denied: '.*locked/x.onefold'"):
        fit("RND", vectors()).save(tmp_path / "locked" / "x.onefold")


def test_long_names_work(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 250)
    storage.write_bytes(long, b"content")
    assert long.read_bytes() == b"content"


def test_readers_see_the_old_or_the_new_never_a_part(tmp_path: Path) -> None:
    """One thread writes two detectors in turn, another reads all the while."""
    path = tmp_path / "x"
    contents = [{"x": torch.full((20_000,), float(i))} for i in range(2)]
    storage.save(path, "thing", contents[0], {})
    done = threading.Event()

    def write() -> None:
        for i in range(40):
            storage.save(path, "thing", contents[i % 2], {})
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        values = storage.load(path, "thing")[0]["x"]
        assert values.min() == values.max()
    writer.join()
