"""The order in which graphs run: learnt, followed, and left, on two ranks, against the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_passes as fsdp
from fsdp_passes.codegen.variants import Regions
from fsdp_passes.runtime import timeline
from fsdp_passes.sharding import group
from fsdp_passes.sharding.state import sharded_state
from tests.dist import pool
from tests.dist.models import WIDTH, Block, build, full_grads, relative_error
from tests.dist.recorded import most_live, recorded

OPTIONS = {"codegen": "fx", "poison": True}
X = torch.linspace(-1, 1, 6 * WIDTH).view(6, WIDTH)


def _blocks() -> nn.Module:
    return nn.ModuleList(Block() for _ in range(4))


def _forward(blocks: Any, order: str = "0123", x: Tensor = X) -> Tensor:
    for digit in order:
        x = blocks[int(digit)](x)
    return x.square().mean()


class Both:
    """The same done to blocks that are sharded, and compiled one by one, and to plain ones."""

    def __init__(self) -> None:
        self.plain: Any = build(_blocks)
        self.sharded: Any = fsdp.shard(build(_blocks), units=[Block])
        for block in self.sharded:
            block.compile(backend="fsdp_opt", options=OPTIONS)

    def do(self, what: Callable[[Any], None]) -> None:
        for blocks in (self.sharded, self.plain):
            blocks.zero_grad()
            what(blocks)
        expected = {name: p.grad for name, p in self.plain.named_parameters()}
        for name, grad in full_grads(self.sharded).items():
            other = expected[name]
            assert (grad is None) == (other is None), name
            assert grad is None or relative_error(grad, other) < 2e-6, name

    @property
    def timeline(self) -> Any:
        return sharded_state(self.sharded).timeline


def _train(order: str) -> Callable[[Any], None]:
    return lambda blocks: _forward(blocks, order).backward()


def _orders(sequence: list[str], bound: int) -> list[str]:
    """What was warned of, when blocks run in these orders one after another."""
    both, warned = Both(), list[str]()
    warnings = mock.patch.object(timeline, "warn_once", lambda log, message: warned.append(message))
    with warnings, recorded(both.sharded) as events:
        for order in sequence:
            both.do(_train(order))
    assert most_live(events) == bound
    return warned


def test_the_same_order_again_and_again_is_followed() -> None:
    assert pool.run(2, _orders, ["0123"] * 3, 2) == [[], []]


def test_another_order_is_gathered_for_on_demand_and_said() -> None:
    for warned in pool.run(2, _orders, ["0123", "0123", "02", "02", "0213", "3210", "0213", "0", "01123", "01123"], 2):
        assert set(warned) == {"fsdp_opt: graphs run in another order than before; each gathers for itself for now"}
        assert len(warned) == 4, warned


def _interrupted() -> None:
    both = Both()

    def forward_without_backward(blocks: Any) -> None:
        _forward(blocks)
        _forward(blocks).backward()

    def evaluation(blocks: Any) -> None:
        with torch.no_grad():
            _forward(blocks)
        _forward(blocks).backward()

    def evaluation_before_backward(blocks: Any) -> None:
        loss = _forward(blocks)
        with torch.no_grad():
            _forward(blocks)
        loss.backward()

    def two_forwards_two_backwards(blocks: Any) -> None:
        first, second = _forward(blocks), _forward(blocks, x=2 * X)
        first.backward()
        second.backward()

    def stopped(blocks: Any) -> None:
        _forward(blocks, "01")
        _forward(blocks).backward()

    def failing(blocks: Any) -> None:
        with pytest.raises(KeyError), mock.patch.object(Regions, "__call__", side_effect=KeyError):
            _forward(both.sharded)
        _forward(blocks).backward()

    def retained(blocks: Any) -> None:
        loss = _forward(blocks)
        loss.backward(retain_graph=True)
        loss.backward()

    both.do(_train("0123"))
    for what in (
        forward_without_backward,
        evaluation,
        evaluation_before_backward,
        two_forwards_two_backwards,
        stopped,
        failing,
        retained,
    ):
        for _ in range(2):
            both.do(what)
            both.do(_train("0123"))
    assert both.timeline.buffers.num_live == 0


def test_what_comes_between_forward_and_backward() -> None:
    pool.run(2, _interrupted)


def _forgotten(times: int) -> list[str]:
    """What was warned of, when forwards that run `times` before each backward are forgotten."""
    both, warned = Both(), list[str]()
    with mock.patch.object(group, "warn_once", lambda log, message: warned.append(message)):
        for _ in range(3):
            for _ in range(times):
                _forward(both.sharded)
            both.do(_train("0123"))
    return warned


def test_a_forgotten_forward_is_told_of() -> None:
    assert pool.run(2, _forgotten, 0) == [[], []]
    for warned in pool.run(2, _forgotten, 1):
        assert len(warned) == 12 and "run it under torch.no_grad()" in warned[0]


def _edits() -> list[str]:
    """Units that are gathered, in the last of three rounds."""
    both = Both()

    def edit_the_next_block(blocks: Any) -> None:
        x = blocks[0](X)
        with torch.no_grad():
            blocks[1].up.bias.add_(1.0)  # gathered already, once the order is known
            blocks[3].down.weight.mul_(0.5)
        for block in (blocks[1], blocks[2], blocks[3]):
            x = block(x)
        x.square().mean().backward()

    for _ in range(2):
        both.do(edit_the_next_block)
    with recorded(both.sharded) as events:
        both.do(edit_the_next_block)
    return [event.unit for event in events if event.kind == "gather"]


def test_an_edit_between_two_graphs_is_seen() -> None:
    for gathered in pool.run(2, _edits):
        assert gathered == ["0", "1", "2", "1", "3", "1", "0"]  # 2 is next when 0 is released; then 1 is waited for


class Branching(nn.Module):
    """A block in front of which something without parameters is computed, if the batch is large."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x.sin() * 3 if x.shape[0] > 5 else x)


