"""Cutting AOTAutograd's joint graph in two, so that backward gathers again, and makes constants again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_passes._compat import min_cut_partition
from fsdp_passes.ir.alias import readers_of, views_of, written
from fsdp_passes.ir.nodes import is_constant, is_pure, is_repeatable, results
from fsdp_passes.ir.ops import UNSHARD

# A region of its own for the partitioner; above the ids that torch.utils.checkpoint counts up from 0.
_RESHARD_REGION = 100_000


def partition(
    joint: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward graph by min-cut, each gathering what it needs."""
    for node in _recomputed_values(joint.graph):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = _RESHARD_REGION
    for node in _readers_of_written_inputs(joint.graph):
        node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    forward, backward = min_cut_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
    _compute_saved_values_early(forward.graph, num_fwd_outputs)
    return forward, backward


def _recomputed_values(graph: fx.Graph) -> set[fx.Node]:
    """Gathers, their views, and what is computed from parameters and constants alone.

    A saved view would keep the whole buffer alive, where the schedule decides what stays gathered; a saved cast of a
    weight would be as large again. Masks and other constants are made anew by each block, so that equal blocks stay
    equal.
    """
    found: set[fx.Node] = set()
    known = {node for node in graph.nodes if is_constant(node)}
    for node in graph.nodes:
        if node.target is UNSHARD:
            found |= {node, *views_of(node)}
        elif is_repeatable(node) and (found | known).issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _readers_of_written_inputs(graph: fx.Graph) -> set[fx.Node]:
    """What is computed from a buffer that the graph writes: in backward the buffer has other values.

    torch 2.13 recomputes it from them, under its own backends, too. What a checkpoint recomputes is left to it: it
    reads the written buffer in eager, too.
    """
    return {reader for buffer in written(graph) for reader in readers_of(buffer) if is_pure(reader)}


def _compute_saved_values_early(forward: fx.Graph, num_fwd_outputs: int) -> None:
    """Move what only backward needs to just after its last operand.

    before   y = mm(x, w); z = mm(y, v); s = div(y, 8); return z, s
    after    y = mm(x, w); s = div(y, 8); z = mm(y, v); return z, s

    Partitioning leaves at the end of forward what it takes over from backward. There it would keep its operands alive,
    and the last region would hold a piece of every block.
    """
    needed = _ancestors(results(forward)[:num_fwd_outputs])
    for node in list(forward.nodes):
        if node not in needed and is_pure(node) and node.all_input_nodes:
            last = max(node.all_input_nodes)  # nodes compare by their place in the graph
            if last.op != "placeholder":
                last.append(node)


def _ancestors(values: Sequence[Any]) -> set[fx.Node]:
    """The nodes among `values`, and all that they are computed from."""
    found: set[fx.Node] = set()
    pending = [value for value in values if isinstance(value, fx.Node)]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found
