"""The embedding of a model: which tensor it is by the conventions of the model's library, and how to read it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from onefold.core.batches import batch_tensors, map_batch
from onefold.core.runtime import available, require
from onefold.errors import LayerError
from onefold.kernels.stages import Stage, find_stages, mean_of_tokens, stage_taps
from onefold.nn.modules import (
    Tap,
    Trace,
    call,
    evaluation_mode,
    find_layer,
    first_tensor,
    layer_rows,
    module_calls,
    tapped,
    to_model,
    traced,
)
from onefold.types import Batch

Rule: TypeAlias = Literal[
    "layer", "head", "head token", "pre-logits", "entry", "class token", "mean", "masked mean", "output", "output mean"
]

PROBE = 2  # samples of the pass that finds the places
SHOWN = 12  # modules in a message
LARGE = 2**24  # numbers in the embeddings of a batch for which memory is checked
HIDDEN = "last_hidden_state"
DOCUMENTED = ("sentence_embedding", "image_embeds", "text_embeds")  # entries of an output that are the embedding
DESCRIPTIONS: dict[Rule, str] = {
    "layer": "output of {name}",
    "head": "input of {name}",
    "head token": "input of {name} at the token of the logits",
    "pre-logits": "pre-logits of forward_head",
    "entry": "{name}",
    "class token": f"class token of {HIDDEN}",
    "mean": f"mean of {HIDDEN}",
    "masked mean": f"mean of {HIDDEN} under attention_mask",
    "output": "output",
    "output mean": "mean of the output over positions",
}


class ModelOutputs(NamedTuple):
    """What one forward pass of a model gives, in float32.

    Args:
        embedding: Embedding [N, D], not standardised.
        logits: Logits [N, classes], or None if the model has no classifier head.
        stages: Pooled stages [N, P], not standardised, or None if the model has none.
    """

    embedding: Float[Tensor, "n d"]
    logits: Float[Tensor, "n classes"] | None = None
    stages: Float[Tensor, "n p"] | None = None


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the outputs of a model are. They are found once, and stored in the files of detectors.

    Args:
        rule: How the embedding is read.
        name: Module, or entry of the model's output, that the rule reads; empty for none.
        size: Length of the embedding.
        head: Last dense layer of a classifier, or None.
        logits: Where the logits are: in the model's output, or in that of `head`. None for a model without classes.
        stages: Ends of the stages.
    """

    rule: Rule
    name: str
    size: int
    head: str | None
    logits: Literal["output", "head"] | None
    stages: tuple[Stage, ...]

    @property
    def origin(self) -> str:
        """Origin of the embedding, such as "pooler_output"."""
        return DESCRIPTIONS[self.rule].format(name=self.name or "the model")

    @property
    def modules(self) -> set[str]:
        """Names of the modules that are read."""
        named = {self.name} if self.rule == "layer" else set()
        return named | {stage.module for stage in self.stages} | {self.head or ""} - {""}


class Embedding(NamedTuple):
    """The tensor of a model that is its embedding: rule, module or entry of the output, and length."""

    rule: Rule
    name: str
    size: int


class ModuleEncoder:
    """Embedding, logits and stages of a torch module, which stays unchanged.

    Args:
        net: Model.
        layer: Name of the module whose output is the embedding; None takes the documented embedding.
        places: Places from a detector's file; None finds them at the first batch.

    Raises:
        LayerError: The model has no such layer, or lacks a module of `places`.
    """

    def __init__(self, net: nn.Module, layer: str | None, places: Places | None = None) -> None:
        self.net, self.layer, self.places = net, layer, places
        for name in {layer} - {None} if places is None else sorted(places.modules):
            find_layer(net, str(name))

    @property
    def size(self) -> int:
        """Length of the embedding; 0 before the first batch."""
        return 0 if self.places is None else self.places.size

    @property
    def origin(self) -> str:
        """Origin of the embedding; empty before the first batch."""
        return "" if self.places is None else self.places.origin

    def outputs(self, x: Batch, *, stages: bool) -> ModelOutputs:
        """Return the outputs of one forward pass, on the model's device; the first call makes a pass to find them.

        Args:
            x: Inputs.
            stages: Compute the pooled stages.
        """
        if self.places is None:
            self.places = find_places(self.net, map_batch(lambda t: t[:PROBE], x), self.layer)
        return read_places(self.net, x, self.places, stages=stages)


