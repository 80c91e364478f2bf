"""Schedules of plans: by text, and against a simulation of random ones that knows nothing of how they are made."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import replace

import expecttest
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_passes.schedule.arena import ALIGN_BYTES, place
from fsdp_passes.schedule.lifetime import Lifetime
from fsdp_passes.schedule.order import schedule, scheduled
from fsdp_passes.schedule.plan import Call, Gather, Plan, Reduce, Release, Run, Step, Wait
from fsdp_passes.schedule.plan_text import dump_plan
from fsdp_passes.schedule.rules import verify_schedule
from tests.schedule.simulation import Simulation, cases, most_units_in_a_region


def plan_of(text: str) -> Plan:
    """A plan without regions from one step a line: `gather a`, `wait a`, `release a`, `run`, `reduce a`.

    Shard and buffer of unit `a` are s_a and a; a second use of it is `a.2`. Every buffer has 128 elements. A run reads
    all that is gathered.
    """
    steps: list[Step] = []
    for word, _, name in (line.strip().partition(" ") for line in textwrap.dedent(text).strip().splitlines()):
        unit, buffer = name.partition(".")[0], name.replace(".", "_")
        match word:
            case "gather":
                steps += [Gather(buffer, f"s_{unit}", torch.float32, 128, unit), Wait(buffer)]
            case "keep":
                steps += [Gather(buffer, f"s_{unit}", torch.float32, 128, unit, reshard=False), Wait(buffer)]
            case "release":
                steps.append(Release(buffer))
            case "run":
                released = [step.buffer for step in steps if isinstance(step, Release)]
                read = [step.buffer for step in steps if isinstance(step, Wait) and step.buffer not in released]
                steps.append(Run(0, tuple(read), ()))
            case "reduce":
                steps.append(Reduce(f"s_{unit}", torch.float32, 128))
    shards = sorted({step.shard for step in steps if isinstance(step, Gather | Reduce)})
    return Plan("fwd", tuple(shards), tuple(steps), (), ())


def texts(plans: Sequence[Plan], in_flight: int | None) -> str:
    """The scheduled steps of `plans`, that run one after another, as their dumps show them."""
    scheduled_steps = schedule([Call.alone(plan) for plan in plans], in_flight)
    dumps = [dump_plan(replace(plan, steps=steps)) for plan, steps in zip(plans, scheduled_steps, strict=True)]
    return "\n".join(line[5:] for dumped in dumps for line in dumped.splitlines() if not line.startswith("peak"))


THREE = """
    gather a
    run
    release a
    gather b
    run
    release b
    gather c
    run
    release c
    """
AGAIN = """
    gather a
    run
    release a
    gather b
    run
    release b
    gather a.2
    run
    release a.2
    """


class TestSchedules(expecttest.TestCase):
    maxDiff = None

    def test_one_unit_at_a_time(self) -> None:
        self.assertExpectedInline(
            texts([plan_of(THREE)], 1),
            """\
fwd (s_a, s_b, s_c)
event   gathers after compute
issue   a: f32[128] = gather(s_a) of "a" at 0
wait    a
run     region_0(a)
release a
event   gathers after compute
issue   b: f32[128] = gather(s_b) of "b" at 0
wait    b
run     region_0(b)
release b
event   gathers after compute
issue   c: f32[128] = gather(s_c) of "c" at 0
wait    c
run     region_0(c)
release c
        return ()""",
        )

    def test_the_next_unit_is_gathered_before_the_current_one_is_used(self) -> None:
        self.assertExpectedInline(
            texts([plan_of(THREE)], 2),
            """\
fwd (s_a, s_b, s_c)
event   gathers after compute
issue   a: f32[128] = gather(s_a) of "a" at 0
issue   b: f32[128] = gather(s_b) of "b" at 512
wait    a
run     region_0(a)
release a
event   gathers after compute
issue   c: f32[128] = gather(s_c) of "c" at 0
wait    b
run     region_0(b)
release b
wait    c
run     region_0(c)
release c
        return ()""",
        )

    def test_without_a_bound_all_is_gathered_at_once(self) -> None:
        self.assertExpectedInline(
            texts([plan_of(THREE)], None),
            """\
