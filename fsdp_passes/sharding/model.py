"""What the flat groups of one model share: whether to reduce, by how much to divide, the forward under way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp_passes._compat import queue_backward_callback

if TYPE_CHECKING:
    from fsdp_passes.sharding.group import FlatGroup


class ShardedModel:
    """State of one sharded model. `gathered` is a dict while an eager forward runs, else None."""

    def __init__(self, input_dtype: torch.dtype | None = None) -> None:
        self.input_dtype = input_dtype  # cast the root's floating inputs to it; None: leave them
        self.groups: list[FlatGroup] = []
        self.requires_sync = True
        self.divide_factor: float | None = None
        self._reducing: FlatGroup | None = None
        self.gathered: dict[int, tuple[Tensor, list[Tensor]]] | None = None

    def gradient_divide_factor(self, world_size: int) -> float:
        return world_size if self.divide_factor is None else self.divide_factor

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.requires_sync = self.requires_sync, False
        try:
            yield
        finally:
            self.requires_sync = before

    def reduce_after_backward(self) -> None:
        """Ask autograd to call `end_backward` when the backward that runs now is over."""
        queue_backward_callback(self.end_backward)

    def end_backward(self) -> None:
        """Reduce every group that has something to reduce, in model order. Calling it again does nothing."""
        for group in self.groups:
            group.gradients.forwards = 0
            if self.requires_sync:
                self.issue_reduce(group)
        self._finish_reduce()

    def issue_reduce(self, group: FlatGroup) -> None:
        """Start a group's reduction and end the one before it: one full buffer in flight, not all of them."""
        if group.gradients.full is None:
            return
        self._finish_reduce()
        group.gradients.issue_reduce()
        self._reducing = group

    def _finish_reduce(self) -> None:
        if self._reducing is not None:
            self._reducing.gradients.finish_reduce()
            self._reducing = None

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """An eager forward: parameters are read as views of one gather a flat group, dropped at its end."""
        self.gathered = {}
        try:
            yield
            for full, _ in self.gathered.values():
                if full._version:
                    raise RuntimeError(
                        "fsdp_passes: expected forward to leave its parameters alone, got an in-place operation on "
                        "one, which edited a gathered copy; edit it outside of forward"
                    )
        finally:
            self.gathered = None

    def read(self, group: FlatGroup, index: int) -> Tensor:
        """Parameter `index` of `group` inside an eager forward. A leaf in every grad mode, as parameters are."""
        assert self.gathered is not None
        if id(group) not in self.gathered:
            with torch.inference_mode(False), torch.enable_grad():
                full = torch.ops.fsdp_opt.unshard(
                    group.shard, group.layout.world_size, group.compute_dtype, reshard=group.reshard
                )
                pieces = full.split_with_sizes(group.layout.sizes)
                shapes = zip(group.layout.pieces, group.layout.shapes, strict=True)
                self.gathered[id(group)] = full, [pieces[piece].view(shape) for piece, shape in shapes]
        return self.gathered[id(group)][1][index]
