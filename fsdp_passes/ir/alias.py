"""Which nodes may share memory with which: views, followed to the value that owns the storage."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from fsdp_passes._compat import is_operator, returns_view, written_arguments
from fsdp_passes.ir.nodes import operand

# Their results are the input's storage, always or when strides allow, whatever their schemas declare.
_UNDECLARED_VIEWS = (
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.contiguous.default,
)


def is_view(node: fx.Node) -> bool:
    """Whether the result may alias the first argument."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(operand(node))
    if node.target in _UNDECLARED_VIEWS:
        return True
    return returns_view(node.target)


def source(node: fx.Node) -> fx.Node:
    """The node whose storage `node` may share: itself unless it is a view."""
    while is_view(node):
        node = operand(node)
    return node


def views_of(node: fx.Node) -> Iterator[fx.Node]:
    """All views of `node`, views of views included, each once, users after what they view."""
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        viewed = pending.pop(0)
        for user in viewed.users:
            if is_view(user) and user.args[0] is viewed and user not in found:
                found[user] = None
                pending.append(user)
    yield from found


def readers_of(node: fx.Node) -> set[fx.Node]:
    """Nodes that compute with `node` or a view of it; views themselves compute nothing."""
    aliases = [node, *views_of(node)]
    return {user for alias in aliases for user in alias.users} - set(aliases)


def writes(node: fx.Node) -> set[fx.Node]:
    """Nodes that the operator of `node` writes into."""
    found: set[fx.Node] = set()
    if is_operator(node.target):
        fx.node.map_arg(written_arguments(node.target, node.args, node.kwargs), found.add)
    return found


def changing(graph: fx.Graph) -> set[fx.Node]:
    """Owners of the memory that some operator of the graph writes into: what they hold depends on when it is read."""
    return {source(node) for node in written(graph)}


def written(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that some operator of the graph writes into."""
    return {argument for node in graph.nodes for argument in writes(node)}
