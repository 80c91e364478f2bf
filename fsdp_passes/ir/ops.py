"""The operators that the package adds to torch, and the lane in which each is printed.

Captured graphs contain two of them, both plain functions of tensors:

    full = unshard(shard, world_size, dtype, reshard=True, reduce_dtype=None)   1-D piece of each rank -> flat group
    grad = reduce_grad(full_grad, shard, world_size, reduce_dtype=None)         its gradient -> the piece's mean

`reduce_dtype` is that of the sum of gradients; None: the shard's. No unit name, rank or process group is an argument,
so that equal blocks give equal graphs on every rank: kernels find the owner of a shard (its flat group) through the
shard's storage.

Passes add the others. The plan says what each one does; but two are computation, with a parameter's slice of the sum
of gradients, grad_slice(shard, piece, shape, dtype):

    grad_write(slice, grad)     slice = grad, or slice += grad where the sum has a gradient already
    grad_mm(slice, a, b)        the same with a @ b, added up in the dtype of the slice
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, fx

NAMESPACE = "fsdp_opt"
_OWNER = "_fsdp_passes_owner"


class ShardOwner(Protocol):
    """What a kernel needs of the flat group that a shard belongs to; `unit` is its name in `model`, for readers."""

    unit: str
    model: Any

    def gather(self, dtype: torch.dtype) -> Tensor:
        """The whole flat group: 1-D, `dtype`, full elements, readable at once."""

    def reduce(self, full_grad: Tensor) -> Tensor:
        """Mean over ranks of this rank's piece of `full_grad`: 1-D, the shard's dtype."""

    def accumulate(self, full_grad: Tensor) -> None:
        """Add one backward's gradient of the whole; reduced when that backward ends, if it synchronises."""


@dataclass(frozen=True)
class ShardInput:
    """Fact on a placeholder: it is a shard; `unit` names the unit of the first call's model, for readers only."""

    unit: str


def unit_of(placeholder: fx.Node) -> str:
    """The unit of a shard; a shard of which nothing is known is a unit by itself."""
    fact = placeholder.meta.get("fsdp")
    return fact.unit if isinstance(fact, ShardInput) else placeholder.name


def unit_names(owners: Sequence[ShardOwner]) -> list[str]:
    """Of each its unit. Models may have units of one name: those of a second model say so."""
    models = list({id(owner.model): None for owner in owners})
    numbers = [models.index(id(owner.model)) for owner in owners]
    return [
        f"{owner.unit} of model {number + 1}" if number else owner.unit
        for owner, number in zip(owners, numbers, strict=True)
    ]


def set_owner(shard: Tensor, owner: ShardOwner) -> None:
    """Remember `owner` on the storage, so that it survives `detach` and saving for backward.

    Weakly: Python's garbage collector does not see through a storage, and the owner holds the shard.
    """
    setattr(shard.untyped_storage(), _OWNER, weakref.ref(owner))