@torch.no_grad()
def find_places(net: nn.Module, x: Batch, layer: str | None) -> Places:
    """Return where the outputs of a model are, from one pass.

    Args:
        net: Model.
        x: A few inputs.
        layer: Name of the module whose output is the embedding; None takes the documented embedding.

    Raises:
        LayerError: The model has no embedding by any rule.
    """
    inputs = to_model(net, x)
    mask, as_timm = _attention_mask(inputs), layer is None and _is_timm(net)
    values: list[Tensor] = []
    taps = [] if layer is None else [Tap(find_layer(net, layer), values.append)]
    with evaluation_mode(net), module_calls(net), tapped(taps), traced(net) as trace:
        output = _run(net, inputs, as_timm=as_timm)
    target = output.get("logits") if isinstance(output, Mapping) else first_tensor(output)
    head = None if as_timm or target is None else _find_head(target, trace)
    if layer is not None:
        embedding = Embedding("layer", layer, layer_rows(net, find_layer(net, layer), values, x).shape[1])
    else:
        embedding = head or _embedding_of(net, output, inputs)
    if embedding is None:
        raise _no_embedding(net, output, trace)
    logits = None
    if target is not None and target.ndim == 2 and target.shape[1] > 1:
        logits = "output" if isinstance(output, Mapping) else "head" if head else None
    return Places(
        rule=embedding.rule,
        name=embedding.name,
        size=embedding.size,
        head=head.name if head and (layer is None or logits == "head") else None,
        logits=logits,
        stages=find_stages(net, trace, batch_tensors(x)[0].shape[0], mask),
    )


@torch.no_grad()
def read_places(net: nn.Module, x: Batch, places: Places, *, stages: bool) -> ModelOutputs:
    """Return the outputs of one forward pass, in float32 on the model's device.

    Args:
        net: Model.
        x: Inputs.
        places: Where the outputs are.
        stages: Compute the pooled stages.
    """
    inputs = to_model(net, x)
    _check_memory(x, places.size, batch_tensors(inputs)[0].device)
    mask = _attention_mask(inputs)
    taps, rows = stage_taps(net, places.stages if stages else (), mask)
    values: dict[str, list[Tensor]] = {"layer": [], "input": [], "output": []}

    def keep(name: str, prepare: Callable[[Tensor], Tensor] = torch.clone) -> Callable[[Tensor], None]:
        return lambda value: values[name].append(prepare(value))

    if places.rule == "layer":
        taps.append(Tap(net.get_submodule(places.name), keep("layer")))
    if places.head is not None:
        prepare = torch.clone if places.rule == "head token" else lambda value: _pool(value, mask)
        head = net.get_submodule(places.head)
        taps += [Tap(head, keep("input", prepare), before=True), Tap(head, keep("output"))]
    with evaluation_mode(net), module_calls(net), tapped(taps):
        output = _run(net, inputs, as_timm=places.rule == "pre-logits")
    embedding = (
        layer_rows(net, net.get_submodule(places.name), values["layer"], x)
        if places.rule == "layer"
        else _read_embedding(places, output, values, mask)
    )
    if missing := [stage.module for stage, row in zip(places.stages, rows, strict=False) if not row.numel()]:
        raise LayerError(f"{type(net).__name__}: the module {missing[0]} ran for the first batch, and not for this one")
    logits = None
    if places.logits is not None:
        logits = (output["logits"] if places.logits == "output" else values["output"][-1]).float()
    return ModelOutputs(embedding.float(), logits, torch.cat(rows, 1) if rows else None)


