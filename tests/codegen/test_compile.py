"""Regions as functions: shared when equal, called with lists that they empty, strides as promised."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, fx
from torch._dynamo.utils import counters

from fsdp_passes.codegen import compile as codegen
from fsdp_passes.codegen.compile import compile_regions
from tests.simulated import graph, random_inputs

BLOCK = """
    0 x: f32[6,4] = input()
    1 w: f32[4,4] = input()
    2 y: f32[6,4] = aten.mm(x, w)
    3 z: f32[6,4] = aten.relu(y)
    4 return (z,)
    """
STRIDES = """
    0 x: f32[6,4] = input()
    1 y: f32[4,6]{1,4} = aten.t(x)
    2 z: f32[4,6]{1,4} = aten.neg(y)
    3 v: f32[24] = aten.reshape(x, [24])
    4 return (z, y, v)
    """
WRITES = """
    0 total: f32[6] = input()
    1 g: bf16[2,3] = input()
    2 flat: bf16[6] = aten.reshape(g, [6])
    3 more: f32[6] = aten.add.Tensor(total, flat)
    4 done: f32[6] = aten.copy_(total, more)
    5 return ()
    """
ZEROS = """
    0 x: f32[2] = input()
    1 zeros: f32[3] = aten.zeros([3], device=device("cpu"), pin_memory=False)
    2 y: f32[5] = aten.cat([x, zeros])
    3 return (y,)
    """
ROWS = """
    0 n: sym[s0] = input()
    1 x: f32[s0,4] = input()
    2 y: f32[s0,4] = aten.neg(x)
    3 return (y,)
    """


NAMES = [f"region_{number} of fwd" for number in range(9)]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled yet, nothing counted yet."""
    monkeypatch.setattr(codegen, "_CACHE", codegen._Cache())
    counters.clear()
    yield


def compiled(*texts: str) -> list[Any]:
    return compile_regions([graph(text) for text in texts], "inductor", NAMES[: len(texts)])


def counted() -> dict[str, int]:
    return dict(counters["fsdp_opt"])


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """What is given to Inductor; it is not called."""
    given: list[fx.GraphModule] = []

    def record(gm: fx.GraphModule) -> tuple[Any, Any]:
        given.append(gm)
        return f"compiled {len(given)}", lambda: None

    monkeypatch.setattr(codegen, "inductor_compile", record)
    return given


def test_equal_regions_are_one_function(stubs: list[fx.GraphModule]) -> None:
    renamed = BLOCK.replace("x", "a").replace("y", "b").replace("z", "c")
    first, second, other = compiled(BLOCK, renamed, BLOCK.replace("relu", "neg"))
    assert first is second
    assert other is not first
    assert compiled(renamed) == [first]
    assert counted() == {"regions": 4, "regions_compiled": 2}


def test_inductors_settings_tell_regions_apart(stubs: list[fx.GraphModule]) -> None:
    compiled(BLOCK)
    with inductor_config.patch(emulate_precision_casts=True):
        compiled(BLOCK)
    compiled(BLOCK)
    assert counted() == {"regions": 3, "regions_compiled": 2}


def test_a_region_without_a_key_is_compiled_each_time(
    stubs: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codegen, "region_key", lambda gm: None)
    first, second = compiled(BLOCK, BLOCK)
    assert first != second


def size_of(gm: fx.GraphModule) -> torch.SymInt:
    return next(iter(gm.graph.nodes)).meta["val"]


def test_what_the_code_takes_for_granted_must_hold_for_the_next_region(stubs: list[fx.GraphModule]) -> None:
    """24 rows are a multiple of 8, of which a guard tells; then 36 rows, which are none; then any."""
    multiple, none, again = (graph(ROWS) for _ in range(3))
    assert bool(size_of(multiple) % 8 == 0)
    (first,) = compile_regions([multiple], "inductor", NAMES[:1])
    size_of(none).node._hint = 36
    none_env = size_of(none).node.shape_env
    for symbol in list(none_env.backed_var_to_val):
        none_env.backed_var_to_val[symbol] = type(none_env.backed_var_to_val[symbol])(36)
    (second,) = compile_regions([none], "inductor", NAMES[:1])
    assert second != first
    (third,) = compile_regions([again], "inductor", NAMES[:1])
    assert third == first
    assert any("Mod" in str(guard.expr) for guard in size_of(again).node.shape_env.guards)


def test_a_region_empties_its_list_and_gives_the_numbers() -> None:
    (block,) = compiled(BLOCK)
    x, w = random_inputs(graph(BLOCK))
    values = [x, w]
    (z,) = block(values)
    assert values == []
    torch.testing.assert_close(z, (x @ w).relu())


