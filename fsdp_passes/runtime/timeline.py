"""The order in which the graphs of a model run, and what is gathered meanwhile.

A round goes from the first graph of a forward to the end of its backward; of a forward without one, to the next time
that its first graph runs. The first round runs each graph by its own plan. Then its order is known: a round that
begins alike is expected to go on alike, and follows one schedule for all of its graphs. When another graph comes than
was expected, what was gathered ahead is dropped, the rest of the round runs by the graphs' own plans, and what has run
is the order that is known from then on.

Ranks decide alike as long as they send the same, and edit parameters alike: before each call they compare.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_passes._compat import queue_backward_callback, running_backward, warn_once
from fsdp_passes.runtime.arena import Arena
from fsdp_passes.runtime.collectives import Done
from fsdp_passes.runtime.order import GraphCall, Order
from fsdp_passes.schedule.plan import Accumulate, Event, Gather, GradSlice, Reduce, Release, Run, Step, Wait, WaitReduce
from fsdp_passes.sharding.group import FlatGroup
from fsdp_passes.sharding.model import ShardedModel
from fsdp_passes.sharding.poison import poison

log = logging.getLogger(__name__)

_COMPUTES = (Accumulate, GradSlice, Release, Run)
_MAX_CALLS = 1000  # of a round; a longer one is several, whose order is not worth knowing
_MAX_ORDERS = 16


@dataclass(frozen=True)
class _Gathered:
    """A buffer that is filled, when `work` is done, with what the shard was at `version`."""

    group: FlatGroup
    full: Tensor
    work: dist.Work | Done
    version: int
    step: Gather

    @property
    def is_stale(self) -> bool:
        """Whether the shard was edited since, between two graphs."""
        return self.version != self.group.version


@dataclass
class Turn:
    """Call `number` of a round: what it does, how far it has come, and its buffers."""

    timeline: Timeline
    number: int
    steps: tuple[Step, ...]
    position: int = 0

    def __iter__(self) -> Iterator[Step]:
        for position, step in enumerate(self.steps):
            self.position = position
            yield step

    def do(self, step: Event | Gather | WaitReduce) -> None:
        match step:
            case Event():
                self.timeline.order_gathers(self.number)
            case Gather():
                self.timeline.issue(self.number, step)
            case WaitReduce():
                call = self.timeline.call(self.number - step.ago, now=self.number)
                call.groups[step.shard].gradients.finish_reduce()

    def send_the_rest(self) -> None:
        """An exception ended what is computed: send what the other ranks wait for in this graph, gradients as zeros."""
        if not isinstance(self.steps[self.position], _COMPUTES):
            return
        for step in self.steps[self.position + 1 :]:
            match step:
                case Event() | Gather():
                    self.do(step)
                case Wait():
                    self.wait(step.buffer)
                case Reduce():
                    group = self.timeline.call(self.number, now=self.number).groups[step.shard]
                    if group.is_reduced_by_graph():
                        group.gradients.reduce_zeros()

    def wait(self, buffer: str) -> Tensor:
        return self.timeline.wait(self.number, buffer)

    def release(self, buffer: str) -> None:
        self.timeline.release(self.number, buffer)


@dataclass
class Timeline:
    """What is known of one model's rounds."""

    arena: Arena = field(default_factory=Arena)
    _calls: list[GraphCall] = field(default_factory=list)  # of the round that is under way
    _expected: Order | None = None
    _known: dict[tuple[object, ...], Order] = field(default_factory=dict)  # by the first call
    _live: dict[tuple[int, int], _Gathered] = field(default_factory=dict)  # by number of the call, and of the buffer
    _kept: dict[tuple[FlatGroup, torch.dtype], _Gathered] = field(default_factory=dict)  # for the rest of the window
    _kept_by: tuple[Order | None, int] = None, 0  # in which window

    @classmethod
    def of(cls, model: ShardedModel | None) -> Timeline:
        """The one that belongs to `model`; one for a single call without."""
        known = None if model is None else model.timeline
        timeline = known if isinstance(known, cls) else cls()
        if model is not None:
            model.timeline = timeline
        return timeline

    @property
    def orders(self) -> tuple[Order, ...]:
        """Those that are known."""
        return tuple(self._known.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> Timeline:
        """A copy of the model has a memory, and an order, of its own."""
        return Timeline()

    def begin(self, call: GraphCall) -> Turn:
        """`call` runs now."""
        if call.model is None:
            return Turn(self, 0, call.plan.steps)
        if running_backward() is not None:
            queue_backward_callback(self.end_round)
        elif self._calls and self._calls[0].key == call.key:
            self.end_round()
        if len(self._calls) == _MAX_CALLS:
            self.abandon_round()
        if not self._calls:
            self._drop_buffers()
            self._expected = self._known.get(call.key)
        self._calls.append(call)
        if self._expected is not None and not self._expected.goes_on_with(self._calls):
            self._leave_order(self._expected)
        self._drop_kept(call, call.model.agreement.step)
        number, order = len(self._calls) - 1, self._expected
        device = next(iter(call.groups.values())).shard.device
        self.arena.reserve(order.nbytes if order else call.plan.arena_bytes, device)
        steps = order.steps_of(number, call) if order else call.plan.steps
        call.model.agreement.check(self._lines(number, steps))
        return Turn(self, number, steps)

    def _lines(self, number: int, steps: Sequence[Step]) -> Iterator[str]:
        """What `steps` of call `number` send: all of it is decided before the first of them.

        What is kept for a window is named, too: ranks are to run as many microbatches, though it sends nothing.
        Reductions last between two waits: they do not wait for gathers, so that their order makes no difference.
        """
        call = self._calls[number]
        direction = "forward" if call.plan.direction == "fwd" else "backward"
        reductions: list[str] = []
        for step in steps:
            match step:
                case Gather(kept_from=None):
                    group = self.call(number + step.ahead, now=number).groups[step.shard]
                    kind = "gather" if self._find_kept(group, step) is None else "use of the kept copy"
                    yield group.line(f"{direction} {kind}", step.dtype)
                case Reduce() if call.groups[step.shard].is_reduced_by_graph():
                    reductions.append(call.groups[step.shard].line("reduce-scatter", step.dtype))
                case Wait() | WaitReduce():
                    yield from reductions
                    reductions.clear()
                    yield from self._lines_of_wait(number, step)
        yield from reductions

    def _lines_of_wait(self, number: int, step: Wait | WaitReduce) -> Iterator[str]:
        buffers = self._calls[number].plan.buffers
        gathered = self._live.get((number, buffers[step.buffer])) if isinstance(step, Wait) else None
        if gathered is not None and gathered.is_stale:
            yield gathered.group.line("gather after an edit", gathered.full.dtype)

    def _leave_order(self, order: Order) -> None:
        """Another graph runs than was expected, perhaps because the round is longer: then nothing is left undone."""
        if len(self._calls) <= len(order.calls):
            warn_once(log, "fsdp_opt: graphs run in another order than before; each gathers for itself for now")
        self._expected = None
        self._drop_buffers()
        for group in (group for call in self._calls for group in call.groups.values()):
            group.gradients.finish_reduce()

    def end_round(self) -> None:
        """The order of the calls of this round is what is expected from now on of one that begins alike."""
        calls, expected = self._calls, self._expected
        self.abandon_round()
        self._drop_buffers()
        as_expected = expected is not None  # perhaps it stopped early, as a forward without backward does
        if calls and not as_expected and len({call.limits for call in calls}) == 1:
            self._known.pop(calls[0].key, None)
            self._known[calls[0].key] = Order(calls)
        if len(self._known) > _MAX_ORDERS:
            del self._known[next(iter(self._known))]

    def abandon_round(self) -> None:
        """Learn nothing. What is being gathered is waited for later: after an exception, others may not get there."""
        self._calls, self._expected = [], None

    def _drop_buffers(self) -> None:
        live, self._live = self._live, {}
        for each in live.values():
            each.work.wait()

    def _drop_kept(self, call: GraphCall, window: int) -> None:
        """What is kept is dropped when its window is over, and where another order uses the memory."""
        if self._kept_by != (self._expected, window):
            if call.settings.poison:
                for each in self._kept.values():
                    poison(each.full)
            self._kept, self._kept_by = {}, (self._expected, window)

    def _find_kept(self, group: FlatGroup, step: Gather) -> _Gathered | None:
        """What the shard is now, if it is there from a microbatch before."""
        kept = self._kept.get((group, step.dtype)) if step.for_window else None
        return None if kept is None or kept.is_stale else kept

    def call(self, number: int, now: int) -> GraphCall:
        """Call `number`, as steps of call `now` name its shards and buffers."""
        return self._calls[number] if self._expected is None or number == now else self._expected.calls[number]

    def order_gathers(self, number: int) -> None:
        """From now on they start once what was computed is over."""
        model = self._calls[number].model
        assert model is not None
        model.streams.gather.follow_compute()

    def issue(self, number: int, step: Gather) -> None:
        call = self.call(number + step.ahead, now=number)
        key = number + step.ahead, call.plan.buffers[step.buffer]
        if step.kept_from is not None:
            self._live[key] = self._live.pop((number, self._calls[number].plan.buffers[step.kept_from]))
            return
        group = call.groups[step.shard]
        kept = self._find_kept(group, step)
        if kept is not None:
            self._live[key] = kept
            return
        if step.offset is None:
            full = group.empty_full(step.dtype)
        else:
            full = self.arena.slot(step.offset, step.full_elems, step.dtype)
        self._live[key] = _Gathered(group, full, group.issue_gather(full), group.version, step)

    def wait(self, number: int, buffer: str) -> Tensor:
        """The buffer, with the values that the shard has now."""
        key = number, self._calls[number].plan.buffers[buffer]
        gathered = self._live.pop(key)
        group, full = gathered.group, gathered.full
        with group.waiting_for("gather", full.dtype):
            gathered.work.wait()
            if gathered.is_stale:
                group.gather_into(full)
        now = replace(gathered, work=Done(), version=group.version)
        if gathered.step.offset is not None:
            self._live[key] = now
        if gathered.step.for_window:
            self._kept[group, full.dtype] = now
        return full

    def release(self, number: int, buffer: str) -> None:
        call = self._calls[number]
        full = self._live.pop((number, call.plan.buffers[buffer])).full
        if call.settings.poison:
            poison(full)
