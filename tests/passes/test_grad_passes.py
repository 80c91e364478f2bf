"""The passes that make writes of concatenated gradients, on graphs of a few lines."""

from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
from torch import Tensor, fx

from fsdp_passes.ir.nodes import call, calls, operand, operands, results
from fsdp_passes.ir.ops import GRAD_MM, GRAD_SLICE, REDUCE_GRAD
from fsdp_passes.ir.passes import Declined, Pass
from fsdp_passes.ir.text import dump
from fsdp_passes.ir.verify import verify
from fsdp_passes.passes.flat_grad_writes import FlatGradWrites
from fsdp_passes.passes.one_reduction import OneReduction
from fsdp_passes.passes.peel_transposes import PeelTransposes
from tests.simulated import assert_bitwise, canonical, graph, group_of, random_inputs, run_scheduled

VIEWS, SEPARATE, SUMS = FlatGradWrites(), FlatGradWrites(separate=True), FlatGradWrites(sum_products=True)


def apply(each: Pass, gm: fx.GraphModule) -> list[Declined]:
    """What one pass declined; its result keeps every rule."""
    declined = each.apply(gm) or []
    gm.recompile()
    verify(gm, 2, after=repr(each))
    return declined


def applied(each: Pass, text: str) -> str:
    """The text after one pass, which declines nothing and finds nothing to do a second time."""
    gm = graph(text)
    assert apply(each, gm) == []
    once = dump(gm)
    assert apply(each, gm) == []
    assert dump(gm) == once
    return once


def is_shard(value: Any) -> bool:
    return hasattr(value, "group")


def cloned(inputs: list[Any]) -> list[Any]:
    """Inputs that a graph may write into; shards, which have owners, are the same."""
    return [value if is_shard(value) else value.clone() for value in inputs]


def two_microbatches(gm: fx.GraphModule, whole_numbers: bool = False) -> list[list[Any]]:
    """Inputs of two runs, with the same shards."""
    first = [value if is_shard(value) or not whole_numbers else value.round() for value in random_inputs(gm)]
    return [first, [value if is_shard(value) else value.flip(0) + value for value in first]]


NOTHING_TO_DO = """
    0 s: f32[8] = input(shard="up")
    1 x: f32[4,4] = input()
    2 t: f32[4,4]{1,4} = aten.t(x)
    3 v: f32[16] = aten.reshape(t, [16])
    4 c: f32[32] = aten.cat([v, v])
    5 d: f32[32] = aten.add.Tensor(c, c)
    6 return (d, None, 3)
    """


@pytest.mark.parametrize("each", [OneReduction(), PeelTransposes(), VIEWS, SEPARATE, SUMS], ids=repr)
def test_nothing_to_do(each: Pass) -> None:
    assert applied(each, NOTHING_TO_DO) == canonical(NOTHING_TO_DO)


