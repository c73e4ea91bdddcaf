"""CSD's training on several devices: one process for each, started by torchrun, and one loss of the whole minibatch.

The loss couples all pairs of a minibatch, so losses of its parts do not add up to it. Every process draws the same
minibatch, computes vectors and labels of its own rows, and exchanges them with the others; each then has the loss of
all pairs. Up to rounding, the weights are those of one process with the whole minibatch, and so are the checkpoints:
a training may go on with another number of processes.
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
from onefold.distil.loss import loss_over
from onefold.distil.model import Similarity
from onefold.errors import InputError, TrainingError
from onefold.nn.augment import UNIFORMS
from onefold.nn.train import Draws, Recipe, Training, Update, run
from onefold.types import Indexable, Kernel

COMPARED = 8  # samples by which processes find out whether they were given the same data


def shared_by_processes() -> bool:
    """Whether this process is one of several that train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gathered(rows: Shaped[Tensor, "share *row"]) -> Shaped[Tensor, "n *row"]:
    """The rows of all processes, one process after the other; gradients flow to this one's rows only.

    All processes compute the same loss of the gathered rows, and ∂L/∂θ is the sum of what flows through each process's
    rows. DistributedDataParallel takes the mean over the W processes instead of the sum; the gradient of the rows is
    therefore multiplied by W, and W · 1/W leaves ∂L/∂θ of the whole minibatch. (The differentiable all_gather of
    torch.distributed.nn has the same factor, as it adds up W equal gradients; but torch 2.13 deprecates it, and the
    adding up is one more exchange in every step.)
    """
    world = dist.get_world_size()
    own = rows.detach().contiguous()
    parts = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(parts, own)
    if rows.requires_grad:
        rows.register_hook(lambda gradient: world * gradient)
        parts[dist.get_rank()] = rows
    return torch.cat(parts)


class SharedLabels(Labels):
    """Θ(x, c) for all pairs of a minibatch, in the order of `gathered`, from each process's own rows."""

    @torch.no_grad()
    def __call__(self, index: Int[Tensor, " share"], x: Tensor, c: Tensor) -> Float[Tensor, "n n"]:
        with torch.autocast(x.device.type, enabled=False):
            if self.features is None:
                return gathered(self._from_kernel(x, gathered(c)))
            left = gathered(self._prepared(self.features(x)) if self.cache is None else self.cache[index])
            right = left if c is x else gathered(self._prepared(self.features(c)))
            return left @ right.T


class Towers(nn.Module):
    """φ(x) and ψ(c), and with `small_init` what they were at the start, in the one forward pass that DDP wants."""

    def __init__(self, model: Similarity) -> None:
        super().__init__()
        self.towers = nn.ModuleList([model.phi, model.psi, *model.start])

    def forward(self, x: Any, c: Any) -> list[Tensor]:
        return [net(side) for net, side in zip(self.towers, (x, c, x, c), strict=False)]


class SharedSimilarity:
    """g(x, c) of `model` for all pairs of a minibatch, in the order of `gathered`, from each process's own rows."""

    def __init__(self, model: Similarity) -> None:
        self.towers = DistributedDataParallel(Towers(model))  # all begin with the weights and buffers of process 0
        self.pairs = Similarity(nn.Identity(), nn.Identity(), normalise=model.normalise, scale=model.scale)

    def __call__(self, x: Any, c: Any) -> Float[Tensor, "n n"]:
        phi, psi, *start = map(gathered, self.towers(x, c))
        return self.pairs(phi, psi) - self.pairs(*start) if start else self.pairs(phi, psi)


class ParallelTraining(Training):
    """A training that begins in every process where it does in process 0, which alone knows of checkpoints."""

    begun = False

    def __iter__(self) -> Iterator[Update]:
        self.begun = True
        problem = _from_first(b"", self.device)
        if problem:
            raise TrainingError(f"process 0 could not begin: {problem.decode()}")
        if dist.get_rank() == 0:
            plain = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state().items()}
            _from_first(to_safetensors(plain), self.device)
        else:
            self.restore(from_safetensors(_from_first(b"", self.device)))
        yield from super().__iter__()

    def call_off(self, error: Exception) -> None:
        """Tell the others, who wait for process 0 to begin, that it will not."""
        _from_first((str(error) or type(error).__name__).encode(), self.device)


