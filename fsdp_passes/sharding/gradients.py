"""The gradient of one flat group, from the first backward of a window to `.grad`.

    buffer      reduce dtype, full elements: this rank's sum over microbatches, from its first write to its reduction
    reduced     reduce dtype, shard elements: this rank's piece of the sum over ranks, until the window ends
    shard.grad  parameter dtype, shard elements: mean over ranks; `ShardedParam.grad` are views of it

First write copies, later ones add, in the order of execution. The reduction works in place: this rank's piece of the
buffer receives its piece of the sum. The one division is by the model's divide factor (world size unless set), of this
rank's piece, in the reduce dtype, when the window ends; then one cast to the shard's dtype.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fsdp_passes.runtime.agreement import Sent
from fsdp_passes.runtime.collectives import issue_reduce_scatter
from fsdp_passes.sharding.grad_buffer import GradBuffer, GradSlot
from fsdp_passes.sharding.param import ShardedParam
from fsdp_passes.sharding.pending import PendingGrad, refuse_pending

if TYPE_CHECKING:
    from fsdp_passes.sharding.group import FlatGroup


@dataclass(frozen=True)
class _Reduction:
    """A reduce-scatter in flight; `piece` is a part of the buffer, which nobody else holds."""

    piece: Tensor
    sent: Sent
    params: frozenset[int]


class GroupGradients:
    """Gradients of the parameters of `group`, by index; what `ShardedParam.grad` reads and writes."""

    def __init__(self, group: FlatGroup) -> None:
        self.group = group
        self.buffer: GradBuffer | None = None
        self.differentiated = False  # by a graph since the last reduction, with or without a gradient
        self.reduced: Tensor | None = None
        self.reduced_params: set[int] = set()  # with a gradient in `reduced`; other ranks were not asked yet
        self._unsettled: set[int] = set()  # with a gradient in `reduced`, of this rank or perhaps of another
        self.settled: set[int] = set()  # with a gradient in shard.grad
        self.forwards = 0  # differentiated forwards since the last backward ended
        self._in_flight: _Reduction | None = None
        self._post_hooks: dict[int, OrderedDict[int, Callable[[Tensor], None]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupGradients:
        return copy.deepcopy(self.group, memo).gradients

    def open(self, separate: bool = False) -> GradBuffer:
        """The buffer that backwards add to now; a new one after each reduction."""
        if self.buffer is None:
            group = self.group
            self.buffer = GradBuffer(group.layout, group.reduce_dtype, group.shard.device, separate)
        return self.buffer

    def slot(self, piece: int, shape: Sequence[int], separate: bool) -> GradSlot:
        """Where a graph writes the gradient of `piece`, computed in `shape`."""
        buffer = self.open(separate)
        return GradSlot(buffer.slice(piece).view(shape), buffer, piece)

    def accumulate(self, full_grad: Tensor, pieces: Iterable[int] | None = None) -> None:
        """Add `full_grad` (1-D, full elements); `pieces` of the layout were differentiated (None: all)."""
        self.open().add(full_grad.detach(), pieces)

    @property
    def awaits_reduction(self) -> bool:
        """Whether there is something to reduce: a gradient, or, of a graph that ran, none."""
        return self.buffer is not None or self.differentiated

    def drop_blank_buffer(self) -> None:
        """An exception came before the first write."""
        if self.buffer is not None and not self.buffer.written:
            self.buffer = None

    def issue_reduce(self) -> None:
        """Start the reduce-scatter of what was accumulated; of zeros if that is nothing."""
        self.finish_reduce()  # an exception ended the backward that issued it, or two graphs of this one reduce
        buffer = self.open()
        params = frozenset(i for i in self.group.trained if self.group.layout.pieces[i] in buffer.written)
        self.buffer, self.differentiated, full = None, False, buffer.take()
        self._in_flight = _Reduction(*self._send(full), params)

    def finish_reduce(self) -> None:
        """Wait for the reduction in flight, if there is one, and add it to what was reduced in this window."""
        if self._in_flight is None:
            return
        reduction, self._in_flight = self._in_flight, None
        reduction.sent.wait()
        if self.reduced is None:
            self.reduced = self._own(reduction.piece)
        else:
            self.reduced.add_(reduction.piece)
        self.reduced_params |= reduction.params
        self._unsettled |= self.group.trained

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of the backwards of this window."""
        return self.buffer is None and self.reduced is None and self._in_flight is None

    def settle(self, params: set[int]) -> None:
        """End the window. `params` got a gradient from some rank; only now `.grad` shows it and hooks see it."""
        if self.reduced is None:
            return
        mean, self.reduced = self._mean(self.reduced), None
        self.reduced_params, self._unsettled = set(), set()
        shard = self.group.shard
        if shard.grad is None:
            shard.grad = mean
        else:
            shard.grad.add_(mean)
        self.settled |= params
        for index in sorted(params):
            for hook in list(self._post_hooks.get(index, {}).values()):
                hook(self.group.params[index])

    def reduce_now(self, full_grad: Tensor) -> Tensor:
        """Mean over ranks of this rank's piece of `full_grad`, in the shard's dtype; nothing is remembered."""
        self.group.model.agreement.check([self.group.line("reduce-scatter", self.group.reduce_dtype)])
        full = full_grad.to(self.group.reduce_dtype, copy=True)  # the reduction works in place
        piece, sent = self._send(full)
        sent.wait()
        return self._mean(self._own(piece))

    def _send(self, full: Tensor) -> tuple[Tensor, Sent]:
        group, model = self.group, self.group.model
        piece, work = issue_reduce_scatter(full, group.reduce_group, model.streams.reduce)
        return piece, Sent(work, group.line("reduce-scatter", group.reduce_dtype), model.agreement)

    def _own(self, piece: Tensor) -> Tensor:
        """A part of a buffer as a tensor of its own, so that the buffer is free; the part of one rank is the whole."""
        return piece.clone() if self.group.layout.world_size > 1 else piece

    def _mean(self, piece: Tensor) -> Tensor:
        """Divides `piece` in place. Frozen parameters get zeros: once unfrozen, the next mean is added to this one."""
        divided = piece.div_(self.group.model.gradient_divide_factor(self.group.layout.world_size))
        for index in self.group.frozen:
            self.group.local(divided, index).zero_()
        return divided.to(self.group.shard.dtype)

    def grad_of(self, index: int) -> Tensor | None:
        param = self.group.params[index]
        if self._is_pending(index):
            return PendingGrad(param, self.group.unit)
        if index not in self.settled or self.group.shard.grad is None:
            return None
        return ShardedParam(self.group.local(self.group.shard.grad, index), param.place, is_param=False)

    def _is_pending(self, index: int) -> bool:
        """Whether the parameter has a gradient of a window that is not over."""
        written = self.buffer is not None and self.group.layout.pieces[index] in self.buffer.written
        return (written and index not in self.group.frozen) or self._is_unsettled(index)

    def _is_unsettled(self, index: int) -> bool:
        """Whether the parameter's reduction was issued, but its window is not over: some rank may have a gradient."""
        return index in self._unsettled or (self._in_flight is not None and index in self.group.trained)

    def set_trained(self, index: int, trained: bool) -> None:
        if self.buffer is not None or self.reduced is not None:
            refuse_pending("requires_grad_", self.group.unit)
        self.group.set_trained(index, trained)

    def set_grad(self, index: int, grad: Tensor | None) -> None:
        """None discards what this parameter has accumulated or reduced; a tensor sharded alike replaces it."""
        piece = grad.local.clone() if isinstance(grad, ShardedParam) else None  # it may be what is discarded
        self._discard(index)
        if piece is None:
            return
        if self.group.shard.grad is None:
            self.group.shard.grad = torch.zeros_like(self.group.shard)
        self.settled.add(index)
        self.group.local(self.group.shard.grad, index).copy_(piece)

    def _discard(self, index: int) -> None:
        if self.buffer is not None:
            pieces = self.group.layout.pieces
            self.buffer.written.discard(pieces[index])
            self.buffer = self.buffer if any(pieces[i] in self.buffer.written for i in self.group.trained) else None
        if self._is_unsettled(index):
            self.finish_reduce()
            self.reduced_params.discard(index)
            self._unsettled.discard(index)
            self.reduced = self._without(self.reduced, index, self._unsettled)
        if index in self.settled:
            self.settled.discard(index)
            self.group.shard.grad = self._without(self.group.shard.grad, index, self.settled)
        if self.is_empty:
            self.group.model.forget_backwards()

    def _without(self, piece: Tensor | None, index: int, others: set[int]) -> Tensor | None:
        """`piece` with zeros for parameter `index`; None when no `others` have a gradient in it."""
        if piece is None or not others:
            return None
        self.group.local(piece, index).zero_()
        return piece

    def add_post_hook(self, index: int, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """`hook(param)` after each reduction that gave the parameter a gradient."""
        hooks = self._post_hooks.setdefault(index, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle
