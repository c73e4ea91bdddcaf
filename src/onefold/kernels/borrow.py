"""Looking inside a model that belongs to somebody else, and leaving it as it was."""

import difflib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onefold.errors import LayerError
from onefold.inputs import batch_length, map_batch
from onefold.types import Batch


@contextmanager
def borrowed(net: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's own mode again afterwards, whatever happens."""
    modes = {module: module.training for module in net.modules()}
    net.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def call(net: nn.Module, x: Batch) -> Any:
    """net(x), net(*x) or net(**x); a dict goes in whole where `forward` takes one argument of another name."""
    if isinstance(x, Tensor):
        return net(x)
    if not isinstance(x, Mapping):
        return net(*x)
    parameters = list(inspect.signature(net.forward).parameters.values())
    whole = len(parameters) == 1 and parameters[0].name not in x and parameters[0].kind != parameters[0].VAR_KEYWORD
    return net(x) if whole else net(**x)


def to_model(net: nn.Module, x: Batch) -> Batch:
    """The batch on the model's device, floating-point tensors in the model's precision."""
    first = next(net.parameters(), None)
    if first is None:
        return x
    return map_batch(lambda t: t.to(first.device, first.dtype if t.is_floating_point() else None), x)


def find_layer(net: nn.Module, name: str) -> nn.Module:
    """The submodule of that name, or an error that names the nearest ones."""
    name = str(name)
    layers = {known: module for known, module in net.named_modules() if known}
    if name not in layers:
        near = difflib.get_close_matches(name, layers, n=3, cutoff=0.3) or list(layers)[-3:]
        hint = f"did you mean {', '.join(map(repr, near))}?" if near else "it has no named layers at all"
        raise LayerError(f"{type(net).__name__} has no layer {name!r}: {hint}")
    return layers[name]


def last_linear(net: nn.Module) -> nn.Module:
    """The dense layer that was registered last: the head of most models."""
    linear = [module for module in net.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise LayerError(f"{type(net).__name__} has no nn.Linear layer: name the layer whose output to use, layer='…'")
    return linear[-1]


def tap(net: nn.Module, layer: nn.Module, x: Batch, *, before: bool) -> Tensor:
    """What goes into `layer` (`before`) or comes out of it when `net` runs on `x`, as rows [N, D]."""
    seen: list[Tensor] = []

    def keep(value: Any) -> None:
        tensor = _first_tensor(value)
        seen[:] = [] if tensor is None else [tensor.detach().clone()]  # the next layer may work in place

    def keep_input(_module: nn.Module, args: tuple[Any, ...]) -> None:
        keep(args)

    def keep_output(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        keep(output)

    hook = layer.register_forward_pre_hook(keep_input) if before else layer.register_forward_hook(keep_output)
    try:
        with borrowed(net), torch.no_grad():
            call(net, to_model(net, x))
    finally:
        hook.remove()
    if not seen:
        raise LayerError(f"the layer {type(layer).__name__} gave no tensor when {type(net).__name__} ran")
    value = seen[0]
    if value.ndim < 2 or len(value) != batch_length(x):
        raise LayerError(
            f"the layer {type(layer).__name__} gave a tensor of shape {tuple(value.shape)} for {batch_length(x)} "
            "samples: name a layer whose first axis counts samples"
        )
    return value.flatten(1)


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((found for item in items if (found := _first_tensor(item)) is not None), None)
