"""What a compiled graph does, step by step: frozen, printable, and all that the runtime knows.

    issue    full = gather(primals_2, bf16, 4096)      start filling a buffer of 4096 elements from a shard
    wait     full                                      from here on it may be read
    run      add = region_0(primals_1, full) drop primals_1
    release  full                                      the buffer is free
             slice = grad_slice(primals_2, 0)          where the gradient of piece 0 is added up; the next run writes
                                                       it: copies if no piece that it writes has a gradient, else adds
             accumulate(cat, primals_2, [0, 1])        add to the shard's flat gradient: these pieces have one
    issue    reduce(primals_2)                         reduce-scatter it, if this backward synchronises:
                                                       here, or at its end if another graph adds to it; waited
                                                       for before the next reduction, and at the end

A backward that synchronises ends with one all-reduce of a byte a parameter: which have a gradient on some rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx


@dataclass(frozen=True)
class Gather:
    buffer: str
    shard: str
    dtype: torch.dtype
    full_elems: int


@dataclass(frozen=True)
class Wait:
    buffer: str


@dataclass(frozen=True)
class Run:
    """Call region number `region`; values in `drops` are not needed after it."""

    region: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    drops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Release:
    buffer: str


@dataclass(frozen=True)
class GradSlice:
    """For the next `Run` only. `separate`: a tensor of its own, which the reduction concatenates.

    `dtype` is the reduce dtype.
    """

    name: str
    shard: str
    piece: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    separate: bool = False


@dataclass(frozen=True)
class Accumulate:
    """`pieces` of the shard's layout have a gradient in `full_grad`; None: all of them."""

    full_grad: str
    shard: str
    pieces: tuple[int, ...] | None
    drops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reduce:
    shard: str


Step = Gather | Wait | Run | Release | GradSlice | Accumulate | Reduce
Output = str | int | float | bool | None  # a str is a value's name


@dataclass(frozen=True)
class Plan:
    """`inputs` are names in the order of the arguments, None where nothing reads one."""

    direction: str  # "fwd", or "bwd"
    inputs: tuple[str | None, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]
    regions: tuple[fx.GraphModule, ...]
    trains: bool = False  # a forward whose backward is to come

    @property
    def gathers(self) -> tuple[Gather, ...]:
        return tuple(step for step in self.steps if isinstance(step, Gather))

    @property
    def reductions(self) -> tuple[Reduce, ...]:
        return tuple(step for step in self.steps if isinstance(step, Reduce))

    @property
    def grad_slices(self) -> tuple[GradSlice, ...]:
        return tuple(step for step in self.steps if isinstance(step, GradSlice))


def reads(step: Step) -> tuple[str, ...]:
    """Names that `step` looks up."""
    match step:
        case Gather() | GradSlice() | Reduce():
            return (step.shard,)
        case Wait() | Release():
            return (step.buffer,)
        case Run():
            return step.inputs
        case Accumulate():
            return (step.full_grad, step.shard)


def with_drops(steps: Sequence[Step], outputs: Sequence[Output], kept: set[str]) -> tuple[Step, ...]:
    """`steps` with `drops` filled: a value is dropped by the last step that reads it.

    `kept` names what is never dropped this way: buffers, which have releases, slices, which one step reads, and shards,
    which outlive the graph.
    """
    alive = set(kept) | {output for output in outputs if isinstance(output, str)}
    done: list[Step] = []
    for step in reversed(steps):
        last = tuple(dict.fromkeys(name for name in reads(step) if name not in alive))
        alive.update(last)
        done.append(replace(step, drops=last) if last and isinstance(step, Run | Accumulate) else step)
    return tuple(reversed(done))
