"""The training loop: eager on a CPU; on a GPU a step is captured as a CUDA graph, and compiled if that pays.

The random numbers of a step are two tensors (`Draws`) that are filled before the step. The loss is then a pure function
of parameters and tensors: it can be compiled and captured, and it resumes and repeats exactly. The loop is a generator;
progress bars and checkpoints are generators around it.
"""

import functools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn

from onefold.core import storage
from onefold.core.arguments import check_integer, check_number, check_path
from onefold.core.optimisers import adam_to_tensors, restore_adam
from onefold.core.progress import show_progress
from onefold.errors import FileError, TrainingError
from onefold.nn.cuda_graphs import replayed, side_by_side
from onefold.nn.cudnn import tune_cudnn
from onefold.types import Resumable

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(integers [batch, k], uniforms [batch, m]) -> scalar loss."""

CHECKPOINT = "training checkpoint"
LARGEST_BATCH = 2**24  # bounds a recipe that comes from an untrusted file
COMPILED_FROM = 30_000  # steps; for fewer, compiling costs more time than it saves


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a fit with Adam: linear warm-up, then linear decay to zero (paper, Table "hpsettingsood").

    Args:
        steps: Number of gradient steps.
        batch: Samples per minibatch, at least 2.
        lr: Largest learning rate.
        warmup: Steps of linear warm-up, fewer than `steps`.
        adam_eps: Adam's ε.

    Raises:
        InputError: If a value is out of its range.
    """

    steps: int = 4000
    batch: int = 256
    lr: float = 1e-3
    warmup: int = 0
    adam_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_integer(self.steps, "steps")
        check_integer(self.batch, "batch", 2, LARGEST_BATCH)
        check_integer(self.warmup, "warmup", 0, self.steps - 1)
        check_number(self.lr, "lr")
        check_number(self.adam_eps, "adam_eps")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step.

        Args:
            step: Step number 0, 1, …, steps − 1.

        Returns:
            Learning rate.
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return self.lr * (self.steps - step) / (self.steps - self.warmup)


class Draws:
    """Random numbers of a step: integers from [0, 2⁶²) that index data, and uniforms from [0, 1)."""

    integers: Int[Tensor, "batch k"]
    uniforms: Float[Tensor, "batch m"]

    def __init__(self, batch: int, integers: int, uniforms: int, seed: int, device: torch.device) -> None:
        self.generator = Generator(device).manual_seed(seed)
        self.integers = torch.zeros(batch, integers, dtype=torch.int64, device=device)
        self.uniforms = torch.zeros(batch, uniforms, dtype=torch.float32, device=device)

    def refill(self) -> None:
        """Draw new numbers into the same tensors."""
        self.integers.random_(0, 2**62, generator=self.generator)
        self.uniforms.uniform_(generator=self.generator)


class Update(NamedTuple):
    """Result of a step: the number of steps done, and the loss, still on its device."""

    step: int
    loss: Float[Tensor, ""]


