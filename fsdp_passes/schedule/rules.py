"""What must hold for scheduled steps, each rule a function whose docstring is the invariant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fsdp_passes.ir.verify import VerifyError, lines_around
from fsdp_passes.schedule.plan import Call, Gather, Owner, Reduce, Release, Run, Step, Wait, WaitReduce
from fsdp_passes.schedule.plan_text import step_line


class BrokenSchedule(Exception):
    """A rule does not hold at step number `position` of all calls together."""

    def __init__(self, position: int, what: str) -> None:
        super().__init__(what)
        self.position = position


@dataclass
class Life:
    """One gathered buffer: where it is issued, or taken over, waited for, read, and released, or handed on."""

    gather: Gather
    owner: Owner
    issue: int
    waits: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @property
    def returned(self) -> bool:
        return self.gather.offset is None

    def is_live(self, position: int) -> bool:
        return self.issue <= position and not (self.ends and self.ends[0] <= position)

    def counts_at(self, position: int) -> bool:
        """Whether it takes a place while it is live: one that stays only until it is waited for, if it was not kept."""
        new = self.gather.kept_from is None and not (self.waits and self.waits[0] <= position)
        return self.gather.reshard or new


@dataclass
class Scheduled:
    """Steps of calls that run one after another, and the buffers in them, in the order of their issue."""

    bound: float
    steps: list[tuple[int, Step]] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    _known: dict[tuple[int, str], Life] = field(default_factory=dict)

    def life(self, call: int, buffer: str) -> Life:
        if (call, buffer) not in self._known:
            raise BrokenSchedule(len(self.steps), f"{buffer} is not gathered before")
        return self._known[call, buffer]

    def add(self, call: int, step: Step, calls: Sequence[Call]) -> None:
        position = len(self.steps)
        match step:
            case Gather():
                if step.kept_from is not None:
                    self.life(call, step.kept_from).ends.append(position)
                used_by = call + step.ahead
                self.lives.append(Life(step, calls[used_by].owners[step.shard], position))
                self._known[used_by, step.buffer] = self.lives[-1]
            case Wait():
                self.life(call, step.buffer).waits.append(position)
            case Run():
                for life in filter(None, (self._known.get((call, name)) for name in step.inputs)):
                    life.reads.append(position)
            case Release():
                self.life(call, step.buffer).ends.append(position)
        self.steps.append((call, step))

    def issues(self) -> Iterator[tuple[Life, list[Life]]]:
        """Each buffer that no graph returns, and all of them that are live when it is issued, itself included."""
        live: list[Life] = []
        for life in (life for life in self.lives if not life.returned):
            live = [*(other for other in live if other.is_live(life.issue)), life]
            yield life, live


def gathers_come_first(calls: Sequence[Call], steps: Sequence[Sequence[Step]], in_flight: int | None) -> Scheduled:
    """A buffer is gathered before any other step names it."""
    found = Scheduled(math.inf if in_flight is None else in_flight)
    for call, own_steps in enumerate(steps):
        for step in own_steps:
            found.add(call, step, calls)
    return found


def buffers_are_waited_for_once(found: Scheduled) -> None:
    """A buffer is waited for once, before it is read, released, or handed on."""
    for life in found.lives:
        if len(life.waits) != 1:
            raise BrokenSchedule(life.issue, f"{life.gather.buffer} has {len(life.waits)} waits, expected 1")
        for other in (*life.reads, *life.ends):
            if other < life.waits[0]:
                raise BrokenSchedule(other, f"{life.gather.buffer} is used before its wait")


def buffers_are_let_go_once(found: Scheduled) -> None:
    """A buffer is released or handed on once, after it was last read; never if its graph returns it."""
    for life in found.lives:
        expected = 0 if life.returned else 1
        if len(life.ends) != expected:
            what = f"{life.gather.buffer} is released or handed on {len(life.ends)} times, expected {expected}"
            raise BrokenSchedule(life.issue, what)
        late = [read for read in life.reads if life.ends and read > life.ends[0]]
        if late:
            raise BrokenSchedule(late[0], f"{life.gather.buffer} is read after it was let go")


def what_is_kept_is_what_was_there(found: Scheduled) -> None:
    """A buffer that is kept has the place, and holds the values, of the one that it is kept from."""
    ended = {life.ends[0]: life for life in found.lives if len(life.ends) == 1}
    for life in found.lives:
        if life.gather.kept_from is not None:
            before = ended[life.issue]
            one, other = ((each.owner, each.gather.dtype, each.gather.offset) for each in (life, before))
            if one != other:
                raise BrokenSchedule(life.issue, f"{life.gather.buffer} is not {before.gather.buffer}")


def no_more_units_are_live_than_the_bound(found: Scheduled) -> None:
    """From issue to release at most `in_flight` units are live; one that stays counts until it is waited for."""
    for life, live in found.issues():
        units = sorted({other.owner[0] for other in live if other.counts_at(life.issue)})
        if len(units) > found.bound:
            raise BrokenSchedule(life.issue, f"units {', '.join(units)} are live, expected at most {found.bound}")


def live_buffers_do_not_overlap(found: Scheduled) -> None:
    """Two buffers that are live at the same time have no byte in common."""
    for life, live in found.issues():
        for other in live[:-1]:
            if _overlap(life.gather, other.gather):
                raise BrokenSchedule(life.issue, f"{life.gather.buffer} overlaps {other.gather.buffer}, which is live")


def _overlap(one: Gather, other: Gather) -> bool:
    assert one.offset is not None
    assert other.offset is not None
    return one.offset < other.offset + other.nbytes and other.offset < one.offset + one.nbytes


def reductions_are_waited_for_once(found: Scheduled) -> None:
    """A reduction is waited for once, after its issue; at most `in_flight` of them are under way."""
    under_way: list[tuple[int, str]] = []
    issued: dict[tuple[int, str], int] = {}
    for position, (call, step) in enumerate(found.steps):
        if isinstance(step, Reduce):
            under_way.append((call, step.shard))
            issued[under_way[-1]] = position
            if len(under_way) > found.bound:
                raise BrokenSchedule(position, f"{len(under_way)} reductions are under way, expected {found.bound}")
        elif isinstance(step, WaitReduce):
            if (call - step.ago, step.shard) not in under_way:
                raise BrokenSchedule(position, f"no reduction of {step.shard} is under way")
            under_way.remove((call - step.ago, step.shard))
    if under_way:
        raise BrokenSchedule(issued[under_way[0]], f"the reduction of {under_way[0][1]} is not waited for")


RULES: tuple[Callable[[Scheduled], None], ...] = (
    buffers_are_waited_for_once,
    buffers_are_let_go_once,
    what_is_kept_is_what_was_there,
    no_more_units_are_live_than_the_bound,
    live_buffers_do_not_overlap,
    reductions_are_waited_for_once,
)


def verify_schedule(calls: Sequence[Call], steps: Sequence[Sequence[Step]], in_flight: int | None, level: int) -> None:
    """Check what `calls` do at `level` (0 nothing); VerifyError shows the lines around the step that breaks a rule."""
    if level == 0:
        return
    rule: Callable[..., object] = gathers_come_first
    try:
        found = gathers_come_first(calls, steps, in_flight)
        for rule in RULES:
            rule(found)
    except BrokenSchedule as broken:
        raise VerifyError(_explain(steps, rule, broken)) from None


def _explain(steps: Sequence[Sequence[Step]], rule: Callable[..., object], broken: BrokenSchedule) -> str:
    lines = [f"graph {call} {step_line(step)}" for call, own_steps in enumerate(steps) for step in own_steps]
    head = [f"{rule.__name__}: {broken}", f"  rule: {rule.__doc__}", "  after: schedule"]
    return "\n".join([*head, *lines_around(lines, broken.position)])
