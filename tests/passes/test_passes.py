"""Each pass on a graph of a few lines: text in, one pass, text out."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from dataclasses import dataclass

import expecttest
import pytest
import torch
from torch import fx

from fsdp_passes.ir.ops import RELEASE
from fsdp_passes.ir.passes import Declined, Pass, run_passes
from fsdp_passes.ir.text import dump
from fsdp_passes.ir.verify import VerifyError, verify
from fsdp_passes.options import Options
from fsdp_passes.passes.late_reads import LateReads
from fsdp_passes.passes.lower_reduce_grad import LowerReduceGrad
from fsdp_passes.passes.pipeline import FORWARD, passes_of
from fsdp_passes.passes.stride_safe_views import StrideSafeViews
from fsdp_passes.schedule.intervals import GatherOnDemand
from tests.simulated import assert_bitwise, canonical, graph, group_of, random_inputs, run_scheduled

ALL = sorted({*FORWARD, *passes_of("bwd", Options())}, key=lambda each: each.name)


def apply(each: Pass, gm: fx.GraphModule) -> str:
    """The text after one pass, whose result keeps every rule."""
    each.apply(gm)
    gm.recompile()
    verify(gm, 2, after=repr(each))
    return dump(gm)


def applied(each: Pass, text: str) -> str:
    return apply(each, graph(text))


LINEAR = """
    0 s: f32[8] = input(shard="up")
    1 x: f32[3,4] = input()
    2 w: f32[16] = fsdp_opt.unshard(s, 2, torch.float32)
    3 split: (f32[16],) = aten.split_with_sizes(w, [16])
    4 piece: f32[16] = split[0]
    5 v: f32[4,4] = aten.view(piece, [4, 4])
    6 y: f32[3,4] = aten.relu(x)
    7 z: f32[3,4] = aten.mm(y, v)
    8 return (z,)
    """

TWO_UNITS = """
    0 s: f32[8] = input(shard="up")
    1 r: f32[8] = input(shard="down")
    2 x: f32[16] = input()
    3 a: f32[16] = fsdp_opt.unshard(s, 2, torch.float32)
    4 b: f32[16] = fsdp_opt.unshard(r, 2, torch.float32)
    5 y: f32[16] = aten.mul.Tensor(x, b)
    6 z: f32[16] = aten.mul.Tensor(y, a)
    7 t: f32[16] = aten.add.Tensor(z, b)
    8 return (t,)
    """

READ_AGAIN = """
    0 s: f32[8] = input(shard="up")
    1 r: f32[8] = input(shard="down")
    2 x: f32[16] = input()
    3 a: f32[16] = fsdp_opt.unshard(s, 2, torch.float32)
    4 y: f32[16] = aten.mul.Tensor(x, a)
    5 b: f32[16] = fsdp_opt.unshard(r, 2, torch.float32)
    6 z: f32[16] = aten.mul.Tensor(y, b)
    7 t: f32[16] = aten.add.Tensor(z, a)
    8 return (t,)
    """

GRADIENT = """
    0 s: f32[8] = input(shard="up")
    1 g: f32[6] = input()
    2 zeros: f32[10] = aten.zeros([10])
    3 c: f32[16] = aten.cat([g, zeros])
    4 r: f32[8] = fsdp_opt.reduce_grad(c, s, 2)
    5 return (None, r)
    """

NOTHING_TO_DO = """
    0 x: f32[4] = input()
    1 y: f32[4] = aten.neg(x)
    2 return (y, None, 3)
    """


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.name)
def test_nothing_to_do(each: Pass) -> None:
    assert applied(each, NOTHING_TO_DO) == canonical(NOTHING_TO_DO)


REWRITES = [
    *((each, LINEAR) for each in (StrideSafeViews(), LateReads(), GatherOnDemand())),
    *((each, TWO_UNITS) for each in (LateReads(), GatherOnDemand())),
    (GatherOnDemand(), READ_AGAIN),
]
LOWERINGS = [(LowerReduceGrad(), GRADIENT)]


@pytest.mark.parametrize("each, text", [*REWRITES, *LOWERINGS])
def test_twice_is_once(each: Pass, text: str) -> None:
    gm = graph(text)
    once = apply(each, gm)
    assert once != canonical(text)
    each.apply(gm)
    assert dump(gm) == once


@pytest.mark.parametrize("each, text", REWRITES)
def test_values_are_kept_bit_for_bit(each: Pass, text: str) -> None:
    gm = graph(text)
    inputs = random_inputs(gm)
    expected = gm(*inputs)
    assert apply(each, gm) != canonical(text)
    assert_bitwise(run_scheduled(gm, inputs), expected)


class TestStrideSafeViews(expecttest.TestCase):
    def test_view_becomes_reshape(self) -> None:
        text = """
            0 x: f32[2,4] = input()
            1 v: f32[8] = aten.view(x, [8])
            2 u: i32[8] = aten.view.dtype(v, torch.int32)
            3 return (v, u)
            """
        got = applied(StrideSafeViews(), text)
        self.assertExpectedInline(
            got,
            """\
   0         x: f32[2,4] = input()
   1         v: f32[8] = aten.reshape(x, [8])
   2         u: i32[8] = aten.view.dtype(v, torch.int32)
   3         return (v, u)
