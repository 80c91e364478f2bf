"""The units of a sharded model as a table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fsdp_passes._compat import dtype_names
from fsdp_passes.sharding.group import FlatGroup
from fsdp_passes.sharding.state import sharded_state

_HEAD = ("unit", "group", "parameters", "elements", "padding", "gathered", "shard", "after forward", "accumulated")
_DOMINANT_SHARE = 0.5  # above it, most of the communication is one gather, which nothing can hide


@dataclass(frozen=True)
class GroupRow:
    """One flat group. `gathered_bytes`: its full buffer; `shard_bytes`: what a rank keeps of its parameters.

    `accumulated_bytes`: what a rank holds of its unreduced gradients between the microbatches of a window.
    """

    unit: str
    dtype: torch.dtype
    compute_dtype: torch.dtype
    trainable: bool
    num_params: int
    num_elems: int
    padding_elems: int
    gathered_bytes: int
    shard_bytes: int
    reshards: bool
    accumulated_bytes: int


@dataclass(frozen=True)
class Summary:
    """`str()` of it is the table. `undeferred_units` reduce their gradients in every backward, under no_sync() too."""

    world_size: int
    groups: tuple[GroupRow, ...]
    undeferred_units: tuple[str, ...]

    @property
    def accumulated_bytes(self) -> int:
        """What deferring the reductions of a window costs a rank."""
        return sum(row.accumulated_bytes for row in self.groups)

    @property
    def dominant_unit(self) -> str | None:
        """The unit that holds more than half of what is gathered, if one does."""
        total = sum(row.gathered_bytes for row in self.groups)
        for unit in dict.fromkeys(row.unit for row in self.groups):
            if sum(row.gathered_bytes for row in self.groups if row.unit == unit) > _DOMINANT_SHARE * total:
                return unit
        return None

    def __str__(self) -> str:
        rows = [_HEAD, *(_cells(row) for row in self.groups)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
        lines = [
            "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]
        num_units = len({row.unit for row in self.groups})
        lines.append(f"{num_units} units, {len(self.groups)} flat groups, {self.world_size} ranks")
        lines.append(f"{self.accumulated_bytes:,} B of unreduced gradients between microbatches")
        if self.undeferred_units:
            lines.append(f"reduced in every backward: {', '.join(self.undeferred_units)}")
        if self.dominant_unit is not None:
            lines.append(
                f"unit {self.dominant_unit!r} holds most of the model: its gather has no computation to overlap "
                "with; name smaller units (units=...)"
            )
        return "\n".join(line.rstrip() for line in lines)


def summary(model: nn.Module) -> Summary:
    """The units of a sharded model, their sizes in elements and bytes; the same on every rank.

    Which units reduce in every backward is an option of the backend, `accumulate_bytes`: known after the first forward.
    """
    state = sharded_state(model)
    undeferred = tuple(unit for unit in state.full_grad_bytes() if not state.defers(unit))
    rows = tuple(_row(group, state.defers(group.unit)) for group in state.groups)
    return Summary(state.groups[0].layout.world_size, rows, undeferred)


def _row(group: FlatGroup, defers: bool) -> GroupRow:
    layout = group.layout
    return GroupRow(
        unit=group.unit,
        dtype=group.shard.dtype,
        compute_dtype=group.compute_dtype,
        trainable=group.shard.requires_grad,
        num_params=len(group.names),
        num_elems=sum(layout.numels),
        padding_elems=layout.full_elems - sum(layout.numels),
        gathered_bytes=layout.full_elems * group.compute_dtype.itemsize,
        shard_bytes=layout.shard_elems * group.shard.dtype.itemsize,
        reshards=group.reshard,
        accumulated_bytes=group.full_grad_bytes if defers else 0,
    )


def _cells(row: GroupRow) -> tuple[str, ...]:
    names = dtype_names()
    kind = names[row.dtype] + ("" if row.compute_dtype == row.dtype else f" as {names[row.compute_dtype]}")
    return (
        row.unit,
        kind + ("" if row.trainable else " frozen"),
        f"{row.num_params:,}",
        f"{row.num_elems:,}",
        f"{row.padding_elems:,}",
        f"{row.gathered_bytes:,} B",
        f"{row.shard_bytes:,} B",
        "reshard" if row.reshards else "keep",
        f"{row.accumulated_bytes:,} B",
    )
