"""When gathers are issued, and how many units are live: from a log of the collective calls and of what regions read."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_passes as fsdp
from tests.dist import pool
from tests.dist.models import WIDTH, Block, Net, build, next_token_loss
from tests.dist.recorded import Event, late_gathers, lives_of, most_live, recorded

BLOCKS = 3
TOKENS = torch.arange(10).view(2, 5)


class Stack(nn.Module):
    """Blocks, each a unit; `breaks` is a graph break behind each of them."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x


def model_and_loss(how: str, reshard: bool) -> tuple[Any, Callable[[], Tensor]]:
    if how in ("net", "tied"):
        model: Any = fsdp.shard(build(Net, blocks=BLOCKS, tied=how == "tied"), reshard_after_forward=reshard)
        return model, lambda: next_token_loss(model, TOKENS)
    model = fsdp.shard(build(Stack, how == "graph breaks"), units=[Block], reshard_after_forward=reshard)
    x = torch.linspace(-1, 1, 6 * WIDTH).view(6, WIDTH)
    return model, lambda: model(x).square().mean()


def _train(how: str, in_flight: int | None, reshard: bool = True, num_steps: int = 2) -> tuple[list[Event], Tensor]:
    """Events, and values at the end, of steps of two microbatches."""
    model, loss = model_and_loss(how, reshard)
    for each in model.blocks if how == "block by block" else [model]:
        each.compile(backend="fsdp_opt", options={"codegen": "fx", "in_flight": in_flight, "poison": True})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(model) as events:
        for _ in range(num_steps):
            for last in (False, True):
                events.append(Event("step"))
                with contextlib.nullcontext() if last else model.no_sync():
                    loss().backward()
            optimizer.step()
            optimizer.zero_grad()
    return events, torch.cat([param.full_tensor().flatten() for param in model.parameters()])


def _learnt(events: list[Event]) -> list[Event]:
    """From the second step on."""
    return events[[at for at, event in enumerate(events) if event.kind == "step"][2] :]


HOW = (pytest.param("net", marks=pytest.mark.slow), "tied", "block by block", "graph breaks")
NUM_UNITS = {"net": BLOCKS + 3, "tied": BLOCKS + 2, "block by block": BLOCKS, "graph breaks": BLOCKS}
WAYS = ((1, True), (2, True), (3, True), (None, True), (2, False))  # in_flight, reshard_after_forward


def _train_in_each_way(how: str) -> list[tuple[list[Event], Tensor]]:
    return [_train(how, in_flight, reshard) for in_flight, reshard in WAYS]


@functools.cache
def trained(how: str) -> list[dict[tuple[int | None, bool], tuple[list[Event], Tensor]]]:
    """Of each rank."""
    return [dict(zip(WAYS, results, strict=True)) for results in pool.run(2, _train_in_each_way, how)]


@pytest.mark.parametrize("how", HOW)
def test_the_next_unit_is_gathered_before_the_current_one_is_used(how: str) -> None:
    """Wherever a slot is free, forward and backward, from one graph to the next."""
    for ways in trained(how):
        for in_flight in (2, 3):
            events, _ = ways[in_flight, True]
            assert all(life.reads != [life.issue] for life in lives_of(events)), "each gather is read"
            assert late_gathers(_learnt(events), in_flight) == []
            if in_flight < NUM_UNITS[how]:
                assert late_gathers(_learnt(events), in_flight + 1)  # it is the bound that holds them back


@pytest.mark.parametrize("how", HOW)
def test_no_more_units_are_live_than_the_bound(how: str) -> None:
    for ways in trained(how):
        for in_flight in (1, 2, 3):
            assert most_live(ways[in_flight, True][0]) == in_flight
        assert most_live(ways[None, True][0]) == NUM_UNITS[how]


@pytest.mark.parametrize("how", HOW)
def test_no_value_depends_on_when_units_are_gathered(how: str) -> None:
    for ways in trained(how):
        assert all(torch.equal(values, ways[1, True][1]) for _, values in ways.values())


@pytest.mark.parametrize("how", HOW)
def test_units_that_stay_are_gathered_once_a_microbatch(how: str) -> None:
    for ways in trained(how):
        events = _learnt(ways[2, False][0])
        microbatches = sum(event.kind == "step" for event in events)
        gathered = Counter(event.unit for event in events if event.kind == "gather")
        assert list(gathered.values()) == [microbatches] * NUM_UNITS[how]
