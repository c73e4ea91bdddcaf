"""The state of Adam as named tensors, for files."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from onefold.core.storage import under_prefix, with_prefix
from onefold.errors import FileError

MOMENTS = ("exp_avg", "exp_avg_sq")


def adam_to_tensors(*optimisers: torch.optim.Adam) -> dict[str, Tensor]:
    """Return the state of each parameter as tensors "0.step", "0.exp_avg", "0.exp_avg_sq", "1.step" and so on.

    Parameters are numbered in the order of the optimisers and their groups. One without a step yet has no tensors.
    """
    tensors: dict[str, Tensor] = {}
    for i, (optimiser, parameter) in enumerate(_parameters(optimisers)):
        tensors |= with_prefix(str(i), optimiser.state[parameter]) if parameter in optimiser.state else {}
    return tensors


def restore_adam(tensors: Mapping[str, Tensor], *optimisers: torch.optim.Adam) -> None:
    """Restore the state that `adam_to_tensors` returned for optimisers of the same parameters.

    Tensors move to the device where Adam keeps them. Files do not store memory layouts, so moments get that of the
    parameter.

    Raises:
        FileError: If the tensors are not those of Adam for these parameters.
    """
    parameters = _parameters(optimisers)
    names = {f"{i}.{key}" for i in range(len(parameters)) for key in ("step", *MOMENTS)}
    states = [under_prefix(str(i), tensors) for i in range(len(parameters))]
    if not tensors.keys() <= names or not all(map(_fits, states, parameters)):
        raise FileError("state of Adam: does not match the parameters. Use a file of the same networks.")
    for state, (optimiser, parameter) in zip(states, parameters, strict=True):
        optimiser.state.pop(parameter, None)
        if state:
            group = optimiser.param_groups[0]
            on_device = group["capturable"] or group["fused"]
            step = state["step"].to(parameter.device if on_device else "cpu", copy=True)
            moments = {name: torch.empty_like(parameter).copy_(state[name]) for name in MOMENTS}
            optimiser.state[parameter] = {"step": step, **moments}


def _parameters(optimisers: Sequence[torch.optim.Adam]) -> list[tuple[torch.optim.Adam, Tensor]]:
    """Return every parameter with its optimiser."""
    return [(o, parameter) for o in optimisers for group in o.param_groups for parameter in group["params"]]


def _fits(state: Mapping[str, Tensor], owner: tuple[torch.optim.Adam, Tensor]) -> bool:
    """Return True if the state is empty, or complete and of the parameter's shape."""
    if not state:
        return True
    shapes = {"step": torch.Size(), **dict.fromkeys(MOMENTS, owner[1].shape)}
    return {name: tensor.shape for name, tensor in state.items()} == shapes
