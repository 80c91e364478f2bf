"""Cutting scheduled graphs into regions: what each holds, and that the plan computes the whole graph."""

from __future__ import annotations

import expecttest
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from fsdp_passes.codegen.regions import cut
from fsdp_passes.ir.alias import source
from fsdp_passes.ir.ops import GATHER
from fsdp_passes.ir.verify import verify
from fsdp_passes.passes.late_reads import LateReads
from fsdp_passes.schedule.intervals import GatherOnDemand
from fsdp_passes.schedule.plan import Plan, Run
from fsdp_passes.schedule.plan_text import dump_plan, load_plan
from tests.simulated import assert_bitwise, graph, group_of, random_inputs, run_scheduled

SPLIT_ACROSS_A_CUT = """
    0 s: f32[8] = input(shard="up")
    1 x: f32[8] = input()
    2 sort: (f32[8], i64[8]) = aten.sort(x)
    3 issue gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
    4 wait full: f32[16] = fsdp_opt.wait(gather)
    5 values: f32[8] = sort[0]
    6 pieces: (f32[8], f32[8]) = aten.split_with_sizes(full, [8, 8])
    7 piece: f32[8] = pieces[0]
    8 y: f32[8] = aten.mul.Tensor(values, piece)
    9 release release = fsdp_opt.release(full)
    10 return (y,)
    """
VIEW_IN_TWO_REGIONS = """
    0 s: f32[8] = input(shard="up")
    1 r: f32[8] = input(shard="down")
    2 issue gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
    3 wait full: f32[16] = fsdp_opt.wait(gather)
    4 v: f32[4,4] = aten.view(full, [4, 4])
    5 t: f32[4,4]{1,4} = aten.t(v)
    6 y: f32[4,4]{1,4} = aten.neg(t)
    7 issue gather_1: f32[16] = fsdp_opt.gather(r, 2, torch.float32)
    8 wait full_1: f32[16] = fsdp_opt.wait(gather_1)
    9 w: f32[4,4] = aten.view(full_1, [4, 4])
    10 z: f32[4,4] = aten.mm(t, w)
    11 release release = fsdp_opt.release(full)
    12 release release_1 = fsdp_opt.release(full_1)
    13 return (y, z)
    """
RETURNED_VIEW = """
    0 s: f32[8] = input(shard="up")
    1 issue gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
    2 wait full: f32[16] = fsdp_opt.wait(gather)
    3 v: f32[4,4] = aten.view(full, [4, 4])
    4 t: f32[4,4]{1,4} = aten.t(v)
    5 y: f32[4,4]{1,4} = aten.neg(t)
    6 return (v, full, y)
    """
VIEW_ALONE_IS_RETURNED = RETURNED_VIEW.replace("(v, full, y)", "(v, y)")
CONSTANT = """
    0 s: f32[2] = input(shard="up")
    1 c: f32[4] = get_attr("c")
    2 y: f32[4] = aten.neg(c)
    3 issue gather: f32[4] = fsdp_opt.gather(s, 2, torch.float32)
    4 wait full: f32[4] = fsdp_opt.wait(gather)
    5 z: f32[4] = aten.mul.Tensor(full, c)
    6 release release = fsdp_opt.release(full)
    7 return (y, z)
    """
INPUTS_ARE_OUTPUTS = """
    0 s: f32[2] = input(shard="up")
    1 unread: f32[4] = input()
    2 x: f32[4] = input()
    3 y: f32[4] = aten.neg(x)
    4 return (s, y, x, None, 3)
    """
NO_COMMUNICATION = """
    0 x: f32[4] = input()
    1 y: f32[4] = aten.neg(x)
    2 z: f32[4] = aten.exp(y)
    3 return (z,)
    """
EMPTY = """
    0 x: f32[4] = input()
    1 return ()
    """
WRITTEN_THROUGH_A_VIEW = """
    0 s: f32[2] = input(shard="up")
    1 x: f32[4] = input()
    2 v: f32[2,2] = aten.view(x, [2, 2])
    3 y: f32[2,2] = aten.neg(v)
    4 issue gather: f32[4] = fsdp_opt.gather(s, 2, torch.float32)
    5 wait full: f32[4] = fsdp_opt.wait(gather)
    6 z: f32[2,2] = aten.exp(v)
    7 new: f32[4] = aten.mul.Tensor(x, full)
    8 release release = fsdp_opt.release(full)
    9 done: f32[4] = aten.copy_(x, new)
    10 return (y, z)
    """
