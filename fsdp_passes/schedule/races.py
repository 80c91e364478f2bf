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
from fsdp_passes.schedule.plan import Accumulate, Reduce, Release, Run, WaitReduce

_COMPUTES = (Accumulate, Reduce, Release, Run, WaitReduce)


@dataclass(frozen=True)
class Access:
    """To bytes `first` to `end` of a memory, by the step at `position`, between two positions of what is computed."""

    what: str
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
                earlier, later = sorted((other, access), key=lambda each: each.position)
                raise BrokenSchedule(later.position, f"nothing orders {earlier.what} and {later.what}")
            under_way.append(access)


def _of_buffers(memory: Memory) -> Iterator[tuple[Hashable, Access]]:
    """Gathers write what regions read; what is released is nobody's. Memory of its own was the compute stream's."""
    for number, life in enumerate(memory.lives):
        where: Hashable = ("returned", number) if life.returned else "arena"
        first, name = life.gather.offset or 0, life.gather.buffer
        span = first, first + life.gather.nbytes
        if life.returned:
            before = _last_computed(memory, life.issue)
            yield where, Access(f"what had the memory of {name}", life.issue, before, before, True, *span)
        if life.sends:
            gather = f"the gather of {name}"
            yield where, Access(gather, life.issue, life.after, _first(life.waits), True, *span)
        for position in life.reads:
            yield where, Access(f"a read of {name}", position, position, position, False, *span)
        for position in life.ends:
            if isinstance(memory.steps[position][1], Release):
                yield where, Access(f"the release of {name}", position, position, position, True, *span)


def _last_computed(memory: Memory, position: int) -> float:
    """The last step before `position` that computes, or lets go of memory."""
    steps = (before for before in reversed(range(position)) if isinstance(memory.steps[before][1], _COMPUTES))
    return next(steps, -math.inf)


def _of_gradients(memory: Memory) -> Iterator[tuple[Hashable, Access]]:
    """Regions write the sums of gradients; reductions work in place."""
    for number, each in enumerate(memory.sums):
        for position in each.writes:
            yield ("sum", number), Access(f"a gradient of {each.owner[0]}", position, position, position, True)
        if each.reduce is not None:
            reduction = f"the reduction of {each.owner[0]}"
            yield ("sum", number), Access(reduction, each.issue, each.issue, _first(each.waits), True)


def _of_shards(memory: Memory) -> Iterator[tuple[Hashable, Access]]:
    """Before a graph its shards may have been edited, on the compute stream.

    Not those that were gathered in a graph before: they are gathered again if they were edited.
    """
    starts = {call: position for position, (call, _) in reversed(list(enumerate(memory.steps)))}
    for life in (life for life in memory.lives if life.sends):
        start, where = starts[life.call] - 0.5, ("shard", life.issue)
        yield where, Access("an edit of its shard before the graph", life.issue, start, start, True)
        gather = f"the gather of {life.gather.buffer}"
        yield where, Access(gather, life.issue, life.after, _first(life.waits), False)


def _first(waits: list[int]) -> float:
    return waits[0] if waits else math.inf
