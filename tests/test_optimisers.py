"""The state of Adam as named tensors: resumed exactly, and refused if it is of other parameters."""

import copy
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from onefold.core.optimisers import adam_to_tensors, restore_adam
from onefold.errors import FileError


def networks(seed: int = 0) -> tuple[nn.Module, list[torch.optim.Adam]]:
    torch.manual_seed(seed)
    net: Any = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2))
    net.to(memory_format=torch.channels_last)
    return net, [torch.optim.Adam(net[0].parameters(), 0.1, fused=True), torch.optim.Adam(net[2].parameters(), 0.01)]


def step(net: nn.Module, optimisers: list[torch.optim.Adam], seed: int) -> None:
    net.zero_grad()
    net(torch.randn(5, 2, 4, 4, generator=Generator().manual_seed(seed))).square().sum().backward()
    for optimiser in optimisers:
        optimiser.step()


def test_restored_optimisers_continue_exactly() -> None:
    net, optimisers = networks()
    for seed in range(3):
        step(net, optimisers, seed)
    tensors = {name: tensor.contiguous().clone() for name, tensor in adam_to_tensors(*optimisers).items()}
    assert set(tensors) == {f"{i}.{key}" for i in range(4) for key in ("step", "exp_avg", "exp_avg_sq")}
    other, others = networks(seed=1)
    other.load_state_dict(net.state_dict())
    restore_adam(tensors, *others)
    weight = other.get_parameter("0.weight")
    assert others[0].state[weight]["exp_avg"].stride() == weight.stride(), "moments have the layout of the weights"
    for seed in range(3, 6):
        step(net, optimisers, seed)
        step(other, others, seed)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(float(tensors[f"{i}.step"]) == 3 for i in range(4)), "the tensors of a file are not changed"


def test_optimisers_without_a_step_have_no_state() -> None:
    net, optimisers = networks()
    assert adam_to_tensors(*optimisers) == {}
    fresh = copy.deepcopy(net.state_dict())
    step(net, optimisers, 0)
    net.load_state_dict(fresh)
    restore_adam({}, *optimisers)
    assert adam_to_tensors(*optimisers) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"0.exp_avg": torch.zeros(3)},
        {"1.step": torch.zeros(1)},
        {"4.step": torch.zeros(())},
        {"0.max_exp_avg_sq": torch.zeros(3, 2, 3, 3)},
        {"0.step": None},
    ],
)
def test_states_of_other_networks_are_refused(change: dict[str, Any]) -> None:
    net, optimisers = networks()
    step(net, optimisers, 0)
    tensors: dict[str, Tensor | None] = {**adam_to_tensors(*optimisers), **change}
    with pytest.raises(FileError, match="does not match the parameters"):
        restore_adam({name: tensor for name, tensor in tensors.items() if tensor is not None}, *optimisers)
