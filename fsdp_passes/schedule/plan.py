"""What a compiled graph does, step by step: frozen, printable, and all that the runtime knows.

    event    gathers after compute                     gathers from here on start once what was computed is over
    issue    full: bf16[4096] = gather(primals_2) of "up" at 512
                                                       start filling the arena from byte 512 on, from a shard
    wait     full                                      from here on it may be read
    run      add = region_0(primals_1, full) drop primals_1
    release  full                                      the buffer is free
             slice = grad_slice(primals_2, 0)          where the gradient of piece 0 is added up; the next run writes
                                                       it: copies if no piece that it writes has a gradient, else adds
             accumulate(cat, primals_2, [0, 1])        add to the shard's flat gradient: these pieces have one
    issue    reduce(primals_2, f32[4096])              reduce-scatter it, if this backward synchronises:
                                                       here, or at its end if another graph adds to it
    wait     reduce(primals_2)                         the memory of its unreduced gradient is free

A backward that synchronises ends with one all-reduce of a byte a parameter: which have a gradient on some rank.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx


@dataclass(frozen=True)
class Event:
    """Gathers from here on start once what was computed before is over."""


@dataclass(frozen=True)
class Gather:
    """`buffer` of the graph that runs `ahead` graphs later (0: this one), from that graph's `shard`.

    reshard: False where the unit stays gathered from forward to backward.
    offset: in bytes into the arena; None: memory of its own, which who receives it keeps.
    kept_from: a buffer of this graph, in the same memory, that holds the same values: nothing is sent.
    for_window: it is not released, and nothing is sent if it is there from a microbatch before, of the same window.
    """

    buffer: str
    shard: str
    dtype: torch.dtype
    full_elems: int
    unit: str
    reshard: bool = True
    offset: int | None = None
    ahead: int = 0
    kept_from: str | None = None
    for_window: bool = False

    @property
    def nbytes(self) -> int:
        return self.full_elems * self.dtype.itemsize


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

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Accumulate:
    """`pieces` of the shard's layout have a gradient in `full_grad`; None: all of them."""

    full_grad: str
    shard: str
    pieces: tuple[int, ...] | None
    drops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reduce:
    """Starts once what was computed before is over: `full_elems` of the reduce dtype."""

    shard: str
    dtype: torch.dtype
    full_elems: int

    @property
    def nbytes(self) -> int:
        return self.full_elems * self.dtype.itemsize


@dataclass(frozen=True)
class WaitReduce:
    """For the reduction of `shard`, an input of the graph that ran `ago` graphs before (0: this one)."""

    shard: str
    ago: int = 0


Step = Event | Gather | Wait | Run | Release | GradSlice | Accumulate | Reduce | WaitReduce
Output = str | int | float | bool | None  # a str is a value's name


@dataclass(frozen=True)
class Peak:
    """The most bytes that steps own at once, for communication; the sum of gradients is not kept from before.

    arena: one allocation, for gathered buffers; stay: of it, units with reshard_after_forward=False, at their most;
    window: of it, what is kept for the microbatches of a window.
    Beside it, where these together are most: returned: gathered buffers that are results; written: sums of gradients
    that are still being written; reduced: those that are complete, and under way. What a reduction leaves, this rank's
    part of a sum, is not in it.
    """

    arena: int = 0
    stay: int = 0
    window: int = 0
    returned: int = 0
    written: int = 0
    reduced: int = 0

    @property
    def nbytes(self) -> int:
        return self.arena + self.returned + self.written + self.reduced


@dataclass(frozen=True)
class Plan:
    """`inputs` are names in the order of the arguments, None where nothing reads one."""

    direction: str  # "fwd", or "bwd"
    inputs: tuple[str | None, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]
    regions: tuple[fx.GraphModule, ...]
    trains: bool = False  # a forward whose backward is to come
    peak: Peak = Peak()

    @property
    def peak_bytes(self) -> int:
        """What the plan owns at most, if the graph runs alone: `peak` has its parts."""
        return self.peak.nbytes

    @property
    def gathers(self) -> tuple[Gather, ...]:
        """Those that communicate."""
        return tuple(step for step in self.steps if isinstance(step, Gather) and step.kept_from is None)

    @cached_property
    def buffers(self) -> dict[str, int]:
        """Numbered in the order in which they are waited for."""
        return {step.buffer: n for n, step in enumerate(step for step in self.steps if isinstance(step, Wait))}

    @cached_property
    def skeleton(self) -> tuple[tuple[str | None, Hashable], ...]:
        """What a schedule depends on: a shard, or None, and what is done with it, in order; no names of buffers.

        Plans with equal skeletons on the same shards send the same, in the same order, in every schedule. Releases
        stand where the next communication is, so that what is computed before it makes no difference.
        """
        gathers = {step.buffer: step for step in self.steps if isinstance(step, Gather)}
        found: list[tuple[str | None, Hashable]] = []
        freed: list[int] = []
        for step in self.steps:
            match step:
                case Gather(kept_from=str(buffer)) | Release(buffer):
                    freed.append(self.buffers[buffer])
                    continue
                case Wait():
                    gather = gathers[step.buffer]
                    this: tuple[str | None, Hashable] = gather.shard, ("wait", gather.dtype, gather.reshard)
                case Reduce():
                    this = step.shard, "reduce"
                case _:
                    continue
            found += [(None, ("release", *sorted(freed)))] * bool(freed)
            freed.clear()
            found.append(this)
        return *found, (None, ("release", *sorted(freed)))

    @cached_property
    def arena_bytes(self) -> int:
        return bytes_of_slots(self.steps)

    @property
    def reductions(self) -> tuple[Reduce, ...]:
        return tuple(step for step in self.steps if isinstance(step, Reduce))

    @property
    def grad_slices(self) -> tuple[GradSlice, ...]:
        return tuple(step for step in self.steps if isinstance(step, GradSlice))


Owner = tuple[str, int]  # a unit, and which of its flat groups


@dataclass(frozen=True)
class Call:
    """One run of `plan`. `owners`: to whom each shard belongs; `for_window`: buffers that are kept for a window."""

    plan: Plan
    owners: Mapping[str, Owner]
    for_window: frozenset[str] = frozenset()

    @classmethod
    def alone(cls, plan: Plan) -> Call:
        """The shards belong to the units that the plan names."""
        owners: dict[str, Owner] = {}
        for each in (step for step in plan.steps if isinstance(step, Gather)):
            num_others = sum(unit == each.unit for unit, _ in owners.values())
            owners.setdefault(each.shard, (each.unit, num_others))
        for step in plan.steps:
            if isinstance(step, GradSlice | Accumulate | Reduce):
                owners.setdefault(step.shard, (step.shard, 0))
        return cls(plan, owners)


def bytes_of_slots(steps: Iterable[Step]) -> int:
    """How large the memory must be in which `steps` place their buffers."""
    gathers = (step for step in steps if isinstance(step, Gather))
    return max((step.offset + step.nbytes for step in gathers if step.offset is not None), default=0)


def reads(step: Step) -> tuple[str, ...]:
    """Names that `step` looks up."""
    match step:
        case Event():
            return ()
        case Gather() | GradSlice() | Reduce() | WaitReduce():
            return (step.shard,)
        case Wait() | Release():
            return (step.buffer,)
        case Run():
            return step.inputs
        case Accumulate():
            return (step.full_grad, step.shard)


def drops(step: Step) -> tuple[str, ...]:
    """Values that are not needed after `step`."""
    return step.drops if isinstance(step, Run | Accumulate) else ()


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
