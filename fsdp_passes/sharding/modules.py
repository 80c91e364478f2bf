"""Reading a sharded parameter in a module's forward.

`shard()` gives each module a class of its own (same name, subclass of the old one) with a property per parameter:

    traced by torch.compile   unshard -> split_with_sizes -> view, one chain a read (merged later)
    in an eager forward       views of one gather per forward
    anywhere else             the ShardedParam

What replaced a parameter in its module (torch.func.functional_call) is read as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from fsdp_passes._compat import running_backward, skip_frame, traced_functions
from fsdp_passes.runtime.collectives import is_dry_run
from fsdp_passes.sharding.model import ShardedModel
from fsdp_passes.sharding.param import NeedsWholeParameter, ShardedParam

if TYPE_CHECKING:
    from fsdp_passes.sharding.group import FlatGroup

    ModuleMixin = nn.Module
else:
    ModuleMixin = object  # comes before the module's own class, whose base is nn.Module


class Read:
    """How one parameter is read. Only numbers and the shard, so that equal blocks guard, and compile, alike."""

    def __init__(self, group: FlatGroup, index: int) -> None:
        self.group, self.index = group, index
        self.shard, self.param = group.shard, group.params[index]
        self.world_size, self.is_dry_run = group.layout.world_size, is_dry_run(group.process_group)
        self.dtype = group.compute_dtype
        self.reshard, self.reduce_dtype = group.reshard, group.reduce_dtype
        self.sizes = group.layout.sizes
        self.piece = group.layout.pieces[index]
        self.shape = tuple(group.layout.shapes[index])

    def traced(self) -> Tensor:
        self.check_values()
        full = torch.ops.fsdp_opt.unshard(
            self.shard, self.world_size, self.dtype, reshard=self.reshard, reduce_dtype=self.reduce_dtype
        )
        return full.split_with_sizes(self.sizes)[self.piece].view(self.shape)

    def check_values(self) -> None:
        if not self.is_dry_run and self.shard.device.type == "meta":  # `is_meta` would be a node of the graph
            raise RuntimeError(
                "fsdp_passes: expected a model with values in forward, got one on the meta device; call "
                "fsdp_passes.load_full_state_dict(model, state_dict), or with None for initial values"
            )


class ShardedModule(ModuleMixin):
    """Mixin before the module's own class. Its frames are never compiled on their own, only inlined."""

    _fsdp_model: ShardedModel | None = None  # None: a slice of a container, which made another of its class
    _fsdp_reads: Mapping[str, Read] = MappingProxyType({})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._fsdp_model
        if torch.compiler.is_compiling() or model is None or model.in_forward():
            return super().__call__(*args, **kwargs)
        with model.forward():
            return super().__call__(*args, **kwargs)

    def named_parameters(  # type: ignore[override]  # they are no nn.Parameters in a forward
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """In a forward the values and dtypes that the forward computes with; else the ShardedParams."""
        if not self._is_in_forward():
            yield from super().named_parameters(prefix, recurse, remove_duplicate)
            return
        seen: list[Read] = []
        modules = self.named_modules(prefix=prefix) if recurse else [(prefix, self)]
        for path, module in modules:
            for name in module._parameters:
                read, value = getattr(module, "_fsdp_reads", {}).get(name), getattr(module, name)
                if value is None or (remove_duplicate and any(read is other for other in seen)):
                    continue
                if read is not None:
                    seen.append(read)
                yield (f"{path}.{name}" if path else name), value

    def _is_in_forward(self) -> bool:
        model = self._fsdp_model
        if not torch.compiler.is_compiling():
            return model is not None and model.in_forward()
        return model is not None and (model.is_computing or (__file__, "__call__") in traced_functions())

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name in self._fsdp_reads and param is not self._parameters.get(name):
            raise RuntimeError(
                f"fsdp_passes: {type(self).__name__}.{name} is sharded and cannot be replaced (assignment, "
                "load_state_dict(assign=True)); copy into it: p.copy_(full_tensor)"
            )
        if isinstance(param, ShardedParam) and name not in self._fsdp_reads:
            raise RuntimeError(
                f"fsdp_passes: expected a plain parameter for {type(self).__name__}.{name}, got a sharded one; tie "
                "parameters, and prune them, before shard()"
            )
        super().register_parameter(name, param)

    def share_memory(self) -> NoReturn:
        raise RuntimeError("fsdp_passes: sharded parameters are not shared with processes; use full_state_dict(model)")

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *state = reduced
        return (_make, (make, _NotPickled(args)), *state)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`model.to(...)`: buffers follow; a change of the parameters' dtype or device is refused."""
        for read in self._fsdp_reads.values():
            _refuse_move(read.shard, fn)
        kept, self.__dict__["_parameters"] = self._parameters, {}
        try:
            return super()._apply(fn, recurse)
        finally:
            self.__dict__["_parameters"] = kept


@dataclass(frozen=True)
class _NotPickled:
    """What makes a module's copy; its class is found under no name."""

    args: tuple[Any, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> _NotPickled:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NeedsWholeParameter(
            "fsdp_passes: pickling a sharded module needs its whole parameters; "
            "save fsdp_passes.full_state_dict(model)."
        )


def _make(make: Callable[..., nn.Module], how: _NotPickled) -> nn.Module:
    return make(*how.args)


def _refuse_move(shard: Tensor, fn: Any) -> None:
    before = torch.empty(0, dtype=shard.dtype, device=shard.device)
    after = fn(before)
    if (after.dtype, after.device) != (before.dtype, before.device):
        raise RuntimeError(
            f"fsdp_passes: expected sharded parameters to stay {before.dtype} on {before.device}, got a move to "
            f"{after.dtype} on {after.device}; call .to() before shard(), or give shard() a precision"
        )


def _parameter_property(name: str) -> property:
    def get(self: Any) -> Any:
        if not torch.compiler.is_compiling():
            return _read_now(self, name)
        entry = self._parameters[name]
        if type(entry) is not ShardedParam:
            return entry
        read = self._fsdp_reads[name]
        return read.traced() if entry is read.param else _read_now(self, name)

    skip_frame(get)
    return property(get)


@torch.compiler.disable
def _read_now(module: Any, name: str) -> Any:
    if name not in module._parameters:
        raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
    entry, model = module._parameters[name], module._fsdp_model
    if type(entry) is not ShardedParam:
        return entry
    if not model.in_forward():
        if running_backward() is None:
            return entry
        model.recompute()
    read = module._fsdp_reads[name]
    read.check_values()
    if entry is not read.param or entry.store is not read.group.gradients:
        raise NeedsWholeParameter(
            f"fsdp_passes: expected {type(module).__name__}.{name} as shard() made it, or a plain tensor, got another "
            "sharded tensor in its place (functional_call, swap_tensors); give forward p.full_tensor()."
        )
    return model.read(read.group, read.index)


def _rnn_weights(self: Any) -> list[Any]:
    return [getattr(self, name) for name in self._flat_weights_names]


def sharded_class(cls: type[nn.Module], names: tuple[str, ...], root: type | None = None) -> type[nn.Module]:
    """A subclass of `cls` that looks like it and reads `names` from shards."""
    body: dict[str, Any] = {name: _parameter_property(name) for name in names}
    body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    if issubclass(cls, nn.RNNBase):
        body["_flat_weights"] = property(_rnn_weights, lambda self, value: None)
    bases = (ShardedModule, cls) if root is None else (root, ShardedModule, cls)
    return type(cls.__name__, bases, body)


for _frame in (ShardedModule.__call__, ShardedModule.named_parameters, Read.traced, Read.check_values):
    skip_frame(_frame)
