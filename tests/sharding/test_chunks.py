"""The chunks by which torch.distributed.checkpoint saves and loads a sharded parameter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItemType

from fsdp_passes.sharding.param import ShardedParam
from fsdp_passes.sharding.place import Place

WORLD_SIZE = 3


def _pieces(whole: Tensor, offset: int = 2, shard_elems: int = 13) -> list[ShardedParam]:
    """`whole` as the ranks have it, each a view of a flat shard."""
    flat = torch.zeros(WORLD_SIZE * shard_elems, dtype=whole.dtype)
    flat[offset : offset + whole.numel()] = whole.reshape(-1)
    group: Any = None
    params = []
    for rank in range(WORLD_SIZE):
        place = Place(whole.shape, offset, shard_elems, rank, WORLD_SIZE, group)
        shard = flat[rank * shard_elems : (rank + 1) * shard_elems].clone()
        first = offset + place.start - rank * shard_elems if place.stop > place.start else 0
        params.append(ShardedParam(shard[first : first + place.stop - place.start], place, is_param=False))
    return params


@pytest.mark.parametrize("shape", [(), (1,), (30,), (4, 7), (2, 3, 5), (1, 2, 3, 4), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_chunks_of_all_ranks_are_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    whole = (torch.rand(shape) * 9).to(dtype)
    copied, chunks = torch.zeros_like(whole), 0
    for param in _pieces(whole):
        items = param.__create_write_items__("name", param)
        assert [item.tensor_data.chunk for item in items] == param.__create_chunk_list__()
        for item in items:
            chunk = param.__get_tensor_shard__(item.index)
            where = tuple(slice(o, o + s) for o, s in zip(item.index.offset, chunk.shape, strict=True))
            copied[where] = chunk
            chunks += 1
            assert (item.type, item.tensor_data.size) == (WriteItemType.SHARD, whole.shape)
            assert item.tensor_data.properties.dtype == chunk.dtype == dtype
    assert torch.equal(copied, whole)
    assert chunks >= 1  # also without elements: torch refuses a checkpoint without the entry


def test_a_chunk_is_the_memory_of_the_piece_on_a_storage_of_its_own() -> None:
    """torch clones what is a part of its storage, and keeps the clones until it has written the file."""
    for param in _pieces(torch.rand(4, 7)):
        chunks = [param.__get_tensor_shard__(item.index) for item in param.__create_write_items__("name", param)]
        for chunk in chunks:
            assert chunk.untyped_storage().size() == chunk.nbytes
            chunk.fill_(5)
        assert param.local.tolist() == [5] * param.local.numel()


def test_an_offset_that_is_not_here_is_refused() -> None:
    first, _, last = _pieces(torch.rand(4, 7))
    [*_, item] = last.__create_write_items__("name", last)
    with pytest.raises(ValueError, match=r"index: expected the offset of a box of name on this rank, got torch.Size"):
        first.__get_tensor_shard__(item.index)


def test_new_empty_of_the_same_shape_on_a_given_device_is_sharded() -> None:
    """torch's stager copies a tensor so, and then its attributes; all other shapes are plain."""
    param = _pieces(torch.rand(4, 7))[0]
    twin = param.new_empty(param.shape, device="cpu")
    assert isinstance(twin, ShardedParam) and twin.place == param.place
    assert twin.local.shape == param.local.shape and twin.local.data_ptr() != param.local.data_ptr()
    assert type(param.new_empty(param.shape)) is Tensor
    assert type(param.new_empty((7, 4), device="cpu")) is Tensor
    assert torch.equal(copy.deepcopy(param).local, param.local)