# Gradients of a flat group, each with one reduction.
WRITTEN = {
    "a product, a sum and zeros": """
        0 s: f32[16] = input(shard="up")
        1 a: f32[4,3] = input()
        2 b: f32[3,4] = input()
        3 h: f32[4] = aten.sum.dim_IntList(b, [0])
        4 m: f32[4,4] = aten.mm(a, b)
        5 v: f32[16] = aten.reshape(m, [16])
        6 zeros: f32[12] = aten.zeros([12])
        7 c: f32[32] = aten.cat([v, h, zeros])
        8 r: f32[16] = fsdp_opt.reduce_grad(c, s, 2)
        9 return (None, r)
        """,
    "a node for two pieces": """
        0 s: f32[8] = input(shard="up")
        1 x: f32[2,4] = input()
        2 g: f32[2,4] = aten.exp(x)
        3 v: f32[8] = aten.reshape(g, [8])
        4 c: f32[16] = aten.cat([v, v])
        5 r: f32[8] = fsdp_opt.reduce_grad(c, s, 2)
        6 return (r,)
        """,
    "an input that is the one piece": """
        0 x: f32[4,4] = input()
        1 s: f32[8] = input(shard="up")
        2 v: f32[16] = aten.view(x, [16])
        3 c: f32[16] = aten.cat([v])
        4 r: f32[8] = fsdp_opt.reduce_grad(c, s, 2)
        5 return (r, v)
        """,
    "stride 0": """
        0 s: f32[8] = input(shard="up")
        1 x: f32[4,1] = input()
        2 e: f32[4,4]{1,0} = aten.expand(x, [4, 4])
        3 v: f32[16] = aten.reshape(e, [16])
        4 c: f32[16] = aten.cat([v])
        5 r: f32[8] = fsdp_opt.reduce_grad(c, s, 2)
        6 return (r,)
        """,
    "slices of one producer": """
        0 s: f32[8] = input(shard="up")
        1 x: f32[2,8] = input()
        2 y: f32[2,8] = aten.exp(x)
        3 p: f32[2,3]{8,1} = aten.slice.Tensor(y, 1, 0, 3)
        4 q: f32[2,5]{8,1} = aten.slice.Tensor(y, 1, 3, 8)
        5 v: f32[10] = aten.reshape(q, [10])
        6 u: f32[6] = aten.reshape(p, [6])
        7 c: f32[16] = aten.cat([v, u])
        8 r: f32[8] = fsdp_opt.reduce_grad(c, s, 2)
        9 return (r,)
        """,
    "a transposed producer": """
        0 s: f32[8] = input(shard="up")
        1 a: f32[2,4] = input()
        2 m: f32[2,2,4] = aten.stack([a, a])
        3 t: f32[4,2,2]{1,4,8} = aten.permute(m, [2, 1, 0])
        4 k: f32[4,2,2] = aten.clone(t, memory_format=torch.contiguous_format)
        5 u: f32[16] = aten._unsafe_view(k, [16])
        6 c: f32[16] = aten.cat([u])
        7 r: f32[8] = fsdp_opt.reduce_grad(c, s, 2)
        8 return (r,)
        """,
    "nothing but zeros": """
        0 s: f32[8] = input(shard="up")
        1 x: f32[4] = input()
        2 zeros: f32[12] = aten.zeros([12])
        3 more: f32[4] = aten.new_zeros(x, [4])
        4 c: f32[16] = aten.cat([zeros, more])
        5 r: f32[8] = fsdp_opt.reduce_grad(c, s, 2)
        6 return (r,)
        """,
    "added up in another dtype than the shard's": """
        0 s: bf16[8] = input(shard="up")
        1 x: bf16[4,4] = input()
        2 g: bf16[4,4] = aten.exp(x)
        3 v: bf16[16] = aten.reshape(g, [16])
        4 c: bf16[16] = aten.cat([v])
        5 r: bf16[8] = fsdp_opt.reduce_grad(c, s, 2, reduce_dtype=torch.float32)
        6 return (r,)
        """,
    "no dimensions, and no elements": """
        0 s: f32[8] = input(shard="up")
        1 x: f32[15] = input()
        2 g: f32[] = aten.sum(x)
        3 v: f32[1] = aten.reshape(g, [1])
        4 n: f32[0] = aten.slice.Tensor(x, 0, 0, 0)
        5 c: f32[16] = aten.cat([x, n, v])
        6 r: f32[8] = fsdp_opt.reduce_grad(c, s, 2)
        7 return (r,)
        """,
    "two units": """
        0 s: f32[8] = input(shard="up")
        1 p: f32[4] = input(shard="down")
        2 x: f32[16] = input()
        3 g: f32[16] = aten.exp(x)
        4 h: f32[8] = aten.slice.Tensor(g, 0, 4, 12)
        5 c: f32[16] = aten.cat([g])
        6 d: f32[8] = aten.cat([h])
        7 r: f32[8] = fsdp_opt.reduce_grad(c, s, 2)
        8 q: f32[4] = fsdp_opt.reduce_grad(d, p, 2)
        9 return (r, q)
        """,
    "memory that is written before the cat": """
        0 s: f32[8] = input(shard="up")
        1 x: f32[4,4] = input()
        2 y: f32[4,4] = input()
        3 v: f32[16] = aten.view(x, [16])
        4 done: f32[4,4] = aten.copy_(x, y)
        5 c: f32[16] = aten.cat([v])
        6 r: f32[8] = fsdp_opt.reduce_grad(c, s, 2)
        7 return (r,)
        """,
    "memory that is written after the cat": """
        0 s: f32[8] = input(shard="up")
        1 x: f32[4,4] = input()
        2 y: f32[4,4] = input()
        3 v: f32[16] = aten.view(x, [16])
        4 c: f32[16] = aten.cat([v])
        5 done: f32[4,4] = aten.copy_(x, y)
        6 r: f32[8] = fsdp_opt.reduce_grad(c, s, 2)
        7 return (r,)
        """,
    "a copy of memory that is written": """
        0 s: f32[8] = input(shard="up")
        1 x: f32[4,4] = input()
        2 y: f32[4,4] = input()
        3 k: f32[4,4] = aten.clone(x)
        4 done: f32[4,4] = aten.copy_(x, y)
        5 v: f32[16] = aten.view(k, [16])
        6 c: f32[16] = aten.cat([v])
        7 r: f32[8] = fsdp_opt.reduce_grad(c, s, 2)
        8 return (r,)
        """,
    "a copy that is written": """
        0 s: f32[8] = input(shard="up")
        1 x: f32[4,4] = input()
        2 y: f32[4,4] = input()
        3 k: f32[4,4] = aten.clone(x)
        4 done: f32[4,4] = aten.copy_(k, y)
        5 v: f32[16] = aten.view(k, [16])
        6 c: f32[16] = aten.cat([v])
        7 r: f32[8] = fsdp_opt.reduce_grad(c, s, 2)
        8 return (r,)
        """,
}


