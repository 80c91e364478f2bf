"""`state_dict()` as frameworks expect it that know nothing of sharded tensors: they call it, and pickle the result."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from fsdp_passes._compat import map_tensors
from fsdp_passes.sharding.optimizer_entries import OptimizerEntries
from fsdp_passes.sharding.param import ShardedParam, whole
from fsdp_passes.sharding.shard import original_name, unwrap
from fsdp_passes.sharding.state import full_state_dict, sharded_state


def use_full_state_dicts(model: nn.Module, *optimizers: Optimizer) -> None:
    """From now on `model.state_dict()` and `optimizer.state_dict()` give plain full tensors, copies, on every rank.

    Every rank must call them, then: they are collective. `load_state_dict` takes such tensors: the model's does anyway,
    the optimizers' from now on. That of a part of the model stays sharded, and so does what goes into files of
    torch.distributed.checkpoint. Copies of an optimizer have to be named again.
    """
    sharded_state(model)
    unwrap(model).register_state_dict_post_hook(_give_full)

    def cut(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": OptimizerEntries(model, optimizer).copies(state["state"])}

    for optimizer in optimizers:
        optimizer.register_state_dict_post_hook(lambda _, state: map_tensors(whole, state))
        optimizer.register_load_state_dict_pre_hook(cut)


def _give_full(model: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Of one model, where others may be in the same state. Not with keep_vars=True, for its own parameters."""
    names = [name for name, value in state.items() if isinstance(value, ShardedParam) and value.store is None]
    original = {name: original_name(name.removeprefix(prefix)) for name in names if name.startswith(prefix)}
    if not original:
        return
    full = full_state_dict(model)
    state.update({name: full[key] for name, key in original.items() if key in full})
