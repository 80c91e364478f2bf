"""Whether what streams do to the same memory is ordered: a race checker.

The compute stream does what it is given in order. A gather starts at any time after what was computed before the last
event is over, a reduction after what was computed before itself; either is done at any time before what is computed
after its wait. Nothing else orders them. So each access to memory is an interval in the order of what is computed, and
two accesses are ordered when one ends before the other begins.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from fsdp_passes.schedule.lifetime import BrokenSchedule, Memory
from fsdp_passes.schedule.plan import Release, Run
from fsdp_passes.schedule.plan_text import step_line


@dataclass(frozen=True)
class Access:
    """Of bytes `first` to `end` of a memory, by the step at `position`, between two positions of what is computed."""

    position: int
    begin: float
    done: float
    writes: bool
    first: int = 0
    end: int = 1

    def races(self, other: Access) -> bool:
        """Whether they touch the same bytes, one of them writes, and neither is over when the other begins."""
        touches = self.first < other.end and other.first < self.end
        ordered = self.done < other.begin or other.done < self.begin
        return touches and (self.writes or other.writes) and not ordered


def accesses_are_ordered(memory: Memory) -> None:
    """Of two accesses to the same memory, one of them a write, one is over before the other begins, on any stream."""
    by_memory: dict[Hashable, list[Access]] = defaultdict(list)
    for where, access in (*_of_buffers(memory), *_of_gradients(memory), *_of_shards(memory)):
        by_memory[where].append(access)
    for accesses in by_memory.values():
        under_way: list[Access] = []
        for access in sorted(accesses, key=lambda each: each.begin):
            under_way = [other for other in under_way if other.done >= access.begin]
            for other in filter(access.races, under_way):
                earlier, later = sorted((access, other), key=lambda each: each.position)
                line = step_line(memory.steps[max(earlier.position, 0)][1]).strip()
                raise BrokenSchedule(later.position, f"nothing orders it and '{line}', which use the same memory")
            under_way.append(access)


def _of_buffers(memory: Memory) -> Iterator[tuple[Hashable, Access]]:
    """Gathers write what regions read; what is released is nobody's. Memory of its own was the compute stream's."""
    runs = [position for position, (_, step) in enumerate(memory.steps) if isinstance(step, Run)]
    for number, life in enumerate(memory.lives):
        where: Hashable = ("returned", number) if life.returned else "arena"
        first = life.gather.offset or 0
        span = first, first + life.gather.nbytes
        if life.sends:
            yield where, Access(life.issue, life.after, _first(life.waits), True, *span)
        for position in life.reads:
            yield where, Access(position, position, position, False, *span)
        for position in life.ends:
            if isinstance(memory.steps[position][1], Release):
                yield where, Access(position, position, position, True, *span)
        if life.returned:
            before = max((run for run in runs if run < life.issue), default=-math.inf)
            yield where, Access(life.issue, before, before, True, *span)


def _of_gradients(memory: Memory) -> Iterator[tuple[Hashable, Access]]:
    """Regions write the sums of gradients; reductions work in place."""
    for number, each in enumerate(memory.sums):
        for position in each.writes:
            yield ("sum", number), Access(position, position, position, True)
        if each.reduce is not None:
            yield ("sum", number), Access(each.issue, each.issue, _first(each.waits), True)


def _of_shards(memory: Memory) -> Iterator[tuple[Hashable, Access]]:
    """Before a graph its shards may have been edited, on the compute stream.

    Not those that were gathered in a graph before: they are gathered again if they were edited.
    """
    starts = {call: position for position, (call, _) in reversed(list(enumerate(memory.steps)))}
    for life in (life for life in memory.lives if life.sends):
        start = starts[life.call]
        where = "shard", life.call, life.owner, life.issue
        yield where, Access(start, start - 0.5, start - 0.5, True)
        yield where, Access(life.issue, life.after, _first(life.waits), False)


def _first(waits: list[int]) -> float:
    return waits[0] if waits else math.inf
