"""Reductions of ShardedParams: on the pieces, then one gather of one number a tensor and rank.

    norm / sum / max / all     local number -> (world_size,) -> combined on every rank
    a list of n norms          n local numbers -> (world_size, n) in the same single gather

A gather, not an all-reduce, because the max of gloo and NCCL may drop NaN, because every dtype travels, and
because all ranks then combine the same numbers in the same order. Empty pieces give the neutral element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_passes._compat import named_arguments
from fsdp_passes.runtime.collectives import issue_all_gather
from fsdp_passes.sharding.param import ShardedParam, refuse
from fsdp_passes.sharding.place import Place
from fsdp_passes.sharding.precision import is_inexact

aten = torch.ops.aten

SUMS = (aten.sum.default, aten.sum.dim_IntList)
MEANS = (aten.mean.default, aten.mean.dim)
LARGEST = (aten.max.default, aten.amax.default)
SMALLEST = (aten.min.default, aten.amin.default)
ALL = (aten.all.default, aten.all.dim, aten.all.dims)
ANY = (aten.any.default, aten.any.dim, aten.any.dims)
NORMS = (
    aten.linalg_vector_norm.default,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dtype,
    aten.norm.ScalarOpt_dim_dtype,
)


def reduce_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A reduction of one tensor over all of its dimensions to a plain 0-dim tensor."""
    call = named_arguments(func, args, kwargs)
    tensor = call["self"]
    if not isinstance(tensor, ShardedParam) or not _over_all_dims(func, call):
        refuse(func, "along a dimension")
    if tensor.numel():
        return _REDUCE[func](func, tensor, call)
    # Nothing is sharded: the value of no elements, or torch's own error.
    return func(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), *args[1:], **kwargs)


def _over_all_dims(func: Any, call: dict[str, Any]) -> bool:
    if call.get("keepdim"):
        return False
    dims, ndim = call.get("dim"), call["self"].dim()
    if dims == named_arguments(func, (), {}).get("dim"):
        return True
    dims = [dims] if isinstance(dims, int) else dims or []
    return ndim > 0 and {dim % ndim for dim in dims} == set(range(ndim))


def foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """One norm a tensor, as a list; plain tensors among them count as the same on every rank."""
    call = named_arguments(func, args, kwargs)
    tensors, order, dtype = call["self"], call["ord"], call["dtype"]
    plain = [t for t in tensors if not isinstance(t, ShardedParam)]
    of_plain = iter(func(plain, order, dtype) if plain else [])
    of_sharded = iter(_norms(func, [t for t in tensors if isinstance(t, ShardedParam)], order, dtype))
    return [next(of_sharded if isinstance(t, ShardedParam) else of_plain) for t in tensors]


def unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GradScaler's check: an inf or NaN on one rank is found on every rank."""
    tensors, found_inf, inverse_scale = args
    if isinstance(found_inf, ShardedParam) or isinstance(inverse_scale, ShardedParam):
        refuse(func, "with a sharded scale")
    place = _common_ranks(func, [t for t in tensors if isinstance(t, ShardedParam)])
    func([t._local if isinstance(t, ShardedParam) else t for t in tensors], found_inf, inverse_scale)
    found_inf.copy_(_gather_rows(found_inf.reshape(1), place).amax().reshape(found_inf.shape))


def same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """torch.equal and torch.allclose of tensors that are sharded alike."""
    first, second, *rest = args
    if not isinstance(first, ShardedParam) or not isinstance(second, ShardedParam):
        refuse(func, "with a plain tensor")
    if first._place != second._place:
        refuse(func, "of tensors that are sharded differently")
    here = func(first._local, second._local, *rest, **kwargs)
    return bool(_gather_rows(torch.tensor([here], device=first.device), first._place).all())


def _gather_rows(partials: Tensor, place: Place) -> Tensor:
    """(n,) on each rank -> (world_size, n) on all, any dtype, in one collective."""
    if place.world_size == 1:
        return partials.unsqueeze(0)
    what = f"{partials.numel()} x {str(partials.dtype).removeprefix('torch.')}"
    place.agreement.check([f"norm, sum or other reduction of parameters ({what}, from {place.name} on)"])
    rows = partials.new_empty(place.world_size * partials.numel())
    issue_all_gather(rows, partials.contiguous(), place.process_group).wait()
    return rows.view(place.world_size, -1)


