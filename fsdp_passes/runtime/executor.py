"""Running a plan: one branch a kind of step.

Decided here is only when a `reduce` communicates: at once if the backward synchronises and no other forward of the
group awaits its backward; when the whole backward ends if one does; not at all under no_sync. A backward that was asked
for other gradients only (torch.autograd.grad of an input) accumulates and reduces nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from fsdp_passes._compat import profiler_span
from fsdp_passes.ir.ops import owner_of
from fsdp_passes.schedule.plan import Accumulate, Gather, Plan, Reduce, Release, Run, Wait
from fsdp_passes.sharding.group import FlatGroup


class Executor:
    """`plan` as a function of one list of arguments, which it empties."""

    def __init__(self, plan: Plan, regions: Sequence[Callable[[list[Any]], Sequence[Any]]]) -> None:
        self.plan = plan
        self._regions = regions
        # AOTAutograd then hands over the list itself. On the instance: wrappers copy only its __dict__.
        self._boxed_call = True

    def __call__(self, arguments: list[Any]) -> tuple[Any, ...]:
        values = {name: value for name, value in zip(self.plan.inputs, arguments, strict=True) if name}
        arguments.clear()
        works: dict[str, dist.Work] = {}
        if self.plan.trains:
            _announce_backward(self.plan, values)
        for step in self.plan.steps:
            match step:
                case Gather():
                    group = _group(values[step.shard])
                    values[step.buffer], works[step.buffer] = group.issue_gather(step.dtype)
                case Wait():
                    works.pop(step.buffer).wait()
                case Run():
                    self._run(step, values)
                case Release():
                    del values[step.buffer]
                case Accumulate():
                    _accumulate(step, values)
                case Reduce():
                    _reduce(step, values)
        return tuple(values[out] if isinstance(out, str) else out for out in self.plan.outputs)

    def _run(self, step: Run, values: dict[str, Any]) -> None:
        taken = [values.pop(name) if name in step.drops else values[name] for name in step.inputs]
        with profiler_span(f"fsdp_opt::region_{step.region}"):
            results = self._regions[step.region](taken)
        values.update(zip(step.outputs, results, strict=True))


def _group(shard: Tensor) -> FlatGroup:
    return cast(FlatGroup, owner_of(shard))


def _accumulate(step: Accumulate, values: dict[str, Any]) -> None:
    full_grad = values.pop(step.full_grad) if step.full_grad in step.drops else values[step.full_grad]
    group = _group(values[step.shard])
    if group.wants_gradient():
        group.accumulate(full_grad, step.pieces)


def _reduce(step: Reduce, values: dict[str, Any]) -> None:
    group = _group(values[step.shard])
    if group.wants_gradient():
        group.reduce_if_complete()


def _announce_backward(plan: Plan, values: dict[str, Any]) -> None:
    for shard in {step.shard for step in plan.gathers}:
        _group(values[shard]).expect_backward()
