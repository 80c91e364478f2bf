"""What the flat groups of one model share: whether to reduce, by how much to divide, the forward under way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_passes._compat import mark_as_parameter, queue_backward_callback, running_backward
from fsdp_passes.runtime.agreement import Agreement
from fsdp_passes.runtime.collectives import any_rank
from fsdp_passes.runtime.streams import Streams
from fsdp_passes.sharding.unit_choice import choose_units

if TYPE_CHECKING:
    from fsdp_passes.sharding.group import FlatGroup
    from fsdp_passes.sharding.param import ShardedParam


class ShardedModel:
    """State of one sharded model."""

    def __init__(
        self, device: torch.device, agreement: Agreement, streams: Streams, input_dtype: torch.dtype | None = None
    ) -> None:
        self.device = device  # where values are, or belong while the shards are on the meta device
        self.streams = streams
        self.agreement = agreement
        self.input_dtype = input_dtype  # cast the root's floating inputs to it; None: leave them
        self.groups: list[FlatGroup] = []
        self.requires_sync = True
        self.backwards = 0  # of the window, that came to their end
        self._in_backward = False
        self.divide_factor: float | None = None
        self.deferred_units: frozenset[str] | None = None  # None: all
        self.reports: dict[object, None] = {}  # what the backend says of the graphs that ran, in order
        self._deferred_by_limit: dict[int | None, frozenset[str] | None] = {None: None}
        self.timeline: object | None = None  # what the runtime knows of the order in which the graphs run
        self._gathered: dict[int, _Gathered] | None = None  # while an eager forward runs
        self.is_computing = False  # whether it is there: all that traced code depends on
        self._recomputing: int | None = None  # the backward whose recomputation opened that forward

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self.groups[0].process_group

    def named_params(self) -> Iterator[tuple[str, ShardedParam]]:
        """Each parameter once, by the first of its names."""
        for group in self.groups:
            yield from zip(group.names, group.params, strict=True)

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
        """Ask autograd to call `end_backward` when the backward that runs now is over; it does not if that raises."""
        self._in_backward = True
        queue_backward_callback(self.end_backward)

    def limit_accumulation(self, accumulate_bytes: int | None) -> None:
        """From now on a rank holds only so many bytes of unreduced gradients between microbatches (None: no limit)."""
        if accumulate_bytes is not None and accumulate_bytes not in self._deferred_by_limit:
            self._deferred_by_limit[accumulate_bytes] = choose_units(self.full_grad_bytes(), accumulate_bytes)
        self.deferred_units = self._deferred_by_limit[accumulate_bytes]

    def forget_deferral(self) -> None:
        """The next forward chooses anew which units defer: other parameters are trained now."""
        self._deferred_by_limit = {None: None}

    def full_grad_bytes(self) -> dict[str, int]:
        """What the gradients of each trained unit take unreduced."""
        bytes_of: dict[str, int] = {}
        for group in (group for group in self.groups if group.full_grad_bytes):
            bytes_of[group.unit] = bytes_of.get(group.unit, 0) + group.full_grad_bytes
        return bytes_of

    def defers(self, unit: str) -> bool:
        """Whether the unit's gradients wait for a backward that synchronises."""
        return self.deferred_units is None or unit in self.deferred_units

    def reduces(self, unit: str) -> bool:
        """Whether the backward that runs now reduces the unit's gradients."""
        return self.requires_sync or not self.defers(unit)

    def forget_forwards(self) -> None:
        """No forward awaits a backward any more."""
        for group in self.groups:
            group.gradients.forwards = 0

    def tell_of_failure(self, error: BaseException) -> None:
        """`error`, which is raised here, ended the backward that runs now: say so if the others compare at its end."""
        if self.requires_sync and any(group.wants_gradient() for group in self.groups):
            with contextlib.suppress(RuntimeError):
                failure = f"nothing, because of a {type(error).__name__} in backward"
                self.agreement.check([failure], host_waits=True)

    def end_backward(self) -> None:
        """Reduce every group that has something to reduce, in model order. Calling it again does nothing.

        One full buffer at a time: there is nothing left to compute meanwhile.
        """
        self.backwards += self._in_backward
        self._in_backward = False
        for group in self.groups:
            group.gradients.finish_reduce()
        self.forget_forwards()
        to_reduce = [group for group in self.groups if group.gradients.awaits_reduction and self.reduces(group.unit)]
        has_reduced = any(group.gradients.reduced is not None for group in self.groups)
        ends_window = self.requires_sync and (bool(to_reduce) or has_reduced)
        self.agreement.check(self._lines(to_reduce, ends_window), host_waits=ends_window)
        for group in to_reduce:
            group.gradients.issue_reduce()
            group.gradients.finish_reduce()
        if ends_window:
            self._settle()

    def _lines(self, to_reduce: list[FlatGroup], ends_window: bool) -> Iterator[str]:
        """What the end of a backward sends."""
        for group in to_reduce:
            yield group.line("reduce-scatter", group.reduce_dtype)
        if ends_window:
            yield self._line_of_flags()

    def _line_of_flags(self) -> str:
        """With what ranks must have in common, though it was not sent: a microbatch that one left out."""
        num_params = sum(len(group.params) for group in self.groups)
        of_window = f"{num_params} parameters, {self.backwards} backwards in its window"
        return f"all-reduce at the end of a synchronised backward ({of_window})"

    def _settle(self) -> None:
        """Parameters without a gradient on any rank keep `.grad` None: one byte each, in one all-reduce."""
        flags = [i in group.gradients.reduced_params for group in self.groups for i in range(len(group.params))]
        with self.agreement.waiting_for(self._line_of_flags()):
            on_some_rank = iter(any_rank(flags, self.device, self.process_group))
        self.agreement.step += 1
        self.backwards = 0
        of_hooks: list[Exception] = []
        for group in self.groups:
            params = {index for index in range(len(group.params)) if next(on_some_rank)}
            try:
                group.gradients.settle(params)
            except Exception as error:  # the other groups' windows are over, too
                of_hooks.append(error)
        if of_hooks:
            raise of_hooks[0]

    def forget_backwards(self) -> None:
        """Those of the window do not count if nothing is left of them."""
        if self.backwards and all(group.gradients.is_empty for group in self.groups):
            self.backwards = 0

    def in_forward(self) -> bool:
        """Whether eager code computes with the parameters now: in a forward, or where backward recomputes one."""
        if self._gathered is not None and self._recomputing not in (None, running_backward()):
            self._set_gathered(None)  # an exception ended that backward
        return self._gathered is not None

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """An eager forward: parameters are read as views of one gather a flat group, dropped at its end."""
        gathered: dict[int, _Gathered] = {}
        self._set_gathered(gathered)
        try:
            yield
            if any(each.was_edited() for each in gathered.values()):
                raise RuntimeError(
                    "fsdp_passes: expected forward to leave its parameters alone, got an in-place operation on one, "
                    "which edited a gathered copy; edit it outside of forward"
                )
        finally:
            self._set_gathered(None)

    def recompute(self) -> None:
        """Open a forward until the backward that runs now is over: a checkpoint recomputes a part of one in it."""
        self._set_gathered({}, running_backward())
        queue_backward_callback(self._end_recompute)

    def _end_recompute(self) -> None:
        self._set_gathered(None)

    def _set_gathered(self, gathered: dict[int, _Gathered] | None, recomputing: int | None = None) -> None:
        self._gathered, self._recomputing, self.is_computing = gathered, recomputing, gathered is not None

    def read(self, group: FlatGroup, index: int) -> Tensor:
        """Parameter `index` of `group` in an eager forward. A leaf in every grad mode, as parameters are."""
        assert self._gathered is not None
        if id(group) not in self._gathered:
            self._gathered[id(group)] = _Gathered.from_group(group)
            if torch.is_grad_enabled():
                group.expect_backward()
        return self._gathered[id(group)].params[index]


@dataclass(frozen=True)
class _Gathered:
    """The parameters of a flat group as views of `full`, whose version moves when one of them is edited."""

    full: Tensor
    version: int
    params: tuple[Tensor, ...]

    @classmethod
    def from_group(cls, group: FlatGroup) -> _Gathered:
        layout = group.layout
        with torch.inference_mode(False), torch.enable_grad():
            full = torch.ops.fsdp_opt.unshard(
                group.shard, layout.world_size, group.compute_dtype, reshard=group.reshard
            )
            pieces = full.split_with_sizes(layout.sizes)
            places = zip(layout.pieces, layout.shapes, strict=True)
            params = tuple(pieces[piece].view(shape) for piece, shape in places)
        for param in params:
            mark_as_parameter(param)  # model code may ask isinstance(self.weight, nn.Parameter)
        return cls(full, full._version, params)

    def was_edited(self) -> bool:
        return self.full._version != self.version