def run_together(
    training: ParallelTraining,
    label: str,
    *,
    checkpoint: str | Path | None = None,
    identity: Sequence[Any] = (),
    show: bool | None = None,
) -> float:
    """`train.run` in every process: process 0 shows progress, reads and writes the checkpoint; all end alike."""
    if dist.get_rank() > 0:
        return run(training, label, show=False)
    try:
        return run(training, label, checkpoint=checkpoint, identity=identity, show=show)
    except Exception as error:
        if not training.begun:
            training.call_off(error)
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
    """`distillation`, shared by all processes of torch.distributed: each calls it with the same arguments but `device`.

    Process r of W takes rows r, r + W, … of every minibatch. Rows are independent of each other but in a `Mixture` of
    contexts: its shares are rounded to whole rows of each process. On a GPU, steps are not captured as graphs.
    """
    _check_processes(recipe.batch, device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    few = x[torch.arange(min(COMPARED, len(x)), device=device)]
    _check_agreement([asdict(recipe), seed, len(x), [p.shape for p in parameters], *named(few).values()], device)
    similarity = SharedSimilarity(model)
    inputs = x if encode is None else Encoded(x, encode, device)
    labels = SharedLabels(kernel, inputs, normalise=model.normalise, device=device)
    own = isinstance(contexts, TrainContexts)
    rows = slice(dist.get_rank(), None, dist.get_world_size())

    def loss(integers: Tensor, uniforms: Tensor) -> Tensor:
        index = integers[rows, 0] % len(x)
        batch = context = inputs[index]
        if not own:
            context = contexts(batch if encode is None else x[index], integers[rows, 1], uniforms[rows])
            context = context if encode is None else encode(context)
        return loss_over(model.pairs, similarity(batch, context), labels(index, batch, context))

    draws = Draws(recipe.batch, 2, UNIFORMS, seed, device)
    return ParallelTraining(parameters, loss, recipe, draws, captured=False, bf16=True)


def _check_processes(batch: int, device: torch.device) -> None:
    """Processes that can talk about tensors on this device, and a minibatch that they can share."""
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError("no process group: start with torchrun and call torch.distributed.init_process_group() first")
    world, backends = dist.get_world_size(), dist.get_backend_config()
    if f"{device.type}:" not in backends:
        raise InputError(f"the process group speaks {backends}, not about {device.type}: change its backend or device=")
    if batch % world != 0:
        below, above = batch // world * world, (batch // world + 1) * world
        sizes = f"{below} or {above}" if below >= 2 else f"{above}"
        raise InputError(f"{world} processes cannot share batches of {batch} evenly: use a multiple, such as {sizes}")


def _check_agreement(settings: Sequence[Any], device: torch.device) -> None:
    """The same settings everywhere; the first exchange, where processes on one GPU find out about each other."""
    digest = torch.frombuffer(bytearray.fromhex(fingerprint(*settings)), dtype=torch.uint8)
    try:
        digests = gathered(digest[None].to(device))
    except dist.DistBackendError as error:
        raise InputError(
            "the processes cannot exchange data; does each have a GPU of its own, as with "
            f"device=f\"cuda:{{os.environ['LOCAL_RANK']}}\"? ({str(error).splitlines()[-1]})"
        ) from error
    if (digests != digests[0]).any():
        raise InputError("the processes were given different data or settings: give all of x to each of them")


def _from_first(content: bytes, device: torch.device) -> bytes:
    """What process 0 has as `content`, in every process."""
    size = torch.tensor(len(content), device=device)
    dist.broadcast(size, src=0)
    if not size:
        return b""
    mine = bytearray(content) if dist.get_rank() == 0 else bytearray(int(size))
    buffer = torch.frombuffer(mine, dtype=torch.uint8).to(device)
    dist.broadcast(buffer, src=0)
    return buffer.cpu().numpy().tobytes()
