"""The memory of gathered buffers: one allocation, and a storage for each slot in it."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_passes._compat import storage_over


class Arena:
    """Grows to what is reserved, while no slot is in use, and stays: the allocator never sees a gathered buffer."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._slots: dict[tuple[int, int, torch.dtype], Tensor] = {}

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def slots(self) -> tuple[Tensor, ...]:
        """Those that were asked for."""
        return tuple(self._slots.values())

    def reserve(self, nbytes: int, device: torch.device) -> None:
        if nbytes <= self.nbytes:
            return
        self._slots.clear()
        self._memory = None  # before its successor is allocated
        with torch.inference_mode(False):
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def slot(self, offset: int, elems: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor over the memory from byte `offset` on."""
        key = (offset, elems, dtype)
        if key not in self._slots:
            assert self._memory is not None
            with torch.inference_mode(False):
                self._slots[key] = storage_over(self._memory, offset, elems, dtype)
        return self._slots[key]
