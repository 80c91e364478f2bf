"""Where parameters lie in a flat buffer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_passes.sharding.layout import ALIGN_BYTES, Layout, align_elems, plan_layout

_SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(torch.Size), min_size=1, max_size=7)
_WORLD_SIZES = st.sampled_from([1, 2, 3, 8])
_ALIGNS = st.sampled_from([1, 16, 32, 64, 128])


@pytest.mark.parametrize(
    "dtypes, elems",
    [
        ([torch.float32], 32),
        ([torch.float32, torch.bfloat16], 64),
        ([torch.float64, torch.float32], 32),
        ([torch.bool], 128),
        ([torch.complex128], 8),
    ],
)
def test_alignment_is_128_bytes_of_the_smallest_dtype(dtypes: list[torch.dtype], elems: int) -> None:
    assert ALIGN_BYTES == 128
    assert align_elems(dtypes) == elems


@settings(deadline=None)
@given(_SHAPES, _WORLD_SIZES, _ALIGNS)
def test_parameters_lie_one_after_the_other_in_order(shapes: list[torch.Size], world_size: int, align: int) -> None:
    layout = plan_layout(shapes, world_size, align)
    assert layout.shapes == tuple(shapes)
    assert layout.numels == tuple(shape.numel() for shape in shapes)
    end = 0
    for offset, shape in zip(layout.offsets, shapes, strict=True):
        assert offset % align == 0
        assert end <= offset < end + align  # no gap beyond the alignment, no overlap
        end = offset + shape.numel()
    assert end <= layout.full_elems


@settings(deadline=None)
@given(_SHAPES, _WORLD_SIZES, _ALIGNS)
def test_every_rank_owns_an_equal_aligned_piece(shapes: list[torch.Size], world_size: int, align: int) -> None:
    layout = plan_layout(shapes, world_size, align)
    assert layout.world_size == world_size
    assert layout.shard_elems * world_size == layout.full_elems
    assert layout.shard_elems % align == 0
    assert layout.shard_elems > 0
    last_end = layout.offsets[-1] + shapes[-1].numel()
    assert layout.full_elems == max(-(-last_end // (align * world_size)), 1) * align * world_size  # the least


@settings(deadline=None)
@given(_SHAPES, _WORLD_SIZES, _ALIGNS)
def test_sizes_cut_the_buffer_into_parameters_and_padding(
    shapes: list[torch.Size], world_size: int, align: int
) -> None:
    layout = plan_layout(shapes, world_size, align)
    assert sum(layout.sizes) == layout.full_elems
    assert list(layout.pieces) == sorted(set(layout.pieces))
    starts = [sum(layout.sizes[:piece]) for piece in layout.pieces]
    assert starts == list(layout.offsets)
    assert tuple(layout.sizes[piece] for piece in layout.pieces) == layout.numels
    padding = [size for piece, size in enumerate(layout.sizes) if piece not in layout.pieces]
    assert all(size > 0 for size in padding)
    assert sum(padding) == layout.full_elems - sum(layout.numels)


@settings(deadline=None)
@given(_SHAPES, _WORLD_SIZES, _ALIGNS)
def test_split_with_sizes_gives_back_the_parameters(shapes: list[torch.Size], world_size: int, align: int) -> None:
    """What captured graphs do with a gathered buffer."""
    layout = plan_layout(shapes, world_size, align)
    params = [torch.full(shape, number + 1) for number, shape in enumerate(shapes)]
    full = torch.zeros(layout.full_elems, dtype=torch.int64)
    for param, offset in zip(params, layout.offsets, strict=True):
        full[offset : offset + param.numel()] = param.reshape(-1)
    views = full.split_with_sizes(layout.sizes)
    for param, piece in zip(params, layout.pieces, strict=True):
        assert torch.equal(views[piece].view(param.shape), param)
    assert all(not view.any() for piece, view in enumerate(views) if piece not in layout.pieces)


def _layout_of(shapes: list[tuple[int, ...]]) -> Layout:
    return plan_layout([torch.Size(shape) for shape in shapes], 2, 32)


def test_a_matrix_and_its_bias() -> None:
    layout = _layout_of([(8, 12), (12,)])
    assert layout.offsets == (0, 96)
    assert layout.sizes == (96, 12, 20)
    assert layout.pieces == (0, 1)
    assert (layout.full_elems, layout.shard_elems) == (128, 64)


def test_no_padding_where_parameters_fit() -> None:
    layout = _layout_of([(8, 4), (32,)])
    assert layout.sizes == (32, 32)
    assert layout.full_elems == 64


def test_empty_and_zero_dimensional_parameters_have_a_place() -> None:
    layout = _layout_of([(0, 3), (), (0,)])
    assert layout.numels == (0, 1, 0)
    assert layout.offsets == (0, 0, 32)
    assert layout.sizes == (0, 1, 31, 0, 32)
    assert layout.pieces == (0, 1, 3)


def test_a_group_of_empty_parameters_still_has_a_piece_for_each_rank() -> None:
    layout = _layout_of([(0,)])
    assert layout.shard_elems == 32
    assert layout.sizes == (0, 64)