""",
        )


def test_a_view_of_other_strides_than_inferred_runs_after_stride_safe_views() -> None:
    gm = graph(
        """
        0 x: f32[2,4] = input()
        1 v: f32[8] = aten.view(x, [8])
        2 return (v,)
        """
    )
    transposed = torch.arange(8.0).reshape(4, 2).t()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        gm(transposed)
    apply(StrideSafeViews(), gm)
    assert_bitwise(gm(transposed), (torch.tensor([0.0, 2, 4, 6, 1, 3, 5, 7]),))


class TestLateReads(expecttest.TestCase):
    maxDiff = None

    def test_gather_and_views_move_to_the_first_user(self) -> None:
        got = applied(LateReads(), LINEAR)
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[8] = input(shard="up")
   1         x: f32[3,4] = input()
   2         y: f32[3,4] = aten.relu(x)
   3         w: f32[16] = fsdp_opt.unshard(s, 2, torch.float32)
   4         split: (f32[16],) = aten.split_with_sizes(w, [16])
   5         piece: f32[16] = split[0]
   6         v: f32[4,4] = aten.view(piece, [4, 4])
   7         z: f32[3,4] = aten.mm(y, v)
   8         return (z,)
""",
        )

    def test_gathers_come_in_the_order_of_their_first_uses(self) -> None:
        got = applied(LateReads(), TWO_UNITS)
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[8] = input(shard="up")
   1         r: f32[8] = input(shard="down")
   2         x: f32[16] = input()
   3         b: f32[16] = fsdp_opt.unshard(r, 2, torch.float32)
   4         y: f32[16] = aten.mul.Tensor(x, b)
   5         a: f32[16] = fsdp_opt.unshard(s, 2, torch.float32)
   6         z: f32[16] = aten.mul.Tensor(y, a)
   7         t: f32[16] = aten.add.Tensor(z, b)
   8         return (t,)
""",
        )

    def test_what_only_the_output_reads_moves_to_the_end(self) -> None:
        text = """
            0 s: f32[8] = input(shard="up")
            1 w: f32[16] = fsdp_opt.unshard(s, 2, torch.float32)
            2 v: f32[4,4] = aten.view(w, [4, 4])
            3 x: f32[8] = aten.neg(s)
            4 return (v, x)
            """
        got = applied(LateReads(), text)
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[8] = input(shard="up")
   1         x: f32[8] = aten.neg(s)
   2         w: f32[16] = fsdp_opt.unshard(s, 2, torch.float32)
   3         v: f32[4,4] = aten.view(w, [4, 4])
   4         return (v, x)
""",
        )

    def test_a_copy_is_no_view(self) -> None:
        text = """
            0 s: f32[8] = input(shard="up")
            1 w: f32[16] = fsdp_opt.unshard(s, 2, torch.float32)
            2 c: f32[16] = aten.clone(w)
            3 x: f32[8] = aten.neg(s)
            4 y: f32[16] = aten.neg(c)
            5 return (x, y)
            """
        assert applied(LateReads(), text) == canonical(text)


