"""One fit in two processes: the weights, losses and checkpoints of one process with the whole minibatch."""

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch.multiprocessing.spawn import spawn

import onefold
from onefold.core import storage
from onefold.detectors import CSD
from onefold.distil import (
    Architecture,
    AugmentedContexts,
    Chain,
    ExtraContexts,
    Mixture,
    Similarity,
    TrainContexts,
    distillation,
    parallel,
    similarity_model,
)
from onefold.distil.contexts import Contexts
from onefold.distil.parallel import parallel_distillation, run_distributed
from onefold.errors import InputError, OnefoldError, OnefoldWarning
from onefold.kernels import Features
from onefold.nn.nets import Prior, Standardise, random_network
from onefold.nn.train import Recipe, Training, save_checkpoints
from onefold.types import Kernel

CPU = torch.device("cpu")
PROCESSES = 2
ROUNDING = 1e-6  # relative; the order in which float32 numbers are added up is all that may differ
DRIFT = 1e-5  # the same after 20 steps, as a share of how far training went


class PairsOnly:
    """A kernel that has similarities but no features to show."""

    def __call__(self, x1: Tensor, x2: Tensor) -> Tensor:
        return torch.exp(-torch.cdist(x1, x2))

    def diag(self, x: Tensor) -> Tensor:
        return torch.ones(len(x))


class Case(NamedTuple):
    """The arguments of a training."""

    model: Similarity
    x: Tensor
    kernel: Kernel
    contexts: Contexts
    recipe: Recipe
    encode: Callable[[Any], Tensor] | None = None

    def alone(self) -> Training:
        return distillation(*self[:5], 3, encode=self.encode, device=CPU)

    def together(self) -> parallel.ParallelTraining:
        return parallel_distillation(*self[:5], 3, encode=self.encode, device=CPU)


def case(name: str, *, steps: int = 20, batch: int = 16, rate: float = 1e-3) -> Case:
    """Trainings of small networks on random data, the same in every process."""
    generator = Generator().manual_seed(1)
    shape = (1, 8, 8) if name in ("images", "encoded") else (5,)
    x = torch.rand(60, *shape, generator=generator)
    seen, encode, contexts = x, None, TrainContexts()
    if name in ("images", "encoded"):
        contexts = AugmentedContexts(Chain(apply=0.5), 0.0, 1.0)
    if name == "encoded":
        weight = torch.randn(64, 6, generator=generator)
        encode = lambda images: images.flatten(1) @ weight  # noqa: E731
        seen = encode(x)
    if name == "mixture":
        extra = ExtraContexts(torch.rand(20, 5, generator=generator) + 1)
        contexts = Mixture((TrainContexts(), extra), (0.5, 0.5))
    sizes = Architecture(
        channels=(4,), hidden=(16,), outputs=8, normalise=name != "mixture", small_init=name == "mixture"
    )
    first = Standardise.of(seen)
    prior = random_network(tuple(seen.shape[1:]), generator, channels=(4,), hidden=(12,))
    kernel = PairsOnly() if name == "pairs" else Features(Prior(first, prior))
    model = similarity_model(tuple(seen.shape[1:]), first, sizes, generator)
    return Case(model, x, kernel, contexts, Recipe(steps=steps, batch=batch, lr=rate), encode)


SMALL = {"recipe": Recipe(steps=60, batch=16), "architecture": Architecture(hidden=(32,), outputs=16)}
CASES = ("vectors", "images", "mixture", "pairs", "encoded")


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def first_gradient(training: Training) -> Tensor:
    training.draws.refill()
    training.losses[0](training.draws.integers, training.draws.uniforms).backward()
    gradients = [p.grad for p in training.parameters if p.grad is not None]
    assert len(gradients) == len(training.parameters)
    return torch.cat([gradient.flatten() for gradient in gradients])


def trained(name: str, start: Callable[[Case], Training]) -> dict[str, Tensor]:
    """What is to be the same however many processes there are."""
    gradient = first_gradient(start(case(name)))
    given = case(name)
    losses = torch.stack([update.loss for update in start(given)])
    return {"gradient": gradient, "losses": losses, "weights": weights(given.model)}


