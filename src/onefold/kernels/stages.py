"""Pooled stages of a model: a few numbers per channel at several depths, from one forward pass.

In convolutional networks a stage ends where the resolution next falls, and at the last map: channel means and maxima.
In transformers it ends after each quarter of the blocks: class token, or mean over tokens. In other networks the stages
are the hidden layers, as the dense layers after them receive them.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from onefold.nn.modules import Call, Tap, Trace, find_layer

Pool: TypeAlias = Literal["channels", "class token", "tokens", "masked tokens", "input"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
POOLINGS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
)  # fmt: skip
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
CLASS_TOKENS = ("cls_token", "class_token", "class_embedding")  # names of parameters
QUARTERS = 4


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Place of a stage in a model.

    Args:
        module: Name of the module in `named_modules`.
        call: Which call of the module in one pass, from 0.
        pool: How the module's output becomes one row per sample. "input" is the module's input as it is.
    """

    module: str
    call: int
    pool: Pool


def find_stages(net: nn.Module, trace: Trace, count: int, mask: Tensor | None) -> tuple[Stage, ...]:
    """Return the stages of a model.

    Args:
        net: Model.
        trace: One pass of it.
        count: Number of samples in the pass.
        mask: Attention mask of the pass, if there is one.
    """
    calls = [call for call in trace.calls if call.name and (call.shape[:1] == (count,))]
    return (
        _transformer_stages(net, calls, None if mask is None else tuple(mask.shape))
        or _convolutional_stages(net, calls)
        or _dense_stages(calls)
    )


def stage_taps(net: nn.Module, stages: Sequence[Stage], mask: Tensor | None) -> tuple[list[Tap], list[Tensor]]:
    """Return the taps that read the stages in a pass, and the list that then holds one tensor [N, P] per stage."""
    values: list[Tensor] = [torch.empty(0)] * len(stages)

    def tap(i: int, stage: Stage) -> Tap:
        def use(value: Tensor) -> None:
            values[i] = pool_stage(value, stage.pool, mask)

        return Tap(find_layer(net, stage.module), use, stage.pool == "input", stage.call)

    return list(itertools.starmap(tap, enumerate(stages))), values


def pool_stage(value: Float[Tensor, "n *shape"], pool: Pool, mask: Tensor | None) -> Float[Tensor, "n p"]:
    """Return one row per sample, in float32."""
    if pool == "channels":
        maps = value.flatten(2).float()
        return torch.cat([maps.mean(2), maps.amax(2)], 1)
    if pool == "class token":
        return value[:, 0].float()
    if pool == "input":
        return value.to(torch.float32, copy=True)  # later modules may work in place
    return mean_of_tokens(value, mask if pool == "masked tokens" else None)


def mean_of_tokens(value: Float[Tensor, "n *tokens d"], mask: Tensor | None) -> Float[Tensor, "n d"]:
    """Return the mean over tokens, in float32; over those that are not padding if there is an attention mask."""
    tokens = value.flatten(1, -2).float()
    if mask is None:
        return tokens.mean(1)
    weights = mask.to(tokens.device, torch.float32)[..., None]
    return (tokens * weights).sum(1) / weights.sum(1).clamp(min=1)


def has_class_token(net: nn.Module) -> bool:
    """Return True if the first token of a transformer is a class token."""
    return any(name.rpartition(".")[2] in CLASS_TOKENS for name, _ in net.named_parameters())


def _transformer_stages(net: nn.Module, calls: list[Call], mask: tuple[int, ...] | None) -> tuple[Stage, ...]:
    blocks = _blocks(net, calls)
    ends = sorted({math.ceil(len(blocks) * quarter / QUARTERS) - 1 for quarter in range(1, QUARTERS + 1)})
    first_token = has_class_token(net)

    def pool(block: Call) -> Pool:
        if first_token and len(block.shape) == 3:
            return "class token"
        return "masked tokens" if block.shape[:2] == mask else "tokens"

    return tuple(Stage(module=blocks[i].name, call=blocks[i].index, pool=pool(blocks[i])) for i in ends if blocks)


def _blocks(net: nn.Module, calls: list[Call]) -> list[Call]:
    """Return the calls of a transformer's blocks: of the outermost modules of one class that are called repeatedly."""
    groups: dict[type[nn.Module], list[Call]] = defaultdict(list)
    for call in calls:
        parent = net.get_submodule(call.name.rpartition(".")[0])
        if isinstance(parent, CONTAINERS) and _gives_tokens(call):
            groups[type(call.module)].append(call)
    repeated = [f"{call.name}." for group in groups.values() for call in group if len(group) > 1]
    outermost = [group for group in groups.values() if not group[0].name.startswith(tuple(repeated))]
    return max(reversed(outermost), key=len, default=[])