class Recorder(fx.Interpreter):
    """Runs a graph, and keeps what it reduces: name of the shard -> the whole gradient."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.full_grads: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.target is REDUCE_GRAD:
            self.full_grads[operand(n, 1).name] = self.env[operand(n)].clone()
        return super().run_node(n)


def full_grads(gm: fx.GraphModule, inputs: list[Any]) -> dict[str, Tensor]:
    """What `gm`, a graph before FlatGradWrites, reduces: name of the shard -> the whole gradient."""
    recorder = Recorder(gm)
    recorder.run(*cloned(inputs))
    return recorder.full_grads


def written_grad(shard: Tensor, sizes: list[int]) -> Tensor:
    """What was written for `shard`, whose flat group has pieces of these sizes: zeros where nothing was."""
    group = group_of(shard)
    pieces = [group.grads[piece] if piece in group.written else torch.zeros(n) for piece, n in enumerate(sizes)]
    assert group.grads.keys() == group.written
    return torch.cat(pieces)


@pytest.mark.parametrize("each", [VIEWS, SEPARATE, SUMS], ids=repr)
@pytest.mark.parametrize("kind", WRITTEN)
def test_writes_add_up_what_the_cats_held(each: FlatGradWrites, kind: str) -> None:
    """In two microbatches, bit for bit; products that are added up unrounded are of whole numbers here."""
    gm = graph(WRITTEN[kind])
    reductions = calls(gm.graph, REDUCE_GRAD)
    dtypes: list[Any] = [r.kwargs.get("reduce_dtype") or r.meta["val"].dtype for r in reductions]
    sizes = [[len(piece.meta["val"]) for piece in operands(operand(r))] for r in reductions]
    were_gradients = [result in reductions for result in results(gm.graph)]
    microbatches = two_microbatches(gm, whole_numbers=each.sum_products)
    shards = [value for value in microbatches[0] if is_shard(value)]
    grads = [full_grads(gm, values) for values in microbatches]
    assert apply(each, gm) == []
    total: dict[str, Tensor] = {}
    for number, values in enumerate(microbatches, 1):
        returned = run_scheduled(gm, cloned(values))
        assert all(value is None for value, was in zip(returned, were_gradients, strict=True) if was)
        for (name, grad), dtype, shard, pieces in zip(grads[number - 1].items(), dtypes, shards, sizes, strict=True):
            total[name] = grad.to(dtype) if number == 1 else total[name] + grad.to(dtype)
            assert written_grad(shard, pieces).dtype == dtype
            assert_bitwise((written_grad(shard, pieces),), (total[name],))
            assert group_of(shard).reductions == number


class TestFlatGradWrites(expecttest.TestCase):
    maxDiff = None

    def test_each_gradient_is_written_where_it_is_computed(self) -> None:
        got = applied(VIEWS, WRITTEN["a product, a sum and zeros"])
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[16] = input(shard="up")
   1         a: f32[4,3] = input()
   2         b: f32[3,4] = input()
   3         h: f32[4] = aten.sum.dim_IntList(b, [0])
   4         grad_slice: f32[4] = fsdp_opt.grad_slice(s, 1, [4], torch.float32)
   5         grad_write = fsdp_opt.grad_write(grad_slice, h)
   6         m: f32[4,4] = aten.mm(a, b)
   7         grad_slice_1: f32[4,4] = fsdp_opt.grad_slice(s, 0, [4, 4], torch.float32)
   8         grad_write_1 = fsdp_opt.grad_write(grad_slice_1, m)
   9 issue   reduce = fsdp_opt.reduce(s, 2, torch.float32)
  10         return (None, None)
""",
        )

    def test_slices_may_be_separate(self) -> None:
        got = applied(SEPARATE, WRITTEN["a node for two pieces"])
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[8] = input(shard="up")
   1         x: f32[2,4] = input()
   2         g: f32[2,4] = aten.exp(x)
   3         grad_slice_1: f32[2,4] = fsdp_opt.grad_slice(s, 1, [2, 4], torch.float32, separate=True)
   4         grad_write_1 = fsdp_opt.grad_write(grad_slice_1, g)
   5         grad_slice: f32[2,4] = fsdp_opt.grad_slice(s, 0, [2, 4], torch.float32, separate=True)
   6         grad_write = fsdp_opt.grad_write(grad_slice, g)
   7 issue   reduce = fsdp_opt.reduce(s, 2, torch.float32)
   8         return (None,)
""",
        )

    def test_an_input_is_written_after_the_inputs(self) -> None:
        got = applied(VIEWS, WRITTEN["an input that is the one piece"])
        self.assertExpectedInline(
            got,
            """\
   0         x: f32[4,4] = input()
   1         s: f32[8] = input(shard="up")
   2         grad_slice: f32[4,4] = fsdp_opt.grad_slice(s, 0, [4, 4], torch.float32)
   3         grad_write = fsdp_opt.grad_write(grad_slice, x)
   4 issue   reduce = fsdp_opt.reduce(s, 2, torch.float32)
   5         v: f32[16] = aten.view(x, [16])
   6         return (None, v)
""",
        )

    def test_a_gradient_that_is_spread_over_its_shape(self) -> None:
        got = applied(VIEWS, WRITTEN["stride 0"])
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[8] = input(shard="up")
   1         x: f32[4,1] = input()
   2         e: f32[4,4]{1,0} = aten.expand(x, [4, 4])
   3         grad_slice: f32[4,4] = fsdp_opt.grad_slice(s, 0, [4, 4], torch.float32)
   4         grad_write = fsdp_opt.grad_write(grad_slice, e)
   5 issue   reduce = fsdp_opt.reduce(s, 2, torch.float32)
   6         return (None,)
""",
        )

    def test_writes_are_in_the_order_of_the_producers(self) -> None:
        got = applied(VIEWS, WRITTEN["slices of one producer"])
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[8] = input(shard="up")
   1         x: f32[2,8] = input()
   2         y: f32[2,8] = aten.exp(x)
   3         p: f32[2,3]{8,1} = aten.slice.Tensor(y, 1, 0, 3)
   4         grad_slice: f32[2,3] = fsdp_opt.grad_slice(s, 1, [2, 3], torch.float32)
   5         grad_write = fsdp_opt.grad_write(grad_slice, p)
   6         q: f32[2,5]{8,1} = aten.slice.Tensor(y, 1, 3, 8)
   7         grad_slice_1: f32[2,5] = fsdp_opt.grad_slice(s, 0, [2, 5], torch.float32)
   8         grad_write_1 = fsdp_opt.grad_write(grad_slice_1, q)
   9 issue   reduce = fsdp_opt.reduce(s, 2, torch.float32)
  10         return (None,)
