"""What a fitted detector remembers of its data, as JSON that is read with suspicion."""

from typing import Any, TypeAlias

from onefold.errors import InputError
from onefold.inputs.column_stats import MOST_CATEGORIES
from onefold.inputs.decode import Picture
from onefold.inputs.tables import MOST_COLUMNS, Column, Table

Form: TypeAlias = Picture | Table

_PICTURE = {"kind", "height", "width", "channels"}
_TABLE = {"kind", "columns", "ignored"}
_COLUMN = {"name", "kind", "categories", "centre", "scale", "missing", "frequencies"}


def form_to_json(form: Form) -> dict[str, Any]:
    """A form as plain JSON values."""
    if isinstance(form, Picture):
        return {"kind": "picture", "height": form.height, "width": form.width, "channels": form.channels}
    return {
        "kind": "table",
        "columns": [_column_to_json(column) for column in form.columns],
        "ignored": list(form.ignored),
    }


def form_from_json(content: Any) -> Form:
    """What form_to_json wrote; a ValueError for anything else."""
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind == "picture":
        _check_keys(content, _PICTURE)
        return Picture(*(_typed(content[key], int) for key in ("height", "width", "channels")))
    if kind == "table":
        _check_keys(content, _TABLE)
        columns = _listed(content["columns"], dict, MOST_COLUMNS)
        ignored = _listed(content["ignored"], str, MOST_COLUMNS)
        return Table(tuple(map(_column_from_json, columns)), tuple(ignored))
    raise InputError("the form of the data is neither a picture nor a table")


def _column_to_json(column: Column) -> dict[str, Any]:
    return {
        "name": column.name,
        "kind": column.kind,
        "categories": list(column.categories),
        "centre": column.centre,
        "scale": column.scale,
        "missing": column.missing,
        "frequencies": list(column.frequencies),
    }


def _column_from_json(content: dict[str, Any]) -> Column:
    _check_keys(content, _COLUMN)
    if content["kind"] not in ("number", "category"):
        raise InputError(f"a column's kind is {content['kind']!r}, neither number nor category")
    return Column(
        name=_typed(content["name"], str),
        kind=content["kind"],
        categories=tuple(_listed(content["categories"], str, MOST_CATEGORIES)),
        centre=_typed(content["centre"], float),
        scale=_typed(content["scale"], float),
        missing=_typed(content["missing"], bool),
        frequencies=tuple(_listed(content["frequencies"], float, MOST_CATEGORIES)),
    )


def _check_keys(content: dict[str, Any], expected: set[str]) -> None:
    if content.keys() != expected:
        raise InputError(f"the form of the data has other entries than {sorted(expected)}")


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:  # not isinstance: True is an int
        raise InputError(f"the form of the data has {str(value)[:60]!r} where {kind.__name__} is expected")
    return value


def _listed(value: Any, kind: type, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise InputError(f"the form of the data needs lists of at most {most:,} entries")
    return [_typed(entry, kind) for entry in value]
