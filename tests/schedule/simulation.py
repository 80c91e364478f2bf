"""Random plans, and a simulation of what they do that knows nothing of how they are scheduled, or checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from hypothesis import strategies as st

from fsdp_passes.schedule.plan import Call, Gather, Plan, Reduce, Release, Run, Step, Wait, WaitReduce


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
        elif action == "reduce" and f"s{unit}_0" not in {step.shard for step in steps if isinstance(step, Reduce)}:
            steps.append(Reduce(f"s{unit}_0", torch.float32, sizes[unit, 0]))
        steps.append(Run(0, tuple(name for names in open_.values() for name in names), ()))
    steps += [Release(name) for names in open_.values() for name in names if draw(st.integers(0, 5))]
    return Plan("fwd", (), tuple(steps), (), ())


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Call], int | None]:
    """Graphs that run one after another, and `in_flight`. Some units are kept for a window."""
    units = range(draw(st.integers(1, 5)))
    reshards = {unit: bool(draw(st.integers(0, 4))) for unit in units}
    sizes = {(unit, group): draw(st.integers(1, 700)) for unit in units for group in (0, 1)}
    sequence = draw(st.lists(plans(reshards, sizes), min_size=1, max_size=4))
    kept = {str(unit) for unit in units if not draw(st.integers(0, 5))}
    calls = [Call(plan, owners_of(plan), _buffers_of(plan, kept)) for plan in sequence]
    return calls, draw(st.sampled_from([1, 2, 2, 3, 4, None]))


def _buffers_of(plan: Plan, units: Collection[str]) -> frozenset[str]:
    """But those that the graph returns."""
    released = {step.buffer for step in plan.steps if isinstance(step, Release)}
    return frozenset(gather.buffer for gather in plan.gathers if gather.unit in units) & released


def owners_of(plan: Plan) -> dict[str, tuple[str, int]]:
    shards = {step.shard for step in plan.steps if isinstance(step, Gather | Reduce)}
    return {shard: (shard[1:].partition("_")[0], int(shard[-1])) for shard in shards}


def most_units_in_a_region(call: Call) -> int:
    """The most units that must be live at once, but those that are returned, or kept for a window.

    One that stays must be while it is waited for.
    """
    plan = call.plan
    counted = {step.buffer for step in plan.steps if isinstance(step, Release)} - call.for_window
    gathers = {step.buffer: step for step in plan.steps if isinstance(step, Gather)}
    live: Counter[str] = Counter()
    most = 0
    for step in plan.steps:
        if isinstance(step, Wait):
            gather = gathers[step.buffer]
            counts = step.buffer in counted
            most = max(most, len({*+live, *[gather.unit] * counts}))
            live[gather.unit] += gather.reshard and counts
        elif isinstance(step, Release):
            live[gathers[step.buffer].unit] -= gathers[step.buffer].reshard and step.buffer in counted
    return most


class Simulation:
    """Runs schedules step by step, and fails where one does what it must not."""

    def __init__(self, calls: Sequence[Call], in_flight: int | None, early: bool = True) -> None:
        sequence = [call.plan for call in calls]
        self.early = early  # whether a gather must not be later than need be
        self.bound = float("inf") if in_flight is None else in_flight
        self.live: dict[tuple[int, str], Gather] = {}  # issued, not released
        self.waited: set[tuple[int, str]] = set()
        self.under_way: list[tuple[int, str]] = []
        self.sent: list[str] = []
        waits = [(call, step.buffer) for call, plan in enumerate(sequence) for step in plan.steps if type(step) is Wait]
        gathers = [(call, step) for call, plan in enumerate(sequence) for step in plan.steps if type(step) is Gather]
        units = {(call, gather.buffer): gather.unit for call, gather in gathers}
        self.missing = {key: units[key] for key in waits}  # not issued yet, in the order of use
        self.buffers = set(waits)
        self.live_bytes: list[int] = []  # after each step, of what no graph returns, and no window keeps
        self.kept: dict[tuple[str, torch.dtype], Gather] = {}  # for the window

    @property
    def kept_bytes(self) -> int:
        return sum(gather.nbytes for gather in self.kept.values())

    def run(self, schedules: Sequence[Sequence[Step]]) -> None:
        for gather in (step for steps in schedules for step in steps if isinstance(step, Gather) and step.for_window):
            self.kept[gather.shard, gather.dtype] = gather
        for call, steps in enumerate(schedules):
            for step in steps:
                self.step(call, step)
                self.check()
                own = [gather for gather in self.live.values() if gather.offset is not None]
                self.live_bytes.append(sum(gather.nbytes for gather in own if not gather.for_window))
        left = [gather for gather in self.live.values() if gather.offset is not None]
        assert sorted(map(str, left)) == sorted(map(str, self.kept.values())), "other buffers are left at the end"
        assert not self.under_way, "reductions are left at the end"

    def step(self, call: int, step: Step) -> None:
        if self.early and isinstance(step, Run | Reduce):
            self.check_that_no_place_is_left_free()
        match step:
            case Gather():
                self.issue(call, step)
            case Wait(buffer):
                assert (call, buffer) in self.live, "waited for before it is issued"
                assert (call, buffer) not in self.waited, "waited for twice"
                self.waited.add((call, buffer))
            case Run():
                for name in (name for name in step.inputs if (call, name) in self.buffers):
                    assert (call, name) in self.live, "read after its release"
                    assert (call, name) in self.waited, "read before its wait"
            case Release(buffer):
                assert (call, buffer) in self.waited, "released before its wait"
                released = self.live.pop((call, buffer))
                assert released.offset is not None, "released, though the graph returns it"
                assert not released.for_window, "released, though it is kept"
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
            assert before.offset is not None, "kept, though the graph returns it"
            assert [before.shard, before.dtype, before.offset] == [gather.shard, gather.dtype, gather.offset]
            assert before.for_window == gather.for_window
        if gather.for_window:
            assert gather.offset is not None, "kept, but without a place"
        if gather.offset is not None:
            kept = [each for of, each in self.kept.items() if of != (gather.shard, gather.dtype)]
            for other in (other for other in (*self.live.values(), *kept) if other.offset is not None):
                assert other.offset + other.nbytes <= gather.offset or gather.offset + gather.nbytes <= other.offset
        self.live[key] = gather

    def counted(self) -> set[str]:
        return {
            gather.unit
            for key, gather in self.live.items()
            if gather.offset is not None
            and not gather.for_window
            and (gather.reshard or (key not in self.waited and gather.kept_from is None))
        }

    def check_that_no_place_is_left_free(self) -> None:
        """Unless the next unit in the order of use is live: then it is kept, or gathered again after its release."""
        following = next(iter(self.missing.values()), None)
        is_live = following in {gather.unit for gather in self.live.values()}
        assert following is None or is_live or len(self.counted()) >= self.bound, "a gather is later than need be"

    def check(self) -> None:
        assert len(self.counted()) <= self.bound, "more units are live than the bound"
        assert len(self.under_way) <= self.bound, "more reductions are under way than the bound"
