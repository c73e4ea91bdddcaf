"""The form of a detector's data (image size or table columns) as validated JSON."""

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
    """Return a form as plain JSON values."""
    if isinstance(form, Picture):
        return {"kind": "picture", "height": form.height, "width": form.width, "channels": form.channels}
    return {
        "kind": "table",
        "columns": [_column_to_json(column) for column in form.columns],
        "ignored": list(form.ignored),
    }


def form_from_json(content: Any) -> Form:
    """Return the form that `form_to_json` wrote; raise InputError for any other content."""
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind == "picture":
        _check_keys(content, _PICTURE)
        return Picture(*(_check_type(content[key], int) for key in ("height", "width", "channels")))
    if kind == "table":
        _check_keys(content, _TABLE)
        columns = _check_list(content["columns"], dict, MOST_COLUMNS)
        ignored = _check_list(content["ignored"], str, MOST_COLUMNS)
        return Table(tuple(map(_column_from_json, columns)), tuple(ignored))
    raise InputError("form of the data: neither a picture nor a table. Use an undamaged file.")


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
        raise InputError(f"form of the data: column kind {content['kind']!r} is not supported. Use an undamaged file.")
    return Column(
        name=_check_type(content["name"], str),
        kind=content["kind"],
        categories=tuple(_check_list(content["categories"], str, MOST_CATEGORIES)),
        centre=_check_type(content["centre"], float),
        scale=_check_type(content["scale"], float),
        missing=_check_type(content["missing"], bool),
        frequencies=tuple(_check_list(content["frequencies"], float, MOST_CATEGORIES)),
    )


def _check_keys(content: dict[str, Any], expected: set[str]) -> None:
    if content.keys() != expected:
        raise InputError(f"form of the data: entries are not {sorted(expected)}. Use an undamaged file.")


def _check_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:  # not isinstance: True is an int
        raise InputError(f"form of the data: {str(value)[:60]!r} is not {kind.__name__}. Use an undamaged file.")
    return value


def _check_list(value: Any, kind: type, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise InputError(f"form of the data: no list of at most {most:,} entries. Use an undamaged file.")
    return [_check_type(entry, kind) for entry in value]
