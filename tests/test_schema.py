"""Dataclasses survive JSON, and content of other types is refused by the name of its field."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.schema import from_json, to_json
from onefold.errors import InputError


@dataclass(frozen=True)
class Inner:
    lr: float
    sizes: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")


@dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["a", "b"]
    inner: Inner
    flag: bool = False
    limit: int | None = None
    parts: list[Inner] = field(default_factory=list)
    sets: dict[str, float] = field(default_factory=dict)
    mixed: int | str | list[int] | Inner | None = None


inner = st.builds(
    Inner,
    lr=st.floats(allow_nan=False, allow_infinity=False),
    sizes=st.lists(st.integers(-(2**60), 2**60)).map(tuple),
    pair=st.tuples(st.integers(0, 9), st.text()),
)


@given(
    st.builds(
        Outer, name=st.text(), kind=st.sampled_from(["a", "b"]), inner=inner, flag=st.booleans(),
        limit=st.none() | st.integers(0, 99), parts=st.lists(inner, max_size=3),
        sets=st.dictionaries(st.text(), st.floats(-1, 1)),
    )
)  # fmt: skip
def test_dataclasses_survive_json(value: Outer) -> None:
    assert from_json(Outer, json.loads(json.dumps(to_json(value)))) == value


GOOD: dict[str, Any] = {"name": "x", "kind": "a", "inner": {"lr": 1}}


def test_integers_are_taken_for_floats_and_absent_fields_for_their_defaults() -> None:
    value = from_json(Outer, GOOD)
    assert value == Outer("x", "a", Inner(1.0))
    assert type(value.inner.lr) is float


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "name: 1 is not text"),
        ({"kind": "c"}, "kind: 'c' is not one of a, b"),
        ({"kind": ["a"]}, r"kind: \['a'\] is not one of"),
        ({"flag": 1}, "flag: 1 is not true or false"),
        ({"limit": True}, "limit: True is not an integer"),
        ({"limit": 1.0}, "limit: 1.0 is not an integer"),
        ({"limit": 10**30}, "limit: the integer is too large"),
        ({"inner": None}, "inner: None is not an object"),
        ({"inner": {}}, "inner: lr is missing"),
        ({"inner": {"lr": float("nan")}}, "inner.lr: nan is not a finite number"),
        ({"inner": {"lr": "1"}}, "inner.lr: '1' is not a finite number"),
        ({"inner": {"lr": 1, "sizes": [1, "2"]}}, r"inner.sizes\[1\]: '2' is not an integer"),
        ({"inner": {"lr": 1, "sizes": 3}}, "inner.sizes: 3 is not a list"),
        ({"inner": {"lr": 1, "pair": [1]}}, "inner.pair: 1 entries instead of 2"),
        ({"parts": [{"lr": 1}, 0]}, r"parts\[1\]: 0 is not an object"),
        ({"sets": {"a": None}}, "sets.a: None is not a finite number"),
        ({"mixed": 1.5}, "mixed: 1.5 is not an integer or text or a list or a valid Inner$"),
        ({"mixed": {"lr": "1"}}, "mixed: .* is not an integer or text or a list or a valid Inner$"),
        ({"inner": {"lr": 1, "sizes": [1] * (2**20 + 1)}}, "inner.sizes: has 1,048,577 entries, at most 1,048,576"),
        ({"sets": dict.fromkeys(map(str, range(2**20 + 1)), 1.0)}, "sets: has 1,048,577 entries, at most 1,048,576"),
        ({"other": 1}, "Outer: there is no field 'other'"),
        ({"name": ["x" * 999]}, "name: .{60}… is not text"),
    ],
)
def test_other_content_is_refused_by_the_path_of_its_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_json(Outer, {**GOOD, **change})


@pytest.mark.parametrize("content", [None, [], "x", 3])
def test_what_is_no_object_is_refused(content: Any) -> None:
    with pytest.raises(InputError, match=r"Outer: .* is not an object of settings"):
        from_json(Outer, content)
