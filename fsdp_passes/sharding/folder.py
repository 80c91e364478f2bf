"""A folder that dcp.save wrote: what is in it, and reading this rank's part of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp_passes._compat import set_along_path
from fsdp_passes.runtime.collectives import agree, objects_of_ranks
from fsdp_passes.sharding.entries import Entries, TensorSpec
from fsdp_passes.sharding.optimizer_entries import KeyPath, OptimizerEntries
from fsdp_passes.sharding.reader import RangeReader


@dataclass(frozen=True)
class Folder:
    """`contents` has the type and size of every entry, by its path in the nested dict that was saved."""

    path: str
    contents: Mapping[KeyPath, Any]
    process_group: dist.ProcessGroup

    @classmethod
    def open(cls, path: str | os.PathLike[str], process_group: dist.ProcessGroup) -> Folder:
        """Collective. ValueError, on all ranks: there is no complete checkpoint, or not the same one for all."""
        path = os.fspath(path)
        contents, digest = agree(lambda: _read_contents(path), process_group)
        found = objects_of_ranks((path, digest), process_group)
        if any(other != digest for _, other in found):
            raise ValueError(f"state: expected the same checkpoint on all ranks, got {[each for each, _ in found]}")
        return cls(path, contents, process_group)

    def specs(self, with_optimizer: bool) -> dict[str, Any]:
        """The nested dict, with the TensorSpec of each tensor. Of what else is in "model": its type.

        with_optimizer: reads the hyperparameters, and of the optimizer's state what is no tensor. Collective.
        """
        specs: dict[str, Any] = {"model": {path[1]: _spec(entry) for path, entry in self._part("model").items()}}
        if not with_optimizer:
            return specs
        known = {path: entry for path, entry in self._part("optim").items() if path[1] in ("state", "param_groups")}
        tensors = {path: entry for path, entry in known.items() if path[1] == "state" and _is_tensor(entry)}
        read = self._load({path: _empty(entry) for path, entry in known.items() if path not in tensors})
        for path, entry in tensors.items():
            set_along_path(read, path, _spec(entry))
        return specs | {"optim": read.get("optim", {})}

    def read(self, entries: Entries, optimizer: OptimizerEntries | None) -> dict[str, Any]:
        """The nested dict, with parameters, buffers, and what the optimizer has already, read in place. Collective.

        Of a tied parameter's names one is read.
        """
        of_model, of_state = self._part("model"), self._part("optim", "state")
        names = {path[1] for path in of_model}
        live: dict[Any, Tensor] = {entries.given_name(param, names): param.data for param in entries.each_param}
        live |= {name: buffer.detach() for name, buffer in entries.buffers.items()}
        wanted: dict[KeyPath, Any] = {("model", name): tensor for name, tensor in live.items()}
        wanted |= {path: _empty(entry) for path, entry in of_model.items() if path[1] in entries.extras}
        if optimizer is not None:
            chosen = set(optimizer.name_of_each({path[2] for path in of_state}).values())
            for path, entry in of_state.items():
                if path[2] in chosen:
                    wanted[path] = optimizer.room(path[2], path[3:], _spec(entry)) if _is_tensor(entry) else None
        return self._load(wanted)

    def _part(self, *start: str) -> dict[KeyPath, Any]:
        """The entries below a path."""
        length = len(start)
        return {path: entry for path, entry in self.contents.items() if path[:length] == start and len(path) > length}

    def _load(self, wanted: Mapping[KeyPath, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for path, value in wanted.items():
            set_along_path(state, path, value)
        dcp.load(state, storage_reader=RangeReader(self.path), process_group=self.process_group)
        return state


def _read_contents(path: str) -> tuple[dict[KeyPath, Any], str]:
    """And a digest of what says so."""
    try:
        metadata = RangeReader(path).read_metadata()
        paths, entries = metadata.planner_data, metadata.state_dict_metadata
        contents = None if paths is None else {paths[key]: entry for key, entry in entries.items()}
        digest = hashlib.sha256(Path(path, ".metadata").read_bytes()).hexdigest()
    except Exception as error:  # unpickling raises any
        why = error.strerror if isinstance(error, OSError) else repr(error)
        raise ValueError(
            f"state: expected the folder of a complete checkpoint, got {path}, whose .metadata, which dcp.save "
            f"writes last, cannot be read ({why})"
        ) from error
    if contents is None:
        raise ValueError(
            f"state: expected a checkpoint whose .metadata tells the nested dict that was saved, got {path}, which "
            "was saved with flatten_state_dict=False, or by another planner"
        )
    return contents, digest


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry, TensorStorageMetadata)


def _spec(entry: Any) -> Any:
    return TensorSpec(entry.size, entry.properties.dtype) if _is_tensor(entry) else "value"


def _empty(entry: Any) -> Any:
    """What dcp.load overwrites: a plain tensor, or any value."""
    return torch.empty(entry.size, dtype=entry.properties.dtype) if _is_tensor(entry) else None
