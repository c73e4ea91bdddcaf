"""Saved detectors come back as they were, in a fresh process too; files that are not whole are refused by name."""

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import forged
from safetensors.torch import save as to_safetensors
from test_methods import MAKERS, SHORT, SMALL, Classifier, fit, pictures, vectors
from torch import Generator, nn
from users_models import TextClassifier

import onefold
from onefold import store
from onefold.cli import main
from onefold.detector import KIND
from onefold.distil import Architecture
from onefold.errors import FileError, InputError, NotEnoughMemoryError
from onefold.kernels import from_model, infinite
from onefold.methods import METHODS
from onefold.train import Recipe

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
        rows = [f"{rng.normal():.4f},{'red green blue'.split()[i % 3]},{'' if i % 9 == 0 else i}" for i in range(60)]
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


LABELS = {"DeepEnsemble": {"targets": np.arange(60) % 3}}
PICTURE_LABELS = {"DeepEnsemble": {"targets": np.arange(40) % 3}}
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
        lambda _: onefold.RND(channels=(2,), hidden=(4,), target_hidden=(4,), outputs=3, recipe=BRIEF)
    ),
    "tiny ensemble": on_vectors(
        lambda _: onefold.DeepEnsemble(2, hidden=(4,), recipe=BRIEF), targets=np.arange(60) % 3
    ),
    "tiny KNN": on_vectors(lambda net: onefold.KNN(from_model(net, width=4), k=2, bank=8), model=network),
    "tiny Energy": on_vectors(onefold.Energy, model=network),
    "tiny table": Case(lambda _: onefold.LastLayerGP(width=4), table, table),
}  # fmt: skip
UPDATED = [name for name in CASES if name.startswith(("CSD on", "CSD of", "CSD not", "LastLayer", "RND", "KNN on"))]


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


# --- round trips -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh(detectors: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the files say in a process that has never seen the detectors."""
    code = (
        "import json, sys, warnings, torch; from pathlib import Path; import test_files; warnings.simplefilter('ignore');"
        f"torch.set_num_threads({torch.get_num_threads()}); folder = Path(sys.argv[1]);"
        "print(json.dumps({s: test_files.said_by_all(folder, s) for s in ('.onefold', '.bare')}))"
    )
    return json.loads(_run(["-c", code, str(folder)]))


def _run(arguments: list[str], timeout: float = 500) -> str:
    """A fresh interpreter that finds the modules of the tests."""
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=timeout, check=False
    )
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


