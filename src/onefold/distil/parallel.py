"""Data-parallel training of CSD: one process per device, started by torchrun, and one loss of the whole minibatch.

The loss couples all pairs of a minibatch, so it is not the sum of losses of its parts. Every process draws the same
minibatch, computes vectors and labels of a part of its rows, and exchanges them with the others. Each then computes the
loss of all pairs. Up to rounding, weights and checkpoints are those of a single process, so a training may be resumed
with another number of processes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Shaped
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from onefold.core.batches import named
from onefold.core.storage import fingerprint
from onefold.distil.contexts import Contexts, TrainContexts
from onefold.distil.fit import Encoded, Labels
from onefold.distil.loss import pair_loss
from onefold.distil.model import Similarity
from onefold.errors import InputError, TrainingError
from onefold.nn.augment import UNIFORMS
from onefold.nn.train import Draws, Recipe, Training, Update, run
from onefold.types import Indexable, Kernel

COMPARED = 8  # samples by which processes check that they have the same data


def is_distributed() -> bool:
    """Return True if this process is one of several that train one model."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gather(rows: Shaped[Tensor, "share *row"]) -> Shaped[Tensor, "n *row"]:
    """Return the rows of all processes in the order of their ranks; gradients flow to the rows of this process only.

    All processes compute the same loss of the gathered rows, and ∂L/∂θ is the sum of the gradients through the rows of
    each process. DistributedDataParallel takes their mean over the W processes, so the gradient of the rows is
    multiplied by W here. The differentiable all_gather of torch.distributed.nn has the same factor, but torch 2.13
    deprecates it, and it needs one more exchange per step.
    """
    world = dist.get_world_size()
    local = rows.detach().contiguous()
    parts = [torch.empty_like(local) for _ in range(world)]
    dist.all_gather(parts, local)
    if rows.requires_grad:
        rows.register_hook(lambda gradient: world * gradient)
        parts[dist.get_rank()] = rows
    return torch.cat(parts)


class SharedLabels(Labels):
    """Kernel values of all pairs of a minibatch, in the order of `gather`; each process computes its rows."""

    @torch.no_grad()
    def __call__(
        self, index: Int[Tensor, " share"], x: Tensor, c: Tensor, context_features: Tensor | None = None
    ) -> Float[Tensor, "n n"]:
        del context_features
        with torch.autocast(x.device.type, enabled=False):
            if self.features is None:
                return gather(self._from_kernel(x, gather(c)))
            left = gather(self._normalise(self.features(x)) if self.cache is None else self.cache[index])
            right = left if c is x else gather(self._normalise(self.features(c)))
            return left @ right.T


class _Towers(nn.Module):
    """The networks φ and ψ and, with `small_init`, φ₀ and ψ₀ in one forward pass, as DDP requires."""

    def __init__(self, model: Similarity) -> None:
        super().__init__()
        self.towers = nn.ModuleList([model.phi, model.psi, *model.start])

    def forward(self, x: Any, c: Any) -> list[Tensor]:
        return [net(side) for net, side in zip(self.towers, (x, c, x, c), strict=False)]


class SharedSimilarity:
    """The model for all pairs of a minibatch, in the order of `gather`; each process computes its rows."""

    def __init__(self, model: Similarity) -> None:
        self.towers = DistributedDataParallel(_Towers(model))  # copies the weights of process 0 to all
        self.pairs = Similarity(nn.Identity(), nn.Identity(), normalise=model.normalise, scale=model.scale)

    def __call__(self, x: Any, c: Any) -> Float[Tensor, "n n"]:
        phi, psi, *start = map(gather, self.towers(x, c))
        return self.pairs(phi, psi) - self.pairs(*start) if start else self.pairs(phi, psi)


class ParallelTraining(Training):
    """Training that starts in every process from the state of process 0, which alone handles checkpoints."""

    started = False

    def __iter__(self) -> Iterator[Update]:
        self.started = True
        problem = _broadcast(b"", self.device)
        if problem:
            raise TrainingError(f"process 0 could not start: {problem.decode()}")
        if dist.get_rank() == 0:
            plain = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state().items()}
            _broadcast(to_safetensors(plain), self.device)
        else:
            self.restore(from_safetensors(_broadcast(b"", self.device)))
        yield from super().__iter__()

    def cancel(self, error: Exception) -> None:
        """Raise an error in the other processes, which wait for process 0."""
        _broadcast((str(error) or type(error).__name__).encode(), self.device)


