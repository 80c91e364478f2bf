"""The regions of a plan that writes gradients: each has a variant that copies and one that adds, compiled when used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Thread

import expecttest
import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from fsdp_passes._compat import with_settings_of_now
from fsdp_passes.codegen import compile as codegen
from fsdp_passes.codegen import variants
from fsdp_passes.codegen.compile import Region, compile_regions
from fsdp_passes.codegen.regions import cut
from fsdp_passes.codegen.variants import Regions, write_variant
from fsdp_passes.ir.text import dump
from fsdp_passes.passes.flat_grad_writes import FlatGradWrites
from tests.simulated import assert_bitwise, canonical, executor, graph, group_of, random_inputs

WRITES = """
    0 place: f32[2,3] = input()
    1 place_1: f32[2,2] = input()
    2 x: bf16[2,3] = input()
    3 y: bf16[3,2] = input()
    4 g: bf16[2,3] = aten.neg(x)
    5 w = fsdp_opt.grad_write(place, g)
    6 p = fsdp_opt.grad_mm(place_1, x, y)
    7 return (g,)
    """
FP32 = WRITES.replace("bf16", "f32")
PLAIN = """
    0 x: f32[4] = input()
    1 y: f32[4] = aten.neg(x)
    2 return (y,)
    """


class TestWriteVariant(expecttest.TestCase):
    maxDiff = None

    def test_first_writes_copy(self) -> None:
        got = dump(write_variant(graph(WRITES), first=True))
        self.assertExpectedInline(
            got,
            """\
   0         place: f32[2,3] = input()
   1         place_1: f32[2,2] = input()
   2         x: bf16[2,3] = input()
   3         y: bf16[3,2] = input()
   4         g: bf16[2,3] = aten.neg(x)
   5         w: f32[2,3] = aten.copy_(place, g)
   6         p = fsdp_opt.grad_mm(place_1, x, y, first=True)
   7         return (g,)
""",
        )

    def test_later_writes_add(self) -> None:
        got = dump(write_variant(graph(WRITES), first=False))
        self.assertExpectedInline(
            got,
            """\
   0         place: f32[2,3] = input()
   1         place_1: f32[2,2] = input()
   2         x: bf16[2,3] = input()
   3         y: bf16[3,2] = input()
   4         g: bf16[2,3] = aten.neg(x)
   5         w: f32[2,3] = aten.add_.Tensor(place, g)
   6         p = fsdp_opt.grad_mm(place_1, x, y, first=False)
   7         return (g,)
