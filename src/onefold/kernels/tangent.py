"""The empirical neural tangent kernel of any module, in blocks that respect a memory cap."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from onefold.errors import InputError, LayerError
from onefold.inputs import batch_length, map_batch
from onefold.kernels.borrow import borrowed, call, to_model
from onefold.memory import available, require
from onefold.types import Batch


class EmpiricalNTK:
    """Eq. 4 at the model's present parameters: Θ(x, x′) = ∇_θ f(x)ᵀ ∇_θ f(x′), over all or some parameters.

    A model of several outputs has a matrix per pair of inputs (`full`); as a kernel it is the mean of its diagonal.
    """

    def __init__(self, net: nn.Module, params: Sequence[str] | None = None, *, memory: int | None = None) -> None:
        named = dict(net.named_parameters())
        if not named:
            raise LayerError(f"{type(net).__name__} has no parameters, so it has no tangent kernel")
        patterns = ["*"] if params is None else list(params)
        for pattern in patterns:
            if not any(fnmatch(name, pattern) for name in named):
                raise LayerError(
                    f"no parameter of {type(net).__name__} is called {pattern!r}; it has {', '.join(named)}"
                )
        self._net = net
        self._moving = {n: p.detach() for n, p in named.items() if any(fnmatch(n, pattern) for pattern in patterns)}
        rest = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        self._fixed = {name: t.detach() for name, t in rest.items() if name not in self._moving}
        self._memory = memory

    def full(self, x1: Batch, x2: Batch) -> Float[Tensor, "n1 n2 outputs outputs"]:
        """Θ(x, x′) for every pair of inputs and of outputs."""
        n1, n2 = batch_length(x1), batch_length(x2)
        outputs, rows = self._plan(x1, n1 * n2)
        result = torch.zeros(n1, n2, outputs, outputs, dtype=self._dtype, device=self._device)
        for i, left in self._blocks(x1, rows):
            for j, right in self._blocks(x2, rows):
                k = sum(
                    a.flatten(2).flatten(0, 1) @ b.flatten(2).flatten(0, 1).T for a, b in zip(left, right, strict=True)
                )
                assert isinstance(k, Tensor)
                k = k.reshape(len(left[0]), outputs, len(right[0]), outputs)
                result[i : i + len(left[0]), j : j + len(right[0])] = k.transpose(1, 2)
        return result

    def __call__(self, x1: Batch, x2: Batch) -> Float[Tensor, "n1 n2"]:
        return self.full(x1, x2).diagonal(dim1=2, dim2=3).mean(-1)

    def diag(self, x: Batch) -> Float[Tensor, " n"]:
        _, rows = self._plan(x, batch_length(x))
        blocks = (block for _, block in self._blocks(x, rows))
        return torch.cat([sum(j.flatten(2).square().sum(2) for j in block).mean(1) for block in blocks])  # type: ignore

    @property
    def _device(self) -> torch.device:
        return next(iter(self._moving.values())).device

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self._moving.values())).dtype

    def _plan(self, x: Batch, pairs: int) -> tuple[int, int]:
        """Number of outputs, and how many samples' gradients can be held at once on either side."""
        with borrowed(self._net), torch.no_grad():
            value = call(self._net, to_model(self._net, map_batch(lambda t: t[:1], x)))
        if not isinstance(value, Tensor) or value.ndim > 2:
            raise InputError("a tangent kernel needs a model whose output is one tensor [N] or [N, outputs]")
        outputs = value.numel()
        item = self._dtype.itemsize
        limit = available(self._device) // 2 if self._memory is None else self._memory
        count = sum(p.numel() for p in self._moving.values())
        result, row = pairs * outputs**2 * item, 2 * outputs * count * item
        require(
            result + 2 * row,
            limit,
            what=f"the tangent kernel of {pairs:,} pairs, {outputs} outputs and {count:,} parameters",
            way_out="use fewer samples, params=[…] for some of the parameters, kernels.last_layer, or a larger memory=",
        )
        return outputs, max(1, (limit - result) // (2 * row))

    def _blocks(self, x: Batch, rows: int) -> Iterator[tuple[int, list[Tensor]]]:
        """(start, gradients [rows, outputs, *parameter] of each parameter) for one block of samples after another."""

        def output(moving: dict[str, Tensor], sample: Batch) -> Tensor:
            one = map_batch(lambda t: t[None], sample)
            tensors = {**moving, **self._fixed}
            return functional_call(_Caller(self._net), {f"net.{k}": v for k, v in tensors.items()}, (one,)).reshape(-1)

        for start in range(0, batch_length(x), rows):
            part = to_model(self._net, map_batch(lambda t, s=start: t[s : s + rows], x))
            with borrowed(self._net):
                gradients = vmap(jacrev(output), (None, 0))(self._moving, part)
            yield start, list(gradients.values())


class _Caller(nn.Module):
    """Hands a batch to a model in the way that `call` decides."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Batch) -> Tensor:
        return call(self.net, x)


def empirical_ntk(net: nn.Module, params: Sequence[str] | None = None, *, memory: int | None = None) -> EmpiricalNTK:
    """The tangent kernel of `net` as it is, over all parameters or those that `params` names (wildcards allowed).

    `memory` caps the bytes used, half of what is free by default; a job that cannot fit is refused before it starts.
    """
    return EmpiricalNTK(net, params, memory=memory)