MADE_OF_SIZES = """
    0 s: f32[2] = input(shard="up")
    1 n: sym[s0] = input()
    2 x: f32[3*s0] = input()
    3 zeros: f32[3*s0] = aten.zeros_like(x)
    4 ones: f32[4] = aten.ones([4], device=device("cpu"), pin_memory=False)
    5 rows: i64[s0] = aten.arange(n, device=device("cpu"), pin_memory=False)
    6 y: f32[3*s0] = aten.add.Tensor(x, zeros)
    7 a: i64[s0] = aten.neg(rows)
    8 b: f32[4] = aten.neg(ones)
    9 issue gather: f32[4] = fsdp_opt.gather(s, 2, torch.float32)
    10 wait full: f32[4] = fsdp_opt.wait(gather)
    11 c: f32[4] = aten.mul.Tensor(full, ones)
    12 d: i64[s0] = aten.abs(rows)
    13 e: f32[3*s0] = aten.exp(y)
    14 release release = fsdp_opt.release(full)
    15 return (a, b, c, d, e)
    """
NOT_A_MULTIPLE = """
    0 s: f32[2] = input(shard="up")
    1 n: sym[s0] = input()
    2 x: f32[3*s0] = input()
    3 y: f32[3*s0] = aten.exp(x)
    4 return (y,)
    """
RANDOM_NUMBERS = """
    0 s: f32[2] = input(shard="up")
    1 noise: f32[4] = aten.rand([4], device=device("cpu"), pin_memory=False)
    2 y: f32[4] = aten.neg(noise)
    3 issue gather: f32[4] = fsdp_opt.gather(s, 2, torch.float32)
    4 wait full: f32[4] = fsdp_opt.wait(gather)
    5 z: f32[4] = aten.mul.Tensor(full, noise)
    6 release release = fsdp_opt.release(full)
    7 return (y, z)
    """
WRITES = """
    0 s: f32[2] = input(shard="up")
    1 x: f32[4] = input()
    2 issue gather: f32[4] = fsdp_opt.gather(s, 2, torch.float32)
    3 wait full: f32[4] = fsdp_opt.wait(gather)
    4 y: f32[4] = aten.mul.Tensor(x, full)
    5 release release = fsdp_opt.release(full)
    6 done: f32[4] = aten.copy_(x, y)
    7 return ()
    """
GRADIENTS = """
    0 s: f32[2] = input(shard="up")
    1 x: f32[4] = input()
    2 g: f32[4] = aten.neg(x)
    3 a = fsdp_opt.accumulate(g, s, None)
    4 h: f32[4] = aten.mul.Tensor(g, x)
    5 b = fsdp_opt.accumulate(h, s, [0])
    6 issue r = fsdp_opt.reduce(s, 2, torch.float32)
    7 return (None, g)
    """


def plan_of(text: str) -> Plan:
    return cut(graph(text), "bwd", trains=False)