def _common_ranks(func: Any, tensors: Sequence[ShardedParam]) -> Place:
    place = tensors[0]._place
    if any(t._place.process_group is not place.process_group for t in tensors):
        refuse(func, "of parameters on different process groups")
    return place


def _sum(func: Any, tensor: ShardedParam, call: dict[str, Any]) -> Tensor:
    counted = tensor.dtype if is_inexact(tensor.dtype) else torch.int64
    return _total(tensor, call["dtype"] or counted, divisor=1)


def _mean(func: Any, tensor: ShardedParam, call: dict[str, Any]) -> Tensor:
    dtype = call["dtype"] or tensor.dtype
    if not is_inexact(dtype):
        return torch.mean(tensor._local)  # torch's own error, on every rank
    return _total(tensor, dtype, divisor=tensor.numel())


def _total(tensor: ShardedParam, dtype: torch.dtype, divisor: int) -> Tensor:
    partial = tensor._local.to(dtype).sum(dtype=_wide(dtype))
    total = _gather_rows(partial.reshape(1), tensor._place).sum()
    return (total / divisor if divisor > 1 else total).to(dtype)


def _extremum(func: Any, tensor: ShardedParam, call: dict[str, Any]) -> Tensor:
    if tensor.is_complex():
        refuse(func, "of complex numbers")
    reduce = torch.amax if func in LARGEST else torch.amin
    local = tensor._local
    if not local.numel():
        local = local.new_full((1,), _extreme_value(tensor.dtype, largest=func in SMALLEST))
    return reduce(_gather_rows(reduce(local).reshape(1), tensor._place))


def _truth(func: Any, tensor: ShardedParam, call: dict[str, Any]) -> Tensor:
    reduce = torch.all if func in ALL else torch.any
    return reduce(_gather_rows(reduce(tensor._local).reshape(1), tensor._place))


def _norm(func: Any, tensor: ShardedParam, call: dict[str, Any]) -> Tensor:
    order = call.get("ord", call.get("p"))
    return _norms(func, [tensor], 2 if order is None else order, call.get("dtype"))[0]


def _norms(func: Any, tensors: list[ShardedParam], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The `order`-norm of each tensor, in `dtype` or in its own real one; travels in float32 or float64."""
    for each in tensors:
        if not is_inexact(each.dtype):
            torch.linalg.vector_norm(each._local)  # torch's own error, on every rank
    place = _common_ranks(func, tensors)
    is_double = torch.float64 in {dtype, *(t.dtype.to_real() for t in tensors)}
    wide = torch.float64 if is_double else torch.float32
    partials = torch._foreach_norm([_magnitudes(t._local, order) for t in tensors], order, wide)
    rows = _gather_rows(torch.stack(partials), place)
    totals = rows.sum(0) if order == 0 else torch.linalg.vector_norm(rows, order, dim=0)
    return [norm.to(dtype or t.dtype.to_real()) for norm, t in zip(totals.unbind(), tensors, strict=True)]


def _magnitudes(local: Tensor, order: float) -> Tensor:
    """Real numbers with the norm of `local`, never none: an infinity norm of nothing is an error."""
    if local.numel():
        return local.abs() if local.is_complex() else local
    return local.new_full((1,), math.inf if order < 0 else 0, dtype=local.dtype.to_real())


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Partial sums of floats below 32 bits travel in float32."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _extreme_value(dtype: torch.dtype, largest: bool) -> float:
    if dtype == torch.bool:
        return largest
    if dtype.is_floating_point:
        return math.inf if largest else -math.inf
    return torch.iinfo(dtype).max if largest else torch.iinfo(dtype).min


_REDUCE: dict[Any, Callable[[Any, ShardedParam, dict[str, Any]], Tensor]] = (
    dict.fromkeys(SUMS, _sum)
    | dict.fromkeys(MEANS, _mean)
    | dict.fromkeys(LARGEST + SMALLEST, _extremum)
    | dict.fromkeys(ALL + ANY, _truth)
    | dict.fromkeys(NORMS, _norm)
)

HANDLERS: dict[Any, Callable[..., Any]] = (
    dict.fromkeys(_REDUCE, reduce_one)
    | dict.fromkeys([aten.equal.default, aten.allclose.default], same)
    | {aten._foreach_norm.Scalar: foreach_norm}
    | {aten._amp_foreach_non_finite_check_and_unscale_.default: unscale}
)
