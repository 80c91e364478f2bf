"""From gradients that flow to the shard to gradients that the runtime accumulates and reduces."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fsdp_passes.ir.nodes import (
    attribute,
    call,
    calls,
    erase_unused,
    is_fresh_zeros,
    operand,
    operands,
    results,
    set_results,
)
from fsdp_passes.ir.ops import ACCUMULATE, REDUCE, REDUCE_GRAD, ShardInput, unit_of
from fsdp_passes.ir.passes import Declined, Pass


@dataclass(frozen=True)
class LowerReduceGrad(Pass):
    """Add each gradient to its group's flat buffer, whose reduction is then issued.

    before   c = cat([g1, zeros]); r = reduce_grad(c, shard, 2); return r
    after    c = cat([g1, zeros]); accumulate(c, shard, [0]); reduce(shard, 2, f32); return None

    The list names the pieces of the flat group that have a gradient here; a piece that autograd filled with
    zeros has none. Whether the reduction communicates is decided when the graph runs (no_sync).

    Keeps: every value.
    Declines: a reduce_grad that anything but the output reads, or that is in a graph that this one calls (torch.cond);
        it stays, and goes through autograd in every backward.
    """

    def apply(self, gm: fx.GraphModule) -> list[Declined]:
        for reduction in find_reductions(gm.graph):
            full_grad, shard = operand(reduction), operand(reduction, 1)
            with gm.graph.inserting_before(reduction):
                accumulate = call(gm.graph, ACCUMULATE, full_grad, shard, find_pieces(full_grad))
            reduce_after(accumulate, reduction)
        fate = "it goes through autograd, and is reduced in every backward"
        left = [decline(node, f"not only the output reads it; {fate}") for node in calls(gm.graph, REDUCE_GRAD)]
        return left + [
            Declined(_units_of(body), body.name, f"a graph that is called computes a gradient; {fate}")
            for body in gm.graph.find_nodes(op="get_attr")
            if _reduces(attribute(gm, body))
        ]


def _reduces(body: object) -> bool:
    """Whether `body` is a graph that reduces a gradient, or calls one that does."""
    graphs = body.modules() if isinstance(body, fx.GraphModule) else ()
    return any(isinstance(each, fx.GraphModule) and calls(each.graph, REDUCE_GRAD) for each in graphs)


def _units_of(body: fx.Node) -> str:
    """The units whose shards are given to a graph that is called."""
    given = [argument.meta.get("fsdp") for user in body.users for argument in user.all_input_nodes]
    return ", ".join(sorted({fact.unit for fact in given if isinstance(fact, ShardInput)}))


def find_reductions(graph: fx.Graph) -> list[fx.Node]:
    """The reduce_grads that are gradients of their shards, and nothing else."""
    returned = results(graph)
    return [node for node in calls(graph, REDUCE_GRAD) if len(node.users) == 1 and returned.count(node) == 1]


def find_pieces(full_grad: fx.Node) -> list[int] | None:
    """Pieces of the flat group that have a gradient: those of the cat that are no fresh zeros. None: unknown."""
    if full_grad.target is not torch.ops.aten.cat.default:
        return None
    return [i for i, piece in enumerate(operands(full_grad)) if not is_fresh_zeros(piece)]


def reduce_dtype(reduction: fx.Node) -> torch.dtype:
    """That of the sum of gradients."""
    dtype = reduction.kwargs.get("reduce_dtype") or operand(reduction, 1).meta["val"].dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def reduce_after(node: fx.Node, reduction: fx.Node) -> None:
    """Issue after `node` what `reduction`, a reduce_grad, asked for; its shard's gradient no longer is a result."""
    graph = reduction.graph
    with graph.inserting_before(node.next):
        call(graph, REDUCE, operand(reduction, 1), reduction.args[2], reduce_dtype(reduction))
    set_results(graph, [None if result is reduction else result for result in results(graph)])
    erase_unused(reduction)


def decline(reduction: fx.Node, reason: str) -> Declined:
    return Declined(unit_of(operand(reduction, 1)), reduction.name, reason)
