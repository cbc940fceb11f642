"""Why a model that exports would still be answered wrongly: compiled code draws, writes or refers differently.

Scanned after decomposition: in the traced graph, in-place operators and views hide what is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from bentoml_compile.engines.aot.shadow import tensors_in

_READ = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR, InputKind.USER_INPUT)


def find_hazard(program: ExportedProgram, inputs: list[str], prefix: str) -> str | None:
    """What the program does that compiled code would not do as eager does; None if nothing was found.

    Args:
        inputs: what to call each tensor that the program takes.
        prefix: what the names of parameters and buffers begin with, and a reader should not see.
    """
    decomposed = program.run_decompositions({})
    user_inputs = dict(zip(decomposed.graph_signature.user_inputs, inputs, strict=True))
    for written in decomposed.graph_signature.output_specs:
        if written.kind is OutputKind.USER_OUTPUT:
            continue
        kind = written.kind.name.lower().removesuffix("_mutation").replace("user_", "")
        name = str(written.target or written.arg)
        return f"changes {kind} '{user_inputs.get(name, name.removeprefix(prefix))}'"
    for read in decomposed.graph_signature.input_specs:
        if read.kind not in _READ:
            return f"uses {read.target or read.arg}, which is no tensor"
    for node in _nodes(decomposed.graph_module):
        if _is_random(node):
            return f"draws random numbers in forward ({node.target}); is it in eval mode?"
    return None


def _nodes(module: torch.nn.Module) -> Iterator[fx.Node]:
    """Also those of the branches of a torch.cond and the like."""
    for child in module.modules():
        if isinstance(child, fx.GraphModule):
            yield from child.graph.nodes


def _is_random(node: fx.Node) -> bool:
    """Attention carries the tag too, and draws only if its dropout is not 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return bool(_argument(node, "dropout_p", missing=None) != 0.0)


def _argument(node: fx.Node, name: str, missing: Any) -> Any:
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            given = node.args[position] if position < len(node.args) else argument.default_value
            return node.kwargs.get(name, given)
    return missing


def find_foreign_constant(program: ExportedProgram, model: torch.nn.Module) -> str | None:
    """What a constant of the program is, other than a literal in the code or a plain attribute of the model.

    Those two are the same in every process that has this code and this model. A weight that tracing reached in another
    way than by its module (a closure, a plain list) would keep its value when the weights are replaced; a tensor that
    is no part of the model may have another value in the next process.
    """
    weights = {_memory(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    attributes = {_memory(tensor) for module in model.modules() for tensor in tensors_in(vars(module))}
    nodes = {node.name: node for node in program.graph.nodes}
    for read in program.graph_signature.input_specs:
        if read.kind is not InputKind.CONSTANT_TENSOR or read.target is None:
            continue
        value = program.constants[read.target]
        if value.numel() and _memory(value) in weights:
            return f"reads '{weights[_memory(value)]}' in another way than by its module (a closure, a plain list)"
        if not _is_literal(nodes[read.arg.name]) and _memory(value) not in attributes:
            sizes = list(value.shape)
            return f"reads a tensor of sizes {sizes} that is no part of the model; make it a buffer of a module"
    return None


def _is_literal(constant: fx.Node) -> bool:
    """`torch.tensor([...])` in the traced code is lifted by a copy; a tensor that was there before is read itself."""
    return all(user.target is torch.ops.aten.lift_fresh_copy.default for user in constant.users)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)
