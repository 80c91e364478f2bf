"""What must hold for scheduled steps, each rule a function whose docstring is the invariant."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest

from fsdp_passes.ir.verify import VerifyError, lines_around
from fsdp_passes.schedule.lifetime import BrokenSchedule, Life, Memory, results_of
from fsdp_passes.schedule.plan import Accumulate, Call, Gather, GradSlice, Reduce, Release, Run, Step
from fsdp_passes.schedule.plan_text import step_line
from fsdp_passes.schedule.races import accesses_are_ordered


def steps_name_what_is_there(calls: Sequence[Call], steps: Sequence[Sequence[Step]]) -> Memory:
    """A buffer is gathered, and a reduction issued, before any other step names it."""
    return Memory.of(calls, steps)


def buffers_are_waited_for_once(memory: Memory) -> None:
    """A buffer is waited for once, before it is read, released, or handed on."""
    for life in memory.lives:
        if len(life.waits) != 1:
            raise BrokenSchedule(life.issue, f"{life.gather.buffer} has {len(life.waits)} waits, expected 1")
        for other in (*life.reads, *life.ends):
            if other < life.waits[0]:
                raise BrokenSchedule(other, f"{life.gather.buffer} is used before its wait")


def buffers_are_let_go_once(memory: Memory) -> None:
    """A buffer is released or handed on once, after it was last read; never if its graph returns it."""
    for life in memory.lives:
        expected = (0,) if life.returned else (0, 1) if life.gather.for_window else (1,)
        if len(life.ends) not in expected:
            what = f"{life.gather.buffer} is released or handed on {len(life.ends)} times, expected {expected[-1]}"
            raise BrokenSchedule(life.issue, what)
        late = [read for read in life.reads if life.ends and read > life.ends[0]]
        if late:
            raise BrokenSchedule(late[0], f"{life.gather.buffer} is read after it was let go")


def no_view_leaves_its_region(memory: Memory) -> None:
    """What a region returns is no view of a gathered buffer that is let go, nor of a sum of gradients.

    So each read of these names them.
    """
    let_go = {(life.call + life.gather.ahead, life.gather.buffer) for life in memory.lives if not life.returned}
    let_go |= {(call, step.name) for call, step in memory.steps if isinstance(step, GradSlice)}
    for position, (call, step) in enumerate(memory.steps):
        if isinstance(step, Run):
            for name, _, base in results_of(memory.calls[call], step):
                if (call, base) in let_go:
                    raise BrokenSchedule(position, f"{name} is a view of {base}")


def what_a_window_keeps_is_not_released(memory: Memory) -> None:
    """What is kept for a window has a place, and is handed on only; the last to have it keeps it."""
    for life in (life for life in memory.lives if life.gather.for_window):
        if life.returned:
            raise BrokenSchedule(life.issue, f"{life.gather.buffer} is kept, but has no place")
        for end in life.ends:
            if isinstance(memory.steps[end][1], Release):
                raise BrokenSchedule(end, f"{life.gather.buffer} is kept, but released")


def what_is_kept_is_what_was_there(memory: Memory) -> None:
    """A buffer that is kept has the place, and holds the values, of the one that it is kept from."""
    ended = {life.ends[0]: life for life in memory.lives if len(life.ends) == 1}
    for life in memory.lives:
        if life.gather.kept_from is not None:
            before = ended[life.issue]
            one, other = (
                (each.owner, each.gather.dtype, each.gather.offset, each.gather.for_window) for each in (life, before)
            )
            if one != other:
                raise BrokenSchedule(life.issue, f"{life.gather.buffer} is not {before.gather.buffer}")


def no_more_units_are_live_than_the_bound(memory: Memory, bound: float) -> None:
    """From issue to release at most `in_flight` units are live; one that stays counts until it is waited for.

    What is released after the event of a gather is live when that gather starts.
    """
    live: list[Life] = []
    for life in (life for life in memory.lives if not life.returned):
        live.append(life)
        if not life.sends:
            continue  # it takes the place of the one that it is kept from
        live = [other for other in live if not other.has_ended(life.after)]
        units = sorted({other.owner[0] for other in live if other.counts_at(life.issue)})
        if len(units) > bound:
            raise BrokenSchedule(life.issue, f"units {', '.join(units)} are live, expected at most {bound}")


def live_buffers_do_not_overlap(memory: Memory) -> None:
    """Two buffers that are live at the same time have no byte in common."""
    live: list[Life] = []
    for life in sorted((life for life in memory.lives if not life.returned), key=lambda each: each.start):
        live = [other for other in live if not other.has_ended(life.start)]
        for other in live:
            if _overlap(life.gather, other.gather):
                raise BrokenSchedule(life.issue, f"{life.gather.buffer} overlaps {other.gather.buffer}, which is live")
        live.append(life)


def _overlap(one: Gather, other: Gather) -> bool:
    assert one.offset is not None
    assert other.offset is not None
    return one.offset < other.offset + other.nbytes and other.offset < one.offset + one.nbytes


def sums_of_gradients_are_reduced_once(memory: Memory) -> None:
    """What is written is reduced, and the reduction is waited for once, after its issue."""
    for each in memory.sums:
        if each.reduce is None:
            raise BrokenSchedule(each.start, f"the gradient of {each.owner[0]} is not reduced")
        if len(each.waits) != 1:
            raise BrokenSchedule(each.issue, f"{each.reduce.shard} has {len(each.waits)} waits, expected 1")


def no_more_reductions_are_under_way_than_the_bound(memory: Memory, bound: float) -> None:
    """At most `in_flight` reductions are under way."""
    for each in memory.sums:
        under_way = sum(other.issue <= each.issue < other.waits[0] for other in memory.sums)
        if under_way > bound:
            raise BrokenSchedule(each.issue, f"{under_way} reductions are under way, expected at most {bound}")


def each_graph_does_what_its_plan_says(memory: Memory) -> None:
    """Regions and writes are those of the graph's plan, in its order."""
    computed: list[list[tuple[int, Step]]] = [[] for _ in memory.calls]
    for position, (number, step) in enumerate(memory.steps):
        if isinstance(step, Accumulate | GradSlice | Run):
            computed[number].append((position, step))
    for number, call in enumerate(memory.calls):
        expected = [step for step in call.plan.steps if isinstance(step, Accumulate | GradSlice | Run)]
        for found, other in zip_longest(computed[number], expected):
            if found is None or found[1] != other:
                at = len(memory.steps) - 1 if found is None else found[0]
                raise BrokenSchedule(at, f"graph {number} does not compute what its plan says")


