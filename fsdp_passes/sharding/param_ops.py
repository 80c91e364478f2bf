"""The operators that are right on a ShardedParam, as tables, and how each kind of them runs on pieces.

    element-wise   on the pieces, when every tensor has the same place or is 0-dim
    lists          the same for each index of foreach and fused operators
    random init    draws the whole parameter, so that values equal the unsharded ones, and keeps the piece
    reductions     param_reduce.py

Whatever is in no table raises NeedsWholeParameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_passes._compat import written_arguments
from fsdp_passes.sharding import param_reduce
from fsdp_passes.sharding.param import ShardedParam, refuse

aten = torch.ops.aten


def _overloads(names: str, prefix: str = "", suffixes: Sequence[str] = ("",)) -> frozenset[Any]:
    packets = [getattr(aten, prefix + name + end, None) for name in names.split() for end in suffixes]
    return frozenset(getattr(packet, each) for packet in packets if packet for each in packet.overloads())


ELEMENTWISE = _overloads(
    """
    add sub rsub mul div remainder fmod addcmul addcdiv lerp clamp clamp_min clamp_max maximum minimum
    fmax fmin neg abs sign sgn sqrt rsqrt square reciprocal pow exp expm1 exp2 log log1p log2 log10 sin cos
    tanh sigmoid erf erfc erfinv floor ceil round trunc frac atan2 hypot copysign signbit nan_to_num zero
    where isnan isinf isposinf isneginf eq ne lt le gt ge logical_not logical_and logical_or logical_xor
    bitwise_not bitwise_and bitwise_or bitwise_xor
    """,
    suffixes=("", "_"),
)
ELEMENTWISE |= _overloads("clone empty_like zeros_like ones_like full_like _to_copy") | {aten.fill_.Scalar}
ELEMENTWISE -= {aten.where.default}  # torch.where(condition) lists positions
LISTS = _overloads(
    """
    add sub mul div addcmul addcdiv lerp maximum minimum clamp_min clamp_max pow sqrt rsqrt reciprocal neg abs
    sign exp log erf sigmoid tanh floor ceil round trunc frac clone zero
    """,
    prefix="_foreach_",
    suffixes=("", "_"),
)
LISTS |= _overloads("adam_ adamw_ sgd_ adagrad_", prefix="_fused_")
RANDOM_INIT = _overloads("normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_")
VIEWS = _overloads("view unsqueeze squeeze") - {aten.view.dtype}
FACTORIES = _overloads("new_empty new_empty_strided new_zeros new_ones new_full")


@torch.compiler.disable
def serve(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run operator `func` on pieces, or raise NeedsWholeParameter."""
    handler = _HANDLERS.get(func)
    if handler is None:
        refuse(func)
    result = handler(func, args, kwargs)
    _bump_versions(written_arguments(func, args, kwargs))
    return result


def _bump_versions(written: list[Any]) -> None:
    """Below autograd nothing moves the version of the flat shard, on which cached casts of it are keyed."""
    tensors = [t for each in written for t in (each if isinstance(each, (list, tuple)) else [each])]
    torch.autograd.graph.increment_version([t._local for t in tensors if isinstance(t, ShardedParam)])


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedParam:
    lead = next((each for each in (*args, *kwargs.values()) if isinstance(each, ShardedParam)), None)
    written = written_arguments(func, args, kwargs)
    if lead is None or not all(isinstance(each, ShardedParam) for each in written):
        refuse(func, "into a plain tensor")
    if kwargs.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
        refuse(func, "to another memory format")
    pieces = {name: _piece(func, value, lead) for name, value in kwargs.items()}
    result = func(*[_piece(func, value, lead) for value in args], **pieces)
    return written[0] if written else _sharded_like(lead, result)


def _piece(func: Any, value: Any, like: Tensor) -> Any:
    """What stands for `value` where its piece stands for `like`, which in a list may be a plain tensor."""
    place = like._place if isinstance(like, ShardedParam) else None
    if isinstance(value, ShardedParam):
        return value._local if value._place == place else refuse(func, "of tensors sharded differently")
    if not isinstance(value, Tensor) or place is None:
        return value
    if value.dim():
        refuse(func, "with a plain tensor")
    # The piece of a 0-dim parameter has a dimension; beside it a 0-dim tensor would not count for the dtype.
    return value if place.shape else value.to(like.device).reshape(1)


def _sharded_like(like: Tensor, result: Tensor) -> Any:
    return ShardedParam(result, like._place, is_param=False) if isinstance(like, ShardedParam) else result


