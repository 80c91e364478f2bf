"""`shard(model)`: from a plain module to flat groups, in place."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_passes._compat import map_tensors
from fsdp_passes.runtime.collectives import broadcast_from_first, scatter_from_first
from fsdp_passes.sharding.checks import check_model, check_types, resolve_mesh
from fsdp_passes.sharding.group import FlatGroup
from fsdp_passes.sharding.layout import Layout, align_elems, plan_layout
from fsdp_passes.sharding.model import ShardedModel
from fsdp_passes.sharding.modules import ModuleMixin, Read, sharded_class
from fsdp_passes.sharding.precision import Precision
from fsdp_passes.sharding.units import GroupPlan, Units, find_units, plan_groups

_SAME = Precision(reduce=None)


class ShardedRoot(ModuleMixin):
    """Methods of the model that was given to `shard()`."""

    _fsdp_model: ShardedModel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = self._fsdp_model.input_dtype
        if dtype is not None:
            args, kwargs = map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))
        return super().__call__(*args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards that run inside add to this rank's sum; the first one after it reduces."""
        return self._fsdp_model.no_sync()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether backwards reduce from now on."""
        if not isinstance(requires_gradient_sync, bool):
            raise ValueError(f"requires_gradient_sync: expected a bool, got {requires_gradient_sync!r}")
        self._fsdp_model.requires_sync = requires_gradient_sync

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum over ranks by `factor` instead of the number of ranks."""
        if not isinstance(factor, int | float) or not 0 < factor < math.inf:
            raise ValueError(f"factor: expected a finite number above 0, got {factor!r}")
        self._fsdp_model.divide_factor = float(factor)


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
    holding the parameters of before.

    mesh: 1-D, over all ranks (None) or one dimension of a mesh over all ranks.
    units: what gathers together: "auto" (blocks, embeddings, head), module classes, names, or a
        predicate(name, module); what none of them claims is the unit "root".
    precision: None leaves dtypes alone.
    reshard_after_forward: False keeps a unit gathered from forward to backward; or a predicate(unit name).

    Raises ValueError, before anything is changed, for an argument that does not fit.
    """
    target = unwrap(model)
    check_model(target)
    mesh = resolve_mesh(mesh, next(target.parameters()).device.type)
    precision = _SAME if precision is None else precision
    check_types(precision, reshard_after_forward)
    plans = plan_groups(target, find_units(target, units))
    reshards = {plan.unit: _reshards(reshard_after_forward, plan.unit) for plan in plans}

    state = ShardedModel(precision.param if precision.cast_inputs else None)
    classes: dict[Any, type] = {}
    for module in target.modules():
        _change_class(module, state, module is target, classes)
    for plan in plans:
        _shard_group(plan, mesh.get_group(), precision, reshards[plan.unit], state)
    for buffer in target.buffers():
        broadcast_from_first(buffer, mesh.get_group())
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper, so that its name never shows."""
    return getattr(model, "_orig_mod", model)


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
    shard = nn.Parameter(_scatter(plan.params, layout, process_group), requires_grad=like.requires_grad)
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


def _scatter(params: Sequence[Tensor], layout: Layout, process_group: dist.ProcessGroup) -> Tensor:
    """This rank's piece of rank 0's parameters; only rank 0 ever holds the flat whole."""
    like = params[0]
    piece = torch.empty(layout.shard_elems, dtype=like.dtype, device=like.device)
    full = None
    if process_group.rank() == 0:
        full = torch.zeros(layout.full_elems, dtype=like.dtype, device=like.device)
        for param, offset in zip(params, layout.offsets, strict=True):
            full[offset : offset + param.numel()].view(param.shape).copy_(param.detach())
    scatter_from_first(piece, full, process_group)
    return piece
