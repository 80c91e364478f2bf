"""Typed access to the parts of a graph that the package's passes touch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fsdp_passes._compat import is_operator


def calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    """Nodes that call `target`, in the order of the graph."""
    return list(graph.find_nodes(op="call_function", target=target))


def operand(node: fx.Node, index: int = 0) -> fx.Node:
    """Argument number `index`, which is a node."""
    argument = node.args[index]
    assert isinstance(argument, fx.Node), f"{node.format_node()}: argument {index} is {argument!r}"
    return argument


def operands(node: fx.Node, index: int = 0) -> Sequence[Any]:
    """Argument number `index`, which is a list."""
    argument = node.args[index]
    assert isinstance(argument, Sequence), f"{node.format_node()}: argument {index} is {argument!r}"
    return argument


def results(graph: fx.Graph) -> list[Any]:
    """What the graph returns: nodes, numbers, None."""
    return list(operands(graph.output_node()))


def set_results(graph: fx.Graph, values: Sequence[Any]) -> None:
    graph.output_node().args = (tuple(values),)


def attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    """What `node`, a get_attr in the graph of `gm`, reads."""
    value: Any = gm
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def is_constant(node: fx.Node) -> bool:
    """A tensor that the graph holds, or a size, which may be an input."""
    return node.op == "get_attr" or isinstance(node.meta.get("val"), torch.SymInt | int)


_ZEROS = (torch.ops.aten.zeros.default, torch.ops.aten.new_zeros.default)


def is_fresh_zeros(node: fx.Node) -> bool:
    """What autograd makes up for a gradient that it does not have."""
    return node.target in _ZEROS


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call of the operator `target`, where the graph inserts, with the type that it infers from its arguments."""
    node = graph.create_node("call_function", target, args, kwargs, name=str(target).split(".")[1])
    values, options = fx.node.map_arg((args, kwargs), lambda argument: argument.meta["val"])
    node.meta["val"] = target(*values, **options)
    return node


def erase_unused(node: fx.Node) -> None:
    """Erase `node`, which nobody reads, and what pure operators computed for it alone."""
    operands = node.all_input_nodes
    node.graph.erase_node(node)
    for argument in operands:
        if not argument.users and is_pure(argument):
            erase_unused(argument)


def is_pure(node: fx.Node) -> bool:
    """An operator that writes nothing and, if its tags are true, draws no random numbers; or an item of a tuple."""
    if node.target is operator.getitem:
        return True
    return is_operator(node.target) and not node.is_impure()


def is_repeatable(node: fx.Node) -> bool:
    """A pure operator of torch's own, which gives the same values again; nothing is known of a user's."""
    if node.target is operator.getitem:
        return True
    return is_pure(node) and str(node.target).startswith(("aten.", "prims."))
