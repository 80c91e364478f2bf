"""Schedules of plans: by text, and against a simulation of random ones that knows nothing of how they are made."""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
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
from fsdp_passes.schedule.plan import Call, Gather, Plan, Reduce, Release, Run, Step, Wait, WaitReduce
from fsdp_passes.schedule.plan_text import dump_plan


def plan_of(text: str) -> Plan:
    """A plan without regions from one step a line: `gather a`, `wait a`, `release a`, `run`, `reduce a`.

    Shard and buffer of unit `a` are s_a and a; a second use of it is `a.2`. Every buffer has 128 elements.
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
                steps.append(Run(0, (), ()))
            case "reduce":
                steps.append(Reduce(f"s_{unit}"))
    shards = sorted({step.shard for step in steps if isinstance(step, Gather | Reduce)})
    return Plan("fwd", tuple(shards), tuple(steps), (), ())


def texts(plans: Sequence[Plan], in_flight: int | None) -> str:
    """The scheduled steps of `plans`, that run one after another, as their dumps show them."""
    scheduled_steps = schedule([Call.alone(plan) for plan in plans], in_flight)
    dumps = [dump_plan(replace(plan, steps=steps)) for plan, steps in zip(plans, scheduled_steps, strict=True)]
    return "\n".join(line[5:] for dumped in dumps for line in dumped.splitlines())


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
issue   a: f32[128] = gather(s_a) of "a" at 0
wait    a
run     region_0()
release a
issue   b: f32[128] = gather(s_b) of "b" at 0
wait    b
run     region_0()
release b
issue   c: f32[128] = gather(s_c) of "c" at 0
wait    c
run     region_0()
release c
        return ()""",
        )

    def test_the_next_unit_is_gathered_before_the_current_one_is_used(self) -> None:
        self.assertExpectedInline(
            texts([plan_of(THREE)], 2),
            """\
fwd (s_a, s_b, s_c)
issue   a: f32[128] = gather(s_a) of "a" at 0
issue   b: f32[128] = gather(s_b) of "b" at 512
wait    a
run     region_0()
release a
issue   c: f32[128] = gather(s_c) of "c" at 0
wait    b
run     region_0()
release b
wait    c
run     region_0()
release c
        return ()""",
        )

    def test_without_a_bound_all_is_gathered_at_once(self) -> None:
        self.assertExpectedInline(
            texts([plan_of(THREE)], None),
            """\
fwd (s_a, s_b, s_c)
issue   a: f32[128] = gather(s_a) of "a" at 0
issue   b: f32[128] = gather(s_b) of "b" at 512
issue   c: f32[128] = gather(s_c) of "c" at 1024
wait    a
run     region_0()
release a
wait    b
run     region_0()
release b
wait    c
run     region_0()
release c
        return ()""",
        )

    def test_a_unit_that_comes_next_again_is_kept(self) -> None:
        self.assertExpectedInline(
            texts([plan_of(AGAIN)], 2),
            """\
fwd (s_a, s_b)
issue   a: f32[128] = gather(s_a) of "a" at 0
issue   b: f32[128] = gather(s_b) of "b" at 512
wait    a
run     region_0()
        a_2: f32[128] = gather(s_a) of "a" at 0, kept from a
wait    b
run     region_0()
release b
wait    a_2
run     region_0()
release a_2
        return ()""",
        )

    def test_a_unit_that_comes_again_later_is_gathered_again(self) -> None:
        self.assertExpectedInline(
            texts([plan_of(AGAIN)], 1),
            """\
fwd (s_a, s_b)
issue   a: f32[128] = gather(s_a) of "a" at 0
wait    a
run     region_0()
release a
issue   b: f32[128] = gather(s_b) of "b" at 0
wait    b
run     region_0()
release b
issue   a_2: f32[128] = gather(s_a) of "a" at 0
wait    a_2
run     region_0()
release a_2
        return ()""",
        )

    def test_gathers_for_the_next_graph(self) -> None:
        first, second = plan_of("gather a\nrun\nrelease a"), plan_of("run\ngather b\nrun\nrelease b\ngather b.2")
        self.assertExpectedInline(
            texts([first, second], 2),
            """\
fwd (s_a)
issue   a: f32[128] = gather(s_a) of "a" at 0
issue   b: f32[128] = gather(s_b) of "b" at 512, graphs ahead: 1
wait    a
run     region_0()
release a
issue   b_2: f32[128] = gather(s_b) of "b", graphs ahead: 1
        return ()
fwd (s_b)
run     region_0()
wait    b
run     region_0()
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
issue   a: f32[128] = gather(s_a) of "a" at 0, stays
wait    a
issue   b: f32[128] = gather(s_b) of "b" at 512
run     region_0()
        a: f32[128] = gather(s_a) of "a" at 0, stays, kept from a, graphs ahead: 1
wait    b
run     region_0()
release b
issue   c: f32[128] = gather(s_c) of "c" at 512
wait    c
run     region_0()
        c: f32[128] = gather(s_c) of "c" at 512, kept from c, graphs ahead: 1
        return ()
fwd (s_a, s_b, s_c)
wait    c
run     region_0()
release c
issue   b: f32[128] = gather(s_b) of "b" at 512
wait    b
run     region_0()
release b
wait    a
run     region_0()
release a
        return ()""",
        )

    def test_reductions_are_waited_for_as_late_as_the_bound_allows(self) -> None:
        first, second = plan_of("run\nreduce a\nrun\nreduce b"), plan_of("run\nreduce c\nrun")
        self.assertExpectedInline(
            texts([first, second], 2),
            """\
fwd (s_a, s_b)
run     region_0()
issue   reduce(s_a)
run     region_0()
issue   reduce(s_b)
        return ()
fwd (s_c)
run     region_0()
wait    reduce(s_a), graphs ago: 1
issue   reduce(s_c)
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
issue   a: f32[128] = gather(s_a) of "a"
issue   b: f32[128] = gather(s_b) of "b" at 0
wait    a
run     region_0()
wait    b
run     region_0()
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
    assert scheduled(plan_of(TOGETHER), 3).arena_bytes == 3 * 512


# -- random plans


@st.composite
def plans(draw: st.DrawFn, reshards: dict[int, bool], sizes: dict[tuple[int, int], int]) -> Plan:
    """A graph that gathers on demand. Units have one or two flat groups; intervals may overlap."""
    steps: list[Step] = []
    open_: dict[int, list[str]] = {}  # buffers of each unit
    for number in range(draw(st.integers(1, 12))):
        action = draw(st.sampled_from(["open", "open", "open", "run", "close", "reduce"]))
        unit = draw(st.sampled_from(sorted(reshards)))
        if action == "open" and unit not in open_:
            groups = draw(st.sampled_from([(0,), (1,), (0, 1)]))
            open_[unit] = [f"b{number}_{group}" for group in groups]
            steps += [
                Gather(name, f"s{unit}_{group}", torch.float32, sizes[unit, group], str(unit), reshards[unit])
                for name, group in zip(open_[unit], groups, strict=True)
            ]
            steps += [Wait(name) for name in open_[unit]]
        elif action == "close" and open_:
            first = next(iter(open_))
            steps += [Release(name) for name in open_.pop(first)]
        elif action == "reduce":
            steps.append(Reduce(f"s{unit}_0"))
        steps.append(Run(0, tuple(name for names in open_.values() for name in names), ()))
    steps += [Release(name) for names in open_.values() for name in names if draw(st.integers(0, 5))]
    return Plan("fwd", (), tuple(steps), (), ())


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Plan], int | None]:
    units = range(draw(st.integers(1, 5)))
    reshards = {unit: bool(draw(st.integers(0, 4))) for unit in units}
    sizes = {(unit, group): draw(st.integers(1, 700)) for unit in units for group in (0, 1)}
    sequence = draw(st.lists(plans(reshards, sizes), min_size=1, max_size=4))
    return sequence, draw(st.sampled_from([1, 2, 2, 3, 4, None]))


def owners_of(plan: Plan) -> dict[str, tuple[str, int]]:
    shards = {step.shard for step in plan.steps if isinstance(step, Gather | Reduce)}
    return {shard: (shard[1:].partition("_")[0], int(shard[-1])) for shard in shards}


def most_units_in_a_region(plan: Plan) -> int:
    """The most units that must be live at once, but those that are returned; one that stays while it is waited for."""
    released = {step.buffer for step in plan.steps if isinstance(step, Release)}
    gathers = {step.buffer: step for step in plan.steps if isinstance(step, Gather)}
    live: Counter[str] = Counter()
    most = 0
    for step in plan.steps:
        if isinstance(step, Wait):
            gather = gathers[step.buffer]
            counts = step.buffer in released
            most = max(most, len({*+live, *[gather.unit] * counts}))
            live[gather.unit] += gather.reshard and counts
        elif isinstance(step, Release):
            live[gathers[step.buffer].unit] -= gathers[step.buffer].reshard
    return most


class Simulation:
    """Runs schedules step by step, and fails where one does what it must not."""

    def __init__(self, sequence: Sequence[Plan], in_flight: int | None) -> None:
        self.plans, self.bound = sequence, float("inf") if in_flight is None else in_flight
        self.live: dict[tuple[int, str], Gather] = {}  # issued, not released
        self.waited: set[tuple[int, str]] = set()
        self.under_way: list[tuple[int, str]] = []
        self.sent: list[str] = []
        waits = [(call, step.buffer) for call, plan in enumerate(sequence) for step in plan.steps if type(step) is Wait]
        units = {(call, gather.buffer): gather.unit for call, plan in enumerate(sequence) for gather in plan.gathers}
        self.missing = {key: units[key] for key in waits}  # not issued yet, in the order of use
        self.most_bytes = 0

    def run(self, schedules: Sequence[Sequence[Step]]) -> None:
        for call, steps in enumerate(schedules):
            for step in steps:
                self.step(call, step)
                self.check()
        left = {key for key, gather in self.live.items() if gather.offset is not None}
        assert not left and not self.under_way, "buffers or reductions are left at the end"

    def step(self, call: int, step: Step) -> None:
        if isinstance(step, Run | Reduce):
            self.check_that_no_place_is_left_free()
        match step:
            case Gather():
                self.issue(call, step)
            case Wait(buffer):
                assert (call, buffer) in self.live, "waited for before it is issued"
                assert (call, buffer) not in self.waited, "waited for twice"
                self.waited.add((call, buffer))
            case Run():
                for name in step.inputs:
                    assert (call, name) in self.live, "read after its release"
                    assert (call, name) in self.waited, "read before its wait"
            case Release(buffer):
                assert (call, buffer) in self.waited, "released before its wait"
                del self.live[call, buffer]
            case Reduce():
                self.under_way.append((call, step.shard))
            case WaitReduce():
                self.under_way.remove((call - step.ago, step.shard))

    def issue(self, call: int, gather: Gather) -> None:
        key = (call + gather.ahead, gather.buffer)
        assert key not in self.live
        del self.missing[key]
        if gather.kept_from is None:
            self.sent.append(gather.shard)
        else:
            before = self.live.pop((call, gather.kept_from))
            assert (call, gather.kept_from) in self.waited
            assert [before.shard, before.dtype, before.offset] == [gather.shard, gather.dtype, gather.offset]
        if gather.offset is not None:
            for other in (other for other in self.live.values() if other.offset is not None):
                assert other.offset + other.nbytes <= gather.offset or gather.offset + gather.nbytes <= other.offset
        self.live[key] = gather
        self.most_bytes = max(self.most_bytes, sum(g.nbytes for g in self.live.values() if g.offset is not None))

    def counted(self) -> set[str]:
        return {
            gather.unit
            for key, gather in self.live.items()
            if gather.offset is not None and (gather.reshard or (key not in self.waited and gather.kept_from is None))
        }

    def check_that_no_place_is_left_free(self) -> None:
        """Unless the next unit in the order of use is live: then it is kept, or gathered again after its release."""
        following = next(iter(self.missing.values()), None)
        is_live = following in {gather.unit for gather in self.live.values()}
        assert following is None or is_live or len(self.counted()) >= self.bound, "a gather is later than need be"

    def check(self) -> None:
        assert len(self.counted()) <= self.bound, "more units are live than the bound"
        assert len(self.under_way) <= self.bound, "more reductions are under way than the bound"


@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(cases())
def test_random_schedules_keep_the_bound_and_serve_every_use(case: tuple[list[Plan], int | None]) -> None:
    sequence, in_flight = case
    calls = [Call(plan, owners_of(plan)) for plan in sequence]
    needed = max(most_units_in_a_region(plan) for plan in sequence)
    stays = any(not step.reshard for plan in sequence for step in plan.gathers)
    try:
        schedules = schedule(calls, in_flight)
    except ValueError:
        assert in_flight is not None and needed > in_flight
        return
    assert in_flight is None or needed <= in_flight or stays  # a unit that stays may be there already
    assert schedules == schedule(calls, in_flight)
    simulation = Simulation(sequence, in_flight)
    simulation.run(schedules)
    of_regions = [[step for step in steps if isinstance(step, Wait | Run | Reduce)] for steps in schedules]
    assert of_regions == [[step for step in plan.steps if isinstance(step, Wait | Run | Reduce)] for plan in sequence]
    assert len(simulation.sent) <= sum(len(plan.gathers) for plan in sequence)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(cases())
def test_a_scheduled_plan_is_scheduled_as_before(case: tuple[list[Plan], int | None]) -> None:
    for plan in case[0]:
        once = scheduled(plan, None)
        assert scheduled(once, None) == once
        most = most_units_in_a_region(plan)
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