""",
        )

    def test_no_copy_is_made_of_a_transposed_gradient(self) -> None:
        got = applied(VIEWS, WRITTEN["a transposed producer"])
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[8] = input(shard="up")
   1         a: f32[2,4] = input()
   2         m: f32[2,2,4] = aten.stack([a, a])
   3         t: f32[4,2,2]{1,4,8} = aten.permute(m, [2, 1, 0])
   4         grad_slice: f32[4,2,2] = fsdp_opt.grad_slice(s, 0, [4, 2, 2], torch.float32)
   5         grad_write = fsdp_opt.grad_write(grad_slice, t)
   6 issue   reduce = fsdp_opt.reduce(s, 2, torch.float32)
   7         return (None,)
""",
        )

    def test_a_group_without_gradients_is_reduced(self) -> None:
        got = applied(VIEWS, WRITTEN["nothing but zeros"])
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[8] = input(shard="up")
   1         x: f32[4] = input()
   2 issue   reduce = fsdp_opt.reduce(s, 2, torch.float32)
   3         return (None,)
""",
        )

    def test_slices_are_of_the_reduce_dtype(self) -> None:
        got = applied(VIEWS, WRITTEN["added up in another dtype than the shard's"])
        self.assertExpectedInline(
            got,
            """\
   0         s: bf16[8] = input(shard="up")
   1         x: bf16[4,4] = input()
   2         g: bf16[4,4] = aten.exp(x)
   3         grad_slice: f32[4,4] = fsdp_opt.grad_slice(s, 0, [4, 4], torch.float32)
   4         grad_write = fsdp_opt.grad_write(grad_slice, g)
   5 issue   reduce = fsdp_opt.reduce(s, 2, torch.float32)
   6         return (None,)
""",
        )

    def test_each_unit_is_reduced_after_its_last_write(self) -> None:
        got = applied(VIEWS, WRITTEN["two units"])
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[8] = input(shard="up")
   1         p: f32[4] = input(shard="down")
   2         x: f32[16] = input()
   3         g: f32[16] = aten.exp(x)
   4         grad_slice: f32[16] = fsdp_opt.grad_slice(s, 0, [16], torch.float32)
   5         grad_write = fsdp_opt.grad_write(grad_slice, g)
   6 issue   reduce = fsdp_opt.reduce(s, 2, torch.float32)
   7         h: f32[8] = aten.slice.Tensor(g, 0, 4, 12)
   8         grad_slice_1: f32[8] = fsdp_opt.grad_slice(p, 0, [8], torch.float32)
   9         grad_write_1 = fsdp_opt.grad_write(grad_slice_1, h)
  10 issue   reduce_1 = fsdp_opt.reduce(p, 2, torch.float32)
  11         return (None, None)
""",
        )

    def test_a_write_sees_what_the_cat_saw(self) -> None:
        got = applied(VIEWS, WRITTEN["memory that is written before the cat"])
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[8] = input(shard="up")
   1         x: f32[4,4] = input()
   2         y: f32[4,4] = input()
   3         v: f32[16] = aten.view(x, [16])
   4         done: f32[4,4] = aten.copy_(x, y)
   5         grad_slice: f32[16] = fsdp_opt.grad_slice(s, 0, [16], torch.float32)
   6         grad_write = fsdp_opt.grad_write(grad_slice, v)
   7 issue   reduce = fsdp_opt.reduce(s, 2, torch.float32)
   8         return (None,)
""",
        )

    def test_a_product_is_added_up_in_its_slice(self) -> None:
        got = applied(SUMS, WRITTEN["a product, a sum and zeros"])
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[16] = input(shard="up")
   1         a: f32[4,3] = input()
   2         b: f32[3,4] = input()
   3         h: f32[4] = aten.sum.dim_IntList(b, [0])
   4         grad_slice: f32[4] = fsdp_opt.grad_slice(s, 1, [4], torch.float32)
   5         grad_write = fsdp_opt.grad_write(grad_slice, h)
   6         grad_slice_1: f32[4,4] = fsdp_opt.grad_slice(s, 0, [4, 4], torch.float32)
   7         grad_mm = fsdp_opt.grad_mm(grad_slice_1, a, b)
   8 issue   reduce = fsdp_opt.reduce(s, 2, torch.float32)
   9         return (None, None)
""",
        )


