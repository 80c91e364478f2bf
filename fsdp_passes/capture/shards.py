"""Which placeholders are shards: AOTAutograd's descriptors say which argument each of them is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from fsdp_passes._compat import argument_index
from fsdp_passes.ir.nodes import calls, operand, results
from fsdp_passes.ir.ops import REDUCE_GRAD, ShardInput, is_shard, owner_of


def find_shards(arguments: Sequence[Any]) -> dict[int, ShardInput]:
    """The shards among the real arguments of Dynamo's graph, by position. Keeps none of the arguments alive."""
    return {i: ShardInput(owner_of(value).unit) for i, value in enumerate(arguments) if is_shard(value)}


def label_shards(graph: fx.Graph, shards: Mapping[int, ShardInput]) -> None:
    """Put its `ShardInput` on each placeholder that stands for one of `shards`."""
    for node in graph.find_nodes(op="placeholder"):
        index = argument_index(node)
        if index is not None and index in shards:
            node.meta["fsdp"] = shards[index]


def refuse_gradients_in_parts(graph: fx.Graph) -> None:
    """NotImplementedError: a shard's gradient is several results, those of a tensor subclass; it would keep one."""
    returned = results(graph)
    reductions = [node for node in calls(graph, REDUCE_GRAD) if node in returned]
    for shard, count in Counter(operand(node, 1) for node in reductions).items():
        if count > 1:
            raise NotImplementedError(
                f"gradients of unit {shard.meta['fsdp'].unit!r}: expected plain tensors, got {count} parts of each, as "
                "of a tensor subclass; give the model plain tensors"
            )