def distance(found: Tensor, expected: Tensor, start: Tensor | float = 0.0) -> float:
    return float((found - expected).norm() / (expected - start).norm())


# --- what runs in each of the two processes ------------------------------------------------------------------------


class Notes:
    """Results of one process for the tests to look at: tensors, and errors by name."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank

    def keep(self, name: str, **tensors: Tensor) -> None:
        storage.save(self.folder / f"{name}.{self.rank}", "result", tensors, {})

    def refused(self, name: str, attempt: Callable[[], Any]) -> None:
        try:
            attempt()
        except OnefoldError as error:
            storage.write_json(self.folder / f"{name}.{self.rank}", f"{type(error).__name__}: {error}")


def local_pairs_only(notes: Notes) -> None:
    """The wrong scheme: every process has a loss of its own pairs, and only gradients are shared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "gather", lambda rows: rows)
        notes.keep("wrong", **trained("vectors", Case.together))


def interrupted(notes: Notes, path: Path) -> None:
    """Twelve steps, a checkpoint, and the rest in a new training that only process 0 has the path for."""
    training, identity = case("images").together(), ["images"]
    steps: Iterator[Any] = iter(training)
    if notes.rank == 0:
        steps = save_checkpoints(training, path, storage.fingerprint("cpu", *identity), every=0.0)
    assert len(list(islice(steps, 12))) == 12
    dist.barrier()
    again = case("images")
    place = path if notes.rank == 0 else path.with_name("nowhere")
    with (notes.folder / f"stderr.{notes.rank}").open("w") as log, contextlib.redirect_stderr(log):
        loss = run_distributed(again.together(), "CSD", checkpoint=place, identity=identity, show=True)
    notes.keep("resumed", weights=weights(again.model), loss=torch.tensor(loss))
    alone = case("images")
    run_distributed(alone.together(), "CSD", checkpoint=path.with_name("alone"), identity=identity)
    notes.keep("taken_over", weights=weights(alone.model))
    mistaken = case("images").together()
    notes.refused("foreign", lambda: run_distributed(mistaken, "CSD", checkpoint=place, identity=["other"]))


def detector(notes: Notes) -> None:
    """CSD as a user calls it, from raw data to a file."""
    fitted = CSD(**SMALL, device="cpu").fit(familiar())
    fitted.save(notes.folder / f"saved.{notes.rank}")
    notes.keep("detector", scores=torch.from_numpy(fitted.score(queries())), loss=torch.tensor(fitted.loss))


def familiar() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(150, 4))


def queries() -> np.ndarray:
    return np.concatenate([familiar()[:50], np.random.default_rng(1).normal(size=(50, 4)) * 5])