class TestPlans(expecttest.TestCase):
    maxDiff = None

    def test_an_item_stays_with_the_tuple_that_it_is_taken_from(self) -> None:
        got = dump_plan(plan_of(SPLIT_ACROSS_A_CUT))
        self.assertExpectedInline(
            got,
            """\
plan bwd (s, x)
peak 0 B: arena 0, stay 0, window 0, returned 0, written 0, reduced 0
   0 run     values = region_0(x) drop (x)
   1 issue   full: f32[16] = gather(s) of "up"
   2 wait    full
   3 run     y = region_1(values, full) drop (values)
   4 release full
   5         return (y)

region_0:
   0         x: f32[8] = input()
   1         sort: (f32[8], i64[8]) = aten.sort(x)
   2         values: f32[8] = sort[0]
   3         return (values,)

region_1:
   0         values: f32[8] = input()
   1         full: f32[16] = input()
   2         pieces: (f32[8], f32[8]) = aten.split_with_sizes(full, [8, 8])
   3         piece: f32[8] = pieces[0]
   4         y: f32[8] = aten.mul.Tensor(values, piece)
   5         return (y,)
""",
        )

    def test_views_of_a_buffer_are_repeated(self) -> None:
        got = dump_plan(plan_of(VIEW_IN_TWO_REGIONS))
        self.assertExpectedInline(
            got,
            """\
plan bwd (s, r)
peak 0 B: arena 0, stay 0, window 0, returned 0, written 0, reduced 0
   0 issue   full: f32[16] = gather(s) of "up"
   1 wait    full
   2 run     y = region_0(full)
   3 issue   full_1: f32[16] = gather(r) of "down"
   4 wait    full_1
   5 run     z = region_1(full, full_1)
   6 release full
   7 release full_1
   8         return (y, z)

region_0:
   0         full: f32[16] = input()
   1         v: f32[4,4] = aten.view(full, [4, 4])
   2         t: f32[4,4]{1,4} = aten.t(v)
   3         y: f32[4,4]{1,4} = aten.neg(t)
   4         return (y,)

region_1:
   0         full: f32[16] = input()
   1         full_1: f32[16] = input()
   2         v: f32[4,4] = aten.view(full, [4, 4])
   3         t: f32[4,4]{1,4} = aten.t(v)
   4         w: f32[4,4] = aten.view(full_1, [4, 4])
   5         z: f32[4,4] = aten.mm(t, w)
   6         return (z,)
""",
        )

    def test_returned_views_are_results(self) -> None:
        got = dump_plan(plan_of(RETURNED_VIEW))
        self.assertExpectedInline(
            got,
            """\
plan bwd (s)
peak 0 B: arena 0, stay 0, window 0, returned 0, written 0, reduced 0
   0 issue   full: f32[16] = gather(s) of "up"
   1 wait    full
   2 run     v, y = region_0(full)
   3         return (v, full, y)

region_0:
   0         full: f32[16] = input()
   1         v: f32[4,4] = aten.view(full, [4, 4])
   2         t: f32[4,4]{1,4} = aten.t(v)
   3         y: f32[4,4]{1,4} = aten.neg(t)
   4         return (v, y)
""",
        )

    def test_the_buffer_of_a_returned_view_is_neither_released_nor_dropped(self) -> None:
        got = dump_plan(plan_of(VIEW_ALONE_IS_RETURNED)).partition("\n\n")[0]
        self.assertExpectedInline(
            got,
            """\
plan bwd (s)
peak 0 B: arena 0, stay 0, window 0, returned 0, written 0, reduced 0
   0 issue   full: f32[16] = gather(s) of "up"
   1 wait    full
   2 run     v, y = region_0(full)
   3         return (v, y)""",
        )

    def test_constants_are_repeated(self) -> None:
        got = dump_plan(plan_of(CONSTANT))
        self.assertExpectedInline(
            got,
            """\
plan bwd (s)
peak 0 B: arena 0, stay 0, window 0, returned 0, written 0, reduced 0
   0 run     y = region_0()
   1 issue   full: f32[4] = gather(s) of "up"
   2 wait    full
   3 run     z = region_1(full)
   4 release full
   5         return (y, z)

region_0:
   0         c: f32[4] = get_attr("c")
   1         y: f32[4] = aten.neg(c)
   2         return (y,)

region_1:
   0         full: f32[4] = input()
   1         c: f32[4] = get_attr("c")
   2         z: f32[4] = aten.mul.Tensor(full, c)
   3         return (z,)
""",
        )

    def test_views_of_what_is_written_are_repeated(self) -> None:
        got = dump_plan(plan_of(WRITTEN_THROUGH_A_VIEW))
        self.assertExpectedInline(
            got,
            """\
plan bwd (s, x)
peak 0 B: arena 0, stay 0, window 0, returned 0, written 0, reduced 0
   0 run     y = region_0(x)
   1 issue   full: f32[4] = gather(s) of "up"
   2 wait    full
   3 run     z, new = region_1(x, full)
   4 release full
   5 run     region_2(x, new) drop (x, new)
   6         return (y, z)

region_0:
   0         x: f32[4] = input()
   1         v: f32[2,2] = aten.view(x, [2, 2])
   2         y: f32[2,2] = aten.neg(v)
   3         return (y,)

region_1:
   0         x: f32[4] = input()
   1         full: f32[4] = input()
   2         v: f32[2,2] = aten.view(x, [2, 2])
   3         z: f32[2,2] = aten.exp(v)
   4         new: f32[4] = aten.mul.Tensor(x, full)
   5         return (z, new)

region_2:
   0         x: f32[4] = input()
   1         new: f32[4] = input()
   2         done: f32[4] = aten.copy_(x, new)
   3         return ()
""",
        )

    def test_what_is_made_of_sizes_is_repeated_and_the_sizes_are_inputs(self) -> None:
        got = dump_plan(plan_of(MADE_OF_SIZES))
        self.assertExpectedInline(
            got,
            """\
plan bwd (s, n, x)
peak 0 B: arena 0, stay 0, window 0, returned 0, written 0, reduced 0
   0 run     y, a, b = region_0(x, n) drop (x)
   1 issue   full: f32[4] = gather(s) of "up"
   2 wait    full
   3 run     c, d, e = region_1(full, n, y) drop (n, y)
   4 release full
   5         return (a, b, c, d, e)

region_0:
   0         x: f32[3*s0] = input()
   1         n: sym[s0] = input()
   2         zeros: f32[3*s0] = aten.zeros_like(x)
   3         y: f32[3*s0] = aten.add.Tensor(x, zeros)
   4         rows: i64[s0] = aten.arange(n, device=device("cpu"), pin_memory=False)
   5         a: i64[s0] = aten.neg(rows)
   6         ones: f32[4] = aten.ones([4], device=device("cpu"), pin_memory=False)
   7         b: f32[4] = aten.neg(ones)
   8         return (y, a, b)

region_1:
   0         full: f32[4] = input()
   1         n: sym[s0] = input()
   2         y: f32[3*s0] = input()
   3         ones: f32[4] = aten.ones([4], device=device("cpu"), pin_memory=False)
   4         c: f32[4] = aten.mul.Tensor(full, ones)
   5         rows: i64[s0] = aten.arange(n, device=device("cpu"), pin_memory=False)
   6         d: i64[s0] = aten.abs(rows)
   7         e: f32[3*s0] = aten.exp(y)
   8         return (c, d, e)
""",
        )

    def test_a_symbol_in_a_size_is_an_input_even_if_nothing_reads_it(self) -> None:
        plan = plan_of(NOT_A_MULTIPLE)
        self.assertEqual(plan.steps, (Run(0, ("x", "n"), ("y",), ("x", "n")),))

    def test_random_numbers_are_drawn_once(self) -> None:
        got = dump_plan(plan_of(RANDOM_NUMBERS)).partition("region_1")[0]
        self.assertExpectedInline(
            got,
            """\
plan bwd (s)
peak 0 B: arena 0, stay 0, window 0, returned 0, written 0, reduced 0
   0 run     noise, y = region_0()
   1 issue   full: f32[4] = gather(s) of "up"
   2 wait    full
   3 run     z = """,
        )

    def test_inputs_that_are_outputs(self) -> None:
        got = dump_plan(plan_of(INPUTS_ARE_OUTPUTS))
        self.assertExpectedInline(
            got,
            """\
plan bwd (s, _, x)
peak 0 B: arena 0, stay 0, window 0, returned 0, written 0, reduced 0
   0 run     y = region_0(x)
   1         return (s, y, x, None, 3)

region_0:
   0         x: f32[4] = input()
   1         y: f32[4] = aten.neg(x)
   2         return (y,)
""",
        )

    def test_no_communication_is_one_region(self) -> None:
        got = dump_plan(plan_of(NO_COMMUNICATION))
        self.assertExpectedInline(
            got,
            """\
plan bwd (x)
peak 0 B: arena 0, stay 0, window 0, returned 0, written 0, reduced 0
   0 run     z = region_0(x) drop (x)
   1         return (z)

region_0:
   0         x: f32[4] = input()
   1         y: f32[4] = aten.neg(x)
   2         z: f32[4] = aten.exp(y)
   3         return (z,)
""",
        )

    def test_nothing_at_all(self) -> None:
        got = dump_plan(plan_of(EMPTY))
        self.assertExpectedInline(
            got,
            """\
plan bwd (_)
peak 0 B: arena 0, stay 0, window 0, returned 0, written 0, reduced 0
   0         return ()
""",
        )

    def test_a_region_may_only_write(self) -> None:
        got = dump_plan(plan_of(WRITES))
        self.assertExpectedInline(
            got,
            """\
plan bwd (s, x)
peak 0 B: arena 0, stay 0, window 0, returned 0, written 0, reduced 0
   0 issue   full: f32[4] = gather(s) of "up"
   1 wait    full
   2 run     y = region_0(x, full)
   3 release full
   4 run     region_1(x, y) drop (x, y)
   5         return ()

region_0:
   0         x: f32[4] = input()
   1         full: f32[4] = input()
   2         y: f32[4] = aten.mul.Tensor(x, full)
   3         return (y,)

region_1:
   0         x: f32[4] = input()
   1         y: f32[4] = input()
   2         done: f32[4] = aten.copy_(x, y)
   3         return ()
""",
        )

    def test_gradients_end_regions(self) -> None:
        got = dump_plan(plan_of(GRADIENTS))
        self.assertExpectedInline(
            got,
            """\
plan bwd (s, x)
peak 0 B: arena 0, stay 0, window 0, returned 0, written 0, reduced 0
   0 run     g = region_0(x)
   1         accumulate(g, s, None)
   2 run     h = region_1(g, x) drop (x)
   3         accumulate(h, s, [0]) drop (h)
   4 issue   reduce(s, f32[4])
   5         return (None, g)

region_0:
   0         x: f32[4] = input()
   1         g: f32[4] = aten.neg(x)
   2         return (g,)

region_1:
   0         g: f32[4] = input()
   1         x: f32[4] = input()
   2         h: f32[4] = aten.mul.Tensor(g, x)
   3         return (h,)
""",
        )


