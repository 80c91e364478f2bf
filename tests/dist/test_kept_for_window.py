"""`keep_gathered_bytes`: what is gathered in a window, and what it costs, on two ranks; never other numbers."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp_passes as fsdp
from tests.dist import pool
from tests.dist.models import Block, compiled
from tests.dist.recorded import Event, lives_of, recorded
from tests.dist.test_prefetch import HOW, NUM_UNITS, TOKENS, model_and_loss

ALL = 1 << 20  # bytes; the models have less
SOME = 2500  # two blocks, of 1,024 bytes in fp32
MICROBATCHES = 3
WAYS = ((0, True), (SOME, True), (ALL, True), (SOME, False))  # keep_gathered_bytes, reshard_after_forward


def _train(how: str, keep: int, reshard: bool, num_windows: int = 3) -> tuple[list[Event], Tensor, tuple[str, ...]]:
    """Events of windows, values at the end, and the units that are kept."""
    model, loss = model_and_loss(how, reshard)
    options = {"codegen": "fx", "poison": True, "in_flight": 1, "keep_gathered_bytes": keep}
    for each in model.blocks if how == "block by block" else [model]:
        each.compile(backend="fsdp_opt", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(model) as events:
        for _ in range(num_windows):
            events.append(Event("step"))
            for number in range(MICROBATCHES):
                with contextlib.nullcontext() if number == MICROBATCHES - 1 else model.no_sync():
                    loss().backward()
            optimizer.step()
            optimizer.zero_grad()
    values = torch.cat([param.full_tensor().flatten() for param in model.parameters()])
    return events, values, fsdp.explain(model).rounds[-1].window_units


def _train_in_each_way(how: str) -> list[tuple[list[Event], Tensor, tuple[str, ...]]]:
    return [_train(how, *way) for way in WAYS]


@functools.cache
def trained(how: str) -> list[dict[tuple[int, bool], tuple[list[Event], Tensor, tuple[str, ...]]]]:
    """Of each rank."""
    return [dict(zip(WAYS, results, strict=True)) for results in pool.run(2, _train_in_each_way, how)]


def _gathers_of_last_window(events: list[Event]) -> Counter[str]:
    last = max(at for at, event in enumerate(events) if event.kind == "step")
    return Counter(event.unit for event in events[last:] if event.kind == "gather")


@pytest.mark.parametrize("how", HOW)
def test_a_kept_unit_is_gathered_once_a_window_and_the_others_no_more_than_before(how: str) -> None:
    for ways in trained(how):
        before = _gathers_of_last_window(ways[0, True][0])
        assert min(before.values()) >= MICROBATCHES
        for way in WAYS[1:]:
            events, _, kept = ways[way]
            gathers = _gathers_of_last_window(events)
            assert {unit for unit, count in gathers.items() if count == 1} == set(kept)
            if way[1]:
                others = set(gathers) - set(kept)
                assert all(MICROBATCHES <= gathers[unit] <= before[unit] for unit in others)
        assert 0 < len(ways[SOME, True][2]) < len(ways[ALL, True][2]) == NUM_UNITS[how]
        assert ways[0, True][2] == ()


@pytest.mark.parametrize("how", HOW)
def test_no_value_depends_on_what_is_kept(how: str) -> None:
    for ways in trained(how):
        assert all(torch.equal(values, ways[0, True][1]) for _, values, _ in ways.values())


@pytest.mark.parametrize("how", HOW)
def test_the_bound_holds_for_the_other_units(how: str) -> None:
    for ways in trained(how):
        events, _, kept = ways[SOME, True]
        lives = [life for life in lives_of(events) if life.unit not in kept]
        assert all(sum(life.is_live(at) for life in lives) <= 1 for at in range(len(events)))


def edits_between_microbatches(blocks: Any) -> None:
    _microbatch(blocks)
    with torch.no_grad():
        blocks[1].up.bias.add_(1.0)
        blocks[3].down.weight.mul_(0.5)


def evaluates_between_microbatches(blocks: Any) -> None:
    _microbatch(blocks)
    with torch.no_grad():
        _loss(blocks)


def runs_in_another_order(blocks: Any) -> None:
    _microbatch(blocks)
    _microbatch(blocks, "0213")


def stops_in_the_middle(blocks: Any) -> None:
    _loss(blocks, "01")


def discards_gradients(blocks: Any) -> None:
    _microbatch(blocks)
    blocks.zero_grad()


def loads_a_checkpoint(blocks: Any) -> None:
    _microbatch(blocks)
    values = {name: 0.5 * full for name, full in fsdp.full_state_dict(blocks).items()}
    fsdp.load_full_state_dict(blocks, values)


def edits_data(blocks: Any) -> None:
    for param in blocks.parameters():
        param.data.add_(0.25)


X = torch.linspace(-1, 1, 48).view(6, 8)
BETWEEN = (
    edits_between_microbatches,
    evaluates_between_microbatches,
    runs_in_another_order,
    stops_in_the_middle,
    discards_gradients,
    loads_a_checkpoint,
    edits_data,
)


def _loss(blocks: Any, order: str = "0123", x: Tensor = X) -> Tensor:
    for digit in order:
        x = blocks[int(digit)](x)
    return x.square().mean()


def _microbatch(blocks: Any, order: str = "0123") -> None:
    _loss(blocks, order).backward()


def _four_blocks(keep: int, precision: fsdp.Precision | None = None) -> Any:
    torch.manual_seed(0)
    blocks: Any = fsdp.shard(torch.nn.ModuleList(Block() for _ in range(4)), units=[Block], precision=precision)
    for block in blocks:
        block.compile(backend="fsdp_opt", options={"codegen": "fx", "keep_gathered_bytes": keep, "poison": True})
    return blocks


def _do_between_microbatches(keep: int) -> list[Tensor]:
    """Gradients at the end of windows into which each of `BETWEEN` comes, twice."""
    blocks, grads = _four_blocks(keep), []
    for between in (edits_between_microbatches, *BETWEEN, *BETWEEN):
        with blocks.no_sync():
            _microbatch(blocks)
            between(blocks)
            _microbatch(blocks)
        _microbatch(blocks)
        grads += [param.grad.local.clone() for param in blocks.parameters()]
        blocks.zero_grad()
    return grads


def test_what_comes_between_microbatches_is_seen() -> None:
    for without, some, everything in zip(
        *(pool.run(2, _do_between_microbatches, keep) for keep in (0, SOME, ALL)), strict=True
    ):
        for kept in (some, everything):
            assert all(torch.equal(one, other) for one, other in zip(kept, without, strict=True))


def _edit_between_windows(keep: int, dtype: torch.dtype) -> list[float]:
    """Losses, with edits of which torch's version counter knows nothing."""
    blocks, losses, x = _four_blocks(keep, fsdp.Precision(param=dtype)), [], X.to(dtype)
    for _ in range(4):
        with blocks.no_sync():
            _loss(blocks, x=x).backward()
        loss = _loss(blocks, x=x)
        loss.backward()
        losses.append(loss.item())
        blocks[1].down.weight.local.data.mul_(2.0)
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_begins_with_what_the_shards_are(dtype: torch.dtype) -> None:
    without, everything = (pool.run(2, _edit_between_windows, keep, dtype) for keep in (0, ALL))
    assert without == everything and len(set(without[0])) == 4


def _evaluate() -> list[int]:
    """Gathers of evaluations one after another: the order is known from the second on."""
    model, _ = model_and_loss("net", reshard=True)
    run = compiled(model, keep_gathered_bytes=ALL)
    counts = []
    for _ in range(4):
        with torch.no_grad(), recorded(model) as events:
            run(TOKENS)
        counts.append(sum(event.kind == "gather" for event in events))
    with torch.no_grad(), recorded(model) as events:
        model.head.weight.mul_(2.0)
        run(TOKENS)
    return [*counts, sum(event.kind == "gather" for event in events)]


def test_evaluations_of_unchanged_parameters_gather_once() -> None:
    units = NUM_UNITS["net"]
    assert pool.run(2, _evaluate) == [[units, units, 0, 0, 1]] * 2
