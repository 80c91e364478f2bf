"""When gathers are issued and reductions waited for, over graphs that run one after another.

A gather is issued at the earliest boundary of regions at which fewer than `in_flight` units are live, in the order in
which the units are used. A unit is live from the issue of its gather to its release. Where the next gather in that
order is of a unit that is live, the unit is kept instead, which sends nothing and takes no other place.

A unit that is not resharded after forward is kept until its next use, wherever that is, and counts until its first use
only. What a graph returns does not count, and what is kept for a window neither: that has memory of its own throughout.

A reduction is waited for before the one that is issued `in_flight` reductions later, or at the end.

An event stands before gathers, unless nothing was computed, or let go, since the last: they read shards, which may have
been edited before the graph, and take memory that was used.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch

from fsdp_passes.schedule.arena import place
from fsdp_passes.schedule.lifetime import Life, Lifetime, Memory
from fsdp_passes.schedule.live_bytes import peak_of
from fsdp_passes.schedule.plan import (
    Call,
    Event,
    Gather,
    GradSlice,
    Plan,
    Reduce,
    Release,
    Step,
    Wait,
    WaitReduce,
)


def schedule(calls: Sequence[Call], in_flight: int | None) -> tuple[tuple[Step, ...], ...]:
    """The steps of each of `calls`. Only waits and releases of their plans count, not when gathers are issued there.

    ValueError: `in_flight` (None: no bound) is less than what one region needs.
    """
    line = _Line.of(calls)
    bound = math.inf if in_flight is None else in_flight
    issues = choose_issues(line, bound)
    before = _steps_before(line, issues, bound)
    steps_of: list[list[Step]] = [[] for _ in calls]
    for position, (number, fixed) in enumerate(line.steps):
        steps_of[number] += before[position] + ([] if fixed is None else [fixed])
    return tuple(map(_with_events, steps_of))


def _with_events(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps of one graph, with an event before gathers if anything was computed, or let go, since the last."""
    done: list[Step] = []
    ordered = False
    for step in steps:
        if isinstance(step, Gather) and step.kept_from is None and not ordered:
            done.append(Event())
            ordered = True
        ordered = ordered and isinstance(step, Event | Gather | GradSlice | Wait)
        done.append(step)
    return tuple(done)


def scheduled(plan: Plan, in_flight: int | None) -> Plan:
    """`plan` as it runs by itself; ValueError as `schedule`."""
    call = Call.alone(plan)
    (steps,) = schedule([call], in_flight)
    return replace(plan, steps=steps, peak=peak_of(Memory.of([call], [steps])))


_Part = tuple[int, torch.dtype]  # which flat group of a unit, gathered in that dtype


@dataclass(eq=False)
class Use:
    """One interval of a unit's uses: waited for from position `start` on, released before position `end`.

    gathers: by flat group and dtype; those whose buffer is not in `released` are returned by the graph.
    for_window: its only buffer is kept for a window; it ends where the next use can have it.
    """

    unit: str
    call: int
    start: int
    for_window: bool = False
    gathers: dict[_Part, Gather] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    end: int | None = None
    next: Use | None = None  # takes over the buffers
    stayed: bool = False  # all that it releases was there, of a unit that stays

    @property
    def reshards(self) -> bool:
        return all(gather.reshard for gather in self.gathers.values())

    @property
    def owner(self) -> Hashable:
        """Who has one buffer at a time: a unit, or what is kept for a window."""
        return (self.unit, *self.gathers) if self.for_window else self.unit

    @property
    def nbytes(self) -> int:
        return sum(gather.nbytes for gather in self.gathers.values())

    def has_all_of(self, later: Use) -> bool:
        """Whether its buffers, which no graph returns, are all that `later` needs, and nothing is returned there."""
        parts = [part for part, gather in self.gathers.items() if gather.buffer in self.released]
        return later.gathers.keys() <= set(parts) and len(later.released) == len(later.gathers)

    def counts_at(self, position: int) -> bool:
        """Whether it takes one of the `in_flight` places."""
        is_in_use = position >= self.start + len(self.gathers)  # all of its buffers were waited for
        return not self.for_window and (self.reshards or not (self.stayed or is_in_use))


@dataclass
class _Line:
    """What the schedule leaves in its place, and the uses of units; None is the end of a call."""

    steps: list[tuple[int, Step | None]] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)

    @classmethod
    def of(cls, calls: Sequence[Call]) -> _Line:
        """That of the calls' own plans, in which units are gathered on demand."""
        line = cls()
        place_of: list[int] = []  # of each step
        for number, call in enumerate(calls):
            for step in call.plan.steps:
                place_of.append(len(line.steps))
                if not isinstance(step, Event | Gather | Release | WaitReduce):
                    line.steps.append((number, step))
            line.steps.append((number, None))
        memory = Memory.of(calls, [call.plan.steps for call in calls])
        for life in sorted(memory.lives, key=lambda life: life.waits[0]):
            for_window = life.gather.buffer in calls[life.call].for_window
            use = line._use(life, place_of[life.waits[0]], for_window)
            if life.ends:
                use.released.add(life.gather.buffer)
                use.end = max(place_of[life.ends[0]], use.end or 0)
        return line

    def _use(self, life: Life, wait: int, for_window: bool) -> Use:
        """The use of which `life` is a part: waits that follow each other, for one unit, are one use."""
        last = self.uses[-1] if self.uses else None
        unit, group = life.owner
        part = group, life.gather.dtype
        goes_on = (
            last is not None
            and (last.call, last.unit, last.start + len(last.gathers)) == (life.call, unit, wait)
            and part not in last.gathers
            and not (last.for_window or for_window)
        )
        if last is None or not goes_on:
            last = Use(unit, life.call, wait, for_window)
            self.uses.append(last)
        last.gathers[part] = life.gather
        return last


