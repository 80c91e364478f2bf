"""Where a parameter lies in the flat buffer of its group, and which part of it each rank holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fsdp_passes.runtime.agreement import Agreement


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in the flat buffer of its group.

    shape: of the parameter. offset: of its first element in the flat buffer. shard_elems: elements of the
    flat buffer that each rank owns; rank r owns [r * shard_elems, (r + 1) * shard_elems). name: of the parameter.
    """

    shape: torch.Size
    offset: int
    shard_elems: int
    rank: int
    world_size: int
    process_group: dist.ProcessGroup
    name: str = field(default="", compare=False)
    agreement: Agreement = field(default_factory=Agreement, compare=False)

    def piece(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) of the flattened parameter that `rank` holds; start == stop when none."""
        numel, first = self.shape.numel(), rank * self.shard_elems - self.offset
        return min(max(first, 0), numel), min(max(first + self.shard_elems, 0), numel)

    @property
    def start(self) -> int:
        return self.piece(self.rank)[0]

    @property
    def stop(self) -> int:
        return self.piece(self.rank)[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> Place:
        return self  # a process group cannot be copied, and no place changes
