"""Which placeholders are shards: AOTAutograd's descriptors say which argument each of them is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from fsdp_passes._compat import argument_index
from fsdp_passes.ir.ops import ShardInput, is_shard, owner_of


def find_shards(arguments: Sequence[Any]) -> dict[int, ShardInput]:
    """The shards among the real arguments of Dynamo's graph, by position. Keeps none of the arguments alive."""
    return {i: ShardInput(owner_of(value).unit) for i, value in enumerate(arguments) if is_shard(value)}


def label_shards(graph: fx.Graph, shards: Mapping[int, ShardInput]) -> None:
    """Put its `ShardInput` on each placeholder that stands for one of `shards`."""
    for node in graph.find_nodes(op="placeholder"):
        index = argument_index(node)
        if index is not None and index in shards:
            node.meta["fsdp"] = shards[index]
