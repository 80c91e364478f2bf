"""Graphs that run in one process, on shards of two simulated ranks: nothing is sent, all is recorded."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import torch
from torch import Tensor, fx

from fsdp_passes.codegen.regions import cut
from fsdp_passes.codegen.variants import Regions
from fsdp_passes.ir.ops import owner_of, set_owner
from fsdp_passes.ir.text import dump, load
from fsdp_passes.options import Options
from fsdp_passes.runtime.agreement import Agreement
from fsdp_passes.runtime.executor import Executor
from fsdp_passes.runtime.streams import Streams
from fsdp_passes.schedule.order import schedule, scheduled
from fsdp_passes.schedule.plan import Plan
from fsdp_passes.sharding.grad_buffer import GradSlot

WORLD_SIZE = 2


class SimulatedGroup:
    """Owner of a shard whose every rank holds the same piece."""

    unit = "simulated"
    version = 0

    def __init__(self, shard: Tensor) -> None:
        self.shard = shard
        self.model = SimulatedModel(self)
        self.forwards = 0
        self.grads: dict[int, Tensor] = {}
        self.written: set[int] = set()
        self.full_grad: Tensor | None = None
        self.pieces: list[tuple[int, ...] | None] = []
        self.reductions = self.finished = 0

    def gather(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([self.shard] * WORLD_SIZE).to(dtype)

    def empty_full(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(WORLD_SIZE * self.shard.numel(), dtype=dtype)

    def issue_gather(self, full: Tensor) -> SimulatedWork:
        """The buffer holds NaN until it is waited for."""
        return SimulatedWork(full, self.gather(full.dtype))

    def gather_into(self, full: Tensor) -> None:
        full.copy_(self.gather(full.dtype))

    def reduce(self, full_grad: Tensor) -> Tensor:
        return full_grad[: self.shard.numel()].to(self.shard.dtype)

    def wants_gradient(self) -> bool:
        return True

    @property
    def gradients(self) -> SimulatedGroup:
        return self

    def drop_blank_buffer(self) -> None:
        pass

    def grad_slot(self, piece: int, shape: tuple[int, ...], dtype: torch.dtype, separate: bool) -> GradSlot:
        """Memory that holds NaN until it is written."""
        flat = self.grads.setdefault(piece, torch.full((math.prod(shape),), torch.nan, dtype=dtype))
        return GradSlot(flat.view(shape), self, piece)  # type: ignore[arg-type]  # all that it needs is `written`

    def has_gradient(self, piece: int) -> bool:
        return piece in self.written

    def accumulate(self, full_grad: Tensor, pieces: tuple[int, ...] | None) -> None:
        assert self.reductions == 0, "a gradient came after the reduction"
        self.full_grad = full_grad.clone() if self.full_grad is None else self.full_grad + full_grad
        self.pieces.append(pieces)

    def expect_backward(self) -> None:
        self.forwards += 1

    def reduce_if_complete(self) -> None:
        self.reductions += 1

    def finish_reduce(self) -> None:
        self.finished = self.reductions

    @property
    def reduced(self) -> Tensor | None:
        """What the reduction gives this rank; None without one."""
        return self.reduce(self.full_grad) if self.reductions and self.full_grad is not None else None


class SimulatedModel:
    device = torch.device("cpu")
    agreement = Agreement()

    def __init__(self, group: SimulatedGroup) -> None:
        self.groups = [group]
        self.reports: dict[object, None] = {}
        self.accumulate_bytes: int | None = None
        self.timeline: object | None = None
        self.streams = Streams(self.device)

    def limit_accumulation(self, accumulate_bytes: int | None) -> None:
        self.accumulate_bytes = accumulate_bytes


class SimulatedWork:
    def __init__(self, buffer: Tensor, values: Tensor) -> None:
        self._buffer, self._values = buffer.fill_(torch.nan), values

    def wait(self) -> None:
        self._buffer.copy_(self._values)


def graph(text: str) -> fx.GraphModule:
    """The graph that indented `text` describes."""
    return load(textwrap.dedent(text))


def canonical(text: str) -> str:
    """`text` as `dump` writes it."""
    return dump(graph(text))


def random_inputs(gm: fx.GraphModule) -> list[Any]:
    """A random tensor of the written type for each input, a shard where the text says so; always the same."""
    generator = torch.Generator().manual_seed(0)
    values = []
    for node in gm.graph.find_nodes(op="placeholder"):
        like = node.meta["val"]
        value = torch.randn(tuple(like.shape), generator=generator).to(like.dtype)
        if "fsdp" in node.meta:
            value.group = SimulatedGroup(value)  # a storage holds its owner weakly
            set_owner(value, value.group)
        values.append(value)
    return values


def executor(plan: Plan, regions: Regions, in_flight: int | None = None) -> Executor:
    """What runs `plan`, which gathers on demand; what is released is poisoned."""
    return Executor(scheduled(plan, in_flight), regions, schedule, Options(in_flight=in_flight, poison=True))


def run_scheduled(gm: fx.GraphModule, inputs: list[Any], in_flight: int | None = None) -> tuple[Any, ...]:
    """What the executor makes of `gm`, a graph that gathers on demand."""
    plan = cut(gm, "bwd", trains=False)
    return executor(plan, Regions(plan.regions, "fx", "bwd"), in_flight)(list(inputs))


def group_of(shard: Tensor) -> SimulatedGroup:
    owner = owner_of(shard)
    assert isinstance(owner, SimulatedGroup)
    return owner


def assert_bitwise(got: Any, expected: Any) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        same = torch.equal(one, other) if isinstance(other, Tensor) else one == other
        assert same, (one, other)
