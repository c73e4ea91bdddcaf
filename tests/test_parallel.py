"""One fit in two processes: the weights, losses and checkpoints of one process with the whole minibatch."""

import os
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch.multiprocessing.spawn import spawn

from onefold import store
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
from onefold.distil.parallel import parallel_distillation, run_together
from onefold.errors import InputError, OnefoldError
from onefold.kernels import Features
from onefold.methods import CSD, csd
from onefold.methods.prior import prior_kernel, random_network
from onefold.nets import Standardise
from onefold.train import CHECKPOINT, Recipe, Training, checkpointed, run
from onefold.types import Kernel

CPU = torch.device("cpu")
PROCESSES = 2
CLOSE = 1e-5  # how far apart two results may be, as a share of how far training went: float32 rounds sums by their order


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


def case(name: str, *, steps: int = 30, batch: int = 16, rate: float = 1e-3) -> Case:
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
    kernel = PairsOnly() if name == "pairs" else prior_kernel(first, prior)
    model = similarity_model(tuple(seen.shape[1:]), first, sizes, generator)
    return Case(model, x, kernel, contexts, Recipe(steps=steps, batch=batch, lr=rate), encode)


CASES = ("vectors", "images", "mixture", "pairs", "encoded")


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def first_gradient(training: Training) -> Tensor:
    training.draws.refill()
    training.loss(training.draws.integers, training.draws.uniforms).backward()
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
        store.save(self.folder / f"{name}.{self.rank}", "result", tensors, {})

    def refused(self, name: str, attempt: Callable[[], Any]) -> None:
        try:
            attempt()
        except OnefoldError as error:
            store.write_json(self.folder / f"{name}.{self.rank}", f"{type(error).__name__}: {error}")


def local_pairs_only(notes: Notes) -> None:
    """The wrong scheme: every process has a loss of its own pairs, and only gradients are shared."""
    right = parallel.gathered
    parallel.gathered = lambda rows: rows
    parallel._check_agreement = lambda *_: None
    wrong = trained("vectors", Case.together)
    parallel.gathered = right
    notes.keep("wrong", **wrong)


def interrupted(notes: Notes, path: Path) -> None:
    """Twelve steps, a checkpoint, and the rest in a new training that only process 0 has the path for."""
    training, identity = case("images").together(), ["images"]
    steps: Iterator[Any] = iter(training)
    if notes.rank == 0:
        steps = checkpointed(training, path, store.fingerprint("cpu", *identity), every=0.0)
    assert len(list(islice(steps, 12))) == 12
    dist.barrier()
    again = case("images")
    place = path if notes.rank == 0 else path.with_name("nowhere")
    loss = run_together(again.together(), "CSD", checkpoint=place, identity=identity, show=True)
    notes.keep("resumed", weights=weights(again.model), loss=torch.tensor(loss))
    alone = case("images")
    run_together(alone.together(), "CSD", checkpoint=path.with_name("alone"), identity=identity)
    notes.keep("taken_over", weights=weights(alone.model))
    mistaken = case("images").together()
    notes.refused("foreign", lambda: run_together(mistaken, "CSD", checkpoint=place, identity=["other"]))


def detectors(notes: Notes, file: str) -> None:
    """CSD as a user calls it, from raw data to a file."""
    detector = CSD(recipe=Recipe(steps=40, batch=16), device="cpu").fit(familiar())
    detector.save(notes.folder / f"{file}.{notes.rank}.onefold")
    notes.keep(file, scores=torch.from_numpy(detector.score(queries())), loss=torch.tensor(detector.loss))


def familiar() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(150, 4))


def queries() -> np.ndarray:
    return np.concatenate([familiar()[:50], np.random.default_rng(1).normal(size=(50, 4)) * 5])


def process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    sys.stderr = (folder / f"stderr.{rank}").open("w")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=PROCESSES)
    notes = Notes(folder, rank)
    for name in CASES:
        notes.keep(name, **trained(name, Case.together))
    interrupted(notes, folder / "checkpoint")
    notes.refused("uneven", case("vectors", batch=15).together)
    other = case("vectors")
    notes.refused("other_data", other._replace(x=other.x + rank).together)
    notes.refused("other_settings", case("vectors", rate=1e-3 + rank).together)
    detectors(notes, "detector")
    local_pairs_only(notes)
    last = case("vectors", steps=1)
    run_together(last.together(), "CSD")
    dist.destroy_process_group()
    last.model(last.x, last.x).sum().backward()  # nothing of the group may cling to the model
    sys.stderr.flush()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the two processes have left behind."""
    place = tmp_path_factory.mktemp("parallel")
    alone, steps = case("images").alone(), 7
    list(islice(checkpointed(alone, place / "alone", store.fingerprint("cpu", "images"), every=0.0), steps))
    spawn(process, (place,), nprocs=PROCESSES)
    return place


def results(folder: Path, name: str) -> list[dict[str, Tensor]]:
    return [store.load(folder / f"{name}.{rank}", "result")[0] for rank in range(PROCESSES)]