def test_a_gradient_of_symbolic_size_is_written_in_the_size_of_its_piece() -> None:
    """Sizes that a guard has fixed stay symbols in the types of what was computed before."""
    gm = graph(
        """
        0 s: f32[48] = input(shard="up")
        1 n: sym[s0] = input()
        2 x: f32[s0,4] = input()
        3 y: f32[s0,4] = aten.neg(x)
        4 z: f32[96] = aten.zeros([96])
        5 c: f32[96] = aten.cat([z])
        6 r: f32[48] = fsdp_opt.reduce_grad(c, s, 2)
        7 return (r,)
        """
    )
    zeros, y = (calls(gm.graph, target)[0] for target in (torch.ops.aten.zeros.default, torch.ops.aten.neg.default))
    with gm.graph.inserting_before(zeros):
        zeros.replace_all_uses_with(call(gm.graph, torch.ops.aten.reshape.default, y, [96]))
    gm.graph.erase_node(zeros)
    assert not isinstance(y.meta["val"].shape[0], int)
    assert VIEWS.apply(gm) == []
    (slice_,) = calls(gm.graph, GRAD_SLICE)
    assert slice_.args[1:3] == (0, [96])


_MM = """
    0 s: f32[8] = input(shard="up")
    1 a: f32[4,2] = input()
    2 b: f32[2,4] = input()
    3 m: f32[4,4] = aten.mm(a, b)
    4 v: f32[16] = aten.reshape(m, [16])
    5 c: f32[16] = aten.cat([v])
    6 r: f32[8] = fsdp_opt.reduce_grad(c, s, 2)
    7 return (r,)
    """
NO_PRODUCT = {
    "the product is read, too": _MM.replace("(r,)", "(r, m)"),
    "its reshape is read, too": _MM.replace("(r,)", "(r, v)"),
    "it is a gradient twice": _MM.replace("f32[8]", "f32[16]")
    .replace("c: f32[16]", "c: f32[32]")
    .replace("[v]", "[v, v]"),
    "sums are in bf16": _MM.replace("f32", "bf16"),
    "it is written before the cat": _MM.replace("5 c:", "5 done: f32[4,4] = aten.neg_(m)\n    5 c:"),
    "it is scaled": _MM.replace("4 v", "4 w: f32[4,4] = aten.mul.Tensor(m, m)\n    4 v").replace(
        "(m, [16])", "(w, [16])"
    ),
    "it is added to something": _MM.replace("mm(a, b)", "addmm(s, a, b)")
    .replace("s: f32[8]", "s: f32[4]")
    .replace("r: f32[8]", "r: f32[4]")
    .replace("c, s, 2", "c, s, 4"),
}


@pytest.mark.parametrize("kind", NO_PRODUCT)
def test_what_is_more_than_a_product_is_rounded_before_it_is_added_up(kind: str) -> None:
    assert "grad_mm" in applied(SUMS, _MM)
    assert applied(SUMS, NO_PRODUCT[kind]) == applied(VIEWS, NO_PRODUCT[kind])


@pytest.mark.parametrize("dtype, reduces", [("bf16", ", reduce_dtype=torch.float32"), ("f32", "")])
def test_a_product_of_any_dtype_is_added_up_in_fp32(dtype: str, reduces: str) -> None:
    gm = graph(_MM.replace("f32", dtype).replace("s, 2)", f"s, 2{reduces})"))
    apply(SUMS, gm)
    (product,) = calls(gm.graph, GRAD_MM)
    assert operand(product).meta["val"].dtype == torch.float32


_CAT = """
    0 s: f32[8] = input(shard="up")
    1 p: f32[8] = input(shard="down")
    2 g: f32[16] = input()
    3 c: f32[16] = aten.cat([g])
    {}
    9 return ({})
    """
_REDUCED = "4 r: f32[8] = fsdp_opt.reduce_grad(c, s, 2)"
_NEG = "5 n: f32[16] = aten.neg(c)"
# The lines after the cat, what is returned, and the reason; without one FlatGradWrites says nothing.
LEFT: dict[str, tuple[str, str, list[Declined]]] = {
    "no cat": (_REDUCED.replace("(c,", "(g,"), "r,", [Declined("up", "r", "g is no cat; it is added up as a whole")]),
    "a sum of cats": (
        "4 d: f32[16] = aten.cat([g])\n    5 a: f32[16] = aten.add.Tensor(c, d)\n    " + _REDUCED.replace("(c,", "(a,"),
        "r,",
        [Declined("up", "r", "a is no cat; it is added up as a whole")],
    ),
    "others read the cat": (
        f"{_REDUCED}\n    {_NEG}\n    6 o: f32[16] = aten.exp(c)",
        "r, n, o",
        [Declined("up", "r", "n, o reads c, too; it is added up as a whole")],
    ),
    "the cat is returned": (_REDUCED, "c, r", [Declined("up", "r", "output reads c, too; it is added up as a whole")]),
    "two units reduce the cat": (
        f"{_REDUCED}\n    5 q: f32[8] = fsdp_opt.reduce_grad(c, p, 2)",
        "r, q",
        [
            Declined("up", "r", "q reads c, too; it is added up as a whole"),
            Declined("down", "q", "r reads c, too; it is added up as a whole"),
        ],
    ),
    "another node reads the gradient": (f"{_REDUCED}\n    5 n: f32[8] = aten.neg(r)", "r, n", []),
    "the gradient is returned twice": (_REDUCED, "r, r", []),
}


@pytest.mark.parametrize("each", [VIEWS, SEPARATE, SUMS], ids=repr)
@pytest.mark.parametrize("kind", LEFT)
def test_flat_grad_writes_declines_and_says_why(each: FlatGradWrites, kind: str) -> None:
    lines, returned, declined = LEFT[kind]
    text = _CAT.format(lines, returned)
    gm = graph(text)
    assert apply(each, gm) == declined
    assert dump(gm) == canonical(text)


