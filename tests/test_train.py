"""The training loop: schedule, exact resume, refusal of foreign checkpoints; files whole or not at all."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from onefold.core import storage
from onefold.detectors import CSD, RND, DeepEnsemble
from onefold.errors import FileError, InputError
from onefold.nn.cuda_graphs import PROFILER_LOGGER, quietly
from onefold.nn.train import CHECKPOINT, Draws, Recipe, Training, descend, run, save_checkpoints, show_updates

CPU = torch.device("cpu")


def training(seed: int = 0, steps: int = 40) -> tuple[nn.Linear, Training]:
    """A small regression whose minibatches come from the draws."""
    torch.manual_seed(seed)
    net = nn.Linear(3, 1)
    x = torch.linspace(-1, 1, 30).reshape(10, 3)

    def loss(integers: Tensor, uniforms: Tensor) -> Tensor:
        batch = x[integers[:, 0] % 10]
        return (net(batch).squeeze(1) - batch.sum(1) + uniforms[:, 0] - 0.5).square().mean()

    return net, Training(list(net.parameters()), loss, Recipe(steps=steps, batch=4, lr=0.05), Draws(4, 1, 1, 7, CPU))


def test_rate_warms_up_and_decays_linearly() -> None:
    recipe = Recipe(steps=10, lr=1.0, warmup=4)
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    np.testing.assert_allclose([recipe.rate(step) for step in range(10)], expected)
    np.testing.assert_allclose([Recipe(steps=2, lr=1.0).rate(step) for step in range(2)], [1.0, 0.5])


@pytest.mark.parametrize(
    ("bad", "word"), [({"steps": 0}, "steps?"), ({"batch": 1}, "batch: must"), ({"lr": 0.0}, "lr: must")]
)
def test_impossible_recipes_are_refused(bad: dict, word: str) -> None:
    with pytest.raises(InputError, match=word):
        Recipe(**bad)


def test_adam_with_the_schedule_is_torchs_adam() -> None:
    net, ours = training()
    theirs = nn.Linear(3, 1)
    theirs.load_state_dict(net.state_dict())
    adam = torch.optim.Adam(theirs.parameters(), lr=0.05, eps=1e-5)
    draws, x = Draws(4, 1, 1, 7, CPU), torch.linspace(-1, 1, 30).reshape(10, 3)
    for step, update in enumerate(ours):
        draws.refill()
        batch = x[draws.integers[:, 0] % 10]
        adam.param_groups[0]["lr"] = ours.recipe.rate(step)
        adam.zero_grad()
        loss = (theirs(batch).squeeze(1) - batch.sum(1) + draws.uniforms[:, 0] - 0.5).square().mean()
        loss.backward()
        adam.step()
        torch.testing.assert_close(update.loss, loss.detach())
    torch.testing.assert_close(net.weight, theirs.weight)


def test_losses_side_by_side_train_as_they_do_alone() -> None:
    def loss_of(theta: nn.Parameter, column: int) -> Any:
        return lambda integers, uniforms: (theta - uniforms[:, column] - integers[:, column] % 3).square().mean()

    recipe = Recipe(steps=30, batch=4, lr=0.1)
    together = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    losses = [loss_of(theta, i) for i, theta in enumerate(together)]
    sums = [float(update.loss) for update in Training(together, losses, recipe, Draws(4, 2, 2, 0, CPU))]
    alone, parts = [nn.Parameter(torch.zeros(1)) for _ in range(2)], []
    for i, theta in enumerate(alone):
        training_ = Training([theta], loss_of(theta, i), recipe, Draws(4, 2, 2, 0, CPU))
        parts.append([float(update.loss) for update in training_])
    torch.testing.assert_close(torch.stack([*together]), torch.stack([*alone]))
    np.testing.assert_allclose(sums, np.sum(parts, axis=0), rtol=1e-5)


def test_the_loss_reported_is_that_of_the_last_tenth() -> None:
    _, ours = training()
    losses = [float(update.loss) for update in ours]
    _, again = training()
    assert run(again, "fitting", show=False) == pytest.approx(np.mean(losses[-4:]), rel=1e-6)


@given(stop=st.integers(1, 39))
def test_resuming_anywhere_gives_the_uninterrupted_result(stop: int) -> None:
    whole, uninterrupted = training()
    for _ in uninterrupted:
        pass
    _, first = training()
    for update in first:
        if update.step == stop:
            break
    state = {name: tensor.clone() for name, tensor in first.state().items()}
    net, second = training(seed=1)
    second.restore(state)
    assert [update.step for update in second] == list(range(stop + 1, 41))
    assert torch.equal(net.weight, whole.weight)
    assert torch.equal(net.bias, whole.bias)


def test_checkpoints_of_other_runs_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    _, run_a = training()
    for _ in save_checkpoints(run_a, path, "a"):
        pass
    content = path.read_bytes()
    with pytest.raises(FileError, match=r"run.ckpt: belongs to a run on other data or settings"):
        next(save_checkpoints(training()[1], path, "b"))
    assert path.read_bytes() == content
    assert list(save_checkpoints(training()[1], path, "a")) == [], "a finished run has nothing left to do"
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(FileError, match=r"run.ckpt: damaged"):
        next(save_checkpoints(training()[1], path, "a"))
    assert [p.name for p in tmp_path.iterdir()] == ["run.ckpt"], "no temporary files stay behind"


KILLED_FIT = """
import sys, numpy as np, onefold
from onefold.nn import train
from onefold.nn.train import Recipe
train.save_checkpoints.__defaults__ = (0.0,)  # write after every step
x = np.random.default_rng(0).normal(size=(80, 5))
det = onefold.CSD(recipe=Recipe(steps=100, batch=16), device="cpu").fit(x, checkpoint=sys.argv[1])
np.savetxt(sys.argv[2], det.variance(x), fmt="%.17g")
"""


def test_a_killed_fit_goes_on_and_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """kill -9 in the middle, again and again, in real processes."""
    command = [sys.executable, "-c", KILLED_FIT]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(tmp_path / "calm"), str(tmp_path / "calm.txt")], check=True, env=environment)
    checkpoint, result, kills = tmp_path / "harried", tmp_path / "harried.txt", 0
    for wanted in (20, 70, None):
        process = subprocess.Popen([*command, str(checkpoint), str(result)], env=environment)
        while wanted is not None and process.poll() is None:
            if checkpoint.exists() and storage.load(checkpoint, CHECKPOINT)[1]["step"] >= wanted:
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.01)
        process.wait(timeout=600)
    assert kills == 2
    assert result.read_text() == (tmp_path / "calm.txt").read_text()


def test_the_compiler_says_nothing_that_is_of_no_use(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.zeros(3, requires_grad=True)
    optimiser = torch.optim.Adam([weight], foreach=True)
    weight.grad = torch.ones(3)
    with quietly():
        torch.compile(optimiser.step, backend="eager")()
        logging.getLogger(PROFILER_LOGGER).warning("chatter")
    assert weight.max() < 0
    logging.getLogger(PROFILER_LOGGER).warning("a real warning")
    messages = [record.getMessage() for record in caplog.records if record.name.startswith(PROFILER_LOGGER)]
    assert messages == ["a real warning"]
    with quietly():  # warnings are errors in tests
        warnings.warn_explicit("no longer so", FutureWarning, "lowering.py", 1, module="torch._inductor.lowering")
    with quietly(), pytest.raises(UserWarning, match="something else"):
        warnings.warn("something else", UserWarning, stacklevel=1)


@pytest.mark.parametrize("name", ["CSD", "RND", "DeepEnsemble"])
def test_methods_resume_and_refuse_other_data(name: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 4))
    recipe = Recipe(steps=12, batch=8)
    make = {
        "CSD": lambda: CSD(recipe=recipe),
        "RND": lambda: RND(recipe=recipe),
        "DeepEnsemble": lambda: DeepEnsemble(2, recipe=recipe),
    }[name]
    labels = (np.arange(40) % 3,) if name == "DeepEnsemble" else ()
    path = tmp_path / "fit.ckpt"
    first = make().fit(x, *labels, checkpoint=path).score(x)
    again = make().fit(x, *labels, checkpoint=path).score(x)
    np.testing.assert_array_equal(first, again)
    with pytest.raises(FileError, match="other data or settings"):
        make().fit(x + 1, *labels, checkpoint=path)


def test_descend_is_gradient_descent_with_heavy_ball() -> None:
    """On ½ a θ² the iteration is θ ← θ + v, v ← m v − r a θ, done here by hand."""
    theta = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    updates = descend([theta], lambda: (1.5 * theta.square()).sum(), steps=5, rate=0.1, momentum=0.5)
    values = [(float(update.loss), float(theta.detach())) for update in updates]
    hand, v = 1.0, 0.0
    for loss, found in values:
        assert loss == pytest.approx(1.5 * hand**2)
        v = 0.5 * v - 0.1 * 3 * hand
        hand += v
        assert found == pytest.approx(hand)


def test_progress_shows_loss_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    _, small = training(steps=5)
    assert len(list(show_updates(small, 5, "fitting", show=True))) == 5
    seen = capsys.readouterr()
    assert seen.out == ""
    assert re.fullmatch(r"fitting: 5/5, loss \d\.\d{5}, \d+ s\n", seen.err), "no terminal here: lines, not a bar"
    _, quiet = training(steps=5)
    assert run(quiet, "fitting", show=False) > 0
    assert capsys.readouterr().err == ""


# --- store ---------------------------------------------------------------------------------------------------------

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "state": torch.arange(5, dtype=torch.uint8),
    "scalar": torch.tensor(3),
}


def test_files_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "x.onefold"
    storage.save(path, "thing", TENSORS, {"name": "ψ", "sizes": [1, 2]})
    tensors, header = storage.load(path, "thing")
    assert header == {"name": "ψ", "sizes": [1, 2]}
    assert tensors.keys() == TENSORS.keys()
    assert all(
        torch.equal(tensors[name], TENSORS[name]) and tensors[name].dtype == TENSORS[name].dtype for name in TENSORS
    )


@pytest.fixture(scope="module")
def good_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("store") / "x"
    storage.save(path, "thing", TENSORS, {"name": "x"})
    return path.read_bytes()


@pytest.mark.parametrize("seed", range(300))
def test_damaged_files_are_refused_by_name(seed: int, good_file: bytes, tmp_path: Path) -> None:
    """A flipped bit, a cut, an insertion or a swapped stretch, anywhere."""
    rng = np.random.default_rng(seed)
    content = bytearray(good_file)
    at = int(rng.integers(len(content)))
    match seed % 4:
        case 0:
            content[at] ^= 1 << int(rng.integers(8))
        case 1:
            del content[at:]
        case 2:
            content[at:at] = rng.bytes(int(rng.integers(1, 9)))
        case _:
            content[at : at + 8] = rng.bytes(8)
    path = tmp_path / "damaged"
    path.write_bytes(bytes(content))
    with pytest.raises(FileError, match="damaged: "):
        storage.load(path, "thing")


def test_foreign_kinds_and_newer_formats_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    storage.save(path, "thing", TENSORS, {})
    with pytest.raises(FileError, match="is of kind 'thing', and 'checkpoint' was expected"):
        storage.load(path, "checkpoint")
    with pytest.raises(FileError, match="cannot be read"):
        storage.load(tmp_path / "absent", "thing")
    monkeypatch.setattr(storage, "FORMAT", 2)
    storage.save(path, "thing", TENSORS, {})
    monkeypatch.setattr(storage, "FORMAT", 1)
    with pytest.raises(FileError, match="has format 2, this version of onefold reads format 1"):
        storage.load(path, "thing")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    storage.write_json(path, {"old": True})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        storage.write_json(path, {"new": True})
    assert path.read_text() == '{\n  "old": true\n}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_states_of_other_parameters_are_refused() -> None:
    _, resumed = training()
    state = resumed.state()
    with pytest.raises(FileError, match="made by another version"):
        resumed.restore({name: tensor for name, tensor in state.items() if name != "parameters.1"})
