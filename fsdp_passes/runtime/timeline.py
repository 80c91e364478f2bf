"""The order in which the graphs of a model run, and what is gathered meanwhile.

A round goes from the first graph of a forward to the end of its backward; of a forward without one, to the next time
that its first graph runs. The first round runs each graph by its own plan. Then its order is known: a round that
begins alike is expected to go on alike, and follows one schedule for all of its graphs. When another graph comes than
was expected, what was gathered ahead is dropped, the rest of the round runs by the graphs' own plans, and what has run
is the order that is known from then on.

Ranks decide alike as long as they send the same, and edit parameters alike: before each call they compare.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fsdp_passes._compat import queue_backward_callback, running_backward, warn_once
from fsdp_passes.runtime.agreement import LostRank
from fsdp_passes.runtime.buffers import Buffers
from fsdp_passes.runtime.order import GraphCall, Order
from fsdp_passes.schedule.plan import Event, Gather, Reduce, Step, Wait, WaitReduce
from fsdp_passes.sharding.model import ShardedModel

log = logging.getLogger(__name__)

_MAX_CALLS = 1000  # of a round; a longer one is several, whose order is not worth knowing
_MAX_ORDERS = 16


@dataclass
class Turn:
    """Call `number` of a round: its steps, and how they communicate. Those before `position` are done."""

    timeline: Timeline
    number: int
    steps: tuple[Step, ...]
    position: int = 0

    def __iter__(self) -> Iterator[Step]:
        for position, step in enumerate(self.steps):
            self.position = position
            yield step

    def do(self, step: Event | Gather | Reduce | WaitReduce) -> None:
        match step:
            case Event():
                self.timeline.order_gathers(self.number)
            case Gather():
                self.timeline.issue(self.number, step)
            case Reduce(shard):
                self.timeline.call(self.number, now=self.number).groups[shard].reduce_if_complete()
            case WaitReduce(shard, ago):
                self.timeline.call(self.number - ago, now=self.number).groups[shard].gradients.finish_reduce()

    def wait(self, buffer: str) -> Tensor:
        return self.timeline.wait(self.number, buffer)

    def release(self, buffer: str) -> None:
        self.timeline.release(self.number, buffer)

    def send_the_rest(self, error: Exception) -> bool:
        """Do all that the other ranks wait for in this graph, which `error` ended; whether it could be done.

        Sums of gradients are reduced as they are. What lacked memory is tried again.
        """
        if isinstance(error, LostRank):
            return False
        log.warning(
            "fsdp_opt: %r ended a graph; what is left of its communication is done before that is raised", error
        )
        try:
            for step in self.steps[self.position :]:
                match step:
                    case Wait(buffer):
                        self.wait(buffer)
                    case Event() | Gather() | Reduce() | WaitReduce():
                        self.do(step)
        except Exception:
            log.exception("fsdp_opt: that failed, too: other ranks wait in that graph until the timeout")
            return False
        return True


@dataclass
class Timeline:
    """What is known of one model's rounds."""

    buffers: Buffers = field(default_factory=Buffers)
    _calls: list[GraphCall] = field(default_factory=list)  # of the round that is under way
    _expected: Order | None = None
    _known: dict[tuple[object, ...], Order] = field(default_factory=dict)  # by the first call
    _differences: int = 0  # between ranks, that were there when these were learnt

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

    @contextlib.contextmanager
    def turn(self, call: GraphCall) -> Iterator[Turn]:
        """`call` runs now. An exception in what it computes leaves this rank in step with the others."""
        if call.model is None:
            yield Turn(self, 0, call.plan.steps)
            return
        turn = None
        try:
            turn = self._begin(call, call.model)
            yield turn
        except BaseException as error:
            self._end_by(error, turn, call, call.model)
            raise

    def _end_by(self, error: BaseException, turn: Turn | None, call: GraphCall, model: ShardedModel) -> None:
        """Stay in step with the other ranks if that is possible; in a backward, tell them."""
        in_step = turn is not None and isinstance(error, Exception) and turn.send_the_rest(error)
        in_backward = running_backward() is not None
        if not in_step:
            self.abandon_round()
        if in_backward or not in_step:
            for each in call.models:
                each.forget_forwards()
        if in_backward and in_step:
            with contextlib.suppress(LostRank):  # `error` is the one to be raised
                self.end_round()
            model.tell_of_failure(error)
        for group in call.groups.values():
            group.gradients.drop_blank_buffer()

    def _begin(self, call: GraphCall, model: ShardedModel) -> Turn:
        self._forget_after_difference(call, model)
        if running_backward() is not None:
            queue_backward_callback(self.end_round)
        elif self._calls and self._calls[0].key == call.key:
            self.end_round()
        if len(self._calls) == _MAX_CALLS:
            self.abandon_round()
        if not self._calls:
            self.buffers.drop()
            self._expected = self._known.get(call.key)
        self._calls.append(call)
        if self._expected is not None and not self._expected.goes_on_with(self._calls):
            self._leave_order(self._expected)
        self.buffers.drop_kept(unless_by=(self._expected, model.agreement.step), poisons=call.settings.poison)
        number, order = len(self._calls) - 1, self._expected
        device = next(iter(call.groups.values())).shard.device
        self.buffers.arena.reserve(order.nbytes if order else call.plan.arena_bytes, device)
        steps = order.steps_of(number, call) if order else call.plan.steps
        model.agreement.check(self._lines(number, steps))
        return Turn(self, number, steps)

    def _forget_after_difference(self, call: GraphCall, model: ShardedModel) -> None:
        """Ranks that differed may know other orders, and keep other buffers: all begin anew."""
        if self._differences != model.agreement.differences:
            self._differences = model.agreement.differences
            self.abandon_round()
            self._known.clear()
            self.buffers.drop()
            self.buffers.drop_kept(unless_by=None, poisons=call.settings.poison)
            model.forget_forwards()

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
                    kind = "gather" if self.buffers.find_kept(group, step) is None else "use of the kept copy"
                    yield group.line(f"{direction} {kind}", step.dtype)
                case Reduce() if call.groups[step.shard].is_reduced_by_graph():
                    reductions.append(call.groups[step.shard].line("reduce-scatter", step.dtype))
                case Wait() | WaitReduce():
                    yield from reductions
                    reductions.clear()
                    yield from self._lines_of_wait(number, step)
        yield from reductions

    def _lines_of_wait(self, number: int, step: Wait | WaitReduce) -> Iterator[str]:
        stale = self.buffers.find_stale(self._key(number, step.buffer)) if isinstance(step, Wait) else None
        if stale is not None:
            yield stale.group.line("gather after an edit", stale.full.dtype)

    def _leave_order(self, order: Order) -> None:
        """Another graph runs than was expected, perhaps because the round is longer: then nothing is left undone."""
        if len(self._calls) <= len(order.calls):
            warn_once(log, "fsdp_opt: graphs run in another order than before; each gathers for itself for now")
        self._expected = None
        self.buffers.drop()
        for group in (group for call in self._calls for group in call.groups.values()):
            group.gradients.finish_reduce()

    def end_round(self) -> None:
        """The order of the calls of this round is what is expected from now on of one that begins alike."""
        calls, expected = self._calls, self._expected
        self.abandon_round()
        self.buffers.drop()
        if not calls or expected is not None:  # perhaps it stopped early, as a forward without backward does
            return
        if len({call.limits for call in calls}) > 1:
            warn_once(log, "fsdp_opt: graphs have other in_flight or keep_gathered_bytes; each gathers for itself")
        else:
            self._known.pop(calls[0].key, None)
            self._known[calls[0].key] = Order(calls)
        if len(self._known) > _MAX_ORDERS:
            del self._known[next(iter(self._known))]

    def abandon_round(self) -> None:
        """Learn nothing. What is being gathered is waited for later: after an exception, others may not get there."""
        self._calls, self._expected = [], None

    def call(self, number: int, now: int) -> GraphCall:
        """Call `number`, as steps of call `now` name its shards and buffers."""
        return self._calls[number] if self._expected is None or number == now else self._expected.calls[number]

    def order_gathers(self, number: int) -> None:
        """From now on they start once what was computed is over."""
        model = self._calls[number].model
        assert model is not None
        model.streams.gather.follow_compute()

    def _key(self, number: int, buffer: str) -> tuple[int, int]:
        return number, self._calls[number].plan.buffers[buffer]

    def issue(self, number: int, step: Gather) -> None:
        call = self.call(number + step.ahead, now=number)
        key = number + step.ahead, call.plan.buffers[step.buffer]
        if step.kept_from is None:
            self.buffers.issue(key, call.groups[step.shard], step)
        else:
            self.buffers.hand_on(self._key(number, step.kept_from), to=key)

    def wait(self, number: int, buffer: str) -> Tensor:
        return self.buffers.wait(self._key(number, buffer))

    def release(self, number: int, buffer: str) -> None:
        self.buffers.release(self._key(number, buffer), self._calls[number].settings.poison)
