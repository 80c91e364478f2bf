"""Whole values of a sharded model, and the norm of its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsdp_passes.sharding.model import ShardedModel
from fsdp_passes.sharding.shard import original_name, unwrap


def sharded_state(model: nn.Module) -> ShardedModel:
    """What `shard()` left on `model`; ValueError when it was not sharded."""
    state = getattr(unwrap(model), "_fsdp_model", None)
    if state is None:
        raise ValueError(f"model: expected a model that shard() has sharded, got a plain {type(model).__name__}")
    return state


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Plain full tensors, copies, under the names that the unsharded model's `state_dict` has.

    Collective: every rank calls it and gets all of them. One flat group at a time is gathered.
    """
    full: dict[int, Tensor] = {}
    for group in sharded_state(model).groups:
        flat = group.gather(group.shard.dtype)
        for param, offset in zip(group.params, group.layout.offsets, strict=True):
            full[id(param)] = flat[offset : offset + param.numel()].view(param.shape).clone()
    state = unwrap(model).state_dict(keep_vars=True)
    return {
        original_name(name): full[id(value)] if id(value) in full else _copy(value) for name, value in state.items()
    }


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients so that their norm over all parameters and ranks is at most `max_norm`; returns the norm.

    The same as torch.nn.utils.clip_grad_norm_(model.parameters(), ...), with one collective a
    dtype (with foreach=False, one a parameter). RuntimeError inside an open accumulation window.
    """
    sharded_state(model)
    return torch.nn.utils.clip_grad_norm_(unwrap(model).parameters(), max_norm, norm_type, error_if_nonfinite, foreach)
