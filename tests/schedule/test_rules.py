"""Wrong schedules are refused: each way to spoil a step of a right one, against the simulation."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import expecttest
import pytest
from hypothesis import given, settings

from fsdp_passes.ir.verify import VerifyError
from fsdp_passes.schedule.order import schedule, scheduled
from fsdp_passes.schedule.plan import (
    Accumulate,
    Call,
    Event,
    Gather,
    GradSlice,
    Release,
    Run,
    Step,
    Wait,
    WaitReduce,
)
from fsdp_passes.schedule.plan_text import load_plan
from fsdp_passes.schedule.rules import verify_schedule
from tests.schedule.interleaving import Machine, TooMany, Wrong
from tests.schedule.simulation import Simulation, cases
from tests.schedule.test_order import AGAIN, THREE, plan_of

Schedule = tuple[tuple[Step, ...], ...]


def mutants(steps: Schedule) -> Iterator[Schedule]:
    """Each step that does not compute deleted, doubled, moved by one, or swapped with the next like it; places, too.

    The first and the last step of a graph are moved to the one before, and after, unless they compute.
    """
    for call, (one, other) in enumerate(itertools.pairwise(steps)):
        if other and not isinstance(other[0], Run | GradSlice | Accumulate):
            yield *steps[:call], (*one, other[0]), other[1:], *steps[call + 2 :]
        if one and not isinstance(one[-1], Run | GradSlice | Accumulate):
            yield *steps[:call], one[:-1], (one[-1], *other), *steps[call + 2 :]
    for call, own in enumerate(steps):
        for at, step in enumerate(own):
            if isinstance(step, Run | GradSlice | Accumulate):
                continue
            for instead in ([], [step, step], *([change] for change in _changes(step))):
                yield *steps[:call], (*own[:at], *instead, *own[at + 1 :]), *steps[call + 1 :]
            following = next((i for i in range(at + 1, len(own)) if type(own[i]) is type(step)), at)
            if isinstance(step, Gather) and isinstance(other_gather := own[following], Gather):
                places = list(own)
                places[at] = replace(step, offset=other_gather.offset)
                places[following] = replace(other_gather, offset=step.offset)
                yield *steps[:call], tuple(places), *steps[call + 1 :]
            for other in {at - 1, at + 1, following} & set(range(len(own))) - {at}:
                swapped = list(own)
                swapped[at], swapped[other] = own[other], own[at]
                yield *steps[:call], tuple(swapped), *steps[call + 1 :]


def _changes(step: Step) -> Iterator[Step]:
    if isinstance(step, Gather) and step.offset is not None:
        yield replace(step, offset=step.offset + 4)
        if step.offset:
            yield replace(step, offset=step.offset - 4)
        yield replace(step, offset=None)
        yield replace(step, for_window=not step.for_window)
    if isinstance(step, Gather):
        yield replace(step, ahead=step.ahead + 1)
        yield replace(step, ahead=step.ahead - 1)
    if isinstance(step, Gather) and step.kept_from is not None:
        yield replace(step, kept_from=None)
    if isinstance(step, WaitReduce):
        yield replace(step, ago=step.ago + 1)
        yield replace(step, ago=step.ago - 1)


def is_right(calls: Sequence[Call], steps: Schedule, in_flight: int | None, max_states: int = 20_000) -> bool:
    """Whether it does what it should on the host, and in every order that streams may choose.

    That a gather could be earlier is no fault. TooMany: there are more than `max_states` states.
    """
    try:
        Simulation(calls, in_flight, early=False).run(steps)
        for is_there in (False, True):  # what is kept for a window
            Machine(calls, steps, math.inf if in_flight is None else in_flight, is_there).explore(max_states)
    except (AssertionError, KeyError, ValueError, Wrong):
        return False
    return True


def is_accepted(calls: Sequence[Call], steps: Schedule, in_flight: int | None) -> bool:
    try:
        verify_schedule(calls, steps, in_flight, 1)
    except VerifyError:
        return False
    return True


def judge(calls: Sequence[Call], in_flight: int | None, max_states: int = 20_000) -> Counter[str]:
    """How many mutants of the schedule are right, wrong, and have too many orders to tell; of each the rules say so."""
    steps = schedule(calls, in_flight)
    assert is_accepted(calls, steps, in_flight)
    counts: Counter[str] = Counter()
    for mutant in mutants(steps):
        try:
            right = is_right(calls, mutant, in_flight, max_states)
        except TooMany:
            counts["too many"] += 1
            continue
        assert is_accepted(calls, mutant, in_flight) == right, mutant
        counts["right" if right else "wrong"] += 1
    return counts


def test_rules_refuse_what_goes_wrong_and_nothing_else() -> None:
    counts: Counter[str] = Counter()

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(cases())
    def check(case: tuple[list[Call], int | None]) -> None:
        try:
            counts.update(judge(*case, max_states=300))
        except ValueError as refused:
            assert "in_flight" in str(refused)

    check()
    assert counts["wrong"] > 1000 and counts["right"] > 300, counts


@pytest.mark.parametrize("text", [THREE, AGAIN])
def test_most_ways_to_spoil_a_schedule_are_wrong(text: str) -> None:
    counts = judge([Call.alone(plan_of(text))] * 2, 2)
    assert counts["wrong"] > counts["right"] > counts["too many"] == 0


class TestMessages(expecttest.TestCase):
    maxDiff = None

    def test_a_release_is_missing(self) -> None:
        plan = plan_of(THREE)
        (steps,) = schedule([Call.alone(plan)], 2)
        spoiled = tuple(step for step in steps if step != Release("b"))
        with pytest.raises(VerifyError) as caught:
            verify_schedule([Call.alone(plan)], [spoiled], 2, 1)
        self.assertExpectedInline(
            str(caught.value),
            """\