def _on_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
    lead = next((each for each in args if _has_tensors(each)), ())
    pieces = {name: _pieces(func, value, lead) for name, value in kwargs.items()}
    result = func(*[_pieces(func, value, lead) for value in args], **pieces)
    return result and [_sharded_like(like, each) for like, each in zip(lead, result, strict=True)]


def _has_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value)


def _pieces(func: Any, value: Any, lead: Sequence[Tensor]) -> Any:
    if isinstance(value, ShardedParam):
        refuse(func, "with a sharded scalar")
    if not _has_tensors(value):
        return value
    if len(value) != len(lead):
        refuse(func, f"of lists of {len(lead)} and {len(value)} tensors")
    return [_piece(func, each, like) for each, like in zip(value, lead, strict=True)]


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    target, source, *rest = args
    piece = _piece_of_source(func, source, target)
    target._local.copy_(piece, *rest, **kwargs)
    return target


def _foreach_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    targets, sources, *rest = args
    pieces = [_piece_of_source(func, s, t) for s, t in zip(sources, targets, strict=True)]
    func([t._local if isinstance(t, ShardedParam) else t for t in targets], pieces, *rest, **kwargs)


def _piece_of_source(func: Any, source: Tensor, target: Tensor) -> Tensor:
    """`source` is sharded alike, 0-dim, or a whole plain tensor that broadcasts to the shape of `target`."""
    if isinstance(source, ShardedParam) and not isinstance(target, ShardedParam):
        refuse(func, "into a plain tensor")
    if isinstance(source, ShardedParam) or not isinstance(target, ShardedParam):
        return _piece(func, source, target)
    place = target._place
    return source if not source.dim() else source.expand(place.shape).reshape(-1)[place.start : place.stop]


def _random_init(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    target, *rest = args
    if any(isinstance(each, Tensor) for each in rest):
        refuse(func, "with a tensor of probabilities")
    place = target._place
    whole = func(torch.empty(place.shape, dtype=target.dtype, device=target.device), *rest, **kwargs)
    target._local.copy_(whole.view(-1)[place.start : place.stop])
    return target


def _put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """p[mask] = number, with a mask of p's shape, whole or sharded like p."""
    target, indices, value, *rest = args
    mask = indices[0]
    if len(indices) > 1 or mask is None or mask.dtype != torch.bool or mask.shape != target.shape or value.dim():
        refuse(func)
    func(target._local, [_piece_of_source(func, mask, target)], value, *rest, **kwargs)
    return target


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The number of a 0-dim tensor, which one rank holds. One collective."""
    return args[0].full_tensor().item()


def _factory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """p.new_zeros(size) takes dtype and device from p and nothing else: a plain tensor.

    But p.new_empty(p.shape, device=...) is sharded: so torch's StateDictStager (2.13) begins a copy of p, which gets
    p's attributes next.
    """
    tensor, *rest = args
    if func is aten.new_empty.default and rest == [list(tensor.shape)] and kwargs.get("device") is not None:
        return _sharded_like(tensor, func(tensor._local, list(tensor._local.shape), **kwargs))
    return func(tensor._local, *rest, **kwargs)


def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same piece, not a view of it: writes must go on moving the version of the flat shard."""
    return _sharded_like(args[0], args[0]._local)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedParam:
    """Pieces are of the flattened parameter, so it has the same ones in another shape."""
    tensor, *rest = args
    shape = func(torch.empty(tensor.shape, device="meta"), *rest).shape
    return ShardedParam(tensor._local, dataclasses.replace(tensor._place, shape=shape), is_param=False)


_HANDLERS: dict[Any, Callable[..., Any]] = (
    dict.fromkeys(ELEMENTWISE, _elementwise)
    | dict.fromkeys(LISTS, _on_lists)
    | dict.fromkeys(RANDOM_INIT, _random_init)
    | dict.fromkeys(FACTORIES, _factory)
    | dict.fromkeys([aten.copy_.default, aten.fill_.Tensor], _copy)
    | {aten._foreach_copy_.default: _foreach_copy}
    | dict.fromkeys([aten.detach.default, aten.alias.default], _detach)
    | dict.fromkeys(VIEWS, _view)
    | {aten._local_scalar_dense.default: _item}
    | dict.fromkeys([aten.index_put_.default, aten._index_put_impl_.default], _put)
    | param_reduce.HANDLERS
)