def run_distributed(
    training: ParallelTraining,
    label: str,
    *,
    checkpoint: str | Path | None = None,
    identity: Sequence[Any] = (),
    show: bool | None = None,
) -> float:
    """Call `nn.train.run` in every process; process 0 displays progress and handles the checkpoint."""
    if dist.get_rank() > 0:
        return run(training, label, show=False)
    try:
        return run(training, label, checkpoint=checkpoint, identity=identity, show=show)
    except Exception as error:
        if not training.started:
            training.cancel(error)
        raise


def parallel_distillation(
    model: Similarity,
    x: Indexable,
    kernel: Kernel,
    contexts: Contexts,
    recipe: Recipe,
    seed: int,
    *,
    encode: Callable[[Any], Tensor] | None = None,
    device: torch.device,
) -> ParallelTraining:
    """Return the data-parallel form of `distillation`; every process calls it with the same arguments but `device`.

    Process r of W takes the rows r, r + W, … of every minibatch. Rows are independent of each other, except that the
    shares of a `Mixture` are rounded to whole rows of each process. On a GPU, steps are not captured as graphs.
    """
    _check_processes(recipe.batch, device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    few = x[torch.arange(min(COMPARED, len(x)), device=device)]
    _check_agreement([asdict(recipe), seed, len(x), [p.shape for p in parameters], *named(few).values()], device)
    similarity = SharedSimilarity(model)
    inputs = x if encode is None else Encoded(x, encode, device)
    labels = SharedLabels(kernel, inputs, normalise=model.normalise, device=device)
    same = isinstance(contexts, TrainContexts)  # contexts are the samples
    rows = slice(dist.get_rank(), None, dist.get_world_size())

    def loss(integers: Tensor, uniforms: Tensor) -> Tensor:
        index = integers[rows, 0] % len(x)
        batch = context = inputs[index]
        if not same:
            context = contexts(batch if encode is None else x[index], index, integers[rows, 1], uniforms[rows])
            context = context if encode is None else encode(context)
        return pair_loss(model.pairs, similarity(batch, context), labels(index, batch, context))

    draws = Draws(recipe.batch, 2, UNIFORMS, seed, device)
    return ParallelTraining(parameters, loss, recipe, draws, captured=False, bf16=True)


def _check_processes(batch: int, device: torch.device) -> None:
    """Raise InputError without a process group for this device, or if the minibatch cannot be divided."""
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError("no process group. Start with torchrun and call torch.distributed.init_process_group() first.")
    world, backends = dist.get_world_size(), dist.get_backend_config()
    if f"{device.type}:" not in backends:
        raise InputError(
            f"process group: backend {backends} does not support {device.type}. Change the backend or device=."
        )
    if batch % world != 0:
        below, above = batch // world * world, (batch // world + 1) * world
        sizes = f"{below} or {above}" if below >= 2 else f"{above}"
        raise InputError(f"batch: {batch} is not a multiple of the {world} processes. Use a multiple, such as {sizes}.")


def _check_agreement(settings: Sequence[Any], device: torch.device) -> None:
    """Raise InputError if settings differ between processes. As the first exchange it also fails on a shared GPU."""
    digest = torch.frombuffer(bytearray.fromhex(fingerprint(*settings)), dtype=torch.uint8)
    try:
        digests = gather(digest[None].to(device))
    except dist.DistBackendError as error:
        raise InputError(
            f"processes: cannot exchange data ({str(error).splitlines()[-1]}). Use one GPU per process, as with "
            "device=f\"cuda:{os.environ['LOCAL_RANK']}\"."
        ) from error
    if (digests != digests[0]).any():
        raise InputError("processes: data or settings differ. Pass all of x to each of them.")


def _broadcast(content: bytes, device: torch.device) -> bytes:
    """Return the `content` of process 0 in every process."""
    size = torch.tensor(len(content), device=device)
    dist.broadcast(size, src=0)
    if not size:
        return b""
    bytes_ = bytearray(content) if dist.get_rank() == 0 else bytearray(int(size))
    buffer = torch.frombuffer(bytes_, dtype=torch.uint8).to(device)
    dist.broadcast(buffer, src=0)
    return buffer.cpu().numpy().tobytes()
