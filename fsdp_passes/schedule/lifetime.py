"""What memory the steps of graphs use, when the graphs run one after another: one account of it for all who ask.

Positions count the steps of all graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from fsdp_passes.ir.alias import source
from fsdp_passes.ir.nodes import results
from fsdp_passes.schedule.plan import (
    Accumulate,
    Call,
    Event,
    Gather,
    GradSlice,
    Owner,
    Reduce,
    Release,
    Run,
    Step,
    Wait,
    WaitReduce,
)


class BrokenSchedule(Exception):
    """The step at `position` is wrong."""

    def __init__(self, position: int, what: str) -> None:
        super().__init__(what)
        self.position = position


@dataclass(frozen=True)
class Lifetime:
    """`nbytes` of memory that are in use from before step `start` until before step `end`."""

    nbytes: int
    start: int
    end: int


@dataclass
class Life:
    """A gathered buffer: issued, or taken over from another one; waited for, read; released or handed on.

    after: what is computed before this position is over when the buffer is filled.
    """

    gather: Gather
    owner: Owner
    call: int  # that issues it
    issue: int
    after: int
    waits: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @property
    def returned(self) -> bool:
        return self.gather.offset is None

    @property
    def sends(self) -> bool:
        """Whether it may be sent: what is kept for a window is, unless it is there."""
        return self.gather.kept_from is None

    @property
    def start(self) -> int:
        """Where its memory is first taken: what is kept for a window may be there from the start."""
        return 0 if self.gather.for_window and self.sends else self.issue

    def has_ended(self, position: float) -> bool:
        """Whether it was let go before `position`, or there."""
        return bool(self.ends) and self.ends[0] <= position

    def counts_at(self, position: int) -> bool:
        """Whether it takes a place while it is live: one that stays only until it is waited for, if it was not kept."""
        is_new = self.sends and not (self.waits and self.waits[0] <= position)
        return not self.gather.for_window and (self.gather.reshard or is_new)


@dataclass
class GradLife:
    """The sum of gradients of one flat group: its slices, where it is written, its reduction and the waits for that."""

    owner: Owner
    slices: list[tuple[int, GradSlice]] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    reduce: Reduce | None = None
    issue: int = -1
    waits: list[int] = field(default_factory=list)

    @property
    def start(self) -> int:
        """Where its memory is first needed."""
        return min((*(position for position, _ in self.slices), *self.writes), default=self.issue)


@dataclass
class Memory:
    """What `calls` use; lives and sums in the order of their issue, or first use."""

    calls: Sequence[Call]
    steps: list[tuple[int, Step]] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    sums: list[GradLife] = field(default_factory=list)

    @classmethod
    def of(cls, calls: Sequence[Call], steps: Sequence[Sequence[Step]]) -> Memory:
        """BrokenSchedule: a step names what is not there."""
        walk = _Walk(cls(calls))
        for call, own_steps in enumerate(steps):
            for step in own_steps:
                walk.add(call, step)
        return walk.memory


def inputs_of(call: Call, run: Run) -> dict[fx.Node, str]:
    """The inputs of the region that `run` of `call` calls, and their names in the plan; none where it has no graph."""
    if run.region >= len(call.plan.regions):
        return {}
    return dict(zip(call.plan.regions[run.region].graph.find_nodes(op="placeholder"), run.inputs, strict=True))


def results_of(call: Call, run: Run) -> Iterator[tuple[str, fx.Node, str | None]]:
    """The name of each result, the value in the region that owns its storage, and that one's name if it is an input."""
    if run.region < len(call.plan.regions):
        inputs = inputs_of(call, run)
        for node, name in zip(results(call.plan.regions[run.region].graph), run.outputs, strict=True):
            yield name, source(node), inputs.get(source(node))


class _Walk:
    """Steps that are named by a call and a name in it."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._event = -1  # the last
        self._lives: dict[tuple[int, str], Life] = {}
        self._open: dict[tuple[int, str], GradLife] = {}  # by shard
        self._reduced: dict[tuple[int, str], GradLife] = {}  # by shard
        self._slices: dict[tuple[int, str], GradLife] = {}

    def _life(self, call: int, buffer: str) -> Life:
        if (call, buffer) not in self._lives:
            raise BrokenSchedule(len(self.memory.steps), f"{buffer} is not gathered before")
        return self._lives[call, buffer]

    def _sum(self, call: int, shard: str) -> GradLife:
        if shard not in self.memory.calls[call].owners:
            raise BrokenSchedule(len(self.memory.steps), f"{shard} is no shard of graph {call}")
        if (call, shard) not in self._open:
            self._open[call, shard] = GradLife(self.memory.calls[call].owners[shard])
            self.memory.sums.append(self._open[call, shard])
        return self._open[call, shard]

    def add(self, call: int, step: Step) -> None:
        position = len(self.memory.steps)
        match step:
            case Event():
                self._event = position
            case Gather():
                self._gather(call, step, position)
            case Wait(buffer):
                self._life(call, buffer).waits.append(position)
            case Run():
                self._run(call, step, position)
            case Release(buffer):
                self._life(call, buffer).ends.append(position)
            case _:
                self._add_gradient(call, step, position)
        self.memory.steps.append((call, step))

    def _add_gradient(self, call: int, step: GradSlice | Accumulate | Reduce | WaitReduce, position: int) -> None:
        match step:
            case GradSlice():
                self._slices[call, step.name] = self._sum(call, step.shard)
                self._slices[call, step.name].slices.append((position, step))
            case Accumulate():
                self._sum(call, step.shard).writes.append(position)
            case Reduce():
                reduced = self._sum(call, step.shard)
                reduced.reduce, reduced.issue = step, position
                self._reduced[call, step.shard] = self._open.pop((call, step.shard))
            case WaitReduce(shard, ago):
                if (call - ago, shard) not in self._reduced:
                    raise BrokenSchedule(position, f"no reduction of {shard} is under way")
                self._reduced[call - ago, shard].waits.append(position)

    def _gather(self, call: int, step: Gather, position: int) -> None:
        if step.kept_from is not None:
            self._life(call, step.kept_from).ends.append(position)
        used_by = call + step.ahead
        if not 0 <= used_by < len(self.memory.calls) or step.shard not in self.memory.calls[used_by].owners:
            raise BrokenSchedule(position, f"{step.shard} is no shard of graph {used_by}")
        owner = self.memory.calls[used_by].owners[step.shard]
        life = Life(step, owner, call, position, self._event)
        self.memory.lives.append(life)
        self._lives[used_by, step.buffer] = life

    def _run(self, call: int, step: Run, position: int) -> None:
        for life in (self._lives[call, name] for name in step.inputs if (call, name) in self._lives):
            life.reads.append(position)
        written = [self._slices[call, name] for name in step.inputs if (call, name) in self._slices]
        for this in {id(each): each for each in written}.values():
            this.writes.append(position)
