"""Cutting AOTAutograd's joint graph in two, so that no gathered buffer is kept from forward into backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_passes._compat import min_cut_partition
from fsdp_passes.ir.alias import views_of
from fsdp_passes.ir.ops import UNSHARD

# A region of its own for the partitioner; above the ids that torch.utils.checkpoint counts up from 0.
_RESHARD_REGION = 100_000


def partition(
    joint: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward graph by min-cut, each gathering what it needs of the units that reshard."""
    for node in joint.graph.find_nodes(op="call_function", target=UNSHARD):
        if node.kwargs.get("reshard", True):
            _recompute(node)
    return min_cut_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)


def _recompute(unshard: fx.Node) -> None:
    """Tag the gather and every view of it: a saved view would keep the whole buffer alive."""
    for node in (unshard, *views_of(unshard)):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = _RESHARD_REGION