class Training:
    """Minimisation of a loss with Adam; iterating it runs the steps and yields one `Update` each. Iterate it once.

    After `restore` it starts from the restored step. Several losses are summed; each must have parameters of its own,
    and on a GPU they run concurrently. On a GPU a step is `captured` once and replayed as a graph, and with `bf16` the
    networks run in bfloat16. Compiling makes a replayed step a third faster still but takes half a minute; by default
    only long trainings are `compiled`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        loss: Loss | Sequence[Loss],
        recipe: Recipe,
        draws: Draws,
        *,
        captured: bool = True,
        compiled: bool | None = None,
        bf16: bool = False,
    ) -> None:
        self.device = device = draws.integers.device
        self.parameters, self.recipe, self.draws = list(parameters), recipe, draws
        self.losses = [loss] if callable(loss) else list(loss)
        self.on_gpu = device.type == "cuda"
        self.captured, self.bf16 = captured and self.on_gpu, bf16 and self.on_gpu
        self.compiled = self.captured and (recipe.steps >= COMPILED_FROM if compiled is None else compiled)
        self.step = 0
        self.tail = torch.zeros(2, device=device)  # sum and number of the losses in the last tenth of the steps
        self.lr = torch.tensor(recipe.lr, device=device) if self.on_gpu else recipe.lr
        self.optimiser = torch.optim.Adam(
            self.parameters, lr=self.lr, eps=recipe.adam_eps, fused=True, capturable=self.on_gpu
        )

    @property
    def steps(self) -> int:
        return self.recipe.steps

    def __iter__(self) -> Iterator[Update]:
        gradient_step = self._graphed_step() if self.captured else self._eager_step
        while self.step < self.recipe.steps:
            self.draws.refill()
            self._set_rate(self.recipe.rate(self.step))
            loss = gradient_step()
            self.step += 1
            if 10 * self.step > 9 * self.recipe.steps:
                self.tail[0] += loss
                self.tail[1] += 1
            yield Update(self.step, loss)
        self.optimiser.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return every tensor that the next step depends on."""
        parameters = {str(i): parameter for i, parameter in enumerate(self.parameters)}
        return {
            "step": torch.tensor(self.step),
            "generator": self.draws.generator.get_state(),
            "tail": self.tail,
            **storage.with_prefix("parameters", parameters),
            **storage.with_prefix("adam", adam_to_tensors(self.optimiser)),
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Resume from the `state()` of a training with the same settings and shapes."""
        parameters = storage.under_prefix("parameters", tensors)
        if parameters.keys() != {str(i) for i in range(len(self.parameters))}:
            raise FileError("checkpoint: damaged, or made by another version. Delete it to train again.")
        restore_adam(storage.under_prefix("adam", tensors), self.optimiser)
        self.step = int(tensors["step"])
        self.draws.generator.set_state(tensors["generator"])
        self.tail.copy_(tensors["tail"])
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters):
                parameter.copy_(parameters[str(i)])

    def _set_rate(self, rate: float) -> None:
        """Set the learning rate; a captured step reads it from a tensor."""
        if isinstance(self.lr, Tensor):
            self.lr.fill_(rate)
        else:
            for group in self.optimiser.param_groups:
                group["lr"] = rate

    def _eager_step(self, losses: Sequence[Loss] | None = None) -> Tensor:
        """Run one step and return the loss."""
        self.optimiser.zero_grad(set_to_none=True)
        losses = losses or self.losses
        if len(losses) == 1:
            total = self._gradient(losses[0])
        else:
            values = side_by_side([functools.partial(self._gradient, loss) for loss in losses], self.device)
            total = torch.stack(values).sum()
        self.optimiser.step()
        return total

    def _gradient(self, loss_function: Loss) -> Tensor:
        """Add the gradient of one loss to the parameters and return its value."""
        # cuDNN benchmarks its algorithms in the first step: its default for small convolutions is half as fast.
        with torch.enable_grad(), tune_cudnn():
            with torch.autocast("cuda", torch.bfloat16, enabled=self.bf16, cache_enabled=False):
                loss = loss_function(self.draws.integers, self.draws.uniforms)
            loss.backward()
        return loss.detach()

    def _graphed_step(self) -> Callable[[], Tensor]:
        """Return a function that runs one step as a CUDA graph and returns the loss."""
        losses = [torch.compile(loss) if self.compiled else loss for loss in self.losses]
        total = torch.zeros((), device=self.device)

        def step() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler's advice does not concern the user's code
                total.copy_(self._eager_step(losses))

        replay = replayed(step, self.device)

        def next_step() -> Tensor:
            replay()
            return total.clone()

        return next_step


def descend(
    parameters: Sequence[Tensor], loss: Callable[[], Tensor], *, steps: int, rate: float, momentum: float = 0.0
) -> Iterator[Update]:
    """Run full-batch gradient descent in place: v ← momentum · v − rate · ∇L, θ ← θ + v.

    The updates stay in the span of the gradients at initialisation, with momentum too, so that a wide network converges
    to the limit of Eq. 8 and 26. Adam would leave that span.

    Args:
        parameters: Tensors with gradients; changed in place.
        loss: Returns the loss at the current parameters.
        steps: Number of steps.
        rate: Learning rate.
        momentum: Momentum factor in [0, 1).

    Yields:
        The step number from 1 and the loss before the step.
    """
    velocity = [torch.zeros_like(p) for p in parameters]
    for step in range(steps):
        with torch.enable_grad():
            value = loss()
        gradients = torch.autograd.grad(value, parameters)
        with torch.no_grad():
            for p, v, gradient in zip(parameters, velocity, gradients, strict=True):
                p.add_(v.mul_(momentum).add_(gradient, alpha=-rate))
        yield Update(step + 1, value.detach())


def save_checkpoints(training: Resumable, path: Path, fingerprint: str, every: float = 30.0) -> Iterator[Update]:
    """Yield the updates of `training` with a checkpoint at `path`, resumed from if it exists.

    It is saved every `every` seconds and at the end. `fingerprint` identifies data and settings; a checkpoint of
    another run is refused and never overwritten.
    """
    if path.exists():
        tensors, header = storage.load(path, CHECKPOINT)
        if header.get("fingerprint") != fingerprint:
            raise FileError(f"{path}: belongs to a run on other data or settings. Delete it or name another file.")
        training.restore(tensors)
    else:  # fail now if the path cannot be written, not after the first interval
        storage.save(path, CHECKPOINT, training.state(), {"fingerprint": fingerprint, "step": 0})
    written = time.monotonic()
    for update in training:
        done = update.step == training.steps
        if done or time.monotonic() - written >= every:
            storage.save(path, CHECKPOINT, training.state(), {"fingerprint": fingerprint, "step": update.step})
            written = time.monotonic()
        yield update


def show_updates(updates: Iterable[Update], total: int, label: str, show: bool | None = None) -> Iterator[Update]:
    """Yield the updates and display steps, loss and time; by default only if stderr is a terminal."""
    started = time.monotonic()
    with show_progress(label, total, show=show) as display:
        for update in updates:
            display.update(update.step, functools.partial(_describe, update, total, started))
            yield update


def _describe(update: Update, total: int, started: float) -> str:
    """Return a step's number, loss and time; reading the loss waits for the device."""
    seconds = time.monotonic() - started
    return f"{update.step:,}/{total:,}, loss {float(update.loss):.5f}, {seconds:.0f} s"


def run(
    training: Training,
    label: str,
    *,
    checkpoint: str | Path | None = None,
    identity: Sequence[Any] = (),
    show: bool | None = None,
) -> float:
    """Run a training to its end and return the mean loss over the last tenth of the steps.

    A `checkpoint` file is resumed from if it exists, and kept up to date. `identity` lists the data and settings that
    the file must belong to.
    """
    if checkpoint is None:
        updates = iter(training)
    else:
        updates = save_checkpoints(
            training, check_path(checkpoint, "checkpoint"), storage.fingerprint(training.device.type, *identity)
        )
    with show_progress(label, training.steps, show=show) as display:
        started = time.monotonic()
        for update in updates:
            display.update(update.step, functools.partial(_describe, update, training.steps, started))
    if not all(p.isfinite().all() for p in training.parameters):
        raise TrainingError(f"{label}: training diverged at learning rate {training.recipe.lr:g}. Use a smaller one.")
    return float(training.tail[0] / training.tail[1])
