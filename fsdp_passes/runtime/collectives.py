"""The collectives that are issued, each asynchronous and over 1-D buffers.

gloo and NCCL both run these; a buffer must not be written between issue and wait.
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


def issue_all_gather(full: Tensor, piece: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Fill `full` (world_size x piece elements, same dtype) with every rank's `piece`."""
    return _all_gather(wire_view(full), wire_view(piece), group=group, async_op=True)


def issue_reduce_scatter(piece: Tensor, full: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Sum `full` over ranks; this rank's 1/world_size of it lands in `piece` (same dtype)."""
    if full.is_complex():
        piece, full = torch.view_as_real(piece).view(-1), torch.view_as_real(full).view(-1)
    return _reduce_scatter(piece, full, group=group, async_op=True)


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
