"""Values that nobody wrote are told from those that somebody did.

floating, complex   NaN in every element
integers            the smallest number, of unsigned ones the largest: as long as no element has another
bool                the byte 255 in every element, which no operator writes
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_passes.sharding.precision import is_inexact


def poison(tensor: Tensor) -> None:
    """Overwrite all of `tensor`."""
    if tensor.dtype == torch.bool:
        tensor.view(torch.uint8).fill_(255)
    else:
        tensor.fill_(_value(tensor.dtype))


def has_unwritten(tensor: Tensor) -> bool:
    """Whether some element has no value; of integers whether none has."""
    if is_inexact(tensor.dtype):
        return bool(_unwritten(tensor).any())
    return is_unwritten(tensor) and tensor.numel() > 0


def is_unwritten(tensor: Tensor) -> bool:
    """Whether no element has a value."""
    return bool(_unwritten(tensor).all())


def _unwritten(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8) == 255
    if is_inexact(tensor.dtype):
        return (tensor.float() if tensor.itemsize == 1 else tensor).isnan()  # no kernels for 8-bit floats
    return tensor == _value(tensor.dtype)


def _value(dtype: torch.dtype) -> float:
    if is_inexact(dtype):
        return float("nan")
    return torch.iinfo(dtype).min if dtype.is_signed else torch.iinfo(dtype).max
