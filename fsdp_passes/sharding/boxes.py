"""A range of a flattened tensor as boxes of the tensor, the form in which torch's checkpoints know pieces.

elements 3:17 of shape [4, 5]
. . . x x      box [0:1, 3:5]    the rest of a row
x x x x x      box [1:3, 0:5]    whole rows
x x x x x
x x . . .      box [3:4, 0:2]    the start of a row
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes, one each a dimension


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Disjoint boxes whose elements, one box after the other, are elements [start, stop) of a tensor of `shape`.

    At most 2n - 1 of them for n dimensions; each is contiguous in the flattened tensor. None for an empty range.
    """
    if start == stop:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows [first, last) are whole
    if first > last:
        return _boxes_of_row(shape, last, start - last * row, stop - last * row)
    head = _boxes_of_row(shape, first - 1, start - (first - 1) * row, row) if start < first * row else []
    tail = _boxes_of_row(shape, last, 0, stop - last * row) if last * row < stop else []
    rows = [((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))] if first < last else []
    return head + rows + tail


def _boxes_of_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes_of_range(shape[1:], start, stop)]
