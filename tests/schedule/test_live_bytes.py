"""Live bytes and peaks: of written plans by hand, of random ones against the simulation, of captured ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from fsdp_passes.schedule.lifetime import Memory
from fsdp_passes.schedule.live_bytes import LiveBytes, live_bytes, peak_of
from fsdp_passes.schedule.order import schedule, scheduled
from fsdp_passes.schedule.plan import Call, GradSlice, Peak, Plan, Reduce, Run, Step
from fsdp_passes.schedule.plan_text import load_plan
from tests.schedule.simulation import Simulation, cases
from tests.schedule.test_order import AGAIN, THREE, plan_of

UNIT = 512  # bytes of each buffer of `plan_of`


def peak(*texts: str, in_flight: int | None = 2) -> Peak:
    """Of plans that run one after another."""
    calls = [Call.alone(plan_of(text)) for text in texts]
    return peak_of(Memory.of(calls, schedule(calls, in_flight)))


@pytest.mark.parametrize(("in_flight", "units"), [(1, 1), (2, 2), (3, 3), (None, 3)])
def test_the_arena_holds_as_many_units_as_the_bound(in_flight: int | None, units: int) -> None:
    assert peak(THREE, in_flight=in_flight) == Peak(arena=units * UNIT)
    assert scheduled(plan_of(THREE), in_flight).peak_bytes == units * UNIT


def test_what_stays_and_what_is_returned_is_listed_apart() -> None:
    assert peak("keep a\nrun\nrelease a\ngather b\nrun\nrelease b", AGAIN, in_flight=1) == Peak(2 * UNIT, stay=UNIT)
    assert peak("gather a\nrun\ngather b\nrun\nrelease b") == Peak(UNIT, returned=UNIT)


def backward(separate: bool) -> Plan:
    """The sums of s, of 80 elements, and t, of 32."""
    fp32 = torch.float32
    steps: tuple[Step, ...] = (
        GradSlice("a", "s", 0, (4, 16), fp32, separate),
        Run(0, ("x", "a"), ()),
        GradSlice("b", "t", 0, (16,), fp32, separate),
        GradSlice("c", "s", 1, (16,), fp32, separate),
        Run(1, ("x", "b", "c"), ()),
        Reduce("t", fp32, 32),
        Run(2, ("x",), ()),
        Reduce("s", fp32, 80),
    )
    return Plan("bwd", ("s", "t", "x"), steps, (None, None, None), ())


def of_sums(separate: bool = False, in_flight: int | None = 2) -> list[tuple[int, int]]:
    """Bytes of gradients that are written, and reduced, at each step."""
    plan = scheduled(backward(separate), in_flight)
    return [(each.written, each.reduced) for each in live_bytes(Memory.of([Call.alone(plan)], [plan.steps]))]


def test_a_sum_is_written_from_its_first_slice_to_its_reduction_and_reduced_until_that_is_waited_for() -> None:
    s, t = 80 * 4, 32 * 4
    both_wait = [(0, s), (0, 0)]
    assert of_sums() == [(s, 0)] * 2 + [(s + t, 0)] * 3 + [(s, t)] * 2 + [(0, s + t), *both_wait]
    waits_first = [(s, 0), (0, s), (0, 0)]
    assert of_sums(in_flight=1) == [(s, 0)] * 2 + [(s + t, 0)] * 3 + [(s, t)] * 2 + waits_first
    assert scheduled(backward(False), 2).peak == Peak(written=s + t)


def test_separate_slices_are_there_beside_their_concatenation() -> None:
    s, t, (a, b, c) = 80 * 4, 32 * 4, (256, 64, 64)
    before_reduction = [(a, 0), (a, 0), (a + b, 0), (a + b + c, 0), (a + b + c, 0)]
    both = [(a + c + t, t), (a + c, t), (s, s + t)]  # with zeros for what nothing was written into
    assert of_sums(separate=True) == [*before_reduction, *both, (0, s), (0, 0)]


def test_a_sum_to_which_two_graphs_add_is_there_to_the_end() -> None:
    assert peak("run\nreduce a\nrun", "run\nreduce a\nrun\nreduce b") == Peak(written=UNIT, reduced=UNIT)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(cases())
def test_bytes_of_gathered_buffers_are_those_of_the_simulation(case: tuple[list[Call], int | None]) -> None:
    calls, in_flight = case
    try:
        schedules = schedule(calls, in_flight)
    except ValueError:
        return
    simulation = Simulation(calls, in_flight)
    simulation.run(schedules)
    memory = Memory.of(calls, schedules)
    assert [each.gathered + each.stay for each in live_bytes(memory)] == simulation.live_bytes
    assert {each.window for each in live_bytes(memory)} == {simulation.kept_bytes} == {peak_of(memory).window}
    assert max(simulation.live_bytes) + simulation.kept_bytes <= peak_of(memory).arena


def test_values_of_a_captured_graph_are_counted_by_storage() -> None:
    """graphs/two_units: relu [4, 16] and what is saved, in bf16; up 256 and down 128 elements."""
    plan = load_plan((Path(__file__).parents[2] / "graphs/two_units.bwd.plan.txt").read_text())
    live = live_bytes(Memory.of([Call.alone(plan)], [plan.steps]))
    inputs = 2 * (4 * 8 + 4 * 16 + 4 * 8)  # tangents, relu, the input of the net
    assert live[0] == LiveBytes(values=inputs)
    assert max(live, key=lambda each: each.total) == LiveBytes(gathered=256, written=1024, reduced=512, values=inputs)
    assert live[-1] == LiveBytes()


ALIASES = """
plan fwd (x)
   0 run     v, y = region_0(x)
   1 run     z = region_1(y) drop (y)
   2 run     w = region_1(v) drop (v)
   3         return (z)

region_0:
   0         x: f32[4] = input()
   1         v: f32[2,2] = aten.view(x, [2, 2])
   2         y: f32[4] = aten.neg(x)
   3         return (v, y)

region_1:
   0         y: f32[4] = input()
   1         z: f32[2,2] = aten.view(y, [2, 2])
   2         return (z,)
"""


def test_a_view_is_no_memory_but_keeps_it() -> None:
    """x lives as long as its view v; z, which is returned, is y's memory; w is nobody's."""
    plan = load_plan(ALIASES.strip() + "\n")
    live = live_bytes(Memory.of([Call.alone(plan)], [plan.steps]))
    assert [each.values for each in live] == [32, 32, 32]