fwd (s_a, s_b, s_c)
event   gathers after compute
issue   a: f32[128] = gather(s_a) of "a" at 0
issue   b: f32[128] = gather(s_b) of "b" at 512
issue   c: f32[128] = gather(s_c) of "c" at 1024
wait    a
run     region_0(a)
release a
wait    b
run     region_0(b)
release b
wait    c
run     region_0(c)
release c
        return ()""",
        )

    def test_a_unit_that_comes_next_again_is_kept(self) -> None:
        self.assertExpectedInline(
            texts([plan_of(AGAIN)], 2),
            """\
fwd (s_a, s_b)
event   gathers after compute
issue   a: f32[128] = gather(s_a) of "a" at 0
issue   b: f32[128] = gather(s_b) of "b" at 512
wait    a
run     region_0(a)
        a_2: f32[128] = gather(s_a) of "a" at 0, kept from a
wait    b
run     region_0(b)
release b
wait    a_2
run     region_0(a_2)
release a_2
        return ()""",
        )

    def test_a_unit_that_comes_again_later_is_gathered_again(self) -> None:
        self.assertExpectedInline(
            texts([plan_of(AGAIN)], 1),
            """\
fwd (s_a, s_b)
event   gathers after compute
issue   a: f32[128] = gather(s_a) of "a" at 0
wait    a
run     region_0(a)
release a
event   gathers after compute
issue   b: f32[128] = gather(s_b) of "b" at 0
wait    b
run     region_0(b)
release b
event   gathers after compute
issue   a_2: f32[128] = gather(s_a) of "a" at 0
wait    a_2
run     region_0(a_2)
release a_2
        return ()""",
        )

    def test_gathers_for_the_next_graph(self) -> None:
        first, second = plan_of("gather a\nrun\nrelease a"), plan_of("run\ngather b\nrun\nrelease b\ngather b.2")
        self.assertExpectedInline(
            texts([first, second], 2),
            """\
fwd (s_a)
event   gathers after compute
issue   a: f32[128] = gather(s_a) of "a" at 0
issue   b: f32[128] = gather(s_b) of "b" at 512, graphs ahead: 1
wait    a
run     region_0(a)
release a
event   gathers after compute
issue   b_2: f32[128] = gather(s_b) of "b", graphs ahead: 1
        return ()
fwd (s_b)
run     region_0()
wait    b
run     region_0(b)
release b
wait    b_2
        return ()""",
        )

    def test_what_stays_is_kept_for_the_next_graph_and_does_not_count(self) -> None:
        forward = plan_of("keep a\nrun\nrelease a\ngather b\nrun\nrelease b\ngather c\nrun\nrelease c")
        backward = plan_of("gather c\nrun\nrelease c\ngather b\nrun\nrelease b\nkeep a\nrun\nrelease a")
        self.assertExpectedInline(
            texts([forward, backward], 1),
            """\
fwd (s_a, s_b, s_c)
event   gathers after compute
issue   a: f32[128] = gather(s_a) of "a" at 0, stays
wait    a
issue   b: f32[128] = gather(s_b) of "b" at 512
run     region_0(a)
        a: f32[128] = gather(s_a) of "a" at 0, stays, kept from a, graphs ahead: 1
wait    b
run     region_0(b)
release b
event   gathers after compute
issue   c: f32[128] = gather(s_c) of "c" at 512
wait    c
run     region_0(c)
        c: f32[128] = gather(s_c) of "c" at 512, kept from c, graphs ahead: 1
        return ()
fwd (s_a, s_b, s_c)
wait    c
run     region_0(c)
release c
event   gathers after compute
issue   b: f32[128] = gather(s_b) of "b" at 512
wait    b
run     region_0(b)
release b
wait    a
run     region_0(a)
release a
        return ()""",
        )

    def test_what_stays_takes_no_place_though_a_result_was_gathered_in_between(self) -> None:
        first = plan_of("keep a\nrun\nkeep a.2\nrun\nrelease a\ngather c\nrun\nrelease c")  # it returns a.2
        second = plan_of("run\nkeep a\nrun\nrelease a\ngather b\nrun\nrelease b")
        self.assertExpectedInline(
            texts([first, second], 1),
            """\
fwd (s_a, s_c)
event   gathers after compute
issue   a: f32[128] = gather(s_a) of "a" at 0, stays
wait    a
issue   a_2: f32[128] = gather(s_a) of "a", stays
issue   c: f32[128] = gather(s_c) of "c" at 512
run     region_0(a)
wait    a_2
run     region_0(a, a_2)
        a: f32[128] = gather(s_a) of "a" at 0, stays, kept from a, graphs ahead: 1
wait    c
run     region_0(a_2, c)
release c
event   gathers after compute
issue   b: f32[128] = gather(s_b) of "b" at 512, graphs ahead: 1
        return ()
