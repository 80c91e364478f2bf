"""Running a plan: one branch a kind of step.

Decided here is only what depends on the state of the gradients: whether a write copies or adds, and when a `reduce`
communicates: at once if the backward synchronises and no other forward of the group awaits its backward; when the whole
backward ends if one does; not at all under no_sync, unless the group's unit is not to accumulate. A backward that was
asked for other gradients only (torch.autograd.grad of an input) accumulates and reduces nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, cast

from torch import Tensor

from fsdp_passes._compat import profiler_span
from fsdp_passes.ir.ops import is_shard, owner_of
from fsdp_passes.runtime.order import GraphCall, Scheduler, Settings
from fsdp_passes.runtime.timeline import Timeline, Turn
from fsdp_passes.schedule.plan import (
    Accumulate,
    Event,
    Gather,
    GradSlice,
    Plan,
    Reduce,
    Release,
    Run,
    Step,
    Wait,
    WaitReduce,
)
from fsdp_passes.sharding.grad_buffer import GradSlot, prepare
from fsdp_passes.sharding.group import FlatGroup


class RegionCaller(Protocol):
    """The compiled regions of a plan: codegen.variants.Regions."""

    @property
    def complete(self) -> bool: ...

    def compile(self, first: Mapping[int, bool]) -> None: ...

    def __call__(self, number: int, first: bool, inputs: list[Any], /) -> Sequence[Any]: ...


class Executor:
    """`plan` as a function of one list of arguments, which it empties.

    report: what the models whose shards it uses keep of it, for `explain`.
    """

    def __init__(
        self, plan: Plan, regions: RegionCaller, schedule: Scheduler, settings: Settings, report: object | None = None
    ) -> None:
        self.plan = plan
        self._regions, self._schedule, self._settings, self._report = regions, schedule, settings, report
        # AOTAutograd then hands over the list itself. On the instance: wrappers copy only its __dict__.
        self._boxed_call = True

    def __call__(self, arguments: list[Any]) -> tuple[Any, ...]:
        values = {name: value for name, value in zip(self.plan.inputs, arguments, strict=True) if name}
        arguments.clear()
        groups = {name: _group(value) for name, value in values.items() if is_shard(value)}
        self._announce(groups.values(), values)
        call = GraphCall(self.plan, groups, self._settings, self._schedule)
        slots: dict[str, GradSlot] = {}
        with Timeline.of(call.model).turn(call) as turn:
            if not self._regions.complete:
                self._regions.compile(_variants(self.plan, values))
            for step in turn:
                self._do(step, turn, values, slots)
        return tuple(values[out] if isinstance(out, str) else out for out in self.plan.outputs)

    def _do(self, step: Step, turn: Turn, values: dict[str, Any], slots: dict[str, GradSlot]) -> None:
        match step:
            case Event() | Gather() | Reduce() | WaitReduce():
                turn.do(step)
            case Wait():
                values[step.buffer] = turn.wait(step.buffer)
            case Run():
                self._run(step, values, slots)
            case Release():
                del values[step.buffer]
                turn.release(step.buffer)
            case GradSlice():
                group = _group(values[step.shard])
                slots[step.name] = group.grad_slot(step.piece, step.shape, step.dtype, step.separate)
            case Accumulate():
                _accumulate(step, values)

    def _announce(self, groups: Collection[FlatGroup], values: dict[str, Any]) -> None:
        """Tell the models what is about to run."""
        for group in groups:
            group.model.reports[self._report] = None
            if self.plan.trains:
                group.model.limit_accumulation(self._settings.accumulate_bytes)
                group.expect_backward()

    def _run(self, step: Run, values: dict[str, Any], slots: dict[str, GradSlot]) -> None:
        """`slots` are those that this region writes; they are marked as written, and forgotten."""
        first = prepare(slots.values())
        values.update((name, slot.tensor) for name, slot in slots.items())
        taken = [values.pop(name) if name in step.drops or name in slots else values[name] for name in step.inputs]
        with profiler_span(f"fsdp_opt::region_{step.region}"):
            results = self._regions(step.region, first, taken)
        values.update(zip(step.outputs, results, strict=True))
        while slots:
            slots.popitem()[1].mark_written()


def _variants(plan: Plan, values: dict[str, Any]) -> dict[int, bool]:
    """For each region whether its writes will copy: no piece that it writes has a gradient."""
    slices = {step.name: step for step in plan.grad_slices}
    variants = {}
    for run in (step for step in plan.steps if isinstance(step, Run)):
        written = [slices[name] for name in run.inputs if name in slices]
        variants[run.region] = not any(_group(values[each.shard]).has_gradient(each.piece) for each in written)
    return variants


def _group(shard: Tensor) -> FlatGroup:
    return cast(FlatGroup, owner_of(shard))


def _accumulate(step: Accumulate, values: dict[str, Any]) -> None:
    full_grad = values.pop(step.full_grad) if step.full_grad in step.drops else values[step.full_grad]
    group = _group(values[step.shard])
    if group.wants_gradient():
        group.accumulate(full_grad, step.pieces)
