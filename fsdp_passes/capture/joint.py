"""Cutting AOTAutograd's joint graph in two, so that no gathered buffer is kept from forward into backward."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_passes._compat import is_operator, min_cut_partition
from fsdp_passes.ir.alias import views_of
from fsdp_passes.ir.ops import UNSHARD

# A region of its own for the partitioner; above the ids that torch.utils.checkpoint counts up from 0.
_RESHARD_REGION = 100_000


def partition(
    joint: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward graph by min-cut, each gathering what it needs of the units that reshard."""
    for node in _parameter_values(joint.graph):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = _RESHARD_REGION
    return min_cut_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)


def _parameter_values(graph: fx.Graph) -> set[fx.Node]:
    """Gathers of units that reshard, their views, and what is computed from parameters alone.

    A saved view would keep the whole buffer alive; a saved cast of a weight would be as large again.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is UNSHARD and node.kwargs.get("reshard", True):
            found |= {node, *views_of(node)}
        elif node.all_input_nodes and found.issuperset(node.all_input_nodes) and _is_repeatable(node):
            found.add(node)
    return found


def _is_repeatable(node: fx.Node) -> bool:
    """A pure operator that gives the same values again; not one that draws random numbers."""
    if node.target is operator.getitem:
        return True
    return is_operator(node.target) and not node.is_impure()