@every_case
def test_a_second_file_is_the_first(name: str, detectors: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    for suffix, samples in ((".onefold", True), (".bare", False)):
        path = folder / f"{name}{suffix}"
        onefold.load(path, model=CASES[name].model()).save(tmp_path / "again", samples=samples)
        assert (tmp_path / "again").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", UPDATED)
def test_updates_go_on_as_if_nothing_had_been_saved(name: str, folder: Path, tmp_path: Path) -> None:
    case, more = CASES[name], CASES[name].query(folder)
    here = case.fitted(folder)
    here.save(tmp_path / "x")
    there = onefold.load(tmp_path / "x", model=case.model())
    for detector in (here, there):
        for _ in range(2):
            detector.update(more, half_life=50)
    assert answers(here, more) == answers(there, more)
    assert here.reader == there.reader
    assert here.alarm is None
    assert there.alarm is None


def test_without_samples_the_file_has_none_of_the_data(detectors: dict[str, Any], folder: Path) -> None:
    for name, case in CASES.items():
        tensors, header = store.load(folder / f"{name}.bare", KIND)
        assert header["reservoirs"] is None
        data = case.data(folder)
        raw = (folder / f"{name}.bare").read_bytes()
        rows = [] if isinstance(data, str) else data["x"] if "x" in data else data
        rows = data["input_ids"] if isinstance(data, dict) and "x" not in data else rows
        assert not any(row.tobytes() in raw for row in rows), name
        assert not any(key.startswith(("reservoir", "held")) for key in tensors)


def test_without_samples_updates_are_refused_or_forget_no_statistics(folder: Path, detectors: dict[str, Any]) -> None:
    x = vectors(30, seed=5)
    for name in ("CSD on vectors", "RND on vectors"):
        with pytest.raises(InputError, match="saved without samples: it cannot be updated"):
            onefold.load(folder / f"{name}.bare").update(x)  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("LastLayerGP on vectors", "KNN on vectors"):
        bare: Any = onefold.load(folder / f"{name}.bare")
        whole: Any = onefold.load(folder / f"{name}.onefold")
        for detector in (bare, whole):
            detector.update(x)
        assert bare.remembered is None
        with pytest.raises(InputError, match="saved without samples: it remembers none"):
            bare.neighbours(x)
        measure = "relative" if name.startswith("Last") else "score"
        np.testing.assert_array_equal(getattr(bare, measure)(x), getattr(whole, measure)(x))
        assert abs(np.median(bare.score(x))) < 10  # standard deviations, still of many samples
        assert np.isfinite(bare.score(x)).all()


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path: Path) -> None:
    knn = onefold.KNN(k=np.int64(2), bank=np.int64(9)) if False else fit("KNN", vectors())
    knn.calibrate(vectors(30, seed=1), float(np.float32(0.1)))
    knn._alarm = onefold.alarm.Alarm(knn.alarm.scores, np.float32(0.1))  # pyright: ignore
    knn.save(tmp_path / "x")
    assert onefold.load(tmp_path / "x").threshold == knn.threshold


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".onefold", ".bare"])
@pytest.mark.parametrize("name", ["CSD of a model", "KNN of a model", "Energy on vectors", "CSD of a kernel"])
def test_another_model_is_refused_by_name(name: str, suffix: str, folder: Path, detectors: dict[str, Any]) -> None:
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
    with pytest.raises(InputError, match=r"was fitted on a model or kernel that is not in the file: load\(path, model"):
        onefold.load(path)
    with pytest.raises(InputError, match="model is a str: the model of the fit, or its kernel, is needed"):
        onefold.load(path, model="net.pt")  # pyright: ignore[reportArgumentType]


def test_models_that_lack_the_layer_or_are_not_needed_are_refused(folder: Path, detectors: dict[str, Any]) -> None:
    with pytest.raises(
        FileError, match=r"CSD of a model.onefold: was fitted on another model: Linear has no layer '1'"
    ):
        onefold.load(folder / "CSD of a model.onefold", model=nn.Linear(5, 2))
    with pytest.raises(InputError, match=r"RND on vectors.onefold: was not fitted on a model, so it needs none"):
        onefold.load(folder / "RND on vectors.onefold", model=network())


def test_texts_without_samples_go_unchecked_and_work(folder: Path, detectors: dict[str, Any]) -> None:
    """Random whole numbers would be no tokens, so there is nothing that the model could be known by."""
    assert "similarity" not in store.load(folder / "GP of texts.bare", KIND)[0]
    assert "similarity" in store.load(folder / "GP of texts.onefold", KIND)[0]


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(detectors: dict[str, Any], folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files, each with samples and without."""
    place = tmp_path_factory.mktemp("tiny")
    table(place)
    for name in CASES:
        if name.startswith("tiny"):
            (place / f"{name}.onefold").write_bytes((folder / f"{name}.onefold").read_bytes())
    return place


def trial(kind: str, folder: Path, count: int, seed: int = 0) -> dict[str, int]:
    said = json.loads(_run([str(HERE / "damage.py"), kind, str(folder), str(count), str(seed)], timeout=3000))
    assert said["wrong"] == [], f"{said['total']} went wrong"
    return said["counts"]


def test_random_damage_is_refused(tiny: Path) -> None:
    counts = trial("random", tiny, 350)
    assert sum(counts.values()) == 350
    assert counts["refus"] > 320


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_much_random_damage_is_refused(tiny: Path, seed: int) -> None:
    assert sum(trial("random", tiny, 6000, seed).values()) == 6000


def test_forgeries_with_a_good_checksum_are_refused(tiny: Path) -> None:
    counts = trial("forged", tiny, 40)
    assert counts["refus"] > 400


@pytest.mark.slow
def test_all_forgeries_with_a_good_checksum_are_refused(tiny: Path) -> None:
    counts = trial("forged", tiny, 10**6)
    assert counts["refus"] > 8000