def test_one_unit_may_be_declined_and_another_written() -> None:
    lines = f"{_REDUCED}\n    5 q: f32[8] = fsdp_opt.reduce_grad(g, p, 2)"
    gm = graph(_CAT.format(lines, "r, q"))
    assert apply(VIEWS, gm) == [Declined("down", "q", "g is no cat; it is added up as a whole")]
    assert [operand(slice_).name for slice_ in calls(gm.graph, GRAD_SLICE)] == ["s"]
    assert [operand(left, 1).name for left in calls(gm.graph, REDUCE_GRAD)] == ["p"]


# One rank: a shard is the whole flat group, and what is returned is all of its gradient.
SUMMED = {
    "two": """
        0 s: f32[16] = input(shard="up")
        1 a: f32[4] = input()
        2 b: f32[12] = input()
        3 zeros: f32[4] = aten.zeros([4])
        4 more: f32[12] = aten.zeros([12])
        5 c: f32[16] = aten.cat([a, more])
        6 d: f32[16] = aten.cat([zeros, b])
        7 p: f32[16] = fsdp_opt.reduce_grad(c, s, 1, reduce_dtype=torch.float32)
        8 q: f32[16] = fsdp_opt.reduce_grad(d, s, 1, reduce_dtype=torch.float32)
        9 t: f32[16] = aten.add.Tensor(p, q)
        10 return (t, None)
        """,
    "three, from the left": """
        0 s: f32[16] = input(shard="up")
        1 x: f32[16] = input()
        2 y: f32[16] = input()
        3 z: f32[16] = input()
        4 c: f32[16] = aten.cat([x])
        5 d: f32[16] = aten.cat([y])
        6 e: f32[16] = aten.cat([z])
        7 p: f32[16] = fsdp_opt.reduce_grad(c, s, 1)
        8 q: f32[16] = fsdp_opt.reduce_grad(d, s, 1)
        9 r: f32[16] = fsdp_opt.reduce_grad(e, s, 1)
        10 t: f32[16] = aten.add.Tensor(p, q)
        11 u: f32[16] = aten.add.Tensor(t, r)
        12 return (u,)
        """,
    "a sum of cats that is reduced": """
        0 s: f32[16] = input(shard="up")
        1 a: f32[4] = input()
        2 b: f32[4] = input()
        3 x: f32[8] = input()
        4 y: f32[8] = input()
        5 zeros: f32[4] = aten.zeros([4])
        6 c: f32[16] = aten.cat([a, x, zeros])
        7 d: f32[16] = aten.cat([b, y, zeros])
        8 t: f32[16] = aten.add.Tensor(c, d)
        9 r: f32[16] = fsdp_opt.reduce_grad(t, s, 1)
        10 return (r,)
        """,
    "gradients that are no cats": """
        0 s: f32[16] = input(shard="up")
        1 x: f32[16] = input()
        2 y: f32[16] = input()
        3 p: f32[16] = fsdp_opt.reduce_grad(x, s, 1)
        4 q: f32[16] = fsdp_opt.reduce_grad(y, s, 1)
        5 t: f32[16] = aten.add.Tensor(p, q)
        6 return (t,)
        """,
}
SUMMED["three, from the right"] = (
    SUMMED["three, from the left"].replace("Tensor(p, q)", "Tensor(q, r)").replace("Tensor(t, r)", "Tensor(p, t)")
)
SUMMED["memory that is written after its cat"] = SUMMED["a sum of cats that is reduced"].replace(
    "7 d:", "7 done: f32[4] = aten.copy_(a, b)\n        7 d:"
)


class TestOneReduction(expecttest.TestCase):
    maxDiff = None

    def test_two_reductions_are_one_of_one_cat(self) -> None:
        got = applied(OneReduction(), SUMMED["two"])
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[16] = input(shard="up")
   1         a: f32[4] = input()
   2         b: f32[12] = input()
   3         cat: f32[16] = aten.cat([a, b])
   4         reduce_grad: f32[16] = fsdp_opt.reduce_grad(cat, s, 1, reduce_dtype=torch.float32)
   5         return (reduce_grad, None)
""",
        )

    def test_three_reductions_are_added_in_their_order(self) -> None:
        got = applied(OneReduction(), SUMMED["three, from the left"])
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[16] = input(shard="up")
   1         x: f32[16] = input()
   2         y: f32[16] = input()
   3         z: f32[16] = input()
   4         add_2: f32[16] = aten.add.Tensor(x, y)
   5         add_3: f32[16] = aten.add.Tensor(add_2, z)
   6         cat: f32[16] = aten.cat([add_3])
   7         reduce_grad: f32[16] = fsdp_opt.reduce_grad(cat, s, 1)
   8         return (reduce_grad,)
""",
        )

    def test_the_order_of_additions_is_kept(self) -> None:
        got = applied(OneReduction(), SUMMED["three, from the right"])
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[16] = input(shard="up")
   1         x: f32[16] = input()
   2         y: f32[16] = input()
   3         z: f32[16] = input()
   4         add_2: f32[16] = aten.add.Tensor(y, z)
   5         add_3: f32[16] = aten.add.Tensor(x, add_2)
   6         cat: f32[16] = aten.cat([add_3])
   7         reduce_grad: f32[16] = fsdp_opt.reduce_grad(cat, s, 1)
   8         return (reduce_grad,)