def is_shard(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and type(tensor) in (Tensor, torch.nn.Parameter) and _has_owner(tensor)


def _has_owner(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and hasattr(tensor.untyped_storage(), _OWNER)


def owner_of(shard: Tensor) -> ShardOwner:
    """The flat group of `shard`; RuntimeError when something replaced the shard by a copy."""
    owner = getattr(shard.untyped_storage(), _OWNER)() if _has_owner(shard) else None
    if owner is None:
        raise RuntimeError(
            "fsdp_passes: expected a shard of a sharded model that is still alive, got a tensor of shape "
            f"{tuple(shard.shape)} without one; a saved-tensor hook that copies parameters (save_on_cpu) does this, too"
        )
    return cast(ShardOwner, owner)


_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(
    "unshard(Tensor shard, int world_size, ScalarType dtype, *, bool reshard=True, "
    "ScalarType? reduce_dtype=None) -> Tensor"
)
_library.define(
    "reduce_grad(Tensor full_grad, Tensor shard, int world_size, *, ScalarType? reduce_dtype=None) -> Tensor"
)
_library.define("gather(Tensor shard, int world_size, ScalarType dtype, *, bool reshard=True) -> Tensor")
_library.define("wait(Tensor(a) buffer) -> Tensor(a)")
_library.define("release(Tensor buffer) -> ()")
_library.define("accumulate(Tensor full_grad, Tensor shard, int[]? pieces) -> ()")
_library.define("reduce(Tensor shard, int world_size, ScalarType dtype) -> ()")
_library.define("grad_slice(Tensor shard, int piece, int[] shape, ScalarType dtype, *, bool separate=False) -> Tensor")
_library.define("grad_write(Tensor(a!) slice, Tensor grad) -> ()")
_library.define("grad_mm(Tensor(a!) slice, Tensor a, Tensor b, *, bool first=False) -> ()")

UNSHARD = torch.ops.fsdp_opt.unshard.default
REDUCE_GRAD = torch.ops.fsdp_opt.reduce_grad.default
GATHER = torch.ops.fsdp_opt.gather.default
WAIT = torch.ops.fsdp_opt.wait.default
RELEASE = torch.ops.fsdp_opt.release.default
ACCUMULATE = torch.ops.fsdp_opt.accumulate.default
REDUCE = torch.ops.fsdp_opt.reduce.default
GRAD_SLICE = torch.ops.fsdp_opt.grad_slice.default
GRAD_WRITE = torch.ops.fsdp_opt.grad_write.default
GRAD_MM = torch.ops.fsdp_opt.grad_mm.default

GRADIENT_WRITES = frozenset({GRAD_WRITE, GRAD_MM})

LANES: dict[Any, str] = {GATHER: "issue", REDUCE: "issue", WAIT: "wait", RELEASE: "release"}
COMMUNICATION = frozenset({GATHER, WAIT, RELEASE, ACCUMULATE, REDUCE})


@torch.library.impl(_library, "unshard", "CompositeExplicitAutograd")
def _unshard(shard: Tensor, world_size: int, dtype: torch.dtype, **for_passes: Any) -> Tensor:
    return owner_of(shard).gather(dtype)


@torch.library.impl(_library, "reduce_grad", "CompositeExplicitAutograd")
def _reduce_grad(full_grad: Tensor, shard: Tensor, world_size: int, **for_passes: Any) -> Tensor:
    return owner_of(shard).reduce(full_grad)


@torch.library.register_fake(f"{NAMESPACE}::unshard", lib=_library)
def _fake_unshard(shard: Tensor, world_size: int, dtype: torch.dtype, **for_passes: Any) -> Tensor:
    return shard.new_empty(shard.numel() * world_size, dtype=dtype)


@torch.library.register_fake(f"{NAMESPACE}::reduce_grad", lib=_library)
def _fake_reduce_grad(full_grad: Tensor, shard: Tensor, world_size: int, **for_passes: Any) -> Tensor:
    return torch.empty_like(shard)


@torch.library.register_fake(f"{NAMESPACE}::gather", lib=_library)
def _fake_gather(shard: Tensor, world_size: int, dtype: torch.dtype, *, reshard: bool = True) -> Tensor:
    return shard.new_empty(shard.numel() * world_size, dtype=dtype)


@torch.library.impl(_library, "wait", "Meta")
def _meta_wait(buffer: Tensor) -> Tensor:
    return buffer.view_as(buffer)


@torch.library.register_fake(f"{NAMESPACE}::release", lib=_library)
def _fake_release(buffer: Tensor) -> None:
    return None


@torch.library.register_fake(f"{NAMESPACE}::accumulate", lib=_library)
def _fake_accumulate(full_grad: Tensor, shard: Tensor, pieces: Sequence[int] | None) -> None:
    return None


@torch.library.register_fake(f"{NAMESPACE}::reduce", lib=_library)
def _fake_reduce(shard: Tensor, world_size: int, dtype: torch.dtype) -> None:
    return None


@torch.library.register_fake(f"{NAMESPACE}::grad_slice", lib=_library)
def _fake_grad_slice(
    shard: Tensor, piece: int, shape: Sequence[int], dtype: torch.dtype, *, separate: bool = False
) -> Tensor:
    return shard.new_empty(shape, dtype=dtype)


@torch.library.register_fake(f"{NAMESPACE}::grad_write", lib=_library)
def _fake_grad_write(slice: Tensor, grad: Tensor) -> None:
    torch._check(slice.shape == grad.shape, lambda: f"expected a gradient of {slice.shape}, got {grad.shape}")


@torch.library.register_fake(f"{NAMESPACE}::grad_mm", lib=_library)
def _fake_grad_mm(slice: Tensor, a: Tensor, b: Tensor, *, first: bool = False) -> None:
    shape = (a.shape[0], b.shape[1])
    torch._check(slice.shape == shape, lambda: f"expected a product of {slice.shape}, got {shape}")


@torch.library.impl(_library, "grad_mm", "CompositeExplicitAutograd")
def _grad_mm(slice: Tensor, a: Tensor, b: Tensor, *, first: bool = False) -> None:
    """CUDA's products take bf16 and add up in fp32; the CPU's need fp32 operands. In fp32 there is nothing to round."""
    if a.dtype == slice.dtype:
        product = torch.mm(a, b)
        slice.copy_(product) if first else slice.add_(product)
    elif slice.is_cuda:
        torch.ops.aten.addmm.dtype_out(slice, a, b, slice.dtype, beta=0 if first else 1, out=slice)
    else:
        torch.addmm(slice, a.to(slice.dtype), b.to(slice.dtype), beta=0 if first else 1, out=slice)


def _keep_for_backward(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Tensor) -> None:
    # Not save_for_backward: a leaf needs no hooks, and in a checkpoint the first read in a forward would save one
    # tensor more than its recomputation, which finds the unit gathered (or the other way round).
    ctx.shard, ctx.world_size, _ = inputs
    ctx.reduce_dtype = keyword_only_inputs["reduce_dtype"]


def _unshard_backward(ctx: Any, full_grad: Tensor) -> tuple[Tensor | None, None, None]:
    """Traced: one `reduce_grad` in the graph. Eager: the owner accumulates and nothing flows to the leaf."""
    if type(full_grad) is not Tensor:
        return REDUCE_GRAD(full_grad, ctx.shard, ctx.world_size, reduce_dtype=ctx.reduce_dtype), None, None
    owner_of(ctx.shard).accumulate(full_grad)
    return None, None, None


torch.library.register_autograd(
    f"{NAMESPACE}::unshard", _unshard_backward, setup_context=_keep_for_backward, lib=_library
)
