"""Parameter reads in the graph that Dynamo captured: one chain a parameter and grad mode.

    before   a = unshard(s); b = split(a)[0].view(8, 8); c = unshard(s); d = split(c)[0].view(8, 8)
    after    a = unshard(s); b = split(a)[0].view(8, 8)                    d's readers read b

Reads inside checkpoint bodies are moved in front of the checkpoint first, so that a flat group has one
unshard, hence one sum of its gradients in autograd's order, wherever its parameters are used. Resharding
does not depend on the body: the joint graph recomputes every unshard.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fsdp_passes.ir.nodes import calls, operand
from fsdp_passes.ir.ops import UNSHARD

_UNSHARD_TARGETS = (UNSHARD, UNSHARD.overloadpacket)
_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem)
_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def merge_reads(gm: fx.GraphModule) -> None:
    """Merge equal reads and drop those that only served `.dtype` or `.shape`; edits `gm` in place."""
    for checkpoint in calls(gm.graph, _CHECKPOINT):
        _hoist_reads(gm, checkpoint)
    _refuse_edits(gm)
    _merge_equal_reads(gm.graph)
    gm.recompile()


def _calls(node: Any, op: str, targets: tuple[Any, ...]) -> bool:
    return isinstance(node, fx.Node) and node.op == op and node.target in targets


def _is_unshard(node: Any) -> bool:
    return _calls(node, "call_function", _UNSHARD_TARGETS)


def _is_split(node: Any) -> bool:
    return _calls(node, "call_method", ("split_with_sizes",)) and _is_unshard(node.args[0])


def _is_piece(node: Any) -> bool:
    return _calls(node, "call_function", (operator.getitem,)) and _is_split(node.args[0])


def _is_parameter(node: Any) -> bool:
    return _calls(node, "call_method", ("view",)) and _is_piece(node.args[0])


def _is_read(node: fx.Node) -> bool:
    return _is_unshard(node) or _is_split(node) or _is_piece(node) or _is_parameter(node)


def _hoist_reads(gm: fx.GraphModule, checkpoint: fx.Node) -> None:
    """Turn each parameter that the checkpoint's body reads into an argument, read in front of it."""
    body = gm.get_submodule(str(operand(checkpoint).target))
    assert isinstance(body, fx.GraphModule)
    for inner in calls(body.graph, _CHECKPOINT):
        _hoist_reads(body, inner)
    _merge_equal_reads(body.graph)
    inputs = body.graph.find_nodes(op="placeholder")
    outer: dict[fx.Node, Any] = dict(zip(inputs, checkpoint.args[1:], strict=True))
    for read in [node for node in body.graph.nodes if _is_parameter(node)]:
        if _chain(read)[0].args[0] not in outer:
            continue
        _copy_in_front(checkpoint, _chain(read), outer)
        checkpoint.args = (*checkpoint.args, outer[read])
        with body.graph.inserting_after(inputs[-1]):
            inputs.append(body.graph.placeholder(read.name))
        inputs[-1].meta = dict(read.meta)
        read.replace_all_uses_with(inputs[-1])
    _drop_dead_reads(body.graph)
    body.recompile()


def _chain(read: fx.Node) -> list[fx.Node]:
    """unshard, split_with_sizes, getitem and view of a parameter."""
    chain = [read]
    while not _is_unshard(chain[0]):
        chain.insert(0, operand(chain[0]))
    return chain


def _copy_in_front(checkpoint: fx.Node, chain: list[fx.Node], outer: dict[fx.Node, Any]) -> None:
    """Copy `chain` from the body to before `checkpoint`; `outer` maps the body's nodes to the copies."""
    for node in chain:
        if node not in outer:
            with checkpoint.graph.inserting_before(checkpoint):
                outer[node] = checkpoint.graph.node_copy(node, outer.__getitem__)


def _grad_modes(graph: fx.Graph) -> Iterator[tuple[fx.Node, object]]:
    """Each node with the grad mode that it runs in, as the last node that set one (None: the caller's)."""
    mode: object = None
    for node in list(graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            mode = node.args[0]
        elif node.op == "call_function" and "inference_mode" in getattr(node.target, "__name__", ""):
            mode = node
        yield node, mode


def _merge_equal_reads(graph: fx.Graph) -> None:
    """A read in another grad mode stays its own: merging would lose or invent its gradient."""
    first: dict[object, fx.Node] = {}
    for node, mode in _grad_modes(graph):
        if not _is_read(node):
            continue
        key = (node.target, node.args, tuple(node.kwargs.items()), mode)
        kept = first.setdefault(key, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
    _drop_dead_reads(graph)


def _drop_dead_reads(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if _is_read(node) and not node.users:
            graph.erase_node(node)


def _refuse_edits(gm: fx.GraphModule) -> None:
    """An in-place operation on a parameter would edit a gathered copy and be lost."""
    for read in [node for node in gm.graph.nodes if _is_parameter(node)]:
        for user in read.users:
            if user.args[0] is read and _is_in_place(user):
                raise RuntimeError(
                    f"fsdp_passes: expected forward to leave its parameters alone, got {user.format_node()}, "
                    "which would edit a gathered copy and be lost; edit the parameter outside of forward"
                )


def _is_in_place(node: fx.Node) -> bool:
    name = str(node.target) if node.op == "call_method" else ""
    method = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return method or node.target in _IN_PLACE
