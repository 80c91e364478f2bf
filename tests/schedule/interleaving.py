"""Every order in which streams can do what a schedule gives them, tried one by one.

The compute stream does its steps in order. A gather may start once compute has come to the last event before it, a
reduction once compute has come to itself; it is done at any time after that, and compute stops at its wait until then.
What is under way leaves its memory in disorder, and so does who writes there meanwhile.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_passes.schedule.plan import (
    Accumulate,
    Call,
    Event,
    Gather,
    GradSlice,
    Reduce,
    Release,
    Run,
    Step,
    Wait,
    WaitReduce,
)

DISORDER, BEFORE, EDITED = "disorder", "before", "edited"
WAITING, UNDER_WAY, DONE = range(3)


class Wrong(Exception):
    """Some order reads something else, or has more units live than the bound, or does not come to an end."""


class TooMany(Exception):
    """There are more states than are to be tried."""


@dataclass
class Sent:
    """What is given to another stream, once compute has come past `after`: the places that it fills, or adds up."""

    position: int
    after: int
    places: list[int]
    shard: int | None = None  # None: a reduction
    contents: tuple[object, ...] = ()  # of each place, when it is done


@dataclass
class Life:
    unit: str
    sent: int | None  # None: it was there
    position: int
    takes_over: bool
    reshard: bool
    pieces: list[tuple[int, object]]  # places, and what they should hold
    wait: int = 0
    end: int = 0


@dataclass(frozen=True)
class State:
    at: int
    sent: tuple[int, ...]
    memory: tuple[Any, ...]


class Machine:
    """`schedules` of `calls` for a compute stream, and what it gives to others. Numbers are of places, or of `sent`.

    is_there: whether what is kept for a window is there from before; at the end it must be, in any case.
    """

    def __init__(
        self, calls: Sequence[Call], schedules: Sequence[Sequence[Step]], bound: float, is_there: bool = False
    ) -> None:
        self.calls, self.bound, self.is_there = calls, bound, is_there
        self.steps = [(call, step) for call, own in enumerate(schedules) for step in own]
        self.sent: list[Sent] = []
        self.lives: list[Life] = []
        self.values: list[Any] = []  # of each place at the beginning
        self.waits: dict[int, int] = {}  # by position, as the following
        self.edits: dict[int, list[int]] = defaultdict(list)
        self.spoils: dict[int, list[int]] = defaultdict(list)
        self.adds: dict[int, set[int]] = defaultdict(set)
        self.reads: dict[int, list[tuple[int, object]]] = defaultdict(list)
        self.at_end: list[tuple[int, object]] = []
        self._starts = {call: at for at, (call, _) in reversed(list(enumerate(self.steps)))}
        self._event, self._last_computed = -1, -1
        self._buffers: dict[tuple[int, str], Life] = {}
        self._sums: dict[tuple[int, str], int] = {}
        self._slices: dict[tuple[int, str], int] = {}
        self._reductions: dict[tuple[int, str], int] = {}
        edges = {edge for _, step in self.steps if isinstance(step, Gather) for edge in _span(step)}
        self._arena = {span: self._place() for span in itertools.pairwise(sorted(edges))}
        for at, (call, step) in enumerate(self.steps):
            self._add(at, call, step)

    def _add(self, at: int, call: int, step: Step) -> None:
        if not isinstance(step, Event | Gather | GradSlice | Wait):
            self._last_computed = at
        match step:
            case Event():
                self._event = at
            case Gather():
                self._add_gather(at, call, step)
            case Wait(buffer):
                life = self._buffers[call, buffer]
                life.wait = at
                self.waits |= {} if life.sent is None else {at: life.sent}
            case Run():
                for name in step.inputs:
                    self.reads[at] += self._buffers[call, name].pieces if (call, name) in self._buffers else []
                    self.adds[at] |= {self._slices[call, name]} if (call, name) in self._slices else set()
            case Release(buffer):
                life = self._buffers[call, buffer]
                life.end = at
                self.spoils[at] += [place for place, _ in life.pieces]
            case WaitReduce(shard, ago):
                self.waits[at] = self._reductions[call - ago, shard]
            case _:
                self._add_gradient(at, call, step)

    def _add_gather(self, at: int, call: int, step: Gather) -> None:
        owner = self.calls[call + step.ahead].owners[step.shard]
        if step.offset is None:
            pieces: list[tuple[int, object]] = [(self._place(), owner)]
            self.spoils[self._last_computed].append(pieces[0][0])  # until then the memory was compute's
        else:
            inside = {a: place for (a, b), place in self._arena.items() if _span(step)[0] <= a and b <= _span(step)[1]}
            pieces = [(place, (owner, a - step.offset)) for a, place in inside.items()]
        index: int | None
        if step.kept_from is None and step.for_window and self.is_there:
            index = None
            for place, content in pieces:
                self.values[place] = content
        elif step.kept_from is None:
            index, shard = len(self.sent), self._place()
            self.edits[self._starts[call]].append(shard)
            places, contents = zip(*pieces, strict=True)
            self.sent.append(Sent(at, self._event, list(places), shard, contents))
        else:
            before = self._buffers[call, step.kept_from]
            index, before.end = before.sent, at
        life = Life(owner[0], index, at, step.kept_from is not None, step.reshard, pieces, end=len(self.steps))
        self._buffers[call + step.ahead, step.buffer] = life
        if step.for_window:
            self.at_end += pieces
        elif step.offset is not None:
            self.lives.append(life)

    def _add_gradient(self, at: int, call: int, step: GradSlice | Accumulate | Reduce) -> None:
        if (call, step.shard) not in self._sums:
            self._sums[call, step.shard] = self._place(frozenset())
        place = self._sums[call, step.shard]
        match step:
            case GradSlice():
                self._slices[call, step.name] = place
            case Accumulate():
                self.adds[at].add(place)
            case Reduce():
                self._reductions[call, step.shard] = len(self.sent)
                self.sent.append(Sent(at, at, [place]))

    def _place(self, value: Any = BEFORE) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def explore(self, max_states: int) -> int:
        """How many states there are; Wrong, TooMany."""
        first = State(0, (WAITING,) * len(self.sent), tuple(self.values))
        pending, seen = [first], {first}
        while pending:
            state = pending.pop()
            following = list(self._following(state))
            if not following and (state.at < len(self.steps) or set(state.sent) - {DONE}):
                raise Wrong("it does not come to an end")
            if not following and any(state.memory[place] != content for place, content in self.at_end):
                raise Wrong("what is kept is not there at the end")
            new = [each for each in following if each not in seen]
            seen.update(new)
            pending += new
            if len(seen) > max_states:
                raise TooMany
        return len(seen)

    def _following(self, state: State) -> Iterator[State]:
        """The last is tried first: what is sent starts as soon, and is done as late, as can be.

        Where compute's next step has to do with nothing that could happen meanwhile, only that: it makes no difference.
        """
        is_blocked = state.at in self.waits and state.sent[self.waits[state.at]] != DONE
        can_compute = state.at < len(self.steps) and not is_blocked
        if can_compute and self._is_independent(state):
            yield self._compute(state)
            return
        for index, status in enumerate(state.sent):
            if status == UNDER_WAY:
                yield self._finish(state, index)
        if can_compute:
            yield self._compute(state)
        for index, status in enumerate(state.sent):
            if status == WAITING and state.at > self.sent[index].after:
                yield self._start(state, index)

    def _is_independent(self, state: State) -> bool:
        at, (_, step) = state.at, self.steps[state.at]
        touched = {*self.edits[at], *self.spoils[at], *self.adds[at], *(place for place, _ in self.reads[at])}
        frees_a_unit = isinstance(step, Gather | Release)
        for status, this in zip(state.sent, self.sent, strict=True):
            may_start = status == WAITING and at > this.after
            if may_start and frees_a_unit:
                return False
            if (may_start or status == UNDER_WAY) and not touched.isdisjoint({*this.places, this.shard}):
                return False
        return True

    def _start(self, state: State, index: int) -> State:
        this = self.sent[index]
        seen = state.memory[this.places[0] if this.shard is None else this.shard]
        if this.shard is not None:
            self._check_bound(state, index)
        return self._changed(state, index, UNDER_WAY, {place: (index, seen) for place in this.places})

    def _finish(self, state: State, index: int) -> State:
        this = self.sent[index]
        found = [state.memory[place] for place in this.places]
        if this.shard is None:
            expected = frozenset(at for at, places in self.adds.items() if this.places[0] in places)
            if found != [(index, expected)]:
                raise Wrong("a sum is reduced that is not complete")
            return self._changed(state, index, DONE, {})
        right = [value == (index, EDITED) for value in found]
        values = [content if r else DISORDER for content, r in zip(this.contents, right, strict=True)]
        return self._changed(state, index, DONE, dict(zip(this.places, values, strict=True)))

    def _compute(self, state: State) -> State:
        at = state.at
        for place, expected in self.reads[at]:
            if state.memory[place] != expected:
                raise Wrong(f"step {at} reads {state.memory[place]}, expected {expected}")
        values: dict[int, Any] = dict.fromkeys(self.edits[at], EDITED) | dict.fromkeys(self.spoils[at], DISORDER)
        for place in self.adds[at]:
            before = state.memory[place]
            values[place] = before | {at} if isinstance(before, frozenset) else DISORDER
        after = self._changed(state, None, DONE, values)
        return State(at + 1, after.sent, after.memory)

    def _check_bound(self, state: State, index: int) -> None:
        """What the host gave to the stream before is counted; a unit that stays until the host came to its wait."""
        units = set()
        for life in (life for life in self.lives if life.position <= self.sent[index].position):
            assert life.sent is not None
            has_begun = state.at > life.position if life.takes_over else state.sent[life.sent] or life.sent == index
            counts = life.reshard or not (life.takes_over or self.sent[index].position > life.wait)
            if has_begun and state.at <= life.end and counts:
                units.add(life.unit)
        if len(units) > self.bound:
            raise Wrong(f"units {units} are live")

    def _changed(self, state: State, index: int | None, status: int, values: dict[int, Any]) -> State:
        sent, memory = list(state.sent), list(state.memory)
        if index is not None:
            sent[index] = status
        for place, value in values.items():
            memory[place] = value
        return State(state.at, tuple(sent), tuple(memory))


def _span(gather: Gather) -> tuple[int, int]:
    return gather.offset or 0, (gather.offset or 0) + gather.nbytes
