"""`shard(model)`: from a plain module to flat groups, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_passes.runtime.agreement import Agreement
from fsdp_passes.runtime.collectives import broadcast_from, scatter_from
from fsdp_passes.runtime.streams import Streams
from fsdp_passes.sharding.checks import check_model, check_types, device_of_values, resolve_mesh
from fsdp_passes.sharding.group import FlatGroup
from fsdp_passes.sharding.layout import Layout, align_elems, plan_layout
from fsdp_passes.sharding.model import ShardedModel
from fsdp_passes.sharding.modules import Read, sharded_class
from fsdp_passes.sharding.precision import Precision
from fsdp_passes.sharding.root import ShardedRoot
from fsdp_passes.sharding.units import GroupPlan, Units, find_units, plan_groups

_SAME = Precision(reduce=None)
_SCATTERED_BYTES = 16 << 20  # laid flat at a time, and copied once more by gloo: small beside a unit


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    units: Units = "auto",
    precision: Precision | None = None,
    reshard_after_forward: bool | Callable[[str], bool] = True,
) -> nn.Module:
    """Shard `model` over `mesh`, in place, and return it. Collective: every rank of the mesh calls it.

    Every rank ends with rank 0's parameters and buffers. Names and shapes stay; each parameter becomes a
    `ShardedParam` that holds 1/world_size of its unit's flat buffer. Make the optimizer afterwards: it would go on
    holding the parameters of before. A model on the meta device stays there, until one of `load_full_state_dict`,
    `load_safetensors` and `load_state_dict` gives it values.

    mesh: 1-D, over all ranks (None) or one dimension of a mesh over all ranks.
    units: what gathers together: "auto" (blocks, embeddings, head), module classes, names, or a
        predicate(name, module); what none of them claims is the unit "root".
    precision: None leaves dtypes alone.
    reshard_after_forward: False keeps a unit gathered from forward to backward; or a predicate(unit name).

    Raises ValueError, before anything is changed, for an argument that does not fit.
    """
    target = unwrap(model)
    check_model(target)
    device = device_of_values(target)
    mesh = resolve_mesh(mesh, None if device is None else device.type)
    precision = _SAME if precision is None else precision
    check_types(precision, reshard_after_forward)
    plans = plan_groups(target, find_units(target, units))
    reshards = {plan.unit: _reshards(reshard_after_forward, plan.unit) for plan in plans}

    device = device or _own_device(mesh)
    agreement = Agreement.among(mesh.get_group(), device)
    streams = Streams(device if mesh.size() > 1 else torch.device("cpu"))  # one rank sends nothing
    state = ShardedModel(device, agreement, streams, precision.param if precision.cast_inputs else None)
    classes: dict[Any, type] = {}
    for module in target.modules():
        _change_class(module, state, module is target, classes)
    for plan in plans:
        _shard_group(plan, mesh.get_group(), precision, reshards[plan.unit], state)
    for buffer in target.buffers():
        if not buffer.is_meta:
            broadcast_from(0, buffer, mesh.get_group())
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper, so that its name never shows."""
    return getattr(model, "_orig_mod", model)


def original_name(name: str) -> str:
    """A parameter's name without those of torch.compile's wrappers inside the model."""
    return name.replace("_orig_mod.", "")


def _own_device(mesh: DeviceMesh) -> torch.device:
    """This rank's device of the mesh: the current one where there are several."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _reshards(reshard_after_forward: bool | Callable[[str], bool], unit: str) -> bool:
    return bool(reshard_after_forward(unit) if callable(reshard_after_forward) else reshard_after_forward)


def _change_class(module: nn.Module, state: ShardedModel, root: bool, classes: dict[Any, type]) -> None:
    names = tuple(name for name, param in module._parameters.items() if param is not None)
    module.__dict__.pop("_flat_weights", None)
    vars(module).update(_fsdp_model=state, _fsdp_reads={})
    key = (type(module), names, root)
    if key not in classes:  # equal blocks share a class, and with it a compiled graph
        classes[key] = sharded_class(*key[:2], ShardedRoot if root else None)
    module.__class__ = classes[key]


def _shard_group(
    plan: GroupPlan,
    process_group: dist.ProcessGroup,
    precision: Precision,
    reshard: bool,
    state: ShardedModel,
) -> None:
    """Move one group's values into shards; its full parameters are free when this returns."""
    like = plan.params[0]
    compute, reduce = precision.compute_dtype(like.dtype), precision.reduce_dtype(like.dtype)
    align = align_elems([like.dtype, compute, reduce])
    layout = plan_layout([param.shape for param in plan.params], process_group.size(), align)
    piece = torch.empty(layout.shard_elems, dtype=like.dtype, device=like.device)
    if not piece.is_meta:
        scatter_values(0, plan.params, layout, piece, process_group)
    shard = nn.Parameter(piece, requires_grad=like.requires_grad)
    group = FlatGroup(
        unit=plan.unit,
        names=tuple(plan.names),
        layout=layout,
        shard=shard,
        process_group=process_group,
        compute_dtype=compute,
        reduce_dtype=reduce,
        reshard=reshard,
        model=state,
    )
    state.groups.append(group)
    for index, places in enumerate(plan.places):
        read = Read(group, index)
        for module, name in places:
            vars(module)["_parameters"][name] = group.params[index]
            vars(module)["_fsdp_reads"][name] = read
    plan.params.clear()


def scatter_values(
    source: int, values: Sequence[Tensor], layout: Layout, piece: Tensor, process_group: dist.ProcessGroup
) -> None:
    """Set `piece`, this rank's of a flat group, from the parameters that rank `source` has, 16 MiB at a time."""
    ranks, is_source = range(process_group.size()), process_group.rank() == source
    flat = (
        [value.detach().reshape(-1) for value in values] if is_source else []
    )  # a copy only of what is not contiguous
    step = _SCATTERED_BYTES // (piece.itemsize * len(ranks)) + 1
    for start in range(0, piece.numel(), step):
        part = piece[start : start + step]
        firsts = [rank * layout.shard_elems + start for rank in ranks] if is_source else []
        parts = [_flat_range(flat, layout, first, torch.zeros_like(part)) for first in firsts]
        scatter_from(source, part, parts, process_group)


def _flat_range(flat: Sequence[Tensor], layout: Layout, first: int, zeros: Tensor) -> Tensor:
    """`zeros` with what a flat group holds from element `first` on."""
    for value, shape, offset in zip(flat, layout.shapes, layout.offsets, strict=True):
        start, stop = max(offset, first), min(offset + shape.numel(), first + zeros.numel())
        if start < stop:
            zeros[start - first : stop - first].copy_(value[start - offset : stop - offset])
    return zeros