""",
        )

    def test_cats_are_added_piece_by_piece(self) -> None:
        got = applied(OneReduction(), SUMMED["a sum of cats that is reduced"])
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[16] = input(shard="up")
   1         a: f32[4] = input()
   2         b: f32[4] = input()
   3         x: f32[8] = input()
   4         y: f32[8] = input()
   5         zeros: f32[4] = aten.zeros([4])
   6         add: f32[4] = aten.add.Tensor(a, b)
   7         add_1: f32[8] = aten.add.Tensor(x, y)
   8         cat: f32[16] = aten.cat([add, add_1, zeros])
   9         r: f32[16] = fsdp_opt.reduce_grad(cat, s, 1)
  10         return (r,)
""",
        )

    def test_gradients_that_are_no_cats_are_added_as_a_whole(self) -> None:
        got = applied(OneReduction(), SUMMED["gradients that are no cats"])
        self.assertExpectedInline(
            got,
            """\
   0         s: f32[16] = input(shard="up")
   1         x: f32[16] = input()
   2         y: f32[16] = input()
   3         add: f32[16] = aten.add.Tensor(x, y)
   4         reduce_grad: f32[16] = fsdp_opt.reduce_grad(add, s, 1)
   5         return (reduce_grad,)
""",
        )


@pytest.mark.parametrize("kind", SUMMED)
def test_one_reduction_keeps_values_and_the_order_of_additions(kind: str) -> None:
    """With addends of which fp32 loses one where they are added in another order."""
    gm = graph(SUMMED[kind])
    shard, *addends = random_inputs(gm)
    values = [shard, *(value * scale for value, scale in zip(addends, (1, 1e8, -1e8, 1), strict=False))]
    expected = gm(*cloned(values))
    apply(OneReduction(), gm)
    assert len(calls(gm.graph, REDUCE_GRAD)) == 1
    assert_bitwise(gm(*cloned(values)), expected)


_TERMS = """
    0 s: f32[16] = input(shard="up")
    1 o: f32[16] = input(shard="down")
    2 x: f32[16] = input()
    3 y: f32[16] = input()
    4 z: f32[4] = input()
    5 w: f32[12] = input()
    6 p: f32[16] = fsdp_opt.reduce_grad({})
    7 q: f32[16] = fsdp_opt.reduce_grad({})
    8 t: f32[16] = aten.{}
    9 return ({})
    """
_CATS = """
    0 s: f32[16] = input(shard="up")
    1 x: f32[8] = input()
    2 y: f32[8] = input()
    3 z: f32[4] = input()
    4 w: f32[12] = input()
    5 c: f32[16] = aten.cat({})
    6 d: f32[16] = aten.{}
    7 t: f32[16] = aten.{}
    8 r: f32[16] = fsdp_opt.reduce_grad(t, s, 1)
    9 return ({})
    """
NO_SUM = {
    "scaled": _TERMS.format("x, s, 1", "y, s, 1", "add.Tensor(p, q, alpha=2)", "t,"),
    "with another term": _TERMS.format("x, s, 1", "y, s, 1", "add.Tensor(p, x)", "t, q"),
    "of two shards": _TERMS.format("x, s, 1", "y, o, 1", "add.Tensor(p, q)", "t,"),
    "of two reduce dtypes": _TERMS.format("x, s, 1", "y, s, 1, reduce_dtype=torch.float64", "add.Tensor(p, q)", "t,"),
    "a product": _TERMS.format("x, s, 1", "y, s, 1", "mul.Tensor(p, q)", "t,"),
    "of a term and itself": _TERMS.format("x, s, 1", "y, s, 1", "add.Tensor(p, p)", "t, q"),
    "of a term that is returned": _TERMS.format("x, s, 1", "y, s, 1", "add.Tensor(p, q)", "t, q"),
    "that is read again": _TERMS.format(
        "x, s, 1", "y, s, 1", "add.Tensor(p, q)\n    9 n: f32[16] = aten.neg(t)", "t, n"
    ),
    "that is no result": _TERMS.format("x, s, 1", "y, s, 1", "add.Tensor(p, q)\n    9 n: f32[16] = aten.neg(t)", "n,"),
    "of cats of unequal pieces": _CATS.format("[x, y]", "cat([z, w])", "add.Tensor(c, d)", "r,"),
    "of a cat and no cat": _CATS.format("[x, y]", "zeros([16])", "add.Tensor(c, d)", "r,"),
    "of a cat that is returned": _CATS.format("[x, y]", "cat([y, x])", "add.Tensor(c, d)", "r, d"),
    "of scaled cats": _CATS.format("[x, y]", "cat([y, x])", "add.Tensor(c, d, alpha=2)", "r,"),
    "of cats that is returned": _CATS.format("[x, y]", "cat([y, x])", "add.Tensor(c, d)", "r, t"),
    "of a cat and itself": _CATS.format("[x, y]", "cat([y, x])", "add.Tensor(c, c)", "r, d"),
}


@pytest.mark.parametrize("kind", NO_SUM)
def test_one_reduction_leaves_a_sum(kind: str) -> None:
    assert applied(OneReduction(), NO_SUM[kind]) == canonical(NO_SUM[kind])


