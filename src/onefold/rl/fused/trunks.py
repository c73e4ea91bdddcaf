"""Whole trunks of IMPALA networks by the fused stages."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.rl.fused.stages import Form, fits, pictures, stage


def forms(shape: tuple[int, int, int], channels: Sequence[int]) -> list[Form]:
    """Return the forms of the stages of a network, with channels padded to multiples of 8.

    Images that are not square give forms that no kernel supports.
    """
    inputs, height, width = shape
    side, stages = height if height == width else 0, []
    for count in channels:
        stages.append(Form(-(-inputs // 8) * 8, count, side))
        inputs, side = count, (side + 1) // 2
    return stages


def fuse(module: nn.Module, device: torch.device) -> None:
    """Use the fused stages in all networks of `module` where their sizes and the device allow it.

    They compute in bfloat16, whatever their inputs are.
    """
    for part in module.modules():
        sizes = getattr(part, "stage_sizes", None)
        if isinstance(sizes, tuple):
            part.fused = fits(forms(*sizes), device)  # pyright: ignore[reportArgumentType]


def fused_trunks(nets: Sequence[Any], inputs: Sequence[Float[Tensor, "n c h w"]]) -> list[Float[Tensor, "n width"]]:
    """Return what the trunks of networks of one form make of their inputs, as `onefold.nn.nets.trunks` does."""
    x = pictures(inputs)
    for i in range(0, len(nets[0].trunk), 4):
        layers = [[c for c in net.trunk[i : i + 4].modules() if isinstance(c, nn.Conv2d)] for net in nets]
        x = stage(
            x,
            torch.stack([entry.weight for entry, *_ in layers]),
            torch.stack([_bias(entry) for entry, *_ in layers]),
            torch.stack([torch.stack([c.weight for c in units]) for _, *units in layers]),
            torch.stack([torch.stack([_bias(c) for c in units]) for _, *units in layers]),
        )
    return list(F.relu(x).permute(0, 1, 4, 2, 3).flatten(2).to(inputs[0].dtype).unbind())


def _bias(layer: nn.Conv2d) -> Tensor:
    assert layer.bias is not None
    return layer.bias
