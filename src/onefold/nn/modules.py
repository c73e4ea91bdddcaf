"""Calls, hooks and lookups in any module, which they leave unchanged."""

import difflib
import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onefold.core.batches import batch_tensors, map_batch
from onefold.errors import InputError, LayerError
from onefold.types import Batch

MOST_HEADS = 8  # dense layers at the end of a model that may be its classifier
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


@contextmanager
def module_calls(net: nn.Module) -> Iterator[None]:
    """Make torch's transformer layers call their modules, which their fast path does not do, so that hooks run."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    if not enabled or not any(isinstance(module, nn.TransformerEncoderLayer) for module in net.modules()):
        yield
        return
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def call(net: nn.Module, x: Batch) -> Any:
    """Return net(x), net(*x) or net(**x).

    A dict is passed as one argument if `forward` needs a single argument, of another name.
    """
    if isinstance(x, Tensor):
        return net(x)
    if not isinstance(x, Mapping):
        return net(*x)
    parameters = inspect.signature(net.forward).parameters
    any_key = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    accepted = {key: p.default is inspect.Parameter.empty for key, p in parameters.items() if p.kind in KEYWORDS}
    name = next(iter(accepted), "")
    if list(accepted.values()) != [True] or name in x:
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
    first = next(filter(Tensor.is_floating_point, net.parameters()), next(net.parameters(), None))
    if first is None:
        return map_batch(lambda t: t.clone(), x)
    precision = first.dtype if first.is_floating_point() else None
    return map_batch(lambda t: t.to(first.device, precision if t.is_floating_point() else None, copy=True), x)


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


@dataclass(frozen=True)
class Tap:
    """A tensor to read while a model runs: the input or the output of one module.

    Args:
        module: Module to read.
        use: Receives the first tensor of the input or output, without gradients. Later modules may work in place, so
            it copies what it keeps.
        before: Read the input instead of the output.
        call: Which call of the module in one pass of the model, from 0; None for every call.
    """

    module: nn.Module
    use: Callable[[Tensor], None]
    before: bool = False
    call: int | None = None


@contextmanager
def tapped(taps: Iterable[Tap]) -> Iterator[None]:
    """Read tensors while a model runs; afterwards the model has the hooks that it had before."""
    handles: list[RemovableHandle] = []
    try:
        for tap in taps:
            handles.append(_register(tap))  # noqa: PERF401  # one that fails must leave the others in the list
        yield
    finally:
        for handle in handles:
            handle.remove()


def _register(tap: Tap) -> RemovableHandle:
    calls = 0

    def read(value: Any) -> None:
        nonlocal calls
        tensor = first_tensor(value)
        if tensor is not None and tap.call in (None, calls):
            tap.use(tensor.detach())
        calls += 1

    def read_input(_module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        read((args, keywords))

    def read_output(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        read(output)

    if tap.before:
        return tap.module.register_forward_pre_hook(read_input, with_kwargs=True)
    return tap.module.register_forward_hook(read_output)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module in a pass of a model.

    Args:
        name: Name of the module in `named_modules`.
        module: The module.
        index: Which call of the module, from 0.
        input_shape: Shape of the first tensor of the input; () for none.
        shape: Shape of the first tensor of the output; () for none.
        rows: The first tensor of the input if it has two axes.
    """

    name: str
    module: nn.Module
    index: int
    input_shape: tuple[int, ...]
    shape: tuple[int, ...]
    rows: Tensor | None

    @property
    def has_weights(self) -> bool:
        """True for a module without children that has parameters."""
        return not list(self.module.children()) and next(self.module.parameters(), None) is not None


@dataclass(frozen=True, eq=False)
class Trace:
    """What a model does in one pass: the calls of its modules in the order in which they end.

    Args:
        calls: All calls.
        dense: Calls of the last dense layers, with input and output.
    """

    calls: list[Call] = field(default_factory=list)
    dense: deque[tuple[Call, Tensor, Tensor]] = field(default_factory=lambda: deque(maxlen=MOST_HEADS))


@contextmanager
def traced(net: nn.Module) -> Iterator[Trace]:
    """Record the calls of a model's modules."""
    trace, counts, handles = Trace(), Counter[str](), []

    def record(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        source, value = first_tensor(inputs), first_tensor(output)
        rows = source if source is not None and source.ndim == 2 else None
        before, after = (() if tensor is None else tuple(tensor.shape) for tensor in (source, value))
        call = Call(name, module, counts[name], before, after, rows)
        counts[name] += 1
        trace.calls.append(call)
        if isinstance(module, nn.Linear) and source is not None and value is not None:
            trace.dense.append((call, source, value))

    def register(name: str, module: nn.Module) -> RemovableHandle:
        return module.register_forward_hook(
            lambda module, args, keywords, output: record(name, module, (args, keywords), output), with_kwargs=True
        )

    try:
        for name, module in net.named_modules():
            handles.append(register(name, module))  # the ones before one that fails are removed
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def read_layer(net: nn.Module, layer: nn.Module, x: Batch, *, before: bool) -> Tensor:
    """Return the input of `layer` (if `before`) or its output when `net` runs on `x`, as rows [N, D]."""
    values: list[Tensor] = []

    def keep(value: Tensor) -> None:
        values[:] = [value.clone()]

    with tapped([Tap(layer, keep, before)]):
        run_model(net, x)
    return layer_rows(net, layer, values, x)


def layer_rows(net: nn.Module, layer: nn.Module, values: Sequence[Tensor], x: Batch) -> Tensor:
    """Return what was read of a layer as rows [N, D]; raise LayerError if that is not one row per sample."""
    if not values:
        raise LayerError(f"the layer {type(layer).__name__} gave no tensor when {type(net).__name__} ran")
    value = values[-1]
    count = batch_tensors(x)[0].shape[0]  # not len(): while a model is exported, this is a symbol
    if value.ndim < 2 or value.shape[0] != count:
        raise LayerError(
            f"the layer {type(layer).__name__} gave a tensor of shape {tuple(value.shape)} for {count} "
            "samples: name a layer whose first axis counts samples"
        )
    return value.flatten(1)


@torch.no_grad()
def run_model(net: nn.Module, x: Batch) -> Any:
    """Return the output of `net` in evaluation mode."""
    with evaluation_mode(net):
        return call(net, to_model(net, x))


def flattened(output: Any) -> Tensor:
    """Return the first tensor of a model's output, as rows."""
    value = first_tensor(output)
    if value is None or value.ndim < 2:
        raise LayerError("the model's output has no row of numbers per sample", argument="layer", hint="Name a layer.")
    return value.flatten(1)


def first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor in nested lists, tuples and dicts, or None."""
    if isinstance(value, Tensor):
        return value
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((tensor for item in items if (tensor := first_tensor(item)) is not None), None)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