def process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", OnefoldWarning)  # of so short a training
    place, patience = f"file://{folder}/meeting", timedelta(seconds=600)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=PROCESSES, timeout=patience)
    notes = Notes(folder, rank)
    for name in CASES:
        notes.keep(name, **trained(name, Case.together))
    interrupted(notes, folder / "checkpoint")
    notes.refused("uneven", case("vectors", batch=15).together)
    other = case("vectors")
    notes.refused("other_data", other._replace(x=other.x + rank).together)
    notes.refused("other_settings", case("vectors", rate=1e-3 + rank).together)
    detector(notes)
    local_pairs_only(notes)
    last = case("vectors", steps=1)
    run_distributed(last.together(), "CSD")
    dist.destroy_process_group()
    last.model(last.x, last.x).sum().backward()  # nothing of the group may cling to the model
    os._exit(0)  # torch's own threads, left over from the group, have been seen to abort a process as it ends


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As in the two processes: threads round differently, and would fight for the same cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the two processes have left behind."""
    place = tmp_path_factory.mktemp("parallel")
    alone, steps = case("images").alone(), 7
    list(islice(save_checkpoints(alone, place / "alone", storage.fingerprint("cpu", "images"), every=0.0), steps))
    spawn(process, (place,), nprocs=PROCESSES)
    return place


def results(folder: Path, name: str) -> list[dict[str, Tensor]]:
    return [storage.load(folder / f"{name}.{rank}", "result")[0] for rank in range(PROCESSES)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_like_one(name: str, folder: Path) -> None:
    """Gradient of the first step, loss of every step, weights after the last."""
    expected, (first, second) = trained(name, Case.alone), results(folder, name)
    assert all(torch.equal(first[key], second[key]) for key in expected), "processes must not drift apart"
    start = weights(case(name).model)
    assert distance(first["gradient"], expected["gradient"]) < ROUNDING
    assert distance(first["losses"], expected["losses"]) < ROUNDING
    assert distance(first["weights"], expected["weights"], start) < DRIFT
    assert distance(first["weights"], expected["weights"]) < ROUNDING


def test_a_loss_of_local_pairs_would_be_found_out(folder: Path) -> None:
    expected, wrong = trained("vectors", Case.alone), results(folder, "wrong")[0]
    assert distance(wrong["gradient"], expected["gradient"]) > 1e4 * ROUNDING
    assert distance(wrong["weights"], expected["weights"], weights(case("vectors").model)) > 1e3 * DRIFT


def test_a_resumed_training_ends_like_an_uninterrupted_one(folder: Path) -> None:
    whole = results(folder, "images")[0]
    for found in results(folder, "resumed"):
        assert torch.equal(found["weights"], whole["weights"])
        torch.testing.assert_close(found["loss"], whole["losses"][-2:].mean())
    assert not (folder / "nowhere").exists(), "only process 0 writes"
    assert "CSD: 20/20, loss" in (folder / "stderr.0").read_text()
    assert (folder / "stderr.1").read_text() == "", "only process 0 shows progress"


def test_two_processes_go_on_from_a_checkpoint_of_one(folder: Path) -> None:
    whole, start = results(folder, "images")[0]["weights"], weights(case("images").model)
    first, second = (found["weights"] for found in results(folder, "taken_over"))
    assert torch.equal(first, second)
    assert distance(first, whole, start) < DRIFT


DIFFERENT = "InputError: processes: data or settings differ. Pass all of x to each of them."
REFUSALS = {
    "uneven": ["InputError: batch: 15 is not a multiple of the 2 processes. Use a multiple, such as 14 or 16."] * 2,
    "other_data": [DIFFERENT] * 2,
    "other_settings": [DIFFERENT] * 2,
    "foreign": [
        "FileError: {}/checkpoint: belongs",
        "TrainingError: process 0 could not start: {}/checkpoint: belongs",
    ],
}


@pytest.mark.parametrize("name", REFUSALS)
def test_every_process_says_what_is_wrong(name: str, folder: Path) -> None:
    for rank, message in enumerate(REFUSALS[name]):
        found = json.loads((folder / f"{name}.{rank}").read_text("utf-8"))
        assert found.startswith(message.format(folder))
        assert "\n" not in found


def test_a_detector_is_the_same_in_every_process_and_as_good_as_from_one(folder: Path) -> None:
    first, second = results(folder, "detector")
    assert torch.equal(first["scores"], second["scores"])
    assert (folder / "saved.0").read_bytes() == (folder / "saved.1").read_bytes()
    alone = CSD(**SMALL, device="cpu").fit(familiar())
    np.testing.assert_allclose(first["scores"].numpy(), alone.score(queries()), rtol=1e-2, atol=1e-3)
    assert float(first["loss"]) == pytest.approx(alone.loss, rel=1e-4)
    np.testing.assert_array_equal(onefold.load(folder / "saved.1").score(queries()), second["scores"].numpy())


def test_without_a_process_group_nothing_is_shared() -> None:
    assert not parallel.is_distributed()
    with pytest.raises(InputError, match=r"no process group\. Start with torchrun"):
        case("vectors").together()


def test_a_group_that_cannot_reach_the_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with nccl and a CPU; this machine need not have it."""
    answers = {"is_initialized": True, "get_world_size": 2, "get_backend_config": "cuda:nccl"}
    for name, answer in answers.items():
        monkeypatch.setattr(dist, name, lambda answer=answer: answer)
    with pytest.raises(InputError, match="backend cuda:nccl does not support cpu"):
        case("vectors").together()