buffers_are_let_go_once: b is released or handed on 0 times, expected 1
  rule: A buffer is released or handed on once, after it was last read; never if its graph returns it.
  after: schedule
  graph 0 event   gathers after compute
  graph 0 issue   a: f32[128] = gather(s_a) of "a" at 0
> graph 0 issue   b: f32[128] = gather(s_b) of "b" at 512
  graph 0 wait    a
  graph 0 run     region_0(a)
  graph 0 release a""",
        )

    def test_a_read_before_its_wait(self) -> None:
        plan = plan_of(THREE)
        (steps,) = schedule([Call.alone(plan)], 2)
        spoiled = tuple(replace(step, inputs=("b",)) if isinstance(step, Run) else step for step in steps)
        with pytest.raises(VerifyError) as caught:
            verify_schedule([Call.alone(plan)], [spoiled], 2, 1)
        self.assertExpectedInline(
            str(caught.value),
            """\
buffers_are_waited_for_once: b is used before its wait
  rule: A buffer is waited for once, before it is read, released, or handed on.
  after: schedule
  graph 0 issue   a: f32[128] = gather(s_a) of "a" at 0
  graph 0 issue   b: f32[128] = gather(s_b) of "b" at 512
  graph 0 wait    a
> graph 0 run     region_0(b)
  graph 0 release a
  graph 0 event   gathers after compute
  graph 0 issue   c: f32[128] = gather(s_c) of "c" at 0""",
        )

    def test_nothing_orders_a_gather(self) -> None:
        plan = plan_of(THREE)
        (steps,) = schedule([Call.alone(plan)], 2)
        at = [number for number, step in enumerate(steps) if isinstance(step, Event)]
        messages = []
        for bound, number in ((2, at[0]), (None, at[1])):
            with pytest.raises(VerifyError) as caught:
                verify_schedule([Call.alone(plan)], [(*steps[:number], *steps[number + 1 :])], bound, 1)
            messages.append(str(caught.value))
        self.assertExpectedInline(
            "\n".join(messages),
            """\
accesses_are_ordered: nothing orders the gather of a and an edit of its shard before the graph
  rule: Of two accesses to the same memory, one of them a write, one is over before the other begins, on any stream.
  after: schedule
> graph 0 issue   a: f32[128] = gather(s_a) of "a" at 0
  graph 0 issue   b: f32[128] = gather(s_b) of "b" at 512
  graph 0 wait    a
  graph 0 run     region_0(a)
accesses_are_ordered: nothing orders the gather of a and the gather of c
  rule: Of two accesses to the same memory, one of them a write, one is over before the other begins, on any stream.
  after: schedule
  graph 0 wait    a
  graph 0 run     region_0(a)
  graph 0 release a
> graph 0 issue   c: f32[128] = gather(s_c) of "c" at 0
  graph 0 wait    b
  graph 0 run     region_0(b)
  graph 0 release b""",
        )


VIEW = """
plan bwd (s)
   0 issue   full: f32[4] = gather(s) of "up" at 0
   1 wait    full
   2         slice: f32[4] = grad_slice(s, 0)
   3 run     x, y = region_0(full, slice)
   4 release full
   5 run     z = region_1(x, y)
   6 issue   reduce(s, f32[4])
   7 wait    reduce(s)
   8         return (z)

region_0:
   0         a: f32[4] = input()
   1         b: f32[4] = input()
   2         c: f32[2,2] = aten.view(a, [2, 2])
   3         d: f32[2,2] = aten.neg(c)
   4         e: f32[2,2] = aten.view(b, [2, 2])
   5         return (LEAVING)

region_1:
   0         f: f32[2,2] = input()
   1         g: f32[2,2] = input()
   2         h: f32[2,2] = aten.mm(f, g)
   3         return (h,)
"""


@pytest.mark.parametrize(
    ("leaving", "message"),
    [("d, d", None), ("d, c", "y is a view of full"), ("e, d", "x is a view of slice")],
)
def test_a_view_of_what_is_let_go_does_not_leave_its_region(leaving: str, message: str | None) -> None:
    plan = scheduled(load_plan(VIEW.strip().replace("LEAVING", leaving) + "\n"), 1)
    refusal = contextlib.nullcontext() if message is None else pytest.raises(VerifyError, match=message)
    with refusal:
        verify_schedule([Call.alone(plan)], [plan.steps], 1, 1)


def test_nothing_is_checked_at_level_0() -> None:
    plan = plan_of(THREE)
    verify_schedule([Call.alone(plan)], [[Wait("a")]], 2, 0)
