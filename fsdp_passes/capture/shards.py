"""What AOTAutograd's descriptors say of shards: which placeholders they are, and that each has one gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from fsdp_passes._compat import argument_index, gradient_indices
from fsdp_passes.ir.ops import ShardInput, is_shard, owner_of, unit_names


def find_shards(arguments: Sequence[Any]) -> dict[int, ShardInput]:
    """The shards among the real arguments of Dynamo's graph, by position. Keeps none of the arguments alive."""
    owners = {i: owner_of(value) for i, value in enumerate(arguments) if is_shard(value)}
    return {i: ShardInput(unit) for i, unit in zip(owners, unit_names(list(owners.values())), strict=True)}


def label_shards(graph: fx.Graph, shards: Mapping[int, ShardInput]) -> None:
    """Put its `ShardInput` on each placeholder that stands for one of `shards`."""
    for node in graph.find_nodes(op="placeholder"):
        index = argument_index(node)
        if index is not None and index in shards:
            node.meta["fsdp"] = shards[index]


def refuse_gradients_in_parts(graph: fx.Graph, shards: Mapping[int, ShardInput]) -> None:
    """NotImplementedError: a shard has several gradients, the parts of a tensor subclass, and could keep only one."""
    gradients = Counter(reversed(gradient_indices(graph)))  # backward comes to the last units first
    for index, count in gradients.items():
        if index in shards and count > 1:
            raise NotImplementedError(
                f"gradients of unit {shards[index].unit!r}: expected plain tensors, got {count} parts of each, as "
                "of a tensor subclass; give the model plain tensors"
            )