def _branches() -> nn.Module:
    return nn.ModuleList(Branching() for _ in range(4))


def _one_rank_compiles_anew() -> int:
    """Rank 1 sees another batch size in each step: it compiles other graphs, with symbolic sizes, and with a branch."""
    plain: Any = build(_branches)
    sharded: Any = fsdp.shard(build(_branches), units=[Branching])
    for block in sharded:
        block.compile(backend="fsdp_opt", options=OPTIONS)
    for step in range(5):
        inputs = [torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH), torch.ones(4 + step, WIDTH)]
        sharded.zero_grad()
        _forward(sharded, x=inputs[dist.get_rank()]).backward()
        plain.zero_grad()
        for x in inputs:
            (_forward(plain, x=x) / 2).backward()
        for (name, grad), p in zip(full_grads(sharded).items(), plain.parameters(), strict=True):
            assert grad is not None
            assert relative_error(grad, p.grad) < 2e-6, name
    return len(fsdp.explain(sharded).graphs)


def test_one_rank_may_compile_anew() -> None:
    first, second = pool.run(2, _one_rank_compiles_anew)
    assert first == 4  # the first block's input needs no gradient
    assert second > 4


def _copies() -> None:
    both = Both()
    both.do(_train("0123"))
    both.do(_train("0123"))
    twin = copy.deepcopy(both.sharded)
    for blocks in (twin, both.sharded, twin):
        blocks.zero_grad()
        _forward(blocks).backward()
    for one, other in zip(full_grads(twin).values(), full_grads(both.sharded).values(), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert sharded_state(twin).timeline.buffers.arena is not both.timeline.buffers.arena


def test_a_copy_has_a_memory_of_its_own() -> None:
    pool.run(2, _copies)


class TwoModels(nn.Module):
    """Two models, with units of one name, in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.second(self.first(x))) * self.second.up.bias.sum()


def _two_models(in_flight: int) -> None:
    plain, sharded = build(TwoModels), build(TwoModels)
    for each in sharded.children():
        fsdp.shard(each)
    run: Any = torch.compile(sharded, backend="fsdp_opt", options={**OPTIONS, "in_flight": in_flight})
    for _ in range(3):
        for model, call in ((sharded, run), (plain, plain)):
            model.zero_grad()
            call(X).sum().backward()
        for (name, grad), p in zip(full_grads(sharded).items(), plain.parameters(), strict=True):
            assert grad is not None
            assert relative_error(grad, p.grad) < 2e-6, name


@pytest.mark.parametrize("in_flight", [1, 2])
def test_two_models_in_one_graph(in_flight: int) -> None:
    pool.run(2, _two_models, in_flight)


class Returning(nn.Module):
    """Units of which one flat group, trained, is returned, and the other, frozen, is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v, self.w = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.u.weight.requires_grad_(False)
        self.w.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for weight in (self.u.weight, self.w.weight, self.v.weight, self.u.weight, self.w.weight):
            x = (x @ weight).tanh()
        return x, self.u.bias, self.w.bias.view(2, -1)


def _returning(in_flight: int) -> None:
    plain, sharded = build(Returning), fsdp.shard(build(Returning), units=[nn.Linear])
    run: Any = torch.compile(sharded, backend="fsdp_opt", options={**OPTIONS, "in_flight": in_flight})
    kept = []
    for _ in range(3):
        for model, call in ((sharded, run), (plain, plain)):
            model.zero_grad()
            results = call(X)
            sum(result.square().sum() for result in results).backward()
            kept.append([result.detach() for result in results])
        for (name, grad), p in zip(full_grads(sharded).items(), plain.parameters(), strict=True):
            assert (grad is None) == (p.grad is None)
            assert grad is None or relative_error(grad, p.grad) < 2e-6, name
    assert all(relative_error(one, other) < 2e-6 for each in kept for one, other in zip(each, kept[1], strict=True))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_what_a_graph_returns_is_not_counted_and_stays_as_it_is(in_flight: int) -> None:
    pool.run(2, _returning, in_flight)


class Product(nn.Module):
    """One product of the weights of two units."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.a.weight @ self.b.weight)


def _refusal() -> str:
    model: Any = fsdp.shard(build(Product), units=["a", "b"])
    run = torch.compile(model, backend="fsdp_opt", options={**OPTIONS, "in_flight": 1})
    with pytest.raises(Exception) as refused:
        run(X)
    return f"{type(refused.value).__name__}: {refused.value}"


def test_a_bound_below_what_one_region_needs_is_refused() -> None:
    for message in pool.run(2, _refusal):
        assert (
            "ValueError: options['in_flight']: expected at least 2, because one region uses the units 'a' (256 B), "
            "'b' (256 B) at once, got 1" in message
        )
