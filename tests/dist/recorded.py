"""What is gathered, and what computes with it: recorded at the collective calls, and where regions are called."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor, nn

from fsdp_passes.codegen.variants import Regions
from fsdp_passes.runtime import collectives
from fsdp_passes.sharding.state import sharded_state


@dataclass(frozen=True)
class Event:
    """kind: "gather", which writes `memory`; "run", which reads it; "step", a forward begins."""

    kind: str
    unit: str = ""
    memory: tuple[tuple[int, int], ...] = ()

    def touches(self, other: Event) -> bool:
        return any(a < d and c < b for a, b in self.memory for c, d in other.memory)


def _span(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


@contextlib.contextmanager
def recorded(model: nn.Module) -> Iterator[list[Event]]:
    """What is sent, and computed, meanwhile."""
    units = {_span(group.shard)[0]: group.unit for group in sharded_state(model).groups}
    events: list[Event] = []
    alive: list[Tensor] = []  # so that nothing else gets the addresses of what was gathered
    all_gather, call = collectives._all_gather, Regions.__call__

    def gather(full: Tensor, piece: Tensor, **kwargs: Any) -> Any:
        alive.append(full)
        events.append(Event("gather", units[_span(piece)[0]], (_span(full),)))
        return all_gather(full, piece, **kwargs)

    def run(self: Regions, number: int, first: bool, inputs: list[Any]) -> Any:
        events.append(Event("run", memory=tuple(_span(each) for each in inputs if isinstance(each, Tensor))))
        return call(self, number, first, inputs)

    with mock.patch.object(collectives, "_all_gather", gather), mock.patch.object(Regions, "__call__", run):
        yield events


@dataclass
class Life:
    """A gather, from its issue to the last run that reads what it wrote."""

    unit: str
    issue: int
    reads: list[int]

    def is_live(self, at: int) -> bool:
        return self.issue <= at <= self.reads[-1]


def lives_of(events: list[Event]) -> list[Life]:
    """In the order of their first reads."""
    lives = []
    for at, event in enumerate(events):
        if event.kind != "gather":
            continue
        end = next((i for i in range(at + 1, len(events)) if _overwrites(events[i], event)), len(events))
        reads = [i for i in range(at, end) if events[i].kind == "run" and events[i].touches(event)]
        lives.append(Life(event.unit, at, reads or [at]))
    return sorted(lives, key=lambda life: life.reads[0])


def _overwrites(later: Event, gather: Event) -> bool:
    return later.kind == "gather" and later.touches(gather)


def most_live(events: list[Event]) -> int:
    lives = lives_of(events)
    return max(len({life.unit for life in lives if life.is_live(at)}) for at in range(len(events)))


def late_gathers(events: list[Event], in_flight: int) -> list[str]:
    """Units that could have been gathered before an earlier computation of their microbatch: a slot was free."""
    lives, late = lives_of(events), []
    for at, event in enumerate(events):
        if event.kind == "run" and len({life.unit for life in lives if life.is_live(at)}) < in_flight:
            end = next((i for i in range(at, len(events)) if events[i].kind == "step"), len(events))
            late += [life.unit for life in lives if at < life.issue < end]
    return late