def test_constants_keep_their_values() -> None:
    gm = graph(CONSTANT)
    gm.c = torch.arange(4.0)
    inputs = random_inputs(gm)
    full = torch.cat([inputs[0]] * 2)
    assert_bitwise(run_scheduled(gm, inputs), (-gm.c, full * gm.c))


def test_writes_reach_the_input() -> None:
    gm = graph(WRITES)
    inputs = random_inputs(gm)
    expected = inputs[1] * torch.cat([inputs[0]] * 2)
    assert run_scheduled(gm, inputs) == ()
    assert torch.equal(inputs[1], expected)


def test_gradients_are_accumulated_in_order() -> None:
    gm = graph(GRADIENTS)
    shard, x = random_inputs(gm)
    run_scheduled(gm, [shard, x])
    assert group_of(shard).pieces == [None, (0,)]
    assert torch.equal(group_of(shard).full_grad, -x + -x * x)


@pytest.mark.parametrize("text", [SPLIT_ACROSS_A_CUT, VIEW_IN_TWO_REGIONS, RETURNED_VIEW])
def test_no_region_gives_a_view_of_a_buffer_to_another(text: str) -> None:
    assert_views_stay_inside(graph(text))


def assert_views_stay_inside(gm: fx.GraphModule) -> None:
    nodes = {node.name: node for node in gm.graph.nodes}
    plan = cut(gm, "bwd", trains=False)
    for step in plan.steps:
        given = step.outputs if isinstance(step, Run) else ()
        views = [name for name in given if source(nodes[name]).target is GATHER]
        assert set(views) <= set(plan.outputs)


