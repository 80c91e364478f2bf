"""Saving and loading with torch.distributed.checkpoint (dcp): of any kind of sharding, at any number of ranks.

    save     dcp.save(fsdp.state_dict(model, optimizer), checkpoint_id=folder), or dcp.async_save
    load     fsdp.load_state_dict(model, optimizer, folder)

The keys are those that torch's own `get_state_dict` gives for a plain or an FSDP2 model, so that these load each
other's checkpoints: "model.<name>", "optim.state.<name>.<key>", "optim.param_groups.<number>.<key>".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_passes._compat import map_tensors
from fsdp_passes.runtime.collectives import agree, objects_of_ranks
from fsdp_passes.sharding.entries import Entries, refuse, set_extra_state, specs_of
from fsdp_passes.sharding.folder import Folder
from fsdp_passes.sharding.initialize import filling, initialize_buffers
from fsdp_passes.sharding.model import ShardedModel
from fsdp_passes.sharding.optimizer_entries import OptimizerEntries
from fsdp_passes.sharding.optimizer_state import named_state
from fsdp_passes.sharding.param import ShardedParam, whole
from fsdp_passes.sharding.shard import original_name, unwrap
from fsdp_passes.sharding.state import sharded_state


def state_dict(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """{"model": {name: value}, "optim": {"state": {name: {key: value}}, "param_groups": [...]}}; no collective.

    Parameters, and optimizer state of their shape, are sharded tensors that share the model's and the optimizer's
    memory: dcp.save writes this rank's pieces, dcp.load overwrites them, and load_state_dict ends such a load.
    Of an optimizer that has made no step: the state that its first step starts from. A twin of it makes that step: its
    state, groups and parameters stay, but if `step` writes to other objects that it holds, such as a list, it shows.

    Raises ValueError for an optimizer of other parameters, and for one without state whose `step` needs a closure.
    """
    sharded_state(model)
    entries = unwrap(model).state_dict(keep_vars=True)
    state: dict[str, Any] = {"model": {original_name(name): _detached(value) for name, value in entries.items()}}
    if optimizer is not None:
        state["optim"] = map_tensors(_detached, named_state(model, optimizer))
    return state


def full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The "optim" part of `state_dict` with plain full tensors, copies, on every rank. Collective."""
    sharded_state(model)
    return map_tensors(whole, named_state(model, optimizer))


def load_state_dict(
    model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any] | str | os.PathLike[str]
) -> None:
    """Set the model's parameters and buffers, and the optimizer's state and hyperparameters. Collective.

    state: the folder of a checkpoint, of which a rank reads the ranges that it owns; or what `state_dict` gives, with
        values that dcp.load has loaded, or with plain full tensors. Entries other than "model" and "optim" are left
        alone. optimizer: None loads the model only.

    A model on the meta device gets memory, and buffers that no state dict holds get their initial values.

    Raises ValueError on every rank, before anything is changed, with the list of all entries of both that are missing,
    unexpected or misshapen, and for a folder without a complete checkpoint. Parameters without state in the optimizer's
    part, which have made no step, have none afterwards.
    """
    sharded, target = sharded_state(model), unwrap(model)
    calls = objects_of_ranks((_is_path(state), optimizer is not None), sharded.process_group)
    if len(set(calls)) > 1:
        raise ValueError(f"state, optimizer: expected a path, and an optimizer, on all ranks or on none, got {calls}")
    if _is_path(state):
        _load_folder(target, sharded, optimizer, state)
    else:
        _load_values(target, sharded, optimizer, state)


def _is_path(state: Any) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(state, (str, os.PathLike))


def _load_folder(
    model: nn.Module, sharded: ShardedModel, optimizer: Optimizer | None, path: str | os.PathLike[str]
) -> None:
    ranks = sharded.process_group
    folder = Folder.open(path, ranks)
    specs = folder.specs(with_optimizer=optimizer is not None)
    optim = agree(lambda: _fitting(f"state: {folder.path}", Entries.of(model, sharded), model, optimizer, specs), ranks)
    with filling(model, sharded) as blank:
        initialize_buffers(model, sharded, blank)
        values = folder.read(Entries.of(model, sharded), optim)
        torch.autograd.graph.increment_version([group.shard for group in sharded.groups])

        def set_others() -> None:
            _set_extras(model, sharded, values["model"])
            if optim is not None:
                optim.load(optim.by_index(values.get("optim", {}).get("state", {})))

        agree(set_others, ranks)


def _load_values(model: nn.Module, sharded: ShardedModel, optimizer: Optimizer | None, values: Any) -> None:
    ranks = sharded.process_group

    def check() -> OptimizerEntries | None:
        entries = Entries.of(model, sharded)
        return _fitting("state", entries, model, optimizer, _specs(entries, values, optimizer is not None))

    optim = agree(check, ranks)
    with filling(model, sharded) as blank:
        initialize_buffers(model, sharded, blank)

        def copy() -> None:
            _copy_values(Entries.of(model, sharded), values["model"])
            _set_extras(model, sharded, values["model"])
            if optim is not None:
                optim.load(optim.copies(optim.by_index(values["optim"].get("state", {}))))

        agree(copy, ranks)


def _specs(entries: Entries, values: Any, with_optimizer: bool) -> dict[str, Any]:
    """Of the values for the model; those for the optimizer as they are. ValueError: they are no dicts."""
    parts = ("model", "optim") if with_optimizer else ("model",)
    if not isinstance(values, Mapping) or not all(isinstance(values.get(part), Mapping) for part in parts):
        got = sorted(values) if isinstance(values, Mapping) else type(values).__name__
        raise ValueError(f"state: expected a path, or a dict of dicts {' and '.join(map(repr, parts))}, got {got}")
    specs = specs_of(values["model"], Tensor, nn.Parameter, ShardedParam)
    for name, param in entries.params.items():
        value = values["model"].get(name)
        if isinstance(value, ShardedParam) and value.shape == param.shape and value.place != param.place:
            specs[name] = "tensor that is sharded otherwise"
    return {**values, "model": specs}


def _fitting(
    argument: str, entries: Entries, model: nn.Module, optimizer: Optimizer | None, specs: Mapping[str, Any]
) -> OptimizerEntries | None:
    """The entries of the optimizer. ValueError: `specs` differs from those of the model and the optimizer."""
    misfits = entries.misfits(specs["model"])
    optim = None
    if optimizer is not None:
        optim = OptimizerEntries(model, optimizer, specs["optim"].get("param_groups", []))
        misfits += optim.misfits(specs["optim"].get("state", {}))
    refuse(argument, misfits)
    return optim


@torch.no_grad()
def _copy_values(entries: Entries, given: Mapping[str, Any]) -> None:
    for param in entries.each_param:
        param.copy_(given[entries.given_name(param, given)])
    for name, buffer in entries.buffers.items():
        buffer.copy_(given[name])


def _set_extras(model: nn.Module, sharded: ShardedModel, given: Mapping[str, Any]) -> None:
    for name in Entries.of(model, sharded).extras:
        set_extra_state(model, name, given[name])


def _detached(value: Any) -> Any:
    return value.data if isinstance(value, ShardedParam) else value.detach() if isinstance(value, Tensor) else value