class TestLowerReduceGrad(expecttest.TestCase):
    maxDiff = None

    def test_pieces_that_are_zeros_have_no_gradient(self) -> None:
        got = applied(LowerReduceGrad(), GRADIENT)
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[8] = input(shard="up")
   1         g: f32[6] = input()
   2         zeros: f32[10] = aten.zeros([10])
   3         c: f32[16] = aten.cat([g, zeros])
   4         accumulate = fsdp_opt.accumulate(c, s, [0])
   5 issue   reduce = fsdp_opt.reduce(s, 2, torch.float32)
   6         return (None, None)
""",
        )


NOT_PLAIN = "not only the output reads it; it goes through autograd, and is reduced in every backward"
DECLINED = {
    "a node reads it": """
        0 s: f32[8] = input(shard="up")
        1 g: f32[16] = input()
        2 r: f32[8] = fsdp_opt.reduce_grad(g, s, 2)
        3 n: f32[8] = aten.neg(r)
        4 return (r, n)
        """,
    "returned twice": """
        0 s: f32[8] = input(shard="up")
        1 g: f32[16] = input()
        2 r: f32[8] = fsdp_opt.reduce_grad(g, s, 2)
        3 return (r, r)
        """,
    "a term of a sum": """
        0 s: f32[8] = input(shard="up")
        1 g: f32[16] = input()
        2 r: f32[8] = fsdp_opt.reduce_grad(g, s, 2)
        3 a: f32[8] = aten.add.Tensor(r, s)
        4 return (a,)
        """,
}


@pytest.mark.parametrize("reason", DECLINED)
def test_lower_reduce_grad_declines_what_is_no_plain_gradient(reason: str) -> None:
    gm = graph(DECLINED[reason])
    assert LowerReduceGrad().apply(gm) == [Declined("up", "r", NOT_PLAIN)]
    assert dump(gm) == canonical(DECLINED[reason])


def test_the_driver_returns_and_logs_what_was_declined() -> None:
    gm = graph(DECLINED["returned twice"])
    with unittest.TestCase().assertLogs("fsdp_passes", "WARNING") as logs:
        declined = run_passes(gm, passes_of("bwd", Options()), 2, lambda stage, gm: None)
    assert declined == (Declined("up", "r", NOT_PLAIN),)
    assert [line.partition(":")[2] for line in logs.output] == [
        f"fsdp_passes.ir.passes:r of unit 'up' is left as it is: {NOT_PLAIN}"
    ]


def test_accumulated_and_reduced_is_what_reduce_grad_gave() -> None:
    gm = graph(GRADIENT)
    inputs = random_inputs(gm)
    expected = gm(*inputs)[-1]
    apply(LowerReduceGrad(), gm)
    assert run_scheduled(gm, inputs)[-1] is None
    group = group_of(inputs[0])
    assert group.reductions == 1
    assert_bitwise((group.reduced,), (expected,))


class TestGatherOnDemand(expecttest.TestCase):
    maxDiff = None

    def test_release_follows_the_last_reader_through_any_view(self) -> None:
        got = applied(GatherOnDemand(), LINEAR)
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[8] = input(shard="up")
   1         x: f32[3,4] = input()
   2 issue   gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
   3 wait    full: f32[16] = fsdp_opt.wait(gather)
   4         split: (f32[16],) = aten.split_with_sizes(full, [16])
   5         piece: f32[16] = split[0]
   6         v: f32[4,4] = aten.view(piece, [4, 4])
   7         y: f32[3,4] = aten.relu(x)
   8         z: f32[3,4] = aten.mm(y, v)
   9 release release = fsdp_opt.release(full)
  10         return (z,)
""",
        )

    def test_release_waits_for_the_next_communication(self) -> None:
        text = """
            0 s: f32[8] = input(shard="up")
            1 r: f32[8] = input(shard="down")
            2 a: bf16[16] = fsdp_opt.unshard(s, 2, torch.bfloat16, reshard=False)
            3 y: bf16[16] = aten.neg(a)
            4 z: bf16[16] = aten.neg(y)
            5 b: f32[16] = fsdp_opt.unshard(r, 2, torch.float32)
            6 t: f32[16] = aten.mul.Tensor(z, b)
            7 return (t,)
            """
        got = applied(GatherOnDemand(), text)
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[8] = input(shard="up")
   1         r: f32[8] = input(shard="down")
   2 issue   gather: bf16[16] = fsdp_opt.gather(s, 2, torch.bfloat16, reshard=False)
   3 wait    full: bf16[16] = fsdp_opt.wait(gather)
   4         y: bf16[16] = aten.neg(full)
   5         z: bf16[16] = aten.neg(y)
   6 release release = fsdp_opt.release(full)
   7 issue   gather_1: f32[16] = fsdp_opt.gather(r, 2, torch.float32)
   8 wait    full_1: f32[16] = fsdp_opt.wait(gather_1)
   9         t: f32[16] = aten.mul.Tensor(z, full_1)
  10 release release_1 = fsdp_opt.release(full_1)
  11         return (t,)
