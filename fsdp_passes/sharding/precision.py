"""The dtypes of a sharded model."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def is_inexact(dtype: torch.dtype) -> bool:
    """Floating or complex: with NaN, means and norms."""
    return dtype.is_floating_point or dtype.is_complex


@dataclass(frozen=True)
class Precision:
    """Dtypes of a sharded model; shards, `.grad` and optimizer states keep the parameters' own.

    param: parameters are gathered, and computed with, in this dtype. None: their own.
    reduce: gradients accumulate over microbatches and ranks in this dtype. None: the parameters' own.
    cast_inputs: cast floating tensors among the root's arguments to `param`, once.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = torch.float32
    cast_inputs: bool = False

    def __post_init__(self) -> None:
        for name in ("param", "reduce"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name}: expected a floating torch.dtype or None, got {dtype!r}")
        if self.cast_inputs and self.param is None:
            raise ValueError("cast_inputs: expected a Precision with param, the dtype to cast to, got param=None")

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.param if self.param is not None and dtype.is_floating_point else dtype

    def reduce_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.reduce if self.reduce is not None and dtype.is_floating_point else dtype
