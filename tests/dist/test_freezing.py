"""Parameters are frozen and unfrozen between steps; gradients and steps stay those of the unsharded model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_passes as fsdp
from fsdp_passes.sharding.pending import GradientNotReduced, PendingGrad
from fsdp_passes.sharding.state import sharded_state
from tests.dist import pool
from tests.dist.models import Net, backward_window, build, compiled, full_grads, relative_error, shard_net

# By step: what is frozen from then on. blocks.0 is a unit of its own, up.bias a part of one.
FROZEN: list[tuple[str, ...]] = [(), ("blocks.0.",), ("blocks.0.up.bias", "embed"), (), ("head", "norm"), ()]


def _set_frozen(model: nn.Module, prefixes: tuple[str, ...]) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(prefixes or ("none",)))


def _train(codegen: str | None, tied: bool) -> None:
    expected, sharded = build(Net, tied=tied), shard_net(tied=tied)
    run = sharded if codegen is None else compiled(sharded, codegen=codegen)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9) for model in (expected, sharded)]
    for step, prefixes in enumerate(FROZEN):
        for model in (expected, sharded):
            _set_frozen(model, prefixes)
        backward_window(expected, None, step, count=2)
        backward_window(run, sharded, step, count=2)
        grads, theirs = full_grads(sharded), full_grads(expected)
        for name, grad in theirs.items():
            mine = grads[name]
            assert (mine is None) == (grad is None), (step, name)
            assert grad is None or relative_error(mine, grad) < 2e-6, (step, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in fsdp.full_state_dict(sharded).items():
        assert relative_error(value, expected.state_dict()[name]) < 2e-6, name


@pytest.mark.parametrize("codegen, tied", [(None, False), ("fx", True)])
def test_freezing_and_unfreezing(codegen: str | None, tied: bool) -> None:
    pool.run(2, _train, codegen, tied)


def _kept_gradients() -> None:
    """Freezing keeps `.grad`, and what comes after unfreezing is added to it, as in torch."""
    expected, sharded = build(Net), shard_net()
    for model, owner in ((expected, None), (sharded, sharded)):
        backward_window(model, owner, step=0, count=1)
        model.blocks[0].up.bias.requires_grad_(False)
        backward_window(model, owner, step=1, count=1)
        model.blocks[0].up.bias.requires_grad_(True)
        backward_window(model, owner, step=2, count=1)
    grads = full_grads(sharded)
    assert all(relative_error(grads[name], grad) < 2e-6 for name, grad in full_grads(expected).items())


def _with_accumulate_bytes() -> None:
    """The units that defer are chosen anew when others are trained: frozen, a unit takes nothing."""
    model: Any = shard_net()
    run = compiled(model, accumulate_bytes=2 * _largest_bytes(model))
    deferred = []
    for prefixes in ((), ("blocks.",)):
        _set_frozen(model, prefixes)
        backward_window(run, model, step=0, count=2)
        deferred.append(sharded_state(model).deferred_units)
        model.zero_grad()
    assert deferred[0] != deferred[1]


def _largest_bytes(model: Any) -> int:
    return max(sharded_state(model).full_grad_bytes().values())


def _copies_stay_frozen() -> None:
    model: Any = shard_net()
    model.blocks[0].up.bias.requires_grad_(False)
    twin = copy.deepcopy(model)
    model.blocks[0].up.bias.requires_grad_(True)
    assert not twin.blocks[0].up.bias.requires_grad
    for each in (model, twin):
        backward_window(each, each, step=0, count=1)
    assert twin.blocks[0].up.bias.grad is None and model.blocks[0].up.bias.grad is not None


def _open_window() -> None:
    """Refused by all ranks, and the window goes on."""
    model: Any = shard_net()
    with model.no_sync():
        _accumulate(model)
    for param in model.parameters():
        with pytest.raises(GradientNotReduced, match="expected reduced gradients for requires_grad_, got one of unit"):
            param.requires_grad_(False)
        assert param.requires_grad
    _accumulate(model)
    model.blocks[0].up.bias.requires_grad_(False)
    with model.no_sync():
        _accumulate(model)
    assert model.blocks[0].up.bias.grad.full_tensor().any()  # what it had, and nothing that is pending
    assert type(model.blocks[0].up.weight.grad) is PendingGrad


def _accumulate(model: Any) -> None:
    model(torch.arange(4).view(1, 4)).sum().backward()


@pytest.mark.parametrize("check", [_kept_gradients, _copies_stay_frozen, _open_window, _with_accumulate_bytes])
def test_between_windows(check: Any) -> None:
    pool.run(2, check)
