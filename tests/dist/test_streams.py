"""What the runtime gives to which stream: recorded on two ranks, on the CPU, where streams order nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import fsdp_passes as fsdp
from fsdp_passes.codegen.variants import Regions
from fsdp_passes.runtime import buffers, collectives
from fsdp_passes.runtime.streams import Stream, Streams
from fsdp_passes.sharding.grad_buffer import GradBuffer
from fsdp_passes.sharding.group import FlatGroup
from fsdp_passes.sharding.state import sharded_state
from tests.dist import pool
from tests.dist.models import Net, backward_window, build, compiled

Log = list[tuple[str, str]]  # what, and on which stream, or which stream follows what was computed


@contextlib.contextmanager
def recorded(streams: Streams) -> Iterator[Log]:
    names = {id(streams.gather): "gather", id(streams.reduce): "reduce"}
    log: Log = []
    current = ["compute"]

    @contextlib.contextmanager
    def enter(stream: Stream) -> Iterator[None]:
        current.append(names[id(stream)])
        yield
        current.pop()

    def logged(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            log.append((what, current[-1]))
            return function(*args, **kwargs)

        return call

    cast = FlatGroup.wire_shard

    def wire_shard(group: FlatGroup, dtype: torch.dtype) -> torch.Tensor:
        before, start = group._wire, len(log)
        wire = cast(group, dtype)
        if group._wire is not before:
            log.insert(start, ("cast", current[-1]))
        return wire

    with contextlib.ExitStack() as patches:
        for owner, name, what in (
            (collectives, "_all_gather", "gather"),
            (collectives, "_reduce_scatter", "reduce"),
            (Regions, "__call__", "run"),
            (buffers, "poison", "release"),
            (GradBuffer, "take", "sum"),
        ):
            patches.enter_context(mock.patch.object(owner, name, logged(what, getattr(owner, name))))
        patches.enter_context(mock.patch.object(Stream, "current", enter))
        follow = mock.patch.object(Stream, "follow_compute", lambda stream: log.append(("follow", names[id(stream)])))
        patches.enter_context(follow)
        patches.enter_context(mock.patch.object(FlatGroup, "wire_shard", wire_shard))
        yield log


def _train(way: str) -> Log:
    """Windows of two microbatches, in bf16."""
    precision = fsdp.Precision(param=torch.bfloat16, reduce=torch.float32)
    model: Any = fsdp.shard(build(Net, tied=True), precision=precision)
    if way == "compiled":
        run = compiled(model, poison=True)
    else:
        run = model
        for block in model.blocks if way == "block by block" else []:
            block.compile(backend="fsdp_opt", options={"codegen": "fx", "poison": True})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(sharded_state(model).streams) as log:
        for step in range(3):
            backward_window(run, model, step, 2)
            optimizer.step()
            optimizer.zero_grad()
    return log


@pytest.mark.parametrize("way", ["compiled", "block by block", "uncompiled"])
def test_what_is_sent_follows_all_that_was_computed(way: str) -> None:
    """On a stream of its own; what is computed is on the current one."""
    for log in pool.run(2, _train, way):
        follows = {"gather": False, "reduce": False}
        for what, stream in log:
            if what == "follow":
                follows[stream] = True
            elif what in follows:
                assert stream == what and follows[what]
            else:
                assert stream == "compute"
                follows = dict.fromkeys(follows, False)
        kinds = {what for what, _ in log}
        assert kinds >= {"cast", "follow", "gather", "reduce", "sum"}
        assert way == "uncompiled" or kinds >= {"run", "release"}
