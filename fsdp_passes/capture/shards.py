"""Which placeholders are shards: AOTAutograd's descriptors say which argument each of them is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fsdp_passes._compat import argument_index
from fsdp_passes.ir.ops import ShardInput, is_shard, owner_of


def label_shards(graph: fx.Graph, arguments: Sequence[Any]) -> None:
    """Put a `ShardInput` on each placeholder that is a shard among `arguments`, the real ones of Dynamo."""
    for node in graph.find_nodes(op="placeholder"):
        index = argument_index(node)
        if index is not None and is_shard(arguments[index]):
            node.meta["fsdp"] = ShardInput(owner_of(arguments[index]).unit)