@dataclass(eq=False)
class Issue:
    """The buffers of `use` are gathered before `position`, or kept from those of `source`."""

    use: Use
    position: int
    source: Use | None = None


def choose_issues(line: _Line, bound: float) -> list[Issue]:
    """In the order in which they are issued. No use waits for a place that is taken for good: they are served in order.

    ValueError: what one region uses is more than `bound` units.
    """
    queue = _find_queue(line.uses)
    live: list[Use] = []
    issues: list[Issue] = []
    for position in range(len(line.steps)):
        free = [use for use in live if use.end == position]
        live = [use for use in live if use.end != position]
        issues += [Issue(use.next, position, use) for use in free if use.next]
        live += [use.next for use in free if use.next]
        while queue:
            use, num_live = queue[0], sum(each.counts_at(position) for each in live)
            holder = next((each for each in live if each.owner == use.owner), None)
            if holder and holder.next is None and holder.has_all_of(use):
                holder.next, use.stayed = use, True
            elif use.for_window:
                issues.append(Issue(use, position))
                live.append(use)
            elif use.end is None and (num_live < bound or use.start == position):
                issues.append(Issue(use, position))
            elif use.end is not None and holder is None and num_live < bound:
                source = next((each for each in free if each.unit == use.unit and each.next is None), None)
                issues.append(Issue(use, position, source))
                use.stayed = len(_taken_over(issues[-1])) == len(use.released)
                live.append(use)
            else:
                break
            queue.popleft()
        if queue and queue[0].start == position:
            _refuse([use for use in live if use.start <= position and use.counts_at(position)] + [queue[0]], bound)
    return issues


def _find_queue(uses: Sequence[Use]) -> deque[Use]:
    """Uses, but those for which a unit that is not resharded stays, or that find what is kept for a window."""
    last: dict[Hashable, Use] = {}
    queue: deque[Use] = deque()
    for use in uses:
        before = last.get(use.owner)
        if before is not None and (use.for_window or not before.reshards) and before.has_all_of(use):
            before.next, use.stayed = use, True
        else:
            queue.append(use)
        last[use.owner] = use
    return queue


def _refuse(uses: Sequence[Use], bound: float) -> None:
    units = ", ".join(f"{use.unit!r} ({use.nbytes:,} B)" for use in uses)
    raise ValueError(
        f"options['in_flight']: expected at least {len(uses)}, because one region uses the units {units} at once, "
        f"got {bound}"
    )


def _steps_before(line: _Line, issues: Sequence[Issue], bound: float) -> dict[int, list[Step]]:
    """What is done before each position: releases, gathers, waits for reductions."""
    slots = _place(issues, len(line.steps))
    kept = {(issue.source, part) for issue in issues for part in _taken_over(issue)}
    before: dict[int, list[Step]] = defaultdict(list)
    for issue in issues:
        use = issue.use
        for part, gather in use.gathers.items():
            if gather.buffer in use.released and (use, part) not in kept and not use.for_window:
                assert use.end is not None
                before[use.end].append(Release(gather.buffer))
    for issue in issues:
        taken = _taken_over(issue)
        for part, gather in issue.use.gathers.items():
            placed = replace(
                gather,
                unit=issue.use.unit,
                offset=slots.get((issue.use, part)),
                ahead=issue.use.call - line.steps[issue.position][0],
                kept_from=taken.get(part),
                for_window=issue.use.for_window,
            )
            before[issue.position].append(placed)
    for position, wait in _waits_for_reductions(line, bound):
        before[position].append(wait)
    return before


def _taken_over(issue: Issue) -> dict[_Part, str]:
    """The buffers of the source that hold what is needed, and that no graph returns."""
    if issue.source is None:
        return {}
    taken = {}
    for part, gather in issue.use.gathers.items():
        other = issue.source.gathers.get(part)
        if other and other.buffer in issue.source.released and gather.buffer in issue.use.released:
            taken[part] = other.buffer
    return taken


def _place(issues: Sequence[Issue], num_steps: int) -> dict[tuple[Use, _Part], int]:
    """The offset of each buffer of a use that is not returned; one that is kept stays where it is."""
    first: dict[tuple[Use, _Part], tuple[Use, _Part]] = {}
    lifetimes: dict[tuple[Use, _Part], Lifetime] = {}
    for issue in issues:
        taken = _taken_over(issue)
        for part, gather in issue.use.gathers.items():
            if gather.buffer not in issue.use.released:
                continue
            assert issue.use.end is not None
            this = (issue.use, part)
            first[this] = first[issue.source, part] if issue.source and part in taken else this
            start = lifetimes[first[this]].start if part in taken else issue.position
            alive = (0, num_steps) if issue.use.for_window else (start, issue.use.end)
            lifetimes[first[this]] = Lifetime(gather.nbytes, *alive)
    offsets = dict(zip(lifetimes, place(tuple(lifetimes.values())), strict=True))
    return {this: offsets[start] for this, start in first.items()}


def _waits_for_reductions(line: _Line, bound: float) -> list[tuple[int, WaitReduce]]:
    waits: list[tuple[int, WaitReduce]] = []
    under_way: deque[tuple[int, str]] = deque()
    for position, (call, step) in enumerate(line.steps):
        if isinstance(step, Reduce):
            if len(under_way) == bound:
                issued, shard = under_way.popleft()
                waits.append((position, WaitReduce(shard, call - issued)))
            under_way.append((call, step.shard))
    end = len(line.steps) - 1
    waits += [(end, WaitReduce(shard, line.steps[end][0] - issued)) for issued, shard in under_way]
    return waits
