"""Programs of torch.export: files, calls, and programs cut at a layer."""

import difflib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen

from onefold.core.batches import batch_tensors
from onefold.errors import InputError, LayerError
from onefold.nn.modules import check_keys, to_model
from onefold.types import Batch, Model


def is_program(model: Model) -> bool:
    """Return True for a torch.export program; torch.export loads slowly, and a program exists only after its import."""
    export = sys.modules.get("torch.export")
    return export is not None and isinstance(model, export.ExportedProgram)


def load_program(path: Path) -> Model:
    """Return the exported model in a file. The file can contain code, so load only files that the user names."""
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    import torch.export  # loads slowly

    export_logger = logging.getLogger("torch.export")
    level = export_logger.level
    export_logger.setLevel(logging.CRITICAL)  # torch logs a page about every unreadable file
    try:
        net = torch.export.load(path)
    except Exception as error:  # any error means that the file is unreadable
        raise InputError(f"{path}: not a model that torch.export.save wrote ({type(error).__name__})") from None
    finally:
        export_logger.setLevel(level)
    sizes = [shape[0] for shape in input_shapes(net) if len(shape)]
    if any(isinstance(size, int) for size in sizes):
        raise InputError(
            f"{path}: takes batches of {sizes[0]} only: export it with a free batch size, "
            'torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))'
        )
    return net


def input_shapes(net: Model) -> list[Sequence[Any]]:
    """Return the shapes of a model's inputs; a dynamic size is a symbol."""
    inputs = set(net.graph_signature.user_inputs)
    return [node.meta["val"].shape for node in net.graph.nodes if node.name in inputs and "val" in node.meta]


def program_inputs(program: GraphModule, x: Batch) -> list[Tensor]:
    """Return the tensors of a batch in the order of an exported program's inputs; by name if the names match."""
    takes = [str(node.target) for node in program.graph.nodes if node.op == "placeholder"]
    if isinstance(x, Mapping) and (len(x) != len(takes) or set(x) == set(takes)):
        check_keys("the exported model", dict.fromkeys(takes, True), x)
        return [x[key] for key in takes]
    return batch_tensors(x)


def program_caller(program: Model) -> Callable[[Batch], Any]:
    """Return the function from a batch to what an exported program returns."""
    graph_module = program.module()
    assert isinstance(graph_module, GraphModule)

    def run(x: Batch) -> Any:
        with torch.no_grad():
            return graph_module(*program_inputs(graph_module, to_model(graph_module, x)))

    return run


def cut_program(program: Model, layer: str) -> Callable[[Batch], Tensor]:
    """Return an exported program up to the output of the named layer."""
    graph_module = program.module()
    assert isinstance(graph_module, GraphModule)
    nodes = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    inside = [node for node in nodes if _belongs(node, layer)]
    if not inside:
        paths = sorted({path for node in nodes for path in _paths(node)} - {""})
        near = difflib.get_close_matches(layer, paths, n=3, cutoff=0.3) or paths[-3:]
        raise LayerError(f"the exported model has no layer {layer!r}: did you mean {', '.join(map(repr, near))}?")
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    output.args = (inside[-1],)
    graph_module.graph.set_codegen(CodeGen())
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()

    def encode(x: Batch) -> Tensor:
        with torch.no_grad():
            return graph_module(*program_inputs(graph_module, to_model(graph_module, x)))

    return encode


def _paths(node: Node) -> list[str]:
    """Return the names of the modules that contain a node of an exported graph."""
    return [
        path.removeprefix("L['self'].").removeprefix("L__self___")
        for path, _ in node.meta.get("nn_module_stack", {}).values()
    ]


def _belongs(node: Node, layer: str) -> bool:
    return any(path == layer for path in _paths(node))
