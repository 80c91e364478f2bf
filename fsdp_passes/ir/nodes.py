"""Typed access to the parts of a graph that the package's passes touch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx


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
