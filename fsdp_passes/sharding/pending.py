"""What `.grad` is while its gradient is accumulated but not reduced."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from fsdp_passes import _compat

# What zero_grad(set_to_none=False) and repr() ask. Anything more is refused, `is_sparse` included: optimizers ask it
# before they change a parameter, and would otherwise decay weights before they meet a refusing operator.
_HARMLESS = (
    Tensor.grad_fn.__get__,  # type: ignore[union-attr]
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad_,
)
_DISCARDS = (Tensor.zero_, torch._foreach_zero_)


class GradientNotReduced(RuntimeError):
    """A gradient was used inside an open accumulation window."""


class PendingGrad(Tensor):
    """Stands for the gradient of `param`. Assigning None to `.grad`, or zeroing this, discards that gradient."""

    _param: Tensor
    _unit: str

    def __new__(cls, param: Tensor, unit: str) -> PendingGrad:
        pending: PendingGrad = _compat.wrapper_tensor(cls, param, param.shape)
        pending._param, pending._unit = param, unit
        return pending

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PendingGrad(shape={tuple(self.shape)}, unit={self._unit!r})"

    def full_tensor(self) -> NoReturn:
        """As a reduced gradient has it; there is nothing to show yet."""
        _refuse(self.full_tensor, self._unit)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HARMLESS:
            return _compat.call_past_torch_function(func, types, args, kwargs)
        operands = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
        if func not in _DISCARDS or not all(isinstance(each, cls) for each in operands):
            _refuse(func, next((each._unit for each in operands if isinstance(each, cls)), None))
        for each in operands:
            each._param.grad = None
        return args[0]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        _refuse(func, None)


def _refuse(func: Any, unit: str | None) -> NoReturn:
    name = getattr(func, "__name__", str(func))
    refuse_pending(f"reading .{func.__self__.__name__}" if name == "__get__" else name, unit)


def refuse_pending(action: str, unit: str | None) -> NoReturn:
    where = "" if unit is None else f" of unit {unit!r}"
    raise GradientNotReduced(
        f"fsdp_passes: expected reduced gradients for {action}, got one{where} that is still "
        "accumulating; run the last backward outside of no_sync() (or after set_requires_gradient_sync(True)) first"
    )
