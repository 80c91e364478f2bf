"""From gradients that flow to the shard to gradients that the runtime accumulates and reduces."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fsdp_passes.ir.nodes import call, calls, erase_unused, is_fresh_zeros, operand, operands, results, set_results
from fsdp_passes.ir.ops import ACCUMULATE, REDUCE, REDUCE_GRAD, ShardInput
from fsdp_passes.ir.passes import Declined, Pass


@dataclass(frozen=True)
class LowerReduceGrad(Pass):
    """Add each gradient to its group's flat buffer, whose reduction is then issued.

    before   c = cat([g1, zeros]); r = reduce_grad(c, shard, 2); return r
    after    c = cat([g1, zeros]); accumulate(c, shard, [0]); reduce(shard); return None

    The list names the pieces of the flat group that have a gradient here; a piece that autograd filled with
    zeros has none. Whether the reduction communicates is decided when the graph runs (no_sync).

    Keeps: every value.
    Declines: a reduce_grad that anything but the output reads; it stays, and goes through autograd in every backward.
    """

    def apply(self, gm: fx.GraphModule) -> list[Declined]:
        for reduction in find_reductions(gm.graph):
            full_grad, shard = operand(reduction), operand(reduction, 1)
            with gm.graph.inserting_before(reduction):
                accumulate = call(gm.graph, ACCUMULATE, full_grad, shard, find_pieces(full_grad))
            reduce_after(accumulate, reduction)
        reason = "not only the output reads it; it goes through autograd, and is reduced in every backward"
        return [decline(node, reason) for node in calls(gm.graph, REDUCE_GRAD)]


def find_reductions(graph: fx.Graph) -> list[fx.Node]:
    """The reduce_grads that are gradients of their shards, and nothing else."""
    returned = results(graph)
    return [node for node in calls(graph, REDUCE_GRAD) if len(node.users) == 1 and returned.count(node) == 1]


def find_pieces(full_grad: fx.Node) -> list[int] | None:
    """Pieces of the flat group that have a gradient: those of the cat that are no fresh zeros. None: unknown."""
    if full_grad.target is not torch.ops.aten.cat.default:
        return None
    return [i for i, piece in enumerate(operands(full_grad)) if not is_fresh_zeros(piece)]


def reduce_after(node: fx.Node, reduction: fx.Node) -> None:
    """Issue after `node` what `reduction`, a reduce_grad, asked for; its shard's gradient no longer is a result."""
    graph = reduction.graph
    with graph.inserting_before(node.next):
        call(graph, REDUCE, operand(reduction, 1))
    set_results(graph, [None if result is reduction else result for result in results(graph)])
    erase_unused(reduction)


def decline(reduction: fx.Node, reason: str) -> Declined:
    fact = operand(reduction, 1).meta["fsdp"]
    assert isinstance(fact, ShardInput)
    return Declined(fact.unit, reduction.name, reason)