def program_outputs(output: Any) -> tuple[ModelOutputs, str]:
    """Return what an exported program gives, and the origin of the embedding.

    Args:
        output: One tensor [N, D], one map [N, C, H, W], or a pair of logits [N, classes] and embedding [N, D].

    Raises:
        LayerError: It has none of these forms.
    """
    tensors = _tensors(output)
    if len(tensors) == 2 and all(tensor.ndim == 2 for tensor in tensors):
        return ModelOutputs(tensors[1].float(), tensors[0].float()), "second output of the program"
    if len(tensors) == 1 and tensors[0].ndim not in (0, 1, 3):
        if tensors[0].ndim == 2:
            return ModelOutputs(tensors[0].float()), "output of the program"
        return ModelOutputs(_mean(tensors[0], None)), "mean of the program's output over positions"
    shapes = ", ".join(_shape(tuple(tensor.shape)) for tensor in tensors) or "no tensor"
    raise LayerError(
        f"the exported model returns no embedding ({shapes})",
        argument="layer",
        hint="Name a layer, or export a model that returns the embedding [N, D], or the pair of logits and embedding.",
    )


def _read_embedding(places: Places, output: Any, values: dict[str, list[Tensor]], mask: Tensor | None) -> Tensor:
    if places.rule == "head":
        return values["input"][-1]
    if places.rule == "head token":
        position = _token_of(output["logits"], values["output"][-1])
        return values["input"][-1][torch.arange(position.shape[0], device=position.device), position]
    if places.rule == "pre-logits":
        return output["pre_logits"]
    if places.rule == "class token":
        return output[HIDDEN][:, 0]
    if places.rule in ("mean", "masked mean"):
        return _mean(output[HIDDEN], mask if places.rule == "masked mean" else None)
    value = first_tensor(output[places.name] if places.rule == "entry" else output)
    assert value is not None
    return _mean(value, None) if places.rule == "output mean" else value.flatten(1)


def _run(net: nn.Module, inputs: Batch, *, as_timm: bool) -> Any:
    """Return the output of a model; of a model of timm the pre-logits, and the logits if it has classes."""
    if not as_timm:
        return call(net, inputs)
    model: Any = net
    features = model.forward_features(inputs)
    output = {"pre_logits": model.forward_head(features, pre_logits=True)}
    return output | ({"logits": model.forward_head(features)} if model.num_classes > 0 else {})


def _is_timm(net: nn.Module) -> bool:
    return isinstance(getattr(net, "num_classes", None), int) and all(
        callable(getattr(net, name, None)) for name in ("forward_features", "forward_head")
    )


def _find_head(target: Tensor, trace: Trace) -> Embedding | None:
    """Return the last dense layer of a classifier: the one that gives the logits, or that ends the model.

    The model may normalise what its last layer gives, for example by a softmax.
    """
    for dense, inputs, output in reversed(trace.dense):
        if output.numel() == target.numel() and torch.equal(output.reshape(target.shape), target):
            return Embedding("head", dense.name, inputs.shape[-1])
    for dense, inputs, output in reversed(trace.dense):
        fits = output.ndim == 3 and output.shape[::2] == target.shape
        if fits and (output == target[:, None]).all(2).any(1).all():
            return Embedding("head token", dense.name, inputs.shape[-1])
    last = next((call for call in reversed(trace.calls) if call.has_weights), None)
    for dense, inputs, output in reversed(trace.dense):
        if dense is last and target.ndim == 2 and output.shape == target.shape:
            return Embedding("head", dense.name, inputs.shape[-1])
    return None


def _token_of(logits: Tensor, token_logits: Tensor) -> Tensor:
    """Return for each sample the index of the token whose logits are those of the sample, [N]."""
    return (token_logits == logits[:, None]).all(2).float().argmax(1)


def _embedding_of(net: nn.Module, output: Any, inputs: Batch) -> Embedding | None:
    """Return the embedding of a model without a classifier head, by the entries or the shape of its output."""
    if isinstance(output, Mapping):
        entry = _entry(net, output, inputs)
        if entry is not None:
            return entry
    tensors = _tensors(output)
    if len(tensors) != 1 or tensors[0].ndim < 2 or tensors[0].ndim == 3:
        return None
    value = tensors[0]
    return Embedding("output" if value.ndim == 2 else "output mean", "", value.shape[1])