PEELED = {
    "t of t": """
        0 x: f32[2,3] = input()
        1 t: f32[3,2]{1,3} = aten.t(x)
        2 u: f32[2,3] = aten.t(t)
        3 v: f32[2,3] = aten.relu(u)
        4 return (v,)
        """,
    "three": """
        0 x: f32[2,3] = input()
        1 t: f32[3,2]{1,3} = aten.t(x)
        2 u: f32[2,3] = aten.transpose.int(t, -2, -1)
        3 v: f32[3,2]{1,3} = aten.permute(u, [-1, 0])
        4 w: f32[3,2]{1,3} = aten.neg(v)
        5 return (w,)
        """,
    "a chain that comes back": """
        0 x: f32[2,3,4] = input()
        1 p: f32[3,4,2]{4,1,12} = aten.permute(x, [1, 2, 0])
        2 q: f32[4,3,2]{1,4,12} = aten.transpose.int(p, 0, 1)
        3 r: f32[2,3,4] = aten.transpose.int(q, 0, -1)
        4 y: f32[2,3,4] = aten.neg(r)
        5 return (y,)
        """,
    "one that others read": """
        0 x: f32[2,3] = input()
        1 t: f32[3,2]{1,3} = aten.t(x)
        2 u: f32[2,3] = aten.t(t)
        3 v: f32[2,3] = aten.neg(u)
        4 w: f32[3,2]{1,3} = aten.exp(t)
        5 return (v, w)
        """,
    "no and one dimension": """
        0 x: f32[] = input()
        1 y: f32[3] = input()
        2 t: f32[] = aten.t(x)
        3 u: f32[3] = aten.t(y)
        4 v: f32[] = aten.permute(t, [])
        5 w: f32[] = aten.transpose.int(v, 0, -1)
        6 a: f32[] = aten.neg(w)
        7 b: f32[3] = aten.neg(u)
        8 return (a, b)
        """,
}
KEPT = {
    "another order": """
        0 x: f32[2,2,2] = input()
        1 p: f32[2,2,2]{1,2,4} = aten.transpose.int(x, 0, -1)
        2 q: f32[2,2,2]{2,1,4} = aten.transpose.int(p, 0, 1)
        3 r: f32[2,2,2]{1,4,2} = aten.permute(q, [1, 2, 0])
        4 return (r,)
        """,
    "a permutation applied twice": """
        0 x: f32[2,2,2] = input()
        1 p: f32[2,2,2]{2,1,4} = aten.permute(x, [1, 2, 0])
        2 q: f32[2,2,2]{1,4,2} = aten.permute(p, [1, 2, 0])
        3 return (q,)
        """,
    "something between": """
        0 x: f32[2,3] = input()
        1 t: f32[3,2]{1,3} = aten.t(x)
        2 y: f32[3,2]{1,3} = aten.neg(t)
        3 u: f32[2,3] = aten.t(y)
        4 return (u,)
        """,
}


class TestPeelTransposes(expecttest.TestCase):
    maxDiff = None

    def test_two_transposes_are_none(self) -> None:
        got = applied(PeelTransposes(), PEELED["t of t"])
        self.assertExpectedInline(
            got,
            """\
   0         x: f32[2,3] = input()
   1         v: f32[2,3] = aten.relu(x)
   2         return (v,)
""",
        )

    def test_three_are_one(self) -> None:
        got = applied(PeelTransposes(), PEELED["three"])
        self.assertExpectedInline(
            got,
            """\
   0         x: f32[2,3] = input()
   1         v: f32[3,2]{1,3} = aten.permute(x, [-1, 0])
   2         w: f32[3,2]{1,3} = aten.neg(v)
   3         return (w,)
""",
        )

    def test_permutations_are_composed(self) -> None:
        got = applied(PeelTransposes(), PEELED["a chain that comes back"])
        self.assertExpectedInline(
            got,
            """\
   0         x: f32[2,3,4] = input()
   1         y: f32[2,3,4] = aten.neg(x)
   2         return (y,)
""",
        )

    def test_a_transpose_that_others_read_stays_for_them(self) -> None:
        got = applied(PeelTransposes(), PEELED["one that others read"])
        self.assertExpectedInline(
            got,
            """\
   0         x: f32[2,3] = input()
   1         t: f32[3,2]{1,3} = aten.t(x)
   2         v: f32[2,3] = aten.neg(x)
   3         w: f32[3,2]{1,3} = aten.exp(t)
   4         return (v, w)
""",
        )

    def test_a_transpose_of_less_than_two_dimensions_is_none(self) -> None:
        got = applied(PeelTransposes(), PEELED["no and one dimension"])
        self.assertExpectedInline(
            got,
            """\
   0         x: f32[] = input()
   1         y: f32[3] = input()
   2         a: f32[] = aten.neg(x)
   3         b: f32[3] = aten.neg(y)
   4         return (a, b)
""",
        )


@pytest.mark.parametrize("kind", KEPT)
def test_what_does_not_come_back_stays(kind: str) -> None:
    assert applied(PeelTransposes(), KEPT[kind]) == canonical(KEPT[kind])


@pytest.mark.parametrize("kind", PEELED)
def test_peeled_transposes_keep_values_and_strides(kind: str) -> None:
    gm = graph(PEELED[kind])
    inputs = random_inputs(gm)
    expected = gm(*inputs)
    apply(PeelTransposes(), gm)
    got = gm(*inputs)
    assert_bitwise(got, expected)
    assert [value.stride() for value in got] == [value.stride() for value in expected]
