"""The collectives that are issued, each asynchronous and over 1-D buffers.

gloo and NCCL both run these; a buffer must not be written between issue and wait. Among one rank nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

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


def issue_all_gather(full: Tensor, piece: Tensor, group: dist.ProcessGroup) -> dist.Work | Done:
    """Fill `full` (world_size x piece elements, same dtype) with every rank's `piece`."""
    if group.size() == 1:
        full.copy_(piece)
        return Done()
    return _all_gather(wire_view(full), wire_view(piece), group=group, async_op=True)


def issue_reduce_scatter(full: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work | Done]:
    """Sum `full` over ranks, in place: returns this rank's 1/world_size of it, where its piece of the sum will be."""
    piece = full.chunk(group.size())[group.rank()]
    if group.size() == 1:
        return piece, Done()
    received, sent = (torch.view_as_real(each).view(-1) if each.is_complex() else each for each in (piece, full))
    return piece, _reduce_scatter(received, sent, group=group, async_op=True)


def any_rank(flags: Sequence[bool], device: torch.device, group: dist.ProcessGroup) -> list[bool]:
    """For each flag whether it is set on some rank; the host waits for the answer."""
    if group.size() == 1:
        return list(flags)
    union = torch.tensor(flags, dtype=torch.uint8, device=device)
    dist.all_reduce(union, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in union.tolist()]


def scatter_from_first(piece: Tensor, full: Tensor | None, group: dist.ProcessGroup) -> None:
    """Give every rank its `piece` of rank 0's `full`, which is None on the other ranks."""
    pieces = None if full is None else list(wire_view(full).chunk(group.size()))
    dist.scatter(wire_view(piece), pieces, group=group, group_src=0)


def broadcast_from_first(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Overwrite `tensor`, of any layout and dtype, by rank 0's."""
    once = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    elements = tensor.detach().as_strided(once, tensor.stride())  # an expanded tensor's, each once
    contiguous = elements.contiguous()
    dist.broadcast(wire_view(contiguous.view(-1)), group=group, group_src=0)
    if contiguous.data_ptr() != elements.data_ptr():
        elements.copy_(contiguous)
