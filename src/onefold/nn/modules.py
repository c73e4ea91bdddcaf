"""Calls, hooks and lookups in any module, which they leave unchanged."""

import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onefold.core.batches import batch_tensors, map_batch
from onefold.errors import InputError, LayerError
from onefold.types import Batch

KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@contextmanager
def evaluation_mode(net: nn.Module) -> Iterator[None]:
    """Set evaluation mode, and restore the mode of every module afterwards."""
    modes = {module: module.training for module in net.modules()}
    net.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def call(net: nn.Module, x: Batch) -> Any:
    """Return net(x), net(*x) or net(**x).

    A dict is passed as one argument if `forward` has a single parameter of another name.
    """
    if isinstance(x, Tensor):
        return net(x)
    if not isinstance(x, Mapping):
        return net(*x)
    parameters = inspect.signature(net.forward).parameters
    name, kinds = next(iter(parameters), ""), {parameter.kind for parameter in parameters.values()}
    any_key = inspect.Parameter.VAR_KEYWORD in kinds
    if len(parameters) != 1 or name in x or any_key:
        accepted = {key: p.default is inspect.Parameter.empty for key, p in parameters.items() if p.kind in KEYWORDS}
        check_keys(f"{type(net).__name__}.forward", accepted | (dict.fromkeys(x, False) if any_key else {}), x)
        return net(**x)
    try:
        return net(x)
    except (TypeError, AttributeError) as error:  # errors of tensor functions called on a dict
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:200]
        raise InputError(
            f"{type(net).__name__}.forward: failed on samples that are dicts with the keys {_listed(x)} ({reason}). "
            f"If {name!r} is to be a tensor, give it the key {name!r}, and leave out the other keys."
        ) from error


def check_keys(name: str, takes: Mapping[str, bool], x: Mapping[str, Tensor]) -> None:
    """Raise InputError for keys that a model does not take, or if a required key (True in `takes`) is missing."""
    extra = [key for key in x if key not in takes]
    absent = [key for key, needed in takes.items() if needed and key not in x]
    if extra or absent:
        problems = [f"takes no {_listed(extra)}"] * bool(extra) + [f"needs {_listed(absent)}"] * bool(absent)
        raise InputError(
            f"{name}: {' and '.join(problems)}, the samples have the keys {_listed(x)}. "
            "Give each sample the keys that the model takes, and no others."
        )


def to_model(net: nn.Module, x: Batch) -> Batch:
    """Return a copy of the batch on the model's device, with floats in the model's precision.

    It is a copy because a model may work in place, and the batch may be the user's data.
    """
    first = next(net.parameters(), None)
    if first is None:
        return map_batch(lambda t: t.clone(), x)
    return map_batch(lambda t: t.to(first.device, first.dtype if t.is_floating_point() else None, copy=True), x)


def find_layer(net: nn.Module, name: str) -> nn.Module:
    """Return the submodule with this name; raise LayerError with similar names if there is none."""
    name = str(name)
    layers = {path: module for path, module in net.named_modules() if path}
    if name not in layers:
        near = difflib.get_close_matches(name, layers, n=3, cutoff=0.3) or list(layers)[-3:]
        hint = f"did you mean {', '.join(map(repr, near))}?" if near else "it has no named layers at all"
        raise LayerError(f"{type(net).__name__} has no layer {name!r}: {hint}", argument="layer")
    return layers[name]


def last_linear(net: nn.Module) -> nn.Module:
    """Return the dense layer that was registered last: the head of most models."""
    linear = [module for module in net.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise LayerError(
            f"{type(net).__name__} has no nn.Linear layer", argument="layer", hint="Name the layer whose output to use."
        )
    return linear[-1]


def first_dense(net: nn.Module) -> nn.Module:
    """Return the first layer of a model's dense head: the last nn.Linear, or after convolutions the first of several.

    Dense layers after a convolutional trunk discard what the task does not need.
    """
    weighted = [m for m in net.modules() if not list(m.children()) and next(m.parameters(), None) is not None]
    head = [last_linear(net)]
    before = weighted[: weighted.index(head[0])]
    while before and isinstance(before[-1], nn.Linear):
        head.append(before.pop())
    convolutional = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return head[-1] if before and isinstance(before[-1], convolutional) else head[0]


def tap(net: nn.Module, layer: nn.Module, x: Batch, *, before: bool) -> Tensor:
    """Return the input of `layer` (if `before`) or its output when `net` runs on `x`, as rows [N, D]."""
    seen: list[Tensor] = []

    def keep(value: Any) -> None:
        tensor = _first_tensor(value)
        seen[:] = (
            [] if tensor is None else [tensor.detach().clone()]
        )  # a copy, because the next layer may work in place

    def keep_input(_module: nn.Module, args: tuple[Any, ...]) -> None:
        keep(args)

    def keep_output(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        keep(output)

    hook = layer.register_forward_pre_hook(keep_input) if before else layer.register_forward_hook(keep_output)
    try:
        with evaluation_mode(net), torch.no_grad():
            call(net, to_model(net, x))
    finally:
        hook.remove()
    if not seen:
        raise LayerError(f"the layer {type(layer).__name__} gave no tensor when {type(net).__name__} ran")
    value = seen[0]
    count = batch_tensors(x)[0].shape[0]  # not len(): while a model is exported, this is a symbol
    if value.ndim < 2 or value.shape[0] != count:
        raise LayerError(
            f"the layer {type(layer).__name__} gave a tensor of shape {tuple(value.shape)} for {count} "
            "samples: name a layer whose first axis counts samples"
        )
    return value.flatten(1)


@torch.no_grad()
def run_model(net: nn.Module, x: Batch) -> Tensor:
    """Return the output of `net` in evaluation mode, as rows [N, D]."""
    with evaluation_mode(net):
        return flattened(call(net, to_model(net, x)))


def flattened(output: Any) -> Tensor:
    """Return the first tensor of a model's output, as rows."""
    value = _first_tensor(output)
    if value is None or value.ndim < 2:
        raise LayerError("the model's output has no row of numbers per sample", argument="layer", hint="Name a layer.")
    return value.flatten(1)


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((tensor for item in items if (tensor := _first_tensor(item)) is not None), None)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
