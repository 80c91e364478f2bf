"""Cutting a joint graph in two: what backward gets from forward, and where forward computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import Tensor, fx, nn

from fsdp_passes._compat import aot_compile, boxed
from fsdp_passes.capture.joint import _compute_saved_values_early, partition
from fsdp_passes.ir.text import dump
from tests.simulated import canonical, graph


def captured(function: Callable[..., Any], *inputs: Tensor) -> tuple[Any, fx.GraphModule, fx.GraphModule]:
    """The compiled function, its forward graph and its backward graph."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        run = boxed(gm)
        run.__func__._boxed_call = True
        return run

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        return aot_compile(gm, example_inputs, fw_compiler=keep, bw_compiler=keep, partition_fn=partition)

    torch._dynamo.reset()
    run = torch.compile(function, backend=backend)
    run(*inputs).sum().backward()
    return run, *graphs


class Counter(nn.Module):
    """`calls` is written, then multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (2 * self.calls.view(1, 1)).cos()


class ReadFirst(Counter):
    """`calls` is read through a view, then written."""

    def forward(self, x: Tensor) -> Tensor:
        scale = (2 * (self.calls.view(1, 1) + 1)).cos()
        self.calls += 1
        return self.linear(x) * scale


@pytest.mark.parametrize("make", [Counter, ReadFirst])
def test_backward_sees_a_written_buffer_as_forward_did(make: type[Counter]) -> None:
    model = make()
    run, *_ = captured(model, torch.ones(2, 4))
    first = model.linear.bias.grad
    assert first is not None
    torch.testing.assert_close(first, torch.full((4,), 2 * torch.tensor(2.0).cos().item()))
    model.zero_grad()
    run(torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close(model.linear.bias.grad, torch.full((4,), 2 * torch.tensor(4.0).cos().item()))
    assert model.calls == 2


@torch.library.custom_op("fsdp_passes_tests::next_number", mutates_args=())
def next_number(size: int) -> Tensor:
    """Another value at each call, which no tag says."""
    _CALLS.append(size)
    return torch.full((size,), float(len(_CALLS)))


next_number.register_fake(lambda size: torch.empty(size))
_CALLS: list[int] = []


def test_a_users_operator_without_inputs_is_called_once() -> None:
    x, w = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    captured(lambda x, w: (x * (k := next_number(4)) * w).exp() * k, x, w)
    assert _CALLS == [4]


def names(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


FORWARD = """
    0 x: f32[4,4] = input()
    1 b: f32[4] = input()
    2 y: f32[4,4] = aten.relu(x)
    3 z: f32[4,4] = aten.exp(y)
    4 noise: f32[4,4] = aten.rand_like(y)
    5 s: f32[4,4] = aten.div.Tensor(y, 8)
    6 t: f32[4,4]{1,4} = aten.t(s)
    7 u: f32[4] = aten.neg(b)
    8 n: f32[4] = aten.add.Tensor(b, 1)
    9 done: f32[4] = aten.copy_(b, n)
    10 return (z, t, u, noise)
    """


class TestSavedValues(expecttest.TestCase):
    def test_they_are_computed_right_after_their_operands(self) -> None:
        """Not what reads inputs alone, what is random, nor what writes."""
        gm = graph(FORWARD)
        _compute_saved_values_early(gm.graph, num_fwd_outputs=1)
        self.assertExpectedInline(
            dump(gm),
            """\
   0         x: f32[4,4] = input()
   1         b: f32[4] = input()
   2         y: f32[4,4] = aten.relu(x)
   3         s: f32[4,4] = aten.div.Tensor(y, 8)
   4         t: f32[4,4]{1,4} = aten.t(s)
   5         z: f32[4,4] = aten.exp(y)
   6         noise: f32[4,4] = aten.rand_like(y)
   7         u: f32[4] = aten.neg(b)
   8         n: f32[4] = aten.add.Tensor(b, 1)
   9         done: f32[4] = aten.copy_(b, n)
  10         return (z, t, u, noise)
""",
        )

    def test_what_forward_returns_stays(self) -> None:
        gm = graph(FORWARD)
        _compute_saved_values_early(gm.graph, num_fwd_outputs=4)
        self.assertEqual(dump(gm), canonical(FORWARD))


def causal(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(2):
        mask = torch.ones(8, 8, dtype=torch.bool).tril()
        x = (x @ w).masked_fill(~mask, 0.5)
    return x


def test_what_is_made_of_constants_is_not_saved() -> None:
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    _, forward, backward = captured(causal, x, w)
    returned = forward.graph.output_node().all_input_nodes
    assert all(node.meta["val"].dtype != torch.bool for node in returned)
    assert "aten.tril.default" in names(forward) and "aten.tril.default" in names(backward)
