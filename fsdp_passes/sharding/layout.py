"""Where each parameter of a flat group lies in its buffer.

    | weight ........ | pad | bias .. | pad | ............ tail |
    0                       128 B aligned                       full_elems = world_size x shard_elems

Every parameter is contiguous, in registration order, and starts at a multiple of the alignment; the whole is
padded so that rank r owns the r-th of `world_size` equal, aligned pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Widest vector load and L2 line of current GPUs (CUDA C++ Programming Guide, "Device Memory Accesses").
ALIGN_BYTES = 128


def align_elems(dtypes: Sequence[torch.dtype]) -> int:
    """Elements per alignment unit: 128 bytes of the smallest of `dtypes`."""
    return ALIGN_BYTES // min(dtype.itemsize for dtype in dtypes)


def _round_up(elems: int, multiple: int) -> int:
    return -(-elems // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """Offsets of a flat group, in elements. `sizes` cuts the buffer into pieces: parameters and padding."""

    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    pieces: tuple[int, ...]  # pieces[i]: where parameter i stands in `sizes`
    full_elems: int
    world_size: int

    @property
    def shard_elems(self) -> int:
        return self.full_elems // self.world_size

    @property
    def numels(self) -> tuple[int, ...]:
        return tuple(shape.numel() for shape in self.shapes)


def plan_layout(shapes: Sequence[torch.Size], world_size: int, align: int) -> Layout:
    """Place parameters of `shapes` one after the other, each start a multiple of `align` elements."""
    offsets: list[int] = []
    sizes: list[int] = []
    pieces: list[int] = []
    end = 0
    for position, shape in enumerate(shapes):
        offsets.append(end)
        pieces.append(len(sizes))
        sizes.append(shape.numel())
        last = position == len(shapes) - 1
        stop = _round_up(end + shape.numel(), align * world_size if last else align)
        stop = max(stop, align * world_size) if last else stop  # nothing but empty parameters: still a piece each
        if stop > end + shape.numel():
            sizes.append(stop - end - shape.numel())
        end = stop
    return Layout(tuple(shapes), tuple(offsets), tuple(sizes), tuple(pieces), end, world_size)
