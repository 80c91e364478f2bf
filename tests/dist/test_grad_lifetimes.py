"""A unit's buffer of gradients exists from its first write to the end of its reduction, whatever happens between."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp_passes as fsdp
from fsdp_passes.codegen.variants import Regions
from fsdp_passes.sharding.model import ShardedModel
from fsdp_passes.sharding.state import sharded_state
from tests.dist import pool
from tests.dist.models import Block, build

ROWS = 6


def _stack() -> nn.Module:
    return nn.ModuleList(Block() for _ in range(3))


def _sharded() -> Any:
    return fsdp.shard(build(_stack), units=[Block])


def _forward(blocks: Any) -> torch.Tensor:
    x = torch.linspace(-1, 1, ROWS * 8).view(ROWS, 8)
    for block in blocks:
        x = block(x)
    return x.square().mean()


def _num_buffers(model: nn.Module) -> int:
    return sum(group.gradients.buffer is not None for group in sharded_state(model).groups)


def _after_an_uncompiled_backward() -> tuple[int, int]:
    model = _sharded()
    with sharded_state(model).no_sync():
        _forward(model).backward()
    before = _num_buffers(model)
    model.zero_grad()
    return before, _num_buffers(model)


def test_zero_grad_frees_what_an_uncompiled_backward_added() -> None:
    assert pool.run(1, _after_an_uncompiled_backward) == [(3, 0)]


def _after_an_exception_in_the_first_write() -> tuple[int, int]:
    model = _sharded()
    for block in model:
        block.compile(backend="fsdp_opt", options={"codegen": "fx"})
    loss = _forward(model)
    with pytest.raises(KeyError, match="on purpose"), mock.patch.object(Regions, "__call__", side_effect=_raise):
        loss.backward()
    after = _num_buffers(model)
    _forward(model).backward()
    return after, _num_buffers(model)


def _raise(*_: Any) -> None:
    raise KeyError("on purpose")


def test_an_exception_in_the_first_write_leaves_no_buffer() -> None:
    assert pool.run(1, _after_an_exception_in_the_first_write) == [(0, 0)]


def _buffers_at_the_end_of_backward(checkpointing: bool) -> list[int]:
    model, left = _sharded(), []
    end_backward = ShardedModel.end_backward

    def record(self: ShardedModel) -> None:
        left.append(_num_buffers(model))
        end_backward(self)

    for block in model:
        block.compile(backend="fsdp_opt", options={"codegen": "fx"})
    blocks = [lambda x, b=b: checkpoint(b, x, use_reentrant=False) for b in model] if checkpointing else model
    with mock.patch.object(ShardedModel, "end_backward", record):
        _forward(blocks).backward()
    return left


@pytest.mark.parametrize("checkpointing", [False, True])
def test_units_are_reduced_before_backward_ends(checkpointing: bool) -> None:
    """A checkpoint around a compiled block runs its forward twice, and backward once."""
    (left,) = pool.run(1, _buffers_at_the_end_of_backward, checkpointing)
    assert left
    assert set(left) == {0}


def _compiles(rows: tuple[int, ...]) -> int:
    """Graphs that are compiled for these numbers of rows, each symbolic."""
    model: Any = fsdp.shard(build(Block))
    run = torch.compile(model, backend="fsdp_opt", dynamic=True)
    torch._dynamo.utils.counters.clear()
    for number in rows:
        run(torch.ones(number, 8)).sum().backward()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_what_code_assumes_about_symbolic_sizes_is_a_guard() -> None:
    """Inductor sums up to 4096 rows in another way than more: the code of one must not run for the other."""
    assert pool.run(1, _compiles, (24, 40)) == [1]
    assert pool.run(1, _compiles, (24, 5000)) == [2]
