"""The OpenAPI description of a server: what a request for this model holds, and what the answers hold."""

from typing import Any

from onefold.serve.model import ExportedModel


def describe_responses() -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of the answers of /score."""

    def lists(**kinds: dict[str, Any]) -> dict[str, Any]:
        properties = {name: {"type": "array", "items": kind} for name, kind in kinds.items()}
        return {"type": "object", "properties": properties, "required": list(kinds)}

    number = {"type": "number"}
    results = lists(score={"type": ["number", "null"]}, pvalue=number, is_ood={"type": "boolean"})
    error = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    errors = {400: "Not JSON", 408: "Too slow", 413: "Too large", 415: "Another type", 422: "Other columns or values"}
    described: dict[int | str, dict[str, Any]] = {
        200: {"description": "Scores, p-values and alarms", "content": {"application/json": {"schema": results}}}
    }
    for status, description in errors.items():
        described[status] = {"description": description, "content": {"application/json": {"schema": error}}}
    return described


def describe_body(model: ExportedModel, most_rows: int) -> dict[str, Any]:
    """Return the OpenAPI description of a request to /score."""
    if model.kind == "image":
        binary = {"schema": {"type": "string", "format": "binary"}}
        return {"required": True, "content": dict.fromkeys(("image/jpeg", "image/png"), binary)}
    rows = {"type": "array", "items": _describe_row(model), "minItems": 1, "maxItems": most_rows}
    schema = {"type": "object", "properties": {"rows": rows}, "required": ["rows"]}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _describe_row(model: ExportedModel) -> dict[str, Any]:
    if model.kind == "columns":
        kinds = {"number": "number", "category": "string"}
        types = {c["name"]: {"type": [kinds[c["kind"]], "null"]} for c in model.layout["columns"]}
        return {"type": "object", "properties": types, "required": list(types), "additionalProperties": False}
    shapes, dtypes = model.layout["shapes"], model.layout["dtypes"]
    arrays = {name: _describe_array(shape[1:], dtypes[name], model.kind == "codes") for name, shape in shapes.items()}
    if set(arrays) == {"x"}:
        return arrays["x"]
    return {"type": "object", "properties": arrays, "required": list(arrays), "additionalProperties": False}


def _describe_array(shape: list[int], dtype: str, missing: bool) -> dict[str, Any]:
    kind = {"uint8": "integer", "int64": "integer", "bool": "boolean"}.get(dtype, "number")
    schema: dict[str, Any] = {"type": [kind, "null"] if missing else kind}
    if dtype == "uint8":
        schema |= {"minimum": 0, "maximum": 255}
    for size in reversed(shape):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return schema