def test_strides_and_shared_memory_are_as_the_graph_says() -> None:
    (region,) = compiled(STRIDES)
    x = torch.randn(6, 4)
    z, y, v = region([x])
    assert (z.stride(), y.stride(), v.stride()) == ((1, 4), (1, 4), (1,))
    assert torch.equal(z, -x.t())
    assert y.data_ptr() == v.data_ptr() == x.data_ptr() != z.data_ptr()


def test_inputs_are_written_in_place() -> None:
    (region,) = compiled(WRITES)
    total, g = torch.ones(6), torch.arange(6).view(2, 3).bfloat16()
    region([total, g])
    assert torch.equal(total, torch.ones(6) + torch.arange(6))


def test_zeros_that_capture_keeps_whole_are_compiled() -> None:
    (region,) = compiled(ZEROS)
    (y,) = region([torch.ones(2)])
    assert y.tolist() == [1, 1, 0, 0, 0]
    assert counted() == {"regions": 1, "regions_compiled": 1}


def failing(error: Exception) -> Any:
    def raise_it(*_: Any) -> Any:
        raise error

    return raise_it


@pytest.mark.parametrize("late", [False, True])
def test_a_failure_is_told_once(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it comes while a region is lowered, or while its kernels compile."""
    fail = failing(RuntimeError("no such instruction\nand much more"))
    monkeypatch.setattr(
        codegen, "inductor_compile", (lambda gm: (failing(AssertionError("called")), fail)) if late else fail
    )
    messages: list[str] = []
    monkeypatch.setattr(codegen, "warn_once", lambda log, message: messages.append(message))
    first, second = compiled(BLOCK, BLOCK)
    x, w = random_inputs(graph(BLOCK))
    expected = (x @ w).relu()
    assert all(torch.equal(region([x, w])[0], expected) for region in (first, second))
    assert messages == [
        "region_0 of fwd (aten.mm.default, aten.relu.default) runs operator by operator, because Inductor cannot "
        "compile it: RuntimeError: no such instruction"
    ]
    assert counted() == {"regions": 2, "regions_compiled": 1, "regions_not_compiled": 1}


def test_fx_compiles_nothing(stubs: list[fx.GraphModule]) -> None:
    (region,) = compile_regions([graph(BLOCK)], "fx", NAMES[:1])
    x, w = random_inputs(graph(BLOCK))
    values: list[Tensor] = [x, w]
    assert torch.equal(region(values)[0], (x @ w).relu())
    assert (stubs, values, counted()) == ([], [], {})


def test_a_failure_is_tried_again_by_the_next_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(codegen, "inductor_compile", failing(RuntimeError("no compiler")))
        compiled(BLOCK)
    compiled(BLOCK)
    assert counted() == {"regions": 2, "regions_compiled": 2, "regions_not_compiled": 1}


def test_after_an_interrupt_kernels_are_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[BaseException | None] = [KeyboardInterrupt(), None]

    def load() -> None:
        if (error := waits.pop(0)) is not None:
            raise error

    monkeypatch.setattr(codegen, "inductor_compile", lambda gm: ("code", load))
    with pytest.raises(KeyboardInterrupt):
        compiled(BLOCK)
    assert compiled(BLOCK) == ["code"]
    assert waits == []


def test_threads_compile_one_after_the_other() -> None:
    """Each waits for its own kernels; torch's own backend compiles meanwhile."""
    texts = [BLOCK.replace("aten.relu(y)", f"aten.{name}(y)") for name in ("sin", "cos", "exp")]
    x, w = random_inputs(graph(BLOCK))
    with ThreadPoolExecutor(4) as threads:
        stock = threads.submit(torch.compile(lambda a: (a.sin() + 1).cos().sum(-1)), x)
        got = [region([x, w])[0] for (region,) in threads.map(compiled, texts)]
        torch.testing.assert_close(stock.result(), (x.sin() + 1).cos().sum(-1))
    for value, name in zip(got, ("sin", "cos", "exp"), strict=True):
        torch.testing.assert_close(value, getattr(x @ w, name)())
    assert "regions_not_compiled" not in counted()


def test_kernels_compile_while_the_next_region_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is waited for before the last region was given to Inductor."""
    events: list[str] = []
    compile_it = codegen.inductor_compile

    def watched(gm: fx.GraphModule) -> tuple[Any, Any]:
        code, load = compile_it(gm)
        events.append("lowered")

        def load_and_tell() -> None:
            events.append(f"{len(load.__closure__[0].cell_contents)} modules wait")
            load()

        return code, load_and_tell

    monkeypatch.setattr(codegen, "inductor_compile", watched)
    compiled(BLOCK.replace("relu", "tan"), BLOCK.replace("relu", "atan"))
    assert events == ["lowered", "lowered", "1 modules wait", "1 modules wait"]