fwd (s_a, s_b)
run     region_0()
wait    a
run     region_0(a)
release a
wait    b
run     region_0(b)
release b
        return ()""",
        )

    def test_reductions_are_waited_for_as_late_as_the_bound_allows(self) -> None:
        first, second = plan_of("run\nreduce a\nrun\nreduce b"), plan_of("run\nreduce c\nrun")
        self.assertExpectedInline(
            texts([first, second], 2),
            """\
fwd (s_a, s_b)
run     region_0()
issue   reduce(s_a, f32[128])
run     region_0()
issue   reduce(s_b, f32[128])
        return ()
fwd (s_c)
run     region_0()
wait    reduce(s_a), graphs ago: 1
issue   reduce(s_c, f32[128])
run     region_0()
wait    reduce(s_b), graphs ago: 1
wait    reduce(s_c)
        return ()""",
        )

    def test_what_a_graph_returns_has_memory_of_its_own(self) -> None:
        self.assertExpectedInline(
            texts([plan_of("gather a\nrun\ngather b\nrun\nrelease b")], 1),
            """\
fwd (s_a, s_b)
event   gathers after compute
issue   a: f32[128] = gather(s_a) of "a"
issue   b: f32[128] = gather(s_b) of "b" at 0
wait    a
run     region_0(a)
wait    b
run     region_0(a, b)
release b
        return ()""",
        )


TOGETHER = "gather a\ngather b\nrun\ngather c\nrelease a\nrelease b\nrun\nrelease c"


def test_a_bound_that_one_region_exceeds_is_refused_with_the_units_and_their_bytes() -> None:
    with pytest.raises(ValueError) as refused:
        scheduled(plan_of(TOGETHER), 2)
    assert str(refused.value) == (
        "options['in_flight']: expected at least 3, because one region uses the units 'a' (512 B), 'b' (512 B), "
        "'c' (512 B) at once, got 2"
    )
    assert scheduled(plan_of(TOGETHER), 3).peak_bytes == 3 * 512


@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(cases())
def test_random_schedules_keep_the_bound_and_serve_every_use(case: tuple[list[Call], int | None]) -> None:
    calls, in_flight = case
    sequence = [call.plan for call in calls]
    needed = max(map(most_units_in_a_region, calls))
    stays = any(not step.reshard for plan in sequence for step in plan.gathers)
    try:
        schedules = schedule(calls, in_flight)
    except ValueError:
        assert in_flight is not None and needed > in_flight
        return
    assert in_flight is None or needed <= in_flight or stays  # a unit that stays may be there already
    assert schedules == schedule(calls, in_flight)
    simulation = Simulation(calls, in_flight)
    simulation.run(schedules)
    verify_schedule(calls, schedules, in_flight, 1)
    of_regions = [[step for step in steps if isinstance(step, Wait | Run | Reduce)] for steps in schedules]
    assert of_regions == [[step for step in plan.steps if isinstance(step, Wait | Run | Reduce)] for plan in sequence]
    assert len(simulation.sent) <= sum(len(plan.gathers) for plan in sequence)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(cases())
def test_a_scheduled_plan_is_scheduled_as_before(case: tuple[list[Call], int | None]) -> None:
    for call in case[0]:
        plan = call.plan
        once = scheduled(plan, None)
        assert scheduled(once, None) == once
        most = most_units_in_a_region(replace(call, for_window=frozenset()))
        assert scheduled(once, most or 1) == scheduled(plan, most or 1)
        assert (once.skeleton, once.buffers) == (plan.skeleton, plan.buffers)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 12), st.integers(1, 6)), max_size=14))
def test_slots_that_live_at_the_same_time_do_not_overlap(drawn: list[tuple[int, int, int]]) -> None:
    lifetimes = [Lifetime(nbytes, start, start + length) for nbytes, start, length in drawn]
    offsets = place(lifetimes)
    assert all(offset % ALIGN_BYTES == 0 for offset in offsets)
    for step in range(20):
        places = sorted((o, o + e.nbytes) for o, e in zip(offsets, lifetimes, strict=True) if e.start <= step < e.end)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


def test_equal_slots_need_no_more_than_is_live() -> None:
    """A chain of equal units, two at a time, is two slots."""
    lifetimes = [Lifetime(1000, start, start + 2) for start in range(9)]
    assert max(place(lifetimes)) + 1000 == 1024 + 1000
