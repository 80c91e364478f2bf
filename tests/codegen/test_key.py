"""When two regions are one to the compiler: what a key leaves out, and what it must tell apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from fsdp_passes.codegen.key import canonical, region_key
from fsdp_passes.ir.nodes import calls
from fsdp_passes.ir.text import dump
from tests.simulated import graph

BLOCK = """
    0 x: f32[2,4] = input()
    1 w: f32[4,4] = input()
    2 y: f32[2,4] = aten.mm(x, w)
    3 z: f32[2,4] = aten.relu(y)
    4 return (z,)
    """
RENAMED = """
    0 hidden_3: f32[2,4] = input()
    1 full_7: f32[4,4] = input()
    2 mm_9: f32[2,4] = aten.mm(hidden_3, full_7)
    3 relu_9: f32[2,4] = aten.relu(mm_9)
    4 return (relu_9,)
    """
DYNAMIC = """
    0 n: sym[s0] = input()
    1 m: sym[s1] = input()
    2 x: f32[s0,s1] = input()
    3 y: f32[s1,s0]{1,s1} = aten.t(x)
    4 return (y,)
    """
CONSTANT = """
    0 x: f32[2] = input()
    1 c: f32[2] = get_attr("c")
    2 y: f32[2] = aten.mul.Tensor(x, c)
    3 return (y,)
    """
DIFFERENT = {
    "another operator": BLOCK.replace("relu", "neg"),
    "a shape": BLOCK.replace("[2,4]", "[3,4]"),
    "a dtype": BLOCK.replace("f32", "bf16"),
    "strides": BLOCK.replace("w: f32[4,4]", "w: f32[4,4]{1,4}"),
    "a device": BLOCK.replace("x: f32[2,4]", "x: f32[2,4]@meta")
    .replace("w: f32[4,4]", "w: f32[4,4]@meta")
    .replace("y: f32[2,4]", "y: f32[2,4]@meta")
    .replace("z: f32[2,4]", "z: f32[2,4]@meta"),
    "another operand": BLOCK.replace("aten.relu(y)", "aten.relu(x)"),
    "another result": BLOCK.replace("(z,)", "(y,)"),
    "one result more": BLOCK.replace("(z,)", "(y, z)"),
    "the order of inputs": BLOCK.replace("0 x", "0 _x")
    .replace("1 w: f32[4,4]", "1 x: f32[2,4]")
    .replace("0 _x: f32[2,4]", "0 w: f32[4,4]"),
}


def key_of(gm: fx.GraphModule) -> str | None:
    return region_key(canonical(gm))


def test_names_do_not_count() -> None:
    assert key_of(graph(BLOCK)) == key_of(graph(RENAMED)) is not None


def test_symbols_count_by_position() -> None:
    swapped = DYNAMIC.replace("s0", "s2").replace("s1", "s0").replace("s2", "s1")
    assert key_of(graph(DYNAMIC)) == key_of(graph(swapped))
    assert key_of(graph(DYNAMIC)) != key_of(
        graph(DYNAMIC.replace("x: f32[s0,s1]", "x: f32[s1,s0]").replace("y: f32[s1,s0]{1,s1}", "y: f32[s0,s1]{1,s0}"))
    )


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_tells_regions_apart(what: str) -> None:
    assert key_of(graph(DIFFERENT[what])) not in (key_of(graph(BLOCK)), None)


def test_the_unit_of_a_shard_does_not_count() -> None:
    up, down = (f'0 s: f32[4] = input(shard="{unit}")\n1 y: f32[4] = aten.neg(s)\n2 return (y,)' for unit in "ab")
    assert key_of(graph(up)) == key_of(graph(down))


def test_inputs_that_share_memory_count() -> None:
    apart, shared = graph(BLOCK.replace("w: f32[4,4]", "w: f32[4,4]")), graph(BLOCK)
    x, w = shared.graph.find_nodes(op="placeholder")
    with x.meta["val"].fake_mode:
        both = torch.empty(16)
        x.meta["val"], w.meta["val"] = both[:8].view(2, 4), both.view(4, 4)
    assert key_of(apart) != key_of(shared)


def test_the_place_in_the_memory_counts() -> None:
    moved = graph(BLOCK)
    x = next(iter(moved.graph.nodes))
    with x.meta["val"].fake_mode:
        x.meta["val"] = torch.empty(9)[1:].view(2, 4)
    assert key_of(moved) != key_of(graph(BLOCK))


def with_constant(value: Tensor) -> fx.GraphModule:
    gm = graph(CONSTANT)
    gm.c = value
    return gm


def test_values_of_constants_count_and_their_names_do_not() -> None:
    one = with_constant(torch.tensor([1.0, 2.0]))
    same = graph(CONSTANT.replace('"c"', '"d"'))
    same.d = torch.tensor([9.0, 1.0, 2.0])[1:]
    assert key_of(one) == key_of(same)
    assert key_of(one) != key_of(with_constant(torch.tensor([1.0, 2.5])))


def test_what_the_language_cannot_write_has_no_key() -> None:
    gm = graph(BLOCK)
    calls(gm.graph, torch.ops.aten.relu.default)[0].target = len
    assert key_of(gm) is None


def test_a_canonical_graph_is_a_copy_that_computes_the_same() -> None:
    gm = graph(RENAMED)
    before = dump(gm)
    copy = canonical(gm)
    assert dump(gm) == before
    assert [node.name for node in copy.graph.nodes] == ["v0", "v1", "v2", "v3", "v4"]
    x, w = torch.randn(2, 4), torch.randn(4, 4)
    assert torch.equal(copy(x, w)[0], (x @ w).relu())


def test_graphs_inside_are_made_canonical_too() -> None:
    def calling(name: str, body: str) -> fx.GraphModule:
        gm = graph(BLOCK)
        inner = graph(body)
        gm.add_module(name, inner)
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.get_attr(name)
        return gm

    one, same = calling("body_0", BLOCK), calling("body_31", RENAMED)
    assert key_of(one) == key_of(same)
    assert key_of(one) != key_of(calling("body_0", BLOCK.replace("relu", "neg")))
