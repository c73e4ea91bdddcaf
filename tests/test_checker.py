"""The checks of types and shapes that all other tests run with."""

import dataclasses
import inspect
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from checker import check_types, jaxtyped
from jaxtyping import Float, Float64, Int, TypeCheckError
from torch import Tensor

from onefold.exact.gp import PrimalGP

checked = jaxtyped(typechecker=check_types)
refused = pytest.raises((BeartypeCallHintViolation, TypeCheckError))


@checked
def outer(x: Float[Tensor, " n"], y: Float[Tensor, " m"], *, turn: bool = False) -> Float[Tensor, "n m"]:
    product = x[:, None] * y
    return product.T if turn else product


@checked
def repeat(count: int) -> Int[np.ndarray, "{count}"]:
    return np.zeros(min(count, 3), int)


@checked
def pairs(x: Float[Tensor, " n"] | None, others: list[Float[Tensor, " n"]]) -> Iterator[float]:
    yield from (float(x @ other) for other in others if x is not None)


@checked
def unresolved(x: "Unknown", rate: float) -> "Box":  # pyright: ignore[reportUndefinedVariable]
    return x if rate else x[:0]


@checked
@dataclasses.dataclass(frozen=True)
class Box:
    low: Float[Tensor, " d"]
    high: Float[Tensor, " d"]
    rate: float = 0.5

    @property
    @checked
    def sides(self) -> Float[Tensor, " d"]:
        return self.high - self.low

    @staticmethod
    @checked
    def unit(d: int) -> "Box":
        return Box(torch.zeros(d), torch.ones(d))


def test_equal_names_are_equal_sizes_of_arguments_and_result() -> None:
    x, y = torch.arange(3.0), torch.arange(2.0)
    assert torch.equal(outer(x, y), torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 2.0]]))
    assert outer(y, y, turn=True).shape == (2, 2)
    for wrong in ((x[None], y), (x.int(), y), (x, None)):
        with refused:
            outer(*wrong)  # pyright: ignore[reportArgumentType]
    with refused:
        outer(x, y, turn=True)
    with refused:
        outer(x, y, turn=1)  # pyright: ignore[reportArgumentType]


def test_a_call_inside_has_sizes_of_its_own() -> None:
    @checked
    def around(x: Float[Tensor, " n"]) -> Float[Tensor, "n n"]:
        assert outer(x[:1], x).shape == (1, len(x))
        return outer(x, x)

    assert around(torch.ones(4)).shape == (4, 4)


def test_sizes_may_be_values_of_arguments() -> None:
    assert len(repeat(3)) == 3
    with refused:
        repeat(4)


def test_generators_are_checked_when_they_are_made() -> None:
    x = torch.ones(3)
    assert list(pairs(x, [x, x])) == [3.0, 3.0]
    with refused:
        pairs(x, [torch.ones(2)])


def test_dataclasses_properties_and_static_methods_are_checked() -> None:
    assert torch.equal(Box.unit(3).sides, torch.ones(3))
    assert Box(torch.zeros(2), torch.ones(2), rate=1).rate == 1
    with refused:
        Box(torch.zeros(2), torch.ones(3))
    with refused:
        Box.unit(2.0)  # pyright: ignore[reportArgumentType]
    broken = Box.unit(2)
    object.__setattr__(broken, "high", torch.ones(1, 2))
    with refused:
        _ = broken.sides


def test_what_cannot_be_evaluated_is_not_checked() -> None:
    value: Any = 3
    assert unresolved(value, 1) == 3
    with refused:
        unresolved(value, "1")  # pyright: ignore[reportArgumentType]


def test_signatures_stay_as_they_were() -> None:
    assert list(inspect.signature(outer).parameters) == ["x", "y", "turn"]
    assert unresolved.__annotations__["x"] == "Unknown"
    assert (outer.__name__, outer.__module__, outer.__doc__) == ("outer", __name__, None)


@pytest.mark.skipif("JAXTYPING_DISABLE" in os.environ, reason="checks are disabled")
def test_onefold_is_checked() -> None:
    gram: Float64[Tensor, "2 2"] = torch.eye(2, dtype=torch.float64)
    with refused:
        PrimalGP.of(gram[0], 1.0)