def _gives_tokens(call: Call) -> bool:
    """Return True for a block whose last axis has the size of one of its layer norms: [N, T, D] or [N, H, W, D]."""
    if len(call.shape) not in (3, 4) or not list(call.module.children()):
        return False
    norms = [module for module in call.module.modules() if "Norm" in type(module).__name__]
    sizes = {p.numel() for norm in norms if not hasattr(norm, "running_mean") for p in norm.parameters(recurse=False)}
    return call.shape[-1] in sizes and not (len(call.shape) == 4 and call.shape[1] in sizes)


def _convolutional_stages(net: nn.Module, calls: list[Call]) -> tuple[Stage, ...]:
    first = next((i for i, call in enumerate(calls) if isinstance(call.module, CONVOLUTIONS)), None)
    if first is None:
        return ()
    axes = len(calls[first].shape)
    maps = [call for call in calls[first:] if len(call.shape) == axes and math.prod(call.shape[2:]) > 1]
    layers = [i for i, call in enumerate(maps) if isinstance(call.module, CONVOLUTIONS + POOLINGS)]
    sizes = [math.prod(maps[i].shape[2:]) for i in layers]
    later = list(itertools.accumulate(reversed(sizes), max))[::-1]  # largest map from here on
    main = [i for i, size, largest in zip(layers, sizes, later, strict=True) if size >= largest]
    falls = [(a, b) for a, b in itertools.pairwise(main) if _falls(maps[a], maps[b])]
    ends = [_last_before(net, maps[:b], maps[a].shape[2:], maps[b]) for a, b in falls]
    if main:
        ends.append([call for call in maps if call.shape[2:] == maps[main[-1]].shape[2:]][-1])
    return tuple(Stage(module=call.name, call=call.index, pool="channels") for call in ends)


def _falls(before: Call, after: Call) -> bool:
    """Return True if a layer, or what is computed before it, reduces the resolution by more than the borders."""
    size, strides = math.prod(before.shape[2:]), getattr(after.module, "stride", None)
    reduces = strides is None or max(strides if isinstance(strides, tuple) else (strides,)) > 1
    return math.prod(after.shape[2:]) < size and (reduces or math.prod(after.input_shape[2:]) < size)


def _last_before(net: nn.Module, maps: list[Call], size: tuple[int, ...], fall: Call) -> Call:
    """Return the last map of a size before the call at which it falls, outside the block in which it falls.

    A block that reduces the resolution may begin with layers that keep it; these end no stage. A container is no block:
    its entries follow each other. So the innermost module around both the map and the fall is the outermost container
    or a container directly in it, or the outermost module outside that container.
    """
    candidates = [call for call in maps if call.shape[2:] == size]
    parents = [_common_parent(call.name, fall.name) for call in candidates]
    container = min((parent for parent in parents if _is_container(net, parent)), key=len, default=None)
    outside = [parent for parent in parents if container is None or not _is_inside(container, parent)]
    first = min(outside, key=len, default="")

    def is_main(parent: str) -> bool:
        if container is not None and _is_inside(container, parent):
            return _only_containers(net, container, parent)
        return parent == first

    return [call for call, parent in zip(candidates, parents, strict=True) if is_main(parent)][-1]


def _is_inside(outer: str, inner: str) -> bool:
    return outer in ("", inner) or inner.startswith(f"{outer}.")


def _common_parent(a: str, b: str) -> str:
    """Return the name of the innermost module that contains both modules."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a.split("."), b.split("."), strict=False))
    common = [part for part, _ in pairs]
    return ".".join(common[:-1] if a == b else common)


def _is_container(net: nn.Module, name: str) -> bool:
    return isinstance(net.get_submodule(name), CONTAINERS)


def _only_containers(net: nn.Module, outer: str, inner: str) -> bool:
    """Return True if every module on the path from a container to one inside it is a container."""
    parts, start = inner.split("."), len(outer.split(".")) if outer else 0
    return all(_is_container(net, ".".join(parts[:end])) for end in range(start + 1, len(parts) + 1))


def _dense_stages(calls: Iterable[Call]) -> tuple[Stage, ...]:
    """Return the inputs of dense layers after the first layer with weights, each once and never the model's input."""
    layers = [call for call in calls if call.has_weights]
    read: list[Tensor] = [layers[0].rows] if layers and layers[0].rows is not None else []
    stages = []
    for call in layers[1:]:
        rows = call.rows
        if isinstance(call.module, nn.Linear) and rows is not None and not any(rows is other for other in read):
            read.append(rows)
            stages.append(Stage(module=call.name, call=call.index, pool="input"))
    return tuple(stages)
