"""Dataclasses to JSON and back, with every type and bound checked: JSON may come from an untrusted file."""

import dataclasses
import functools
import json
import math
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from onefold.errors import InputError

T = TypeVar("T")
LARGEST_INTEGER = 2**63
MOST_ENTRIES = 2**20  # of one list or object
LONGEST_SHOWN = 60  # characters of a wrong value in a message


def to_json(value: Any) -> Any:
    """Return a dataclass as JSON content; tuples become lists. NaN and infinity are refused."""
    return json.loads(json.dumps(dataclasses.asdict(value), allow_nan=False, default=lambda number: number.item()))


def from_json(kind: type[T], content: Any, name: str = "") -> T:
    """Return the dataclass `kind` that `to_json` wrote.

    Field types may be bool, int, float, str, Any, a Literal, a dataclass, `tuple[X, ...]`, `tuple[X, Y]`, `list[X]`,
    `dict[str, X]`, and unions of these with None. Fields with defaults may be absent; unknown fields are refused.

    Args:
        kind: A dataclass.
        content: JSON content.
        name: Name of `content` in messages, such as "agent"; empty for a whole file.

    Returns:
        The dataclass, with tuples where its fields are tuples.

    Raises:
        InputError: The content does not match the fields; the message names the field by its path, such as "agent.lr".
    """
    hints = _hints(kind)
    fields = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    required = {field.name for field in fields if _is_required(field)}
    where = name or kind.__name__
    if not isinstance(content, dict):
        raise InputError(f"{_quote(content)} is not an object of settings", argument=where)
    if missing := sorted(required - set(content)):
        raise InputError(f"{missing[0]} is missing", argument=where)
    if unknown := sorted(set(content) - {field.name for field in fields}):
        raise InputError(f"there is no field {_quote(unknown[0])}", argument=where)
    values: dict[str, Any] = {}
    for key, value in content.items():
        values[key] = _parse_value(hints[key], value, f"{name}.{key}" if name else key)
    return kind(**values)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the types of the fields; cached: a table file holds one Column object per column."""
    return get_type_hints(kind)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _parse_value(hint: Any, value: Any, name: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _parse_union([kind for kind in arguments if kind is not type(None)], value, name)
    if origin is Literal:
        return _parse_literal(arguments, value, name)
    if origin in (tuple, list):
        entries = []
        for i, entry_kind in enumerate(_entry_kinds(origin, arguments, value, name)):
            entries.append(_parse_value(entry_kind, value[i], f"{name}[{i}]"))
        return origin(entries)
    if origin is dict:
        if not isinstance(value, dict):
            raise InputError(f"{_quote(value)} is not an object", argument=name)
        _check_length(value, name)
        parsed = {}
        for key, entry in value.items():
            parsed[key] = _parse_value(arguments[1], entry, f"{name}.{key}")
        return parsed
    if dataclasses.is_dataclass(hint):
        return from_json(hint, value, name)  # pyright: ignore[reportArgumentType]
    return _parse_scalar(hint, value, name)


def _parse_literal(choices: tuple[Any, ...], value: Any, name: str) -> Any:
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise InputError(f"{_quote(value)} is not one of {', '.join(map(str, choices))}", argument=name)
    return value


def _parse_union(kinds: list[Any], value: Any, name: str) -> Any:
    if len(kinds) == 1:
        return _parse_value(kinds[0], value, name)
    for kind in kinds:
        try:
            return _parse_value(kind, value, name)
        except InputError:
            continue
    raise InputError(f"{_quote(value)} is not {' or '.join(map(_describe_type, kinds))}", argument=name)


def _describe_type(hint: Any) -> str:
    if hint in SCALARS:
        return SCALARS[hint][1]
    origin = get_origin(hint)
    if origin is Literal:
        return " or ".join(map(str, get_args(hint)))
    if origin in (tuple, list):
        return "a list"
    return "an object" if origin is dict else f"a valid {hint.__name__}"


def _check_length(value: list[Any] | dict[str, Any], name: str) -> None:
    if len(value) > MOST_ENTRIES:
        raise InputError(f"has {len(value):,} entries, at most {MOST_ENTRIES:,}", argument=name)


def _entry_kinds(origin: Any, arguments: tuple[Any, ...], value: Any, name: str) -> tuple[Any, ...]:
    """Return the type of each entry of a list; refuse what is not a list of that length."""
    if not isinstance(value, list):
        raise InputError(f"{_quote(value)} is not a list, such as [16, 32]", argument=name)
    _check_length(value, name)
    kinds = arguments
    if origin is list or (len(arguments) == 2 and arguments[1] is Ellipsis):
        kinds = (arguments[0],) * len(value)
    if len(kinds) != len(value):
        raise InputError(f"{len(value)} entries instead of {len(kinds)}", argument=name)
    return kinds


SCALARS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "an integer"),
    float: ((int, float), "a finite number"),
    str: ((str,), "text"),
}


def _parse_scalar(hint: Any, value: Any, name: str) -> Any:
    if hint is Any:
        return value
    if hint not in SCALARS:
        raise TypeError(f"{name}: fields of type {hint} are not supported")
    accepted, wanted = SCALARS[hint]
    if type(value) not in accepted or (isinstance(value, float) and not math.isfinite(value)):
        raise InputError(f"{_quote(value)} is not {wanted}", argument=name)
    if type(value) is int and abs(value) > LARGEST_INTEGER:
        raise InputError("the integer is too large", argument=name)
    return float(value) if hint is float else value


def _quote(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
