"""Gathered buffers: of graphs of a round, and those that are kept for the rest of a window."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fsdp_passes.runtime.agreement import Sent
from fsdp_passes.runtime.arena import Arena
from fsdp_passes.runtime.collectives import Done
from fsdp_passes.schedule.plan import Gather
from fsdp_passes.sharding.group import FlatGroup
from fsdp_passes.sharding.poison import poison

Key = tuple[int, int]  # number of the call in its round, and of the buffer in its plan


@dataclass(frozen=True)
class Gathered:
    """A buffer that is filled, when `sent` is done, with what the shard was at `version`."""

    group: FlatGroup
    full: Tensor
    sent: Sent | Done
    version: int
    step: Gather

    @property
    def is_stale(self) -> bool:
        """Whether the shard was edited since, between two graphs."""
        return self.version != self.group.version


@dataclass
class Buffers:
    """Those of one model. kept_by: who uses the memory in which window; what is kept is kept as long as it is equal."""

    arena: Arena = field(default_factory=Arena)
    _live: dict[Key, Gathered] = field(default_factory=dict)
    _kept: dict[tuple[FlatGroup, torch.dtype], Gathered] = field(default_factory=dict)
    _kept_by: Hashable = None

    @property
    def num_live(self) -> int:
        """Of those that are not kept for a window only."""
        return len(self._live)

    def issue(self, key: Key, group: FlatGroup, step: Gather) -> None:
        kept = self.find_kept(group, step)
        if kept is not None:
            self._live[key] = kept
            return
        if step.offset is None:
            full = group.empty_full(step.dtype)
        else:
            full = self.arena.slot(step.offset, step.full_elems, step.dtype)
        self._live[key] = Gathered(group, full, group.issue_gather(full), group.version, step)

    def hand_on(self, key: Key, to: Key) -> None:
        self._live[to] = self._live.pop(key)

    def wait(self, key: Key) -> Tensor:
        """The buffer, with the values that the shard has now."""
        gathered = self._live[key]
        group, full, step = gathered.group, gathered.full, gathered.step
        gathered.sent.wait()
        if gathered.is_stale:
            group.gather_into(full)
        now = replace(gathered, sent=Done(), version=group.version)
        if step.offset is None:
            del self._live[key]
        else:
            self._live[key] = now
        if step.for_window:
            self._kept[group, step.dtype] = now
        return full

    def release(self, key: Key, poisons: bool) -> None:
        full = self._live.pop(key).full
        if poisons:
            poison(full)

    def find_stale(self, key: Key) -> Gathered | None:
        """A buffer that was issued before, if its shard was edited meanwhile."""
        gathered = self._live.get(key)
        return gathered if gathered is not None and gathered.is_stale else None

    def find_kept(self, group: FlatGroup, step: Gather) -> Gathered | None:
        """What `step` would gather, if it is there from a microbatch before."""
        kept = self._kept.get((group, step.dtype)) if step.for_window else None
        return None if kept is None or kept.is_stale else kept

    def drop(self) -> None:
        """All but those that are kept for a window."""
        live, self._live = self._live, {}
        for each in live.values():
            each.sent.wait()

    def drop_kept(self, unless_by: Hashable, poisons: bool) -> None:
        if self._kept_by != unless_by:
            for each in self._kept.values() if poisons else ():
                poison(each.full)
            self._kept, self._kept_by = {}, unless_by