# Lines of random graphs over vectors of 8; a unit's buffer holds two of them. {a}, {b}: any earlier vector.
_LINES = {
    "unary": "{new}: f32[8] = aten.neg({a})",
    "binary": "{new}: f32[8] = aten.mul.Tensor({a}, {b})",
    "view": "{new}: f32[8] = aten.view({a}, [8])",
    "items": "{new}_p: (f32[4], f32[4]) = aten.split_with_sizes({a}, [4, 4])\n{new}_0: f32[4] = {new}_p[0]\n"
    "{new}_1: f32[4] = {new}_p[1]\n{new}: f32[8] = aten.cat([{new}_1, {new}_0])",
    "tuple": "{new}_p: (f32[8], i64[8]) = aten.sort({a})\n{new}: f32[8] = {new}_p[0]",
    "read": "{new}_u: f32[16] = fsdp_opt.unshard({shard}, 2, torch.float32)\n"
    "{new}_p: (f32[8], f32[8]) = aten.split_with_sizes({new}_u, [8, 8])\n{new}: f32[8] = {new}_p[1]",
}
_SHARDS = ("s0", "s1", "s2")


@st.composite
def graph_texts(draw: st.DrawFn) -> str:
    """A graph with three shards and one input, some gathers, and some of its values as results."""
    lines = [f'{shard}: f32[8] = input(shard="{shard}")' for shard in _SHARDS] + ["x: f32[8] = input()"]
    vectors = ["x"]
    for number, kind in enumerate(draw(st.lists(st.sampled_from(sorted(_LINES)), min_size=1, max_size=9))):
        a, b = draw(st.sampled_from(vectors)), draw(st.sampled_from(vectors))
        new, shard = f"v{number}", draw(st.sampled_from(_SHARDS))
        lines += _LINES[kind].format(new=new, a=a, b=b, shard=shard).splitlines()
        vectors.append(new)
    results = draw(st.lists(st.sampled_from(vectors), min_size=1, max_size=3))
    return "\n".join(f"{at} {line}" for at, line in enumerate([*lines, f"return ({', '.join(results)},)"]))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(graph_texts())
def test_plans_compute_what_graphs_compute(text: str) -> None:
    gm = graph(text)
    inputs = random_inputs(gm)
    expected = gm(*inputs)
    for each in (LateReads(), GatherOnDemand()):
        each.apply(gm)
        verify(gm, 1, after=repr(each))
    assert_views_stay_inside(gm)
    text = dump_plan(cut(gm, "fwd", trains=False))
    assert dump_plan(load_plan(text)) == text
    assert_bitwise(run_scheduled(gm, inputs), expected)
