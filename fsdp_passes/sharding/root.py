"""What `shard()` adds to the model itself."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from fsdp_passes._compat import map_tensors
from fsdp_passes.sharding.model import ShardedModel
from fsdp_passes.sharding.modules import ModuleMixin


class ShardedRoot(ModuleMixin):
    """Methods of the model that was given to `shard()`."""

    _fsdp_model: ShardedModel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = self._fsdp_model.input_dtype
        if dtype is not None:
            args, kwargs = map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))
        return super().__call__(*args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards that run inside add to this rank's sum; the first one after it reduces."""
        return self._fsdp_model.no_sync()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether backwards reduce from now on."""
        if not isinstance(requires_gradient_sync, bool):
            raise ValueError(f"requires_gradient_sync: expected a bool, got {requires_gradient_sync!r}")
        self._fsdp_model.requires_sync = requires_gradient_sync

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum over ranks by `factor` instead of the number of ranks."""
        if not isinstance(factor, int | float) or not 0 < factor < math.inf:
            raise ValueError(f"factor: expected a finite number above 0, got {factor!r}")
        self._fsdp_model.divide_factor = float(factor)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As fsdp_passes.clip_grad_norm_(model, ...); FSDP1 has it here, and frameworks call it."""
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
