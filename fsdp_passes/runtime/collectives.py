"""The collectives that are issued, each asynchronous and over 1-D buffers.

gloo and NCCL both run these; a buffer must not be written between issue and wait. Among one rank nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_passes._compat import group_timeout, known_groups
from fsdp_passes.runtime.streams import Stream

T = TypeVar("T")

# Renamed in torch 2.13; the old names warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def wire_view(buffer: Tensor) -> Tensor:
    """Dtypes that a backend may not know (bool, complex, fp8) travel as bytes."""
    return buffer if buffer.dtype in _WIRE_DTYPES else buffer.view(torch.uint8)


class Done:
    """The work of what needed none."""

    def wait(self) -> None:
        pass


def is_dry_run(group: dist.ProcessGroup) -> bool:
    """Whether the other ranks are not there: torch's "fake" backend sends nothing."""
    return dist.get_backend(group) == "fake"


def another_group(group: dist.ProcessGroup, purpose: str, backend: str | None = None) -> dist.ProcessGroup:
    """A group of the same ranks, made once for each `purpose`: what is sent in one does not wait for another's.

    backend: None: as `group`.
    """
    description = f"fsdp_passes: {purpose} of {group.group_name}"
    if group.size() == 1:
        return group
    for known in known_groups():
        if known.group_desc == description:
            return known
    made = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=group_timeout(group),
        backend=backend or dist.get_backend_config(group),
        use_local_synchronization=True,
        group_desc=description,
    )
    assert isinstance(made, dist.ProcessGroup)
    return made


def issue_all_gather(
    full: Tensor, piece: Tensor, group: dist.ProcessGroup, stream: Stream | None = None
) -> dist.Work | Done:
    """Fill `full` (world_size x piece elements, same dtype) with every rank's `piece`, on `stream` (None: current)."""
    if group.size() == 1:
        full.copy_(piece)
        return Done()
    with nullcontext() if stream is None else stream.current():
        return _all_gather(wire_view(full), wire_view(piece), group=group, async_op=True)


def issue_reduce_scatter(full: Tensor, group: dist.ProcessGroup, stream: Stream) -> tuple[Tensor, dist.Work | Done]:
    """Sum `full` over ranks, in place: returns this rank's 1/world_size of it, where its piece of the sum will be."""
    piece = full.chunk(group.size())[group.rank()]
    if group.size() == 1:
        return piece, Done()
    received, sent = (torch.view_as_real(each).view(-1) if each.is_complex() else each for each in (piece, full))
    stream.follow_compute()
    with stream.current():
        return piece, _reduce_scatter(received, sent, group=group, async_op=True)


def any_rank(flags: Sequence[bool], device: torch.device, group: dist.ProcessGroup) -> list[bool]:
    """For each flag whether it is set on some rank; the host waits for the answer."""
    if group.size() == 1:
        return list(flags)
    union = torch.tensor(flags, dtype=torch.uint8, device=device)
    dist.all_reduce(union, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in union.tolist()]


def numbers_of_ranks(number: int, group: dist.ProcessGroup) -> list[int]:
    """Every rank's `number`, of 64 bits, in the order of ranks, over a group of the host; it waits for them."""
    own = torch.tensor([number], dtype=torch.int64, device="cpu")
    all_ranks = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(all_ranks, own, group=group)
    return [int(each) for each in all_ranks]


def scatter_from(source: int, part: Tensor, parts: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Set every rank's `part` from rank `source`'s `parts`, one a rank; other ranks give none."""
    dist.scatter(wire_view(part), [wire_view(each) for each in parts] or None, group=group, group_src=source)


def broadcast_from(source: int, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Overwrite `tensor`, of any layout and dtype, by rank `source`'s."""
    once = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    elements = tensor.detach().as_strided(once, tensor.stride())  # an expanded tensor's, each once
    contiguous = elements.contiguous()
    dist.broadcast(wire_view(contiguous.view(-1)), group=group, group_src=source)
    if contiguous.data_ptr() != elements.data_ptr():
        elements.copy_(contiguous)


def objects_of_ranks(value: T, group: dist.ProcessGroup) -> list[T]:
    """Every rank's `value`, pickled, in the order of ranks."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def object_from(source: int, value: T, group: dist.ProcessGroup) -> T:
    """Rank `source`'s `value`, pickled."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=source)
    return values[0]


def agree(check: Callable[[], T], group: dist.ProcessGroup) -> T:
    """The result of `check` on this rank. Where it raises, all ranks raise: the others a ValueError with its words."""
    own: Exception | None = None
    try:
        result = check()
    except Exception as raised:
        own = raised
    words = str(own) if isinstance(own, ValueError) else repr(own)
    others = [each for each in objects_of_ranks(None if own is None else words, group) if each is not None]
    if own is not None:
        raise own
    if others:
        raise ValueError(others[0])
    return result
