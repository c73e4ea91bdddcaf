"""Empirical neural tangent kernel of any module, in blocks under a memory limit."""

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from onefold.core.batches import batch_length, batch_tensors, map_batch
from onefold.core.runtime import available, require
from onefold.errors import InputError, LayerError
from onefold.nn.modules import call, evaluation_mode, to_model
from onefold.types import Batch


class EmpiricalNTK:
    """Empirical NTK of a model, Θ(x, x′) = ∇_θ f(x)ᵀ ∇_θ f(x′) (Eq. 4), at its current parameters, in float64.

    For a model with several outputs, `full` returns a matrix per pair of inputs; the kernel is the mean of its
    diagonal.

    Args:
        net: The model.
        params: Names of parameters, with wildcards; by default all.
        memory: Limit in bytes; by default half of the free memory.

    Raises:
        LayerError: The model has no such parameters.
    """

    def __init__(self, net: nn.Module, params: Sequence[str] | None = None, *, memory: int | None = None) -> None:
        named = dict(net.named_parameters())
        if not named:
            raise LayerError(f"{type(net).__name__} has no parameters, so it has no tangent kernel")
        patterns = ["*"] if params is None else [params] if isinstance(params, str) else list(params)
        for pattern in patterns or ["(nothing)"]:
            if not any(fnmatch(name, pattern) for name in named):
                raise LayerError(
                    f"no parameter of {type(net).__name__} is called {pattern!r}; it has {', '.join(named)}"
                )
        self._net = net
        self._moving = {n: p.detach() for n, p in named.items() if any(fnmatch(n, pattern) for pattern in patterns)}
        rest = {**named, **dict(net.named_buffers())}
        self._fixed = {name: t.detach() for name, t in rest.items() if name not in self._moving}
        self._memory = memory

    def full(self, x1: Batch, x2: Batch) -> Float64[Tensor, "n1 n2 outputs outputs"]:
        """Return Θ(x, x′) for every pair of inputs and every pair of outputs.

        Args:
            x1: N1 inputs.
            x2: N2 inputs.

        Returns:
            Kernel matrices [N1, N2, outputs, outputs].

        Raises:
            NotEnoughMemoryError: The result does not fit into the memory limit.
        """
        n1, n2 = batch_length(x1), batch_length(x2)
        outputs, rows = self._plan(x1, lambda outputs: n1 * n2 * outputs**2)
        result = torch.zeros(n1, n2, outputs, outputs, dtype=torch.float64, device=self._device)
        for i, left, j, right in self._pairs(x1, x2, rows):
            k = _products([a.flatten(0, 1) for a in left], [b.flatten(0, 1) for b in right])
            k = k.reshape(len(left[0]), outputs, len(right[0]), outputs)
            result[i : i + len(left[0]), j : j + len(right[0])] = k.transpose(1, 2)
        return result.to(batch_tensors(x1)[0].device)

    def __call__(self, x1: Batch, x2: Batch) -> Float64[Tensor, "n1 n2"]:
        """Return Θ(x, x′) for every pair, the mean over the outputs.

        Args:
            x1: N1 inputs.
            x2: N2 inputs.

        Returns:
            Kernel matrix [N1, N2].
        """
        n1, n2 = batch_length(x1), batch_length(x2)
        outputs, rows = self._plan(x1, lambda _: n1 * n2)
        result = torch.zeros(n1, n2, dtype=torch.float64, device=self._device)
        for i, left, j, right in self._pairs(x1, x2, rows):
            result[i : i + len(left[0]), j : j + len(right[0])] = _products(left, right) / outputs
        return result.to(batch_tensors(x1)[0].device)

    def diag(self, x: Batch) -> Float64[Tensor, " n"]:
        """Return Θ(x, x), the mean over the outputs.

        Args:
            x: N inputs.

        Returns:
            Diagonal of the kernel matrix, [N].
        """
        n = batch_length(x)
        outputs, rows = self._plan(x, lambda _: n)
        result = torch.zeros(n, dtype=torch.float64, device=self._device)
        for i, block in self._blocks(x, rows):
            for gradient in block:
                result[i : i + len(gradient)] += gradient.double().flatten(1).square().sum(1) / outputs
        return result.to(batch_tensors(x)[0].device)

    @property
    def _device(self) -> torch.device:
        return next(iter(self._moving.values())).device

    def _plan(self, x: Batch, entries: Callable[[int], int]) -> tuple[int, int]:
        """Return the number of outputs, and the number of samples per block whose gradients fit into memory."""
        value, activations = self._try_one(map_batch(lambda t: t[:1], x))
        if not isinstance(value, Tensor) or value.ndim > 2:
            raise InputError("a tangent kernel needs a model whose output is one tensor [N] or [N, outputs]")
        outputs = value.numel()
        limit = available(self._device) // 2 if self._memory is None else self._memory
        count = sum(p.numel() for p in self._moving.values())
        # A sample's gradients, their copies in float64, and the activations that each output is differentiated through.
        row = outputs * count * (value.dtype.itemsize + 8) + (1 + outputs) * activations
        result = 8 * entries(outputs)
        require(
            result + 2 * row,
            limit,
            what=f"a tangent kernel of {entries(outputs):,} entries, {outputs} outputs and {count:,} parameters",
            way_out="use fewer samples, params=[…] for some of the parameters, kernels.last_layer, or a larger memory=",
        )
        rows = max(1, (limit - result) // (2 * row))
        while rows > 1 and 2 * rows * row + 16 * (rows * outputs) ** 2 > limit - result:  # two blocks of products
            rows //= 2
        return outputs, rows

    def _try_one(self, sample: Batch) -> tuple[Any, int]:
        """Return the model's output for one sample, and the bytes of all layer outputs."""
        sizes: list[int] = []

        def measure(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor):
                sizes.append(output.nbytes)

        hooks = [module.register_forward_hook(measure) for module in self._net.modules()]
        try:
            with evaluation_mode(self._net), torch.no_grad():
                return call(self._net, to_model(self._net, sample)), sum(sizes)
        finally:
            for hook in hooks:
                hook.remove()

    def _pairs(self, x1: Batch, x2: Batch, rows: int) -> Iterator[tuple[int, list[Tensor], int, list[Tensor]]]:
        """Yield every pair of blocks of `x1` and `x2` with their start rows and gradients."""
        for i, left in self._blocks(x1, rows):
            both = x1 is x2 and len(left[0]) == batch_length(x1)
            for j, right in [(i, left)] if both else self._blocks(x2, rows):
                yield i, left, j, right

    def _blocks(self, x: Batch, rows: int) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield the start row and the gradients [rows, outputs, *parameter] of each block of samples."""

        def output(moving: dict[str, Tensor], sample: Batch) -> Tensor:
            one = map_batch(lambda t: t[None], sample)
            tensors = {**moving, **self._fixed}
            return functional_call(_Caller(self._net), {f"net.{k}": v for k, v in tensors.items()}, (one,)).reshape(-1)

        for start in range(0, batch_length(x), rows):
            part = to_model(self._net, map_batch(lambda t, s=start: t[s : s + rows], x))
            with evaluation_mode(self._net):
                gradients = vmap(jacrev(output), (None, 0))(self._moving, part)
            yield start, list(gradients.values())


def _products(left: Sequence[Tensor], right: Sequence[Tensor]) -> Float64[Tensor, "a b"]:
    """Return the inner products of gradients, row by row, summed over all parameters."""
    total = torch.zeros(len(left[0]), len(right[0]), dtype=torch.float64, device=left[0].device)
    for a, b in zip(left, right, strict=True):
        total.addmm_(a.double().flatten(1), b.double().flatten(1).T)
    return total


class _Caller(nn.Module):
    """Module that calls a model by `call`."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Batch) -> Tensor:
        return call(self.net, x)


def empirical_ntk(net: nn.Module, params: Sequence[str] | None = None, *, memory: int | None = None) -> EmpiricalNTK:
    """Return the empirical NTK of a model at its current parameters.

    Args:
        net: The model; it is not changed.
        params: Names of the parameters to differentiate, with wildcards; by default all.
        memory: Limit in bytes, by default half of the free memory. A call that cannot fit raises an error first.

    Returns:
        The kernel.

    Raises:
        LayerError: The model has no such parameters.
    """
    return EmpiricalNTK(net, params, memory=memory)
