"""Frameworks that pickle `state_dict()` get full tensors, and load them."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import nn

import fsdp_passes as fsdp
from tests.dist import pool
from tests.dist.models import Net, backward_window, build, shard_net


def _saved_and_loaded() -> None:
    """A model beside another sharded one, in a wrapper, with tied parameters, through torch.save."""
    student, teacher = shard_net(tied=True), shard_net()
    both: Any = nn.ModuleDict({"student": student, "teacher": teacher})
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.1)
    fsdp.use_full_state_dicts(student, optimizer)
    backward_window(student, student, step=0, count=1)
    optimizer.step()
    state, full = both.state_dict(), fsdp.full_state_dict(student)
    assert {name for name in state if type(state[name]) is torch.Tensor} == {f"student.{name}" for name in full}
    assert all(torch.equal(state[f"student.{name}"], value) for name, value in full.items())
    assert state["student.head.weight"] is state["student.embed.weight"]
    assert [id(value) for value in student.state_dict(keep_vars=True).values()].count(id(student.head.weight)) == 2

    stored = io.BytesIO()
    torch.save([student.state_dict(), optimizer.state_dict()], stored)
    stored.seek(0)
    values, moments = torch.load(stored)
    build(Net, tied=True).load_state_dict(values)
    twin = shard_net(tied=True)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.5)
    fsdp.use_full_state_dicts(twin, twin_optimizer)
    twin.load_state_dict(values)
    twin_optimizer.load_state_dict(moments)
    for model, each in ((student, optimizer), (twin, twin_optimizer)):
        each.zero_grad()
        backward_window(model, model, step=1, count=1)
        each.step()
    values = (each.state_dict().values() for each in (student, twin))
    assert all(torch.equal(one, other) for one, other in zip(*values, strict=True))
    # What goes into checkpoints stays sharded.
    assert type(fsdp.state_dict(student, optimizer)["model"]["norm.bias"]) is type(student.norm.bias)


def test_full_tensors_through_a_file() -> None:
    pool.run(2, _saved_and_loaded)
