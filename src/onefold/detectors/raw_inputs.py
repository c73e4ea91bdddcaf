"""ONNX nodes before an exported detector: from one image of any size, or from the columns of a table, to its input."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from onefold.errors import InputError, visible
from onefold.inputs import Picture, Table
from onefold.inputs.reader import Reader
from onefold.inputs.tables import MISSING, UNSEEN, Column

Inputs: TypeAlias = Literal["auto", "image", "batch"]

GREY = (19595, 38470, 7471)  # Pillow's weights of red, green and blue, in units of 2⁻¹⁶
RESERVED = frozenset({"score", "pvalue", "is_ood", "threshold", ""})  # names that no column's input may have


@dataclass
class Front:
    """Inputs, nodes and constants that compute the input `x` of a batched model from raw data."""

    inputs: list[Any] = field(default_factory=list)
    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    samples: int | str = "batch"

    def constant(self, values: Sequence[int]) -> str:
        """Add a vector of integers and return its name."""
        import onnx

        name = f"onefold.constant.{len(self.constants)}"
        self.constants.append(onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [len(values)], list(values)))
        return name

    def node(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        import onnx

        output = output or f"onefold.value.{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def prepend_to(self, model: Any) -> None:
        """Replace the input `x` of an ONNX model by these inputs and nodes; rename values of equal names."""
        graph = model.graph
        kept = [value for value in graph.input if value.name != "x"]
        nodes, inputs = list(graph.node), [*self.inputs, *kept]
        _rename_values(graph, {value.name for value in self.inputs} - {"x"})
        del graph.node[:], graph.input[:]
        graph.node.extend([*self.nodes, *nodes])
        graph.input.extend(inputs)
        graph.initializer.extend(self.constants)
        for output in graph.output:
            output.type.tensor_type.shape.dim[0].Clear()
            if isinstance(self.samples, int):
                output.type.tensor_type.shape.dim[0].dim_value = self.samples
            else:
                output.type.tensor_type.shape.dim[0].dim_param = self.samples


def takes_image(reader: Reader, inputs: Inputs) -> bool:
    """Return True if the exported model takes one image of any size; raise InputError if it must but cannot."""
    if inputs != "image":
        return inputs == "auto" and isinstance(reader.form, Picture)
    if reader.kind != "images" or reader.dtypes["x"] != "uint8" or reader.sample_shape[0] not in (1, 3):
        raise InputError(
            "the detector was not fitted on grey or colour images in uint8",
            argument="inputs",
            hint="Export it with inputs='batch'.",
        )
    return True


def image_front(reader: Reader) -> Front:
    """Return the nodes from an image uint8 [H, W, 3] to a batch of one; the same pixels as `decode` up to rounding.

    Crop at the centre, scale with a triangle filter, convert to grey if the detector is for grey images.
    """
    import onnx

    channels, height, width = reader.sample_shape
    front = Front(samples=1)
    front.inputs.append(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, ["height", "width", 3]))
    cropped = _crop(front, "x", height, width)
    planes = front.node("Unsqueeze", front.node("Transpose", cropped, perm=[2, 0, 1]), front.constant([0]))
    # exclude_outside=1 is Pillow's rule at the border: weights of pixels inside the image are normalised
    pixels = front.node(
        "Resize", planes, "", "", front.constant([1, 3, height, width]), mode="linear", antialias=1, exclude_outside=1
    )
    if channels == 1:
        pixels = _to_grey(front, pixels)
    if reader.channels_last:
        pixels = front.node("Transpose", pixels, perm=[0, 2, 3, 1])
    front.node("Reshape", pixels, front.constant([1, *reader.shapes["x"]]), output="onefold.x")
    return front


def _crop(front: Front, image: str, height: int, width: int) -> str:
    """Add the nodes of `Picture.crop` and return the cropped image [h, w, 3]."""
    size = front.node("Shape", image, start=0, end=2)
    other = front.node("Gather", size, front.constant([1, 0]))
    scaled = front.node("Mul", other, front.constant([height, width]))
    scaled = front.node("Add", scaled, front.constant([width // 2, height // 2]))
    scaled = front.node("Div", scaled, front.constant([width, height]))
    cropped = front.node("Min", size, front.node("Max", scaled, front.constant([1, 1])))
    start = front.node("Div", front.node("Sub", size, cropped), front.constant([2, 2]))
    return front.node("Slice", image, start, front.node("Add", start, cropped), front.constant([0, 1]))


def _to_grey(front: Front, pixels: str) -> str:
    """Add Pillow's conversion to grey: (R·19595 + G·38470 + B·7471 + 2¹⁵) // 2¹⁶."""
    import onnx

    weights = front.node("Reshape", front.constant(GREY), front.constant([1, 3, 1, 1]))
    weighted = front.node("Mul", front.node("Cast", pixels, to=onnx.TensorProto.INT64), weights)
    total = front.node("Add", front.node("ReduceSum", weighted, front.constant([1])), front.constant([2**15]))
    return front.node("Cast", front.node("Div", total, front.constant([2**16])), to=onnx.TensorProto.UINT8)


def table_front(reader: Reader, columns: Mapping[str, Column]) -> Front:
    """Return the nodes from the columns of a table to the codes of `Table.encode`.

    Args:
        reader: Layout of the table.
        columns: Columns by the names of their inputs.
    """
    import onnx

    front = Front()
    parts: list[str] = []
    for name, column in columns.items():
        kind = onnx.TensorProto.DOUBLE if column.kind == "number" else onnx.TensorProto.STRING
        front.inputs.append(onnx.helper.make_tensor_value_info(name, kind, ["batch"]))
        values = name
        if column.kind == "category":
            codes = {text: float("nan") for text in sorted(MISSING)}
            codes |= {_encodable(text): float(code) for code, text in enumerate(column.categories)}
            keys, floats = list(codes), list(codes.values())
            values = front.node(
                "LabelEncoder", name, domain="ai.onnx.ml", keys_strings=keys, values_floats=floats, default_float=UNSEEN
            )
            values = front.node("Cast", values, to=onnx.TensorProto.DOUBLE)
        parts.append(front.node("Unsqueeze", values, front.constant([1])))
    matrix = front.node("Concat", *parts, axis=1)
    dtype = onnx.TensorProto.DOUBLE if reader.dtypes["x"] == "float64" else onnx.TensorProto.FLOAT
    front.node("Cast", matrix, to=dtype, output="onefold.x")
    return front


def input_names(table: Table) -> dict[str, Column]:
    """Return the columns by the names of their inputs: the column's name, except where the model uses that name."""
    names: dict[str, Column] = {}
    for position, column in enumerate(table.columns):
        name = _encodable(column.name)
        if name in RESERVED or name in names or name.startswith("onefold."):
            name = f"column {position}: {name}"
        names[name] = column
    return names


def _encodable(text: str) -> str:
    """Return text that UTF-8 can hold: a file that is not UTF-8 may have other names."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return visible(text)
    return text


def _rename_values(graph: Any, taken: set[str]) -> None:
    """Rename the values of a graph whose names are `taken`, and its input `x` to the output of the front."""
    names = {"x": "onefold.x"} | {name: f"onefold.renamed.{i}" for i, name in enumerate(sorted(taken))}
    for node in graph.node:
        for values in (node.input, node.output):
            values[:] = [names.get(name, name) for name in values]
        for attribute in node.attribute:
            if attribute.HasField("g"):  # a branch or a loop reads values of the outer graph by name
                _rename_values(attribute.g, taken)
    for named in (*graph.initializer, *graph.value_info):
        named.name = names.get(named.name, named.name)