""",
        )

    def test_two_live_buffers(self) -> None:
        got = applied(GatherOnDemand(), TWO_UNITS)
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[8] = input(shard="up")
   1         r: f32[8] = input(shard="down")
   2         x: f32[16] = input()
   3 issue   gather_1: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
   4 wait    full_1: f32[16] = fsdp_opt.wait(gather_1)
   5 issue   gather: f32[16] = fsdp_opt.gather(r, 2, torch.float32)
   6 wait    full: f32[16] = fsdp_opt.wait(gather)
   7         y: f32[16] = aten.mul.Tensor(x, full)
   8         z: f32[16] = aten.mul.Tensor(y, full_1)
   9 release release = fsdp_opt.release(full)
  10 release release_1 = fsdp_opt.release(full_1)
  11 issue   gather_2: f32[16] = fsdp_opt.gather(r, 2, torch.float32)
  12 wait    full_2: f32[16] = fsdp_opt.wait(gather_2)
  13         t: f32[16] = aten.add.Tensor(z, full_2)
  14 release release_2 = fsdp_opt.release(full_2)
  15         return (t,)
""",
        )

    def test_a_buffer_that_is_read_again_behind_another_gather(self) -> None:
        got = applied(GatherOnDemand(), READ_AGAIN)
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[8] = input(shard="up")
   1         r: f32[8] = input(shard="down")
   2         x: f32[16] = input()
   3 issue   gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
   4 wait    full: f32[16] = fsdp_opt.wait(gather)
   5         y: f32[16] = aten.mul.Tensor(x, full)
   6 release release = fsdp_opt.release(full)
   7 issue   gather_1: f32[16] = fsdp_opt.gather(r, 2, torch.float32)
   8 wait    full_1: f32[16] = fsdp_opt.wait(gather_1)
   9         z: f32[16] = aten.mul.Tensor(y, full_1)
  10 release release_1 = fsdp_opt.release(full_1)
  11 issue   gather_2: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
  12 wait    full_2: f32[16] = fsdp_opt.wait(gather_2)
  13         t: f32[16] = aten.add.Tensor(z, full_2)
  14 release release_2 = fsdp_opt.release(full_2)
  15         return (t,)