def what_is_sent_is_what_plans_say(memory: Memory) -> None:
    """Each buffer and reduction is of the shard, dtype and size that its graph's plan says, and none is missing."""
    of_plans = ((number, step) for number, call in enumerate(memory.calls) for step in call.plan.steps)
    left = Counter((number, _content(step)) for number, step in of_plans if isinstance(step, Gather | Reduce))
    found = [(life.issue, (life.call + life.gather.ahead, _content(life.gather))) for life in memory.lives]
    found += [(at, (number, step)) for at, (number, step) in enumerate(memory.steps) if isinstance(step, Reduce)]
    for position, each in found:
        if not left[each]:
            raise BrokenSchedule(position, f"the plan of graph {each[0]} does not say that, or not so often")
        left[each] -= 1
    for number, missing in left.elements():
        raise BrokenSchedule(len(memory.steps) - 1, f"graph {number} lacks {step_line(missing)}")


def _content(step: Gather | Reduce) -> Gather | Reduce:
    """What is sent, but not when, and where to."""
    if isinstance(step, Reduce):
        return step
    return replace(step, unit="", offset=None, ahead=0, kept_from=None, for_window=False)


RULES: tuple[Callable[[Memory], None], ...] = (
    buffers_are_waited_for_once,
    buffers_are_let_go_once,
    what_a_window_keeps_is_not_released,
    what_is_kept_is_what_was_there,
    live_buffers_do_not_overlap,
    sums_of_gradients_are_reduced_once,
    accesses_are_ordered,
    each_graph_does_what_its_plan_says,
    what_is_sent_is_what_plans_say,
    no_view_leaves_its_region,
)
BOUNDS: tuple[Callable[[Memory, float], None], ...] = (
    no_more_units_are_live_than_the_bound,
    no_more_reductions_are_under_way_than_the_bound,
)


def verify_schedule(calls: Sequence[Call], steps: Sequence[Sequence[Step]], in_flight: int | None, level: int) -> None:
    """Check what `calls` do at `level` (0 nothing); VerifyError shows the lines around the step that breaks a rule."""
    if level == 0:
        return
    rule: Callable[..., object] = steps_name_what_is_there
    try:
        memory = steps_name_what_is_there(calls, steps)
        for rule in RULES:
            rule(memory)
        for rule in BOUNDS:
            rule(memory, math.inf if in_flight is None else in_flight)
    except BrokenSchedule as broken:
        raise VerifyError(_explain(steps, rule, broken)) from None


def _explain(steps: Sequence[Sequence[Step]], rule: Callable[..., object], broken: BrokenSchedule) -> str:
    lines = [f"graph {call} {step_line(step)}" for call, own_steps in enumerate(steps) for step in own_steps]
    head = [f"{rule.__name__}: {broken}", f"  rule: {rule.__doc__}", "  after: schedule"]
    return "\n".join([*head, *lines_around(lines, broken.position)])
