"""What `shard()` refuses, before it changes anything. Each refusal names the argument, expected and given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parameter import is_lazy

from fsdp_passes._compat import root_mesh, storage_id
from fsdp_passes.sharding.precision import Precision


def resolve_mesh(mesh: DeviceMesh | None, device_type: str | None) -> DeviceMesh:
    """`mesh`, or one dimension over all ranks; ValueError when it does not fit the ranks or the model.

    device_type: of the model's values; None when it has none yet.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("mesh: expected an initialised process group (init_process_group or torchrun), got none")
    if mesh is None:
        return init_device_mesh(device_type or _device_type_of_ranks(), (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh: expected a DeviceMesh or None, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, got {mesh.ndim} of sizes {tuple(mesh.shape)}")
    whole = root_mesh(mesh).size()
    if whole != dist.get_world_size():
        raise ValueError(
            f"mesh: expected a mesh over all {dist.get_world_size()} ranks, or a dimension of one, "
            f"got a mesh over {whole}"
        )
    if device_type not in (None, mesh.device_type):
        raise ValueError(f"model: expected parameters on the mesh's device {mesh.device_type}, got {device_type}")
    return mesh


def _device_type_of_ranks() -> str:
    """What the default process group communicates between: CPUs with gloo, else accelerators where there are any."""
    accelerator = torch.accelerator.current_accelerator() if dist.get_backend() != "gloo" else None
    return "cpu" if accelerator is None else accelerator.type


def check_types(precision: object, reshard_after_forward: object) -> None:
    if not isinstance(precision, Precision):
        raise ValueError(f"precision: expected fsdp_passes.Precision(...) or None, got {precision!r}")
    if not isinstance(reshard_after_forward, bool) and not callable(reshard_after_forward):
        raise ValueError(f"reshard_after_forward: expected a bool or a predicate, got {reshard_after_forward!r}")


def check_model(model: nn.Module) -> None:
    """ValueError for what sharding would get wrong."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected an nn.Module, got {type(model).__name__}")
    if any(hasattr(module, "_fsdp_reads") for module in model.modules()):
        raise ValueError("model: expected a model that is not sharded, got one that shard() has already sharded")
    if next(model.parameters(), None) is None:
        raise ValueError("model: expected at least one parameter, got none")
    for name, param in model.named_parameters():
        _check_parameter(name, param)
    _check_devices(model)
    params = _Memory(model)
    for path, module in model.named_modules():
        _check_module(path or type(module).__name__, module, params)


class _Memory:
    """The memory of a model's parameters, as intervals of addresses; ValueError when two of them overlap."""

    def __init__(self, model: nn.Module) -> None:
        owned = [(*_interval(param), name) for name, param in model.named_parameters() if param.numel()]
        self._intervals = sorted(owned)
        for (space, _, end, name), (other_space, start, _, other) in itertools.pairwise(self._intervals):
            if space == other_space and start < end:
                raise ValueError(f"model: expected parameters with memory of their own, got {name} and {other} in one")

    def owner_of(self, tensor: torch.Tensor) -> str | None:
        """The name of a parameter that `tensor` shares memory with."""
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided or not tensor.numel():
            return None
        where, first, last = _interval(tensor)
        overlaps = (
            name for space, start, end, name in self._intervals if where == space and first < end and start < last
        )
        return next(overlaps, None)


def _interval(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Addresses [first, last) of the elements, after the space that they count in: a meta tensor's is its storage."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    space, first = 0, tensor.data_ptr()
    if tensor.is_meta:
        space, first = storage_id(tensor), int(tensor.storage_offset()) * tensor.element_size()
    return space, first, first + (reach + 1) * tensor.element_size()


def _check_parameter(name: str, param: torch.Tensor) -> None:
    if is_lazy(param):
        raise ValueError(f"model: expected initialised parameters, got lazy {name}; run one forward before shard()")
    if type(param) not in (torch.Tensor, nn.Parameter) or param.layout is not torch.strided:
        raise ValueError(f"model: expected plain dense parameters, got {name} of type {type(param).__name__}")
    if param.grad is not None:
        raise ValueError(
            f"model: expected parameters without gradients, got {name} with one; zero_grad() before shard()"
        )
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        raise ValueError(f"model: expected parameters without hooks, got {name} with one; register it after shard()")


def _check_devices(model: nn.Module) -> None:
    """Everything on one device, but buffers may have values where the parameters have none yet."""
    first_name, first = next(model.named_parameters())
    for name, param in model.named_parameters():
        if param.device != first.device:
            raise ValueError(
                f"model: expected all parameters on {first.device}, as {first_name} is, got {name} on {param.device}"
            )
    expected = device_of_values(model) or first.device
    for name, buffer in model.named_buffers():
        if buffer.device != expected and not (first.is_meta and buffer.is_meta):
            raise ValueError(f"model: expected everything on {expected}, got {name} on {buffer.device}")


def device_of_values(model: nn.Module) -> torch.device | None:
    """Where the model's values are; None when all of it is on the meta device."""
    tensors = [next(model.parameters()), *model.buffers()]
    return next((tensor.device for tensor in tensors if not tensor.is_meta), None)


def _check_module(path: str, module: nn.Module, params: _Memory) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"model: expected Python modules, got the TorchScript module {path}")
    if getattr(module, "max_norm", None) is not None and isinstance(module, nn.Embedding | nn.EmbeddingBag):
        raise ValueError(f"model: expected max_norm=None, got {path} with {module.max_norm}: it edits its weight")
    if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
        raise ValueError(f"model: expected dense gradients, got {path} with sparse=True")
    for name, value in {**vars(module), **module._buffers}.items():
        if name in ("_parameters", "_modules", "_buffers", "_flat_weights"):
            continue
        owners = [owner for leaf in _leaves(value) if (owner := params.owner_of(leaf)) is not None]
        if owners:
            raise ValueError(
                f"model: expected parameters to be reached as attributes only, got {path}.{name}, which shares memory "
                f"with {owners[0]}: it would go on using the unsharded values"
            )


def _leaves(value: Any) -> Iterator[Any]:
    """Tensors in `value`, through lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