""",
        )

    def test_what_the_graph_returns_is_not_released(self) -> None:
        text = """
            0 s: f32[8] = input(shard="up")
            1 r: f32[8] = input(shard="down")
            2 a: f32[16] = fsdp_opt.unshard(s, 2, torch.float32)
            3 b: f32[16] = fsdp_opt.unshard(r, 2, torch.float32)
            4 v: f32[4,4] = aten.view(b, [4, 4])
            5 y: f32[16] = aten.neg(a)
            6 return (a, v, y)
            """
        got = applied(GatherOnDemand(), text)
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[8] = input(shard="up")
   1         r: f32[8] = input(shard="down")
   2 issue   gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
   3 wait    full: f32[16] = fsdp_opt.wait(gather)
   4 issue   gather_1: f32[16] = fsdp_opt.gather(r, 2, torch.float32)
   5 wait    full_1: f32[16] = fsdp_opt.wait(gather_1)
   6         v: f32[4,4] = aten.view(full_1, [4, 4])
   7         y: f32[16] = aten.neg(full)
   8         return (full, v, y)
""",
        )


@pytest.mark.parametrize(
    "view",
    ["aten.reshape({}, [16])", "aten._unsafe_view({}, [16])", "aten.contiguous({})", "aten.detach({})"],
)
def test_readers_of_a_view_keep_the_buffer(view: str) -> None:
    text = f"""
        0 s: f32[8] = input(shard="up")
        1 t: f32[8] = input(shard="down")
        2 w: f32[16] = fsdp_opt.unshard(s, 2, torch.float32)
        3 v: f32[16] = {view.format("w")}
        4 r: f32[16] = fsdp_opt.unshard(t, 2, torch.float32)
        5 y: f32[16] = aten.mul.Tensor(v, r)
        6 return (y,)
        """
    gm = graph(text)
    apply(GatherOnDemand(), gm)
    targets = [node.target for node in gm.graph.nodes]
    assert targets.count(RELEASE) == 2
    assert targets.index(RELEASE) > targets.index(torch.ops.aten.mul.Tensor)


class TestPipeline(expecttest.TestCase):
    maxDiff = None

    def test_forward(self) -> None:
        gm = graph(LINEAR)
        run_passes(gm, FORWARD, 2, lambda stage, gm: None)
        got = dump(gm)
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[8] = input(shard="up")
   1         x: f32[3,4] = input()
   2         y: f32[3,4] = aten.relu(x)
   3 issue   gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
   4 wait    full: f32[16] = fsdp_opt.wait(gather)
   5         split: (f32[16],) = aten.split_with_sizes(full, [16])
   6         piece: f32[16] = split[0]
   7         v: f32[4,4] = aten.reshape(piece, [4, 4])
   8         z: f32[3,4] = aten.mm(y, v)
   9 release release = fsdp_opt.release(full)
  10         return (z,)
""",
        )


def test_nothing_is_gathered_that_nobody_reads() -> None:
    gm = graph(
        """
        0 s: f32[8] = input(shard="up")
        1 w: f32[16] = fsdp_opt.unshard(s, 2, torch.float32)
        2 v: f32[4,4] = aten.view(w, [4, 4])
        3 return (None,)
        """
    )
    apply(GatherOnDemand(), gm)
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "output"]


@dataclass(frozen=True)
class DropsReleases(Pass):
    """A wrong pass."""

    much: bool = True

    def apply(self, gm: fx.GraphModule) -> None:
        for release in gm.graph.find_nodes(op="call_function", target=RELEASE):
            gm.graph.erase_node(release)


def _dumps(level: int, *passes: Pass) -> Iterator[str]:
    stages: list[str] = []
    run_passes(graph(LINEAR), passes, level, lambda stage, gm: stages.append(stage))
    yield from stages


def test_the_driver_dumps_after_each_pass() -> None:
    assert list(_dumps(1, *FORWARD)) == ["captured", "stride_safe_views", "late_reads", "gather_on_demand"]


def test_the_driver_names_the_pass_that_broke_a_rule() -> None:
    with pytest.raises(VerifyError, match=r"after: DropsReleases\(much=True\)"):
        list(_dumps(1, GatherOnDemand(), DropsReleases()))
    assert list(_dumps(0, GatherOnDemand(), DropsReleases()))[-1] == "drops_releases"
