"""From gradients that flow to the shard to gradients that the runtime accumulates and reduces."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import fx

from fsdp_passes.ir.nodes import calls, operand, operands, results, set_results
from fsdp_passes.ir.ops import ACCUMULATE, REDUCE, REDUCE_GRAD
from fsdp_passes.ir.passes import Pass

log = logging.getLogger(__name__)

_ZEROS = (torch.ops.aten.zeros.default, torch.ops.aten.new_zeros.default)
_ADD = torch.ops.aten.add.Tensor
_CAT = torch.ops.aten.cat.default


@dataclass(frozen=True)
class LowerReduceGrad(Pass):
    """Add each gradient to its group's flat buffer, whose reduction is then issued.

    before   c = cat([g1, zeros]); r = reduce_grad(c, shard, 2); return r
    after    c = cat([g1, zeros]); accumulate(c, shard, [0]); reduce(shard); return None

    The list names the pieces of the flat group that have a gradient here; a piece that autograd filled with
    zeros has none. Whether the reduction communicates is decided when the graph runs (no_sync).

    Keeps: every value; a sum of reduce_grads of one shard becomes accumulates, in the order of the graph.
    Declines: a reduce_grad that anything but such a sum or the output reads; it stays, goes through autograd in
        every backward, and is named in the log.
    """

    def apply(self, gm: fx.GraphModule) -> None:
        returned = results(gm.graph)
        for index, result in enumerate(returned):
            nodes = find_sum(result)
            if not nodes or any(len(node.users) > 1 for node in nodes) or returned.count(result) > 1:
                continue
            _lower(gm.graph, result, nodes)
            returned[index] = None
            set_results(gm.graph, returned)
            for node in nodes:
                gm.graph.erase_node(node)
        for node in calls(gm.graph, REDUCE_GRAD):
            log.warning("%s is reduced in every backward, through autograd: it is no plain sum", node.format_node())


def find_sum(result: object) -> list[fx.Node]:
    """The additions and reduce_grads of one shard that make up `result`, users first; empty: it is no such sum."""
    if not isinstance(result, fx.Node):
        return []
    if result.target is REDUCE_GRAD:
        return [result]
    if result.target is not _ADD or len(result.all_input_nodes) != 2 or result.kwargs:
        return []
    left, right = find_sum(result.args[0]), find_sum(result.args[1])
    shards = {operand(node, 1) for node in left + right if node.target is REDUCE_GRAD}
    return [result, *left, *right] if left and right and len(shards) == 1 else []


def find_pieces(full_grad: fx.Node) -> list[int] | None:
    """Pieces of the flat group that have a gradient: those of the cat that are no fresh zeros. None: unknown."""
    if full_grad.target is not _CAT:
        return None
    return [i for i, piece in enumerate(operands(full_grad)) if piece.target not in _ZEROS]


def _lower(graph: fx.Graph, result: fx.Node, nodes: list[fx.Node]) -> None:
    reductions = [node for node in nodes if node.target is REDUCE_GRAD]
    for node in reductions:
        full_grad, shard = operand(node, 0), operand(node, 1)
        with graph.inserting_before(node):
            graph.call_function(ACCUMULATE, (full_grad, shard, find_pieces(full_grad))).meta["val"] = None
    with graph.inserting_before(result):
        graph.call_function(REDUCE, (operand(reductions[0], 1),)).meta["val"] = None
