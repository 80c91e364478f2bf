"""The graph language: one ASCII line a node. `load(dump(gm))` is the same graph over fake tensors.

       0         primals_1: f32[64] = input(shard="layers.0")
       1 issue   gather: bf16[128] = fsdp_opt.gather(primals_1, 2, torch.bfloat16)
       2 wait    wait: bf16[128] = fsdp_opt.wait(gather)
       3         split: (bf16[96], bf16[32]) = aten.split_with_sizes(wait, [96, 32])
       4         getitem: bf16[96] = split[0]
       5 release release = fsdp_opt.release(gather)
       6         return (getitem,)

Columns: index, lane, name, type, operation, arguments; the notation is in `types`, `sizes` and `arguments`.
An operator without outputs has no type. `?` is the type of a node without `meta["val"]`: `load` does not run
it, and believes the types of the lines that read it. Everything else runs again, on fake tensors.
`x: T = get_attr("path")` reads a constant, whose values are not in the text. The graphs that higher-order
operators call follow the main one, each under a line `graph path:`. Indices are for readers: `load` looks at
neither them, nor blank lines, nor lines that start with `#`.

Nothing printed depends on the rank, the machine or the time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fsdp_passes import _compat
from fsdp_passes.ir.arguments import argument_text, operator_text, quote
from fsdp_passes.ir.nodes import attribute
from fsdp_passes.ir.ops import ShardInput
from fsdp_passes.ir.reader import GETITEM, Reader, body_path, lane
from fsdp_passes.ir.sizes import SymbolNames
from fsdp_passes.ir.types import UNKNOWN, TypeReader, type_text

# First example value and step for symbols s0, s1, ... An operator may take only sizes that divide evenly, fit
# into a constant, or come in some order, and the text does not say which: when one choice fails, the next is
# tried.
_HINTS = ((24, 12), (9240, 840), (4, 2), (7200, -12))


def dump(gm: fx.GraphModule) -> str:
    """The text of `gm`; ValueError for a node that the language has no words for."""
    names = SymbolNames()
    return "\n".join(_section(gm, "", names, set()))


def _section(gm: fx.GraphModule, path: str, names: SymbolNames, done: set[str]) -> Iterator[str]:
    """The graph, then the graphs that it calls, each once, depth first."""
    yield "".join(f"{_line(gm, i, node, names)}\n" for i, node in enumerate(gm.graph.nodes))
    for node in gm.graph.find_nodes(op="get_attr"):
        body, inner = _attribute(gm, node), body_path(path, node)
        if isinstance(body, fx.GraphModule) and inner not in done:
            done.add(inner)
            first, *rest = _section(body, inner, names, done)
            yield f"graph {inner}:\n{first}"
            yield from rest


def _line(gm: fx.GraphModule, index: int, node: fx.Node, names: SymbolNames) -> str:
    try:
        if node.op == "output":
            body = f"return {argument_text(node.args[0])}"
        else:
            body = f"{node.name}{_annotation(gm, node, names)} = {_operation(node)}"
    except ValueError as error:
        raise ValueError(f"node {node.name}: {error}") from None
    return f"{index:4} {lane(node):7} {body}"


def _annotation(gm: fx.GraphModule, node: fx.Node, names: SymbolNames) -> str:
    if _compat.returns_nothing(node.target):
        return ""
    if node.op == "get_attr":
        return f": {type_text(_attribute(gm, node), names)}"
    return f": {type_text(node.meta['val'], names) if 'val' in node.meta else UNKNOWN}"


def _attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    value = attribute(gm, node)
    if not isinstance(value, torch.Tensor | fx.GraphModule):
        raise ValueError(f"expected get_attr of a tensor or a graph, got {type(value).__name__}")
    return value


def _operation(node: fx.Node) -> str:
    if node.op == "placeholder":
        shard = node.meta.get("fsdp")
        return f"input(shard={quote(shard.unit)})" if isinstance(shard, ShardInput) else "input()"
    if node.op == "get_attr":
        return f"get_attr({quote(str(node.target))})"
    if node.op != "call_function":
        raise ValueError(f"expected call_function, got {node.op}")
    if node.target is GETITEM and isinstance(node.args[1], int) and node.args[1] >= 0:
        return f"{argument_text(node.args[0])}[{node.args[1]}]"
    arguments = [argument_text(arg) for arg in node.args]
    arguments += [f"{name}={argument_text(arg)}" for name, arg in node.kwargs.items()]
    return f"{operator_text(node.target)}({', '.join(arguments)})"


def load(text: str) -> fx.GraphModule:
    """The graph that `text` describes, with a fake `meta["val"]` for every node of known type.

    SyntaxError: a line that is not the language, an unknown or repeated name, an unknown operator.
    TypeError: an operator that does not give the written type, or does not take its arguments.
    Both name the line.
    """
    failure: TypeError | None = None
    for first, step in _HINTS if re.search(r"\bs\d+\b", text) else _HINTS[:1]:
        reader = Reader(text, TypeReader(itertools.count(first, step)))
        try:
            return reader.read()
        except TypeError as error:
            failure = failure or error
    assert failure is not None
    raise failure
