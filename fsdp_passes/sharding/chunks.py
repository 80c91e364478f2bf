"""How a sharded parameter is written to and read from a checkpoint of torch.distributed.checkpoint.

    this rank's piece              boxes of the parameter        views of the piece
    elements 3:17 of [4, 5]   ->   [0:1, 3:5], [1:3, 0:5],  ->   local[0:2].view(1, 2), local[2:12].view(2, 5),
                                   [3:4, 0:2]                    local[12:14].view(1, 2)

torch intersects the boxes that were written with those that are read, so that world sizes and kinds of sharding mix.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fsdp_passes.sharding.boxes import Box, boxes_of_range
from fsdp_passes.sharding.place import Place


class Chunked:
    """The methods by which torch.distributed.checkpoint saves and loads a sharded tensor."""

    dtype: torch.dtype
    _place: Place
    _local: Tensor

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """What this rank writes of the tensor that the checkpoint has under `fqn`."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self._place.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The boxes that this rank holds."""
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in _boxes(self._place)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The elements of the box at `index.offset`, without a copy."""
        start = 0
        for offsets, sizes in _boxes(self._place):
            stop = start + math.prod(sizes)
            if torch.Size(offsets) == index.offset:
                return _own_storage(self._local, start, stop).view(sizes)
            start = stop
        raise ValueError(f"index: expected the offset of a box of {index.fqn} on this rank, got {index.offset}")


def _boxes(place: Place) -> list[Box]:
    """A parameter without elements is one empty box, of rank 0."""
    if place.shape.numel() == 0 and place.rank == 0:
        return [((0,) * len(place.shape), tuple(place.shape))]
    return boxes_of_range(place.shape, place.start, place.stop)


def _own_storage(local: Tensor, start: int, stop: int) -> Tensor:
    """local[start:stop] on a storage of just these elements, in the same memory.

    torch clones what is a part of its storage before it writes it, and keeps all clones until the file is complete
    (_write_files_from_queue in torch 2.13): a second copy of the shards in the memory of a CPU rank. Writes through it
    do not move the version of the flat shard: load_state_dict does.
    """
    if local.device.type != "cpu" or start == stop:
        return local[start:stop]
    first, itemsize = local.storage_offset(), local.itemsize
    storage = local.untyped_storage()[(first + start) * itemsize : (first + stop) * itemsize]
    return local.new_empty(0).set_(storage, 0, (stop - start,), (1,))
