"""The sum of one flat group's gradients on one rank, piece by piece."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_passes.sharding.layout import Layout


class GradBuffer:
    """A 1-D tensor of `dtype` for each piece of `layout`: parameters and padding.

    The pieces are slices of one flat buffer; with `separate` they are tensors of their own, which `take` concatenates.
    What a piece that is not in `written` holds is nobody's gradient, and is not read.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, separate: bool = False) -> None:
        self.written: set[int] = set()
        self._sizes, self._params = layout.sizes, layout.pieces
        self._offsets = tuple(itertools.accumulate(layout.sizes, initial=0))
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._flat = None if separate else self._like.new_empty(layout.full_elems)
        self._separate: dict[int, Tensor] = {}

    def slice(self, piece: int) -> Tensor:
        if self._flat is not None:
            return self._flat[self._offsets[piece] : self._offsets[piece + 1]]
        if piece not in self._separate:
            self._separate[piece] = self._like.new_empty(self._sizes[piece])
        return self._separate[piece]

    def add(self, full_grad: Tensor, pieces: Iterable[int] | None) -> None:
        """Add a gradient of the whole group, 1-D. `pieces` have a gradient in it (None: all); others are zeros."""
        if self.written:
            self._flat = self.take().add_(full_grad)
        else:
            self._flat = self._like.new_empty(self._offsets[-1]) if self._flat is None else self._flat
            self._flat.copy_(full_grad)
        self._separate.clear()
        self.written.update(self._params if pieces is None else pieces)

    def take(self) -> Tensor:
        """The sum for the whole group: 1-D, full elements, zeros where nothing was written."""
        blank = [piece for piece in range(len(self._sizes)) if piece not in self.written]
        if self._flat is None:
            self._separate |= {piece: self._like.new_zeros(self._sizes[piece]) for piece in blank}
            return torch.cat([self._separate[piece] for piece in range(len(self._sizes))])
        for piece in blank:
            self.slice(piece).zero_()
        return self._flat


@dataclass(frozen=True)
class GradSlot:
    """Where a graph writes one gradient: `tensor`, the memory of `piece` in the gradient's shape.

    buffer: None where the gradient is not wanted, and is written for nothing.
    """

    tensor: Tensor
    buffer: GradBuffer | None
    piece: int

    @property
    def is_blank(self) -> bool:
        """Whether a write copies."""
        return self.buffer is None or self.piece not in self.buffer.written

    def mark_written(self) -> None:
        if self.buffer is not None:
            self.buffer.written.add(self.piece)


def prepare(slots: Collection[GradSlot]) -> bool:
    """Whether the writes of one region copy, as all of its slots are blank; if they add, blank ones become zeros."""
    if all(slot.is_blank for slot in slots):
        return True
    for slot in slots:
        if slot.is_blank:
            slot.tensor.zero_()
    return False
