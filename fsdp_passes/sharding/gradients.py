"""The gradient of one flat group, from the first backward of a window to `.grad`.

    full        reduce dtype, full elements: this rank's sum over microbatches, until it is reduced
    shard.grad  parameter dtype, shard elements: mean over ranks; `ShardedParam.grad` are views of it

First write copies, later ones add, in the order of execution. The one division is by the model's divide factor
(world size unless set), on this rank's piece of the sum, in the reduce dtype; then one cast to the shard's dtype.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fsdp_passes.runtime.collectives import issue_reduce_scatter
from fsdp_passes.sharding.param import ShardedParam
from fsdp_passes.sharding.pending import PendingGrad

if TYPE_CHECKING:
    from fsdp_passes.sharding.group import FlatGroup


@dataclass(frozen=True)
class _Reduction:
    """A reduce-scatter in flight; `full` is kept so that nobody reuses its memory before the wait."""

    work: dist.Work
    full: Tensor
    piece: Tensor
    params: frozenset[int]


class GroupGradients:
    """Gradients of the parameters of `group`, by index; what `ShardedParam.grad` reads and writes."""

    def __init__(self, group: FlatGroup) -> None:
        self.group = group
        self.full: Tensor | None = None
        self.written: set[int] = set()  # parameters with a gradient in `full`
        self.settling: set[int] = set()  # in shard.grad, but other ranks were not asked yet
        self.reduced: set[int] = set()  # parameters with a gradient in shard.grad
        self.forwards = 0  # differentiated forwards since the last backward ended
        self._in_flight: _Reduction | None = None
        self._post_hooks: dict[int, OrderedDict[int, Callable[[Tensor], None]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupGradients:
        return copy.deepcopy(self.group, memo).gradients

    def accumulate(self, full_grad: Tensor, pieces: Iterable[int] | None = None) -> None:
        """Add `full_grad` (1-D, full elements); `pieces` of the layout were differentiated (None: all)."""
        if self.full is None:
            self.full = full_grad.detach().to(self.group.reduce_dtype, copy=True)
        else:
            self.full.add_(full_grad.detach())
        layout = self.group.layout
        given = None if pieces is None else set(pieces)
        self.written |= {i for i, piece in enumerate(layout.pieces) if given is None or piece in given}

    def issue_reduce(self) -> None:
        """Start the reduce-scatter of what was accumulated."""
        assert self.full is not None and self._in_flight is None
        full, self.full = self.full, None
        self._in_flight = self._issue(full, frozenset(self.written))
        self.written = set()

    def finish_reduce(self) -> None:
        """Wait for the reduction in flight, if there is one, and add it to the shard's gradient."""
        if self._in_flight is None:
            return
        reduction, self._in_flight = self._in_flight, None
        self._add_to_shard(self._mean(reduction))
        self.settling |= reduction.params

    def settle(self, params: set[int]) -> None:
        """`params` are those that got a gradient from some rank; only now `.grad` shows it and hooks see it."""
        self.settling = set()
        self.reduced |= params
        for index in sorted(params):
            for hook in list(self._post_hooks.get(index, {}).values()):
                hook(self.group.params[index])

    def reduce_now(self, full_grad: Tensor) -> Tensor:
        """Mean over ranks of this rank's piece of `full_grad`, in the shard's dtype; nothing is remembered."""
        return self._mean(self._issue(full_grad.to(self.group.reduce_dtype), frozenset()))

    def _issue(self, full: Tensor, params: frozenset[int]) -> _Reduction:
        piece = full.new_empty(self.group.layout.shard_elems)
        work = issue_reduce_scatter(piece, full, self.group.process_group)
        return _Reduction(work, full, piece, params)

    def _mean(self, reduction: _Reduction) -> Tensor:
        reduction.work.wait()
        divided = reduction.piece.div_(self.group.model.gradient_divide_factor(self.group.layout.world_size))
        return divided.to(self.group.shard.dtype)

    def _add_to_shard(self, piece: Tensor) -> None:
        shard = self.group.shard
        if shard.grad is None:
            shard.grad = piece
        else:
            shard.grad.add_(piece)

    def grad_of(self, index: int) -> Tensor | None:
        param = self.group.params[index]
        if index in self.written | self._unsettled():
            return PendingGrad(param, self.group.unit)
        if index not in self.reduced or self.group.shard.grad is None:
            return None
        return ShardedParam(self.group.local(self.group.shard.grad, index), param.place, is_param=False)

    def _unsettled(self) -> set[int]:
        """Parameters whose reduction was issued, but whose backward is not over (or was ended by an exception)."""
        return self.settling if self._in_flight is None else self.settling | self._in_flight.params

    def set_grad(self, index: int, grad: Tensor | None) -> None:
        """None discards what this parameter has accumulated or reduced; a tensor sharded alike replaces it."""
        piece = grad.local.clone() if isinstance(grad, ShardedParam) else None  # it may be what is discarded
        self._discard(index)
        if piece is None:
            return
        if self.group.shard.grad is None:
            self.group.shard.grad = torch.zeros_like(self.group.shard)
        self.reduced.add(index)
        self.group.local(self.group.shard.grad, index).copy_(piece)

    def _discard(self, index: int) -> None:
        if index in self.written and self.full is not None:
            self.written.discard(index)
            start = self.group.layout.offsets[index]
            self.full[start : start + self.group.layout.numels[index]].zero_()
            self.full = self.full if self.written else None
        if index in self.reduced | self._unsettled():
            self.finish_reduce()
            self.reduced.discard(index)
            self.settling.discard(index)
            if not self.reduced | self.settling:
                self.group.shard.grad = None
            elif self.group.shard.grad is not None:
                self.group.local(self.group.shard.grad, index).zero_()

    def add_post_hook(self, index: int, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """`hook(param)` after each reduction that gave the parameter a gradient."""
        hooks = self._post_hooks.setdefault(index, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle
