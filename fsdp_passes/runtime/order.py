"""Graphs of a model that run one after another, and what each of them does then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from fsdp_passes.ir.ops import unit_names
from fsdp_passes.schedule.plan import Call, Gather, Owner, Plan, Step, bytes_of_slots
from fsdp_passes.sharding.group import FlatGroup
from fsdp_passes.sharding.model import ShardedModel
from fsdp_passes.sharding.unit_choice import choose_units

Scheduler = Callable[[Sequence[Call], int | None], Sequence[tuple[Step, ...]]]


class Settings(Protocol):
    """Of the backend's options, those that matter when plans run."""

    @property
    def accumulate_bytes(self) -> int | None: ...

    @property
    def in_flight(self) -> int | None: ...

    @property
    def keep_gathered_bytes(self) -> int: ...

    @property
    def poison(self) -> bool: ...


@dataclass(frozen=True)
class GraphCall:
    """One run of `plan` on the shards of `groups`, which are its inputs of these names."""

    plan: Plan
    groups: Mapping[str, FlatGroup]
    settings: Settings
    schedule: Scheduler

    @property
    def model(self) -> ShardedModel | None:
        """That of its first shard, which looks after it; None without shards."""
        return next((group.model for group in self.groups.values()), None)

    @property
    def models(self) -> tuple[ShardedModel, ...]:
        """Those of all its shards, each once."""
        return tuple({id(group.model): group.model for group in self.groups.values()}.values())

    @property
    def limits(self) -> tuple[int | None, int]:
        """On units that are gathered at once, and on bytes that are kept for a window."""
        return self.settings.in_flight, self.settings.keep_gathered_bytes

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Equal for calls that send the same. Ranks need not run equal graphs: one may have compiled anew."""
        bound = ((id(self.groups[shard]) if shard else None, what) for shard, what in self.plan.skeleton)
        return *self.limits, *bound


class Order:
    """What each of `calls` does, if calls like them run one after another: known once they are expected again."""

    def __init__(self, calls: Sequence[GraphCall]) -> None:
        self.calls = tuple(calls)
        self._others: dict[tuple[int, int], tuple[Plan, tuple[Step, ...]]] = {}  # a plan that lives keeps its id

    @cached_property
    def steps(self) -> Sequence[tuple[Step, ...]]:
        return self._scheduled(self.calls)

    @cached_property
    def nbytes(self) -> int:
        return bytes_of_slots(step for steps in self.steps for step in steps)

    def goes_on_with(self, calls: Sequence[GraphCall]) -> bool:
        """Whether the last of `calls` is like the one that is expected after those before it."""
        number = len(calls) - 1
        return number < len(self.calls) and self.calls[number].key == calls[number].key

    def steps_of(self, number: int, call: GraphCall) -> tuple[Step, ...]:
        """Those of `call`, which is like call `number`, though perhaps of another graph."""
        if call.plan is self.calls[number].plan:
            return self.steps[number]
        this = number, id(call.plan)
        if this not in self._others:
            calls = [*self.calls[:number], call, *self.calls[number + 1 :]]
            self._others[this] = call.plan, self._scheduled(calls)[number]
        return self._others[this][1]

    def _scheduled(self, calls: Sequence[GraphCall]) -> Sequence[tuple[Step, ...]]:
        return calls[0].schedule(as_scheduled(calls), calls[0].settings.in_flight)


def as_scheduled(calls: Sequence[GraphCall]) -> list[Call]:
    """The calls, as schedules see them. Units that fill `keep_gathered_bytes` best are kept for a window."""
    groups = list({id(group): group for call in calls for group in call.groups.values()}.values())
    owners: dict[int, Owner] = {
        id(group): (unit, group.model.groups.index(group))
        for group, unit in zip(groups, unit_names(groups), strict=True)
    }
    own = [Call(call.plan, {shard: owners[id(each)] for shard, each in call.groups.items()}) for call in calls]
    parts_of = [_parts(call) for call in own]
    bytes_of: Counter[str] = Counter()
    for (unit, _), _, nbytes in dict.fromkeys(part for parts in parts_of for part in parts.values()):
        bytes_of[unit] += nbytes
    kept = choose_units(bytes_of, calls[0].settings.keep_gathered_bytes)
    return [
        replace(call, for_window=frozenset(buffer for buffer, ((unit, _), *_) in parts.items() if unit in kept))
        for call, parts in zip(own, parts_of, strict=True)
    ]


def _parts(call: Call) -> dict[str, tuple[Owner, torch.dtype, int]]:
    """Of each buffer that is not returned, what it holds, and its bytes."""
    gathers = (step for step in call.plan.steps if isinstance(step, Gather) and step.offset is not None)
    return {gather.buffer: (call.owners[gather.shard], gather.dtype, gather.nbytes) for gather in gathers}