""",
        )


def test_a_variant_leaves_the_region_as_it_was() -> None:
    region, plain = graph(WRITES), graph(PLAIN)
    write_variant(region, first=True)
    assert dump(region) == canonical(WRITES)
    assert write_variant(plain, first=True) is plain


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """For each call of `compile_regions` the names of what it compiled; ", adding" is checked."""
    calls: list[list[str]] = []

    def record(regions: Sequence[fx.GraphModule], codegen: str, names: Iterable[str]) -> list[Region]:
        names = list(names)
        assert ["add_.Tensor" in dump(region) for region in regions] == [name.endswith(", adding") for name in names]
        calls.append(names)
        return compile_regions(regions, codegen, names)

    monkeypatch.setattr(variants, "compile_regions", record)
    return calls


def test_regions_that_write_nothing_are_compiled_at_once(compiled: list[list[str]]) -> None:
    regions = Regions([graph(PLAIN), graph(PLAIN)], "fx", "fwd")
    assert regions.complete
    assert compiled == [["region_0 of fwd", "region_1 of fwd"]]


def test_what_has_symbolic_sizes_is_compiled_at_once_in_all_variants(compiled: list[list[str]]) -> None:
    """Later, what code takes for granted about a size would not become a guard."""
    rows = graph(
        """
        0 n: sym[s0] = input()
        1 place: f32[4] = input()
        2 x: f32[s0,4] = input()
        3 g: f32[4] = aten.sum.dim_IntList(x, [0])
        4 write = fsdp_opt.grad_write(place, g)
        5 return ()
        """
    )
    regions = Regions([rows, graph(WRITES), graph(PLAIN)], "fx", "bwd")
    assert (compiled, regions.complete) == ([["region_0 of bwd"], ["region_0 of bwd, adding"]], False)


def test_each_variant_is_compiled_once_and_only_if_it_is_used(compiled: list[list[str]]) -> None:
    regions = Regions([graph(WRITES), graph(PLAIN), graph(WRITES)], "fx", "bwd")
    assert (compiled, regions.complete) == ([], False)
    regions.compile({0: True, 1: False, 2: False})
    assert compiled == [["region_0 of bwd", "region_1 of bwd", "region_2 of bwd, adding"]]
    regions.compile({0: True, 1: True, 2: True})
    assert (compiled[1:], regions.complete) == ([["region_2 of bwd"]], False)
    regions(0, False, random_inputs(graph(WRITES)))
    assert (compiled[2:], regions.complete) == ([["region_0 of bwd, adding"]], True)
    regions(0, False, random_inputs(graph(WRITES)))
    assert len(compiled) == 3


def test_a_variant_that_is_compiled_late_has_the_settings_of_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def record(regions: Sequence[fx.GraphModule], codegen: str, names: Iterable[str]) -> list[Region]:
        seen.append(inductor_config.max_fusion_size)
        return compile_regions(regions, codegen, names)

    monkeypatch.setattr(variants, "compile_regions", record)
    with inductor_config.patch(max_fusion_size=3):
        regions = Regions([graph(WRITES)], "fx", "bwd")
    backward_thread = Thread(target=regions.compile, args=({0: True},))  # as autograd has one for each GPU
    backward_thread.start()
    backward_thread.join()
    regions.compile({0: False})
    assert seen == [3, 3]


def test_two_threads_may_compile_at_a_time() -> None:
    meeting = with_settings_of_now(Barrier(2, timeout=20).wait)
    with ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(meeting) for _ in range(2)]
        assert sorted(wait.result() for wait in waits) == [0, 1]


# Two regions that write, with a gather between them.
TWO_REGIONS = """
    0 s: f32[8] = input(shard="up")
    1 x: f32[8] = input()
    2 g: f32[8] = aten.exp(x)
    3 issue gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
    4 wait full: f32[16] = fsdp_opt.wait(gather)
    5 h: f32[16] = aten.exp(full)
    6 k: f32[8] = aten.slice.Tensor(h, 0, 0, 8)
    7 release release = fsdp_opt.release(full)
    8 c: f32[16] = aten.cat([g, k])
    9 r: f32[8] = fsdp_opt.reduce_grad(c, s, 2)
    10 return (r,)
    """


def test_a_backward_compiles_the_variants_that_it_needs_in_one_call(compiled: list[list[str]]) -> None:
    gm = graph(TWO_REGIONS)
    FlatGradWrites().apply(gm)
    gm.recompile()
    plan = cut(gm, "bwd", trains=False)
    regions = Regions(plan.regions, "fx", "bwd")
    run = executor(plan, regions)
    shard, x = random_inputs(gm)
    group = group_of(shard)
    for _ in range(2):  # windows of one microbatch
        group.written.clear()
        run([shard, x])
        assert compiled == [["region_0 of bwd", "region_1 of bwd"]]
    run([shard, x])  # a second one
    assert compiled[1:] == [["region_0 of bwd, adding", "region_1 of bwd, adding"]]
    assert regions.complete
    run([shard, x])
    assert len(compiled) == 2
    once = (x.exp(), torch.cat([shard] * 2).exp()[:8])
    assert_bitwise((group.grads[0], group.grads[1]), [grad + grad + grad for grad in once])


def test_a_region_that_writes_nothing_has_one_variant(compiled: list[list[str]]) -> None:
    text = TWO_REGIONS.replace("c: f32[16] = aten.cat([g, k])", "c: f32[8] = aten.cat([k])")
    gm = graph(text.replace("(r,)", "(r, g)"))
    FlatGradWrites().apply(gm)
    plan = cut(gm, "bwd", trains=False)
    run = executor(plan, Regions(plan.regions, "fx", "bwd"))
    shard, x = random_inputs(gm)
    for _ in range(3):
        assert_bitwise(run([shard, x]), (None, x.exp()))
    assert compiled == [["region_0 of bwd", "region_1 of bwd"], ["region_1 of bwd, adding"]]


def test_inductor_gives_the_numbers_of_fx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codegen, "_CACHE", codegen._Cache())
    counters.clear()
    ways = {name: Regions([graph(FP32)], name, "bwd") for name in ("fx", "inductor")}
    inputs = random_inputs(graph(FP32))
    places = {name: [torch.full_like(place, torch.nan) for place in inputs[:2]] for name in ways}
    for number, first in enumerate((True, False, False)):
        assert counters["fsdp_opt"]["regions_compiled"] == min(number, 2)
        got = {name: [*regions(0, first, [*places[name], *inputs[2:]])] for name, regions in ways.items()}
        assert_bitwise(got["inductor"] + places["inductor"], got["fx"] + places["fx"])
    assert counters["fsdp_opt"]["regions_not_compiled"] == 0
    assert torch.equal(places["fx"][0], -3 * inputs[2])


def _product(place: Tensor, a: Tensor, b: Tensor, first: bool) -> Tensor:
    """What is in `place`, a slice of a larger buffer, after a product was added to it, or written."""
    buffer = torch.full((place.numel() + 2,), 7.0)
    slice_ = buffer[1:-1].view(place.shape).copy_(place)
    torch.ops.fsdp_opt.grad_mm(slice_, a, b, first=first)
    assert buffer[0] == buffer[-1] == 7
    return slice_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_added_up_in_fp32(dtype: torch.dtype) -> None:
    """257, and 3 and a thousandth, are no numbers of bfloat16."""
    a, b = torch.tensor([[16.0, 1], [1, 0]], dtype=dtype), torch.tensor([[16.0, 0], [1, 3]], dtype=dtype)
    product = torch.tensor([[257.0, 3], [16, 0]])
    assert_bitwise((_product(torch.full((2, 2), torch.nan), a, b, first=True),), (product,))
    assert_bitwise((_product(torch.full((2, 2), 2.0**-10), a, b, first=False),), (product + 2.0**-10,))
    assert_bitwise((_product(torch.full((2, 2), 1.0), a.t(), b, first=False),), (a.float().t() @ b.float() + 1,))


def test_a_later_product_keeps_a_nan() -> None:
    """A gradient that is NaN stays NaN: only a first product ignores what it finds."""
    ones = torch.ones(2, 2)
    assert _product(torch.full((2, 2), torch.nan), ones, ones, first=False).isnan().all()