def _entry(net: nn.Module, output: Mapping[str, Any], inputs: Batch) -> Embedding | None:
    """Return the embedding by the names that timm, sentence-transformers and transformers use."""
    if isinstance(value := output.get("pre_logits"), Tensor) and value.ndim == 2:
        return Embedding("pre-logits", "", value.shape[1])
    for name in DOCUMENTED:
        if isinstance(value := output.get(name), Tensor) and value.ndim == 2:
            return Embedding("entry", name, value.shape[1])
    hidden, pooled = output.get(HIDDEN), output.get("pooler_output")
    is_text = _is_text(net, inputs)
    if not is_text and isinstance(pooled, Tensor) and not _has_dense_pooler(net):
        return Embedding("entry", "pooler_output", pooled.flatten(1).shape[1])
    if not isinstance(hidden, Tensor) or hidden.ndim < 3:
        return None
    if not is_text and isinstance(pooled, Tensor):
        return Embedding("class token", "", hidden.shape[-1])
    mask = _attention_mask(inputs)
    is_masked = mask is not None and mask.shape == hidden.shape[:2]
    return Embedding("masked mean" if is_masked else "mean", "", hidden.shape[1 if hidden.ndim > 3 else 2])


def _is_text(net: nn.Module, inputs: Batch) -> bool:
    if isinstance(inputs, Mapping):
        return "input_ids" in inputs and "pixel_values" not in inputs
    return getattr(net, "main_input_name", "") == "input_ids"


def _has_dense_pooler(net: nn.Module) -> bool:
    """Return True for the pooler of ViT and DeiT, a dense layer that most checkpoints leave random."""
    poolers = (module for name, module in net.named_modules() if name.rpartition(".")[2] == "pooler")
    return any(isinstance(getattr(pooler, "dense", None), nn.Linear) for pooler in poolers)


def _attention_mask(x: Batch) -> Tensor | None:
    mask = x.get("attention_mask") if isinstance(x, Mapping) else None
    return mask if mask is not None and mask.ndim == 2 else None


def _pool(value: Tensor, mask: Tensor | None) -> Tensor:
    """Return a copy of rows [N, D], or the mean of tokens [N, T, D]."""
    if value.ndim == 2:
        return value.clone()
    return mean_of_tokens(value, mask if mask is not None and mask.shape == value.shape[:2] else None)


def _mean(value: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of tokens [N, T, D], or over the positions of maps [N, C, H, W], in float32."""
    return mean_of_tokens(value, mask) if value.ndim == 3 else value.flatten(2).float().mean(2)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _check_memory(x: Batch, size: int, device: torch.device) -> None:
    """Raise NotEnoughMemoryError if the embeddings of a batch do not fit."""
    count = batch_tensors(x)[0].shape[0]
    if isinstance(count, int) and count * size > LARGE:
        way_out = "name a layer after the pooling, or pass fewer samples at a time"
        what = f"the embedding of {count:,} samples with {size:,} numbers each"
        require(8 * count * size, available(device), what=what, way_out=way_out)


def _no_embedding(net: nn.Module, output: Any, trace: Trace) -> LayerError:
    """Return the error for a model whose output is no embedding, with the modules that could be named."""
    shapes = ", ".join(_shape(tuple(tensor.shape)) for tensor in _tensors(output)) or "no tensor"
    modules = {call.name: call for call in trace.calls if call.name and len(call.shape) > 1}
    outermost = sorted(modules.values(), key=lambda call: call.name.count("."))[:SHOWN]
    example = next((call.name for call in reversed(outermost) if "." not in call.name), "encoder")
    names = ", ".join(f"{call.name} {_shape(call.shape)}" for call in outermost) or "none"
    return LayerError(
        f"no embedding is known for the output of {type(net).__name__} ({shapes}). Its modules: {names}",
        argument="layer",
        hint=f"Name the module whose output to use, such as layer={example!r}.",
    )


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(['N', *map(str, shape[1:])])}]"
