"""Loading whole values into a sharded model: from one rank's state dict, a flat group at a time, or from safetensors
files, of which each rank reads its own ranges.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_passes.runtime.collectives import agree, broadcast_from, object_from, objects_of_ranks
from fsdp_passes.sharding.entries import Entries, TensorSpec, refuse, set_extra_state, specs_of
from fsdp_passes.sharding.initialize import filling, initialize, initialize_buffers
from fsdp_passes.sharding.model import ShardedModel
from fsdp_passes.sharding.safetensors_files import StoredTensor, read_headers
from fsdp_passes.sharding.shard import original_name, scatter_values, unwrap
from fsdp_passes.sharding.state import sharded_state


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Any] | None, from_rank: int = 0) -> None:
    """Set the model's parameters and buffers from what rank `from_rank` has. Collective.

    state_dict: on `from_rank` plain full tensors under the names that the unsharded model's `state_dict` has; of a tied
        parameter's names one is enough, of two the last counts. They are cast where dtypes differ. None on the other
        ranks. None on all ranks: the initial values of a model on the meta device, by its modules' own initialisers.
    from_rank: the rank among those that share the parameters, in a mesh the rank in its dimension.

    A model on the meta device gets memory, and buffers that no state dict holds get their initial values. Beside its
    shards, and what it was given, a rank holds 32 MiB, or one module's parameters while they are initialised.

    Raises ValueError on every rank, with the list of all entries that are missing, unexpected, misshapen or mistyped,
    before anything is changed.
    """
    target, state = unwrap(model), sharded_state(model)
    ranks = state.process_group
    if not _is_given(state, state_dict is not None, from_rank):
        with filling(target, state) as blank:
            initialize(target, state, blank)
        return
    given = state_dict if ranks.rank() == from_rank else None
    extras = object_from(from_rank, agree(lambda: _checked_extras(Entries.of(target, state), given), ranks), ranks)
    with filling(target, state) as blank:
        initialize_buffers(target, state, blank)
        entries = Entries.of(target, state)  # with the buffers that have memory now
        for group in state.groups:
            values = [] if given is None else [given[entries.given_name(param, given)] for param in group.params]
            scatter_values(from_rank, values, group.layout, group.shard.detach(), ranks)
            torch.autograd.graph.increment_version(group.shard)
        for name, buffer in entries.buffers.items():
            if given is not None:
                buffer.copy_(given[name])
            broadcast_from(from_rank, buffer, ranks)
        for name in entries.extras:
            set_extra_state(target, name, extras[name])


def _is_given(state: ShardedModel, here: bool, from_rank: int) -> bool:
    """Whether `from_rank` has a state dict. ValueError, on all ranks, when they do not call alike."""
    calls = objects_of_ranks((here, from_rank), state.process_group)
    given = [rank for rank, (has_one, _) in enumerate(calls) if has_one]
    if any(call[1] != from_rank for call in calls) or not 0 <= from_rank < len(calls):
        raise ValueError(
            f"from_rank: expected one rank below {len(calls)}, the same on all, got {[call[1] for call in calls]}"
        )
    if given and from_rank not in given:
        raise ValueError(f"state_dict: expected one on rank {from_rank}, got one on {given}")
    if not given and not any(group.shard.is_meta for group in state.groups):
        raise ValueError(f"state_dict: expected one on rank {from_rank} for a model that has values, got None")
    return bool(given)


def _checked_extras(entries: Entries, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The extra state in `given`, which fits the model; ValueError otherwise."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"state_dict: expected a dict of tensors, got {type(given).__name__}")
    refuse("state_dict", entries.misfits(specs_of(given, Tensor, nn.Parameter)))
    extras = {name: given[name] for name in entries.extras}
    pickle.dumps(extras)  # it raises here, where all ranks hear of it
    return extras


def load_safetensors(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Set the model's parameters and buffers from safetensors files, each rank from its own ranges of them. Collective.

    path: a file, an index (`*.safetensors.index.json`), or a folder with either. The names are those that the unsharded
        model's `state_dict` has; of a tied parameter's names one is enough. Values are cast where dtypes differ.

    A model on the meta device gets memory, and buffers that no state dict holds get their initial values. A rank holds
    its shards, and 4 MiB that it is reading (while such buffers are computed, their module's parameters).

    Raises ValueError on every rank, before anything is changed: for files that one rank cannot read, and with the list
    of all entries that are missing, unexpected, misshapen or mistyped.
    """
    target, state = unwrap(model), sharded_state(model)
    stored = agree(lambda: _read_headers(Entries.of(target, state), Path(path)), state.process_group)
    with filling(target, state) as blank:
        initialize_buffers(target, state, blank)
        agree(lambda: _read_values(Entries.of(target, state), stored), state.process_group)


def _read_headers(entries: Entries, path: Path) -> dict[str, StoredTensor]:
    """ValueError: the files cannot be read, or do not fit the model."""
    try:
        stored = {original_name(name): tensor for name, tensor in read_headers(path).items()}
    except OSError as error:
        raise ValueError(f"path: expected files that can be read, got {error}") from error
    refuse("path", entries.misfits({name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in stored.items()}))
    return stored


def _read_values(entries: Entries, stored: Mapping[str, StoredTensor]) -> None:
    for param in entries.each_param:
        stored[entries.given_name(param, stored)].read(param.local, param.place.start)
    for name, buffer in entries.buffers.items():
        whole = torch.empty(buffer.numel(), dtype=buffer.dtype, device=buffer.device)
        stored[name].read(whole)
        buffer.copy_(whole.view(buffer.shape))
