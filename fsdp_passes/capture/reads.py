"""Parameter reads in the graph that Dynamo captured: one chain a parameter and grad mode.

    before   a = unshard(s); b = split(a)[0].view(8, 8); c = unshard(s); d = split(c)[0].view(8, 8)
    after    a = unshard(s); b = split(a)[0].view(8, 8)                    d's readers read b

Reads inside checkpoint bodies are moved in front of the checkpoint first, so that a flat group has one
unshard, hence one sum of its gradients in autograd's order, wherever its parameters are used. Resharding
does not depend on the body: the joint graph recomputes every unshard.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fsdp_passes._compat import INFERENCE_MODE, SET_GRAD_ENABLED, reads_data
from fsdp_passes.ir.nodes import calls, operand
from fsdp_passes.ir.ops import UNSHARD

_UNSHARD_TARGETS = (UNSHARD, UNSHARD.overloadpacket)
_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def merge_reads(gm: fx.GraphModule) -> None:
    """Merge equal reads and drop those that only served `.dtype` or `.shape`; edits `gm` in place."""
    _refuse_edits(gm)
    for checkpoint in calls(gm.graph, _CHECKPOINT):
        _hoist_reads(gm, checkpoint)
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


def _merge_equal_reads(graph: fx.Graph) -> None:
    """Reads in different grad modes stay apart: merging would lose or invent a gradient."""
    _move_out_of_no_grad(graph)
    first: dict[object, fx.Node] = {}
    mode: object = torch.is_grad_enabled()
    for node in list(graph.nodes):
        mode = node.args[0] if node.target is SET_GRAD_ENABLED else mode
        if not _is_read(node):
            continue
        kept = first.setdefault((node.target, node.args, tuple(node.kwargs.items()), mode), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
    _drop_dead_reads(graph)


def _move_out_of_no_grad(graph: fx.Graph) -> None:
    """A parameter is a leaf, wherever it is read: what is computed from it later may need its gradient."""
    no_grad, inference, switch = False, 0, graph.output_node()
    for node in list(graph.nodes):
        was_off = no_grad or inference > 0
        if node.target is SET_GRAD_ENABLED:
            no_grad = not node.args[0]
        elif node.op == "call_function" and node.target in INFERENCE_MODE:
            inference += INFERENCE_MODE[node.target]
        if not was_off and (no_grad or inference):
            switch = node
        elif was_off and _is_read(node):
            switch.prepend(node)


def _drop_dead_reads(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if _is_read(node) and not node.users:
            graph.erase_node(node)


def _refuse_edits(gm: fx.GraphModule) -> None:
    """An in-place operation on a parameter would edit a gathered copy and be lost."""
    for graph in [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]:
        for read in [node for node in graph.nodes if _is_parameter(node)]:
            aliases = [read, *(user for user in read.users if reads_data(user))]
            if any(alias.meta["example_value"]._version for alias in aliases):
                raise RuntimeError(
                    "fsdp_passes: expected forward to leave its parameters alone, got an in-place operation on one "
                    f"of shape {tuple(read.args[1])}, read as {read}; edit it outside of forward"
                )
