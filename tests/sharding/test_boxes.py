"""Ranges of a flattened tensor as boxes."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_passes.sharding.boxes import boxes_of_range


@st.composite
def _ranges(draw: st.DrawFn) -> tuple[list[int], int, int]:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    bounds = st.integers(0, math.prod(shape))
    return shape, *sorted((draw(bounds), draw(bounds)))


@settings(deadline=None)
@given(_ranges())
def test_boxes_are_the_range_in_order(case: tuple[list[int], int, int]) -> None:
    shape, start, stop = case
    elements = torch.arange(math.prod(shape)).view(shape)
    boxes = boxes_of_range(shape, start, stop)
    covered: list[int] = []
    for offsets, sizes in boxes:
        assert len(offsets) == len(sizes) == len(shape)
        assert math.prod(sizes) > 0
        box = elements[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
        assert list(box.shape) == list(sizes)
        covered += box.flatten().tolist()
    assert covered == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_the_example_of_the_docstring() -> None:
    assert boxes_of_range([4, 5], 3, 17) == [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]


def test_whole_tensors_and_rows_are_one_box() -> None:
    assert boxes_of_range([], 0, 1) == [((), ())]
    assert boxes_of_range([4, 5], 0, 20) == [((0, 0), (4, 5))]
    assert boxes_of_range([4, 5], 5, 15) == [((1, 0), (2, 5))]
    assert boxes_of_range([4, 5], 7, 9) == [((1, 2), (1, 2))]
    assert boxes_of_range([4, 0], 0, 0) == []
