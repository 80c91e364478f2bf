"""What a sharded parameter is: a tensor of the original shape that holds this rank's piece.

A closed list of operators is right on pieces (param_ops.py); all others raise NeedsWholeParameter before any
collective starts, so that no rank is left waiting. There is no `__tensor_flatten__` on purpose. Without it
Dynamo breaks the graph where model code computes with `parameters()` in forward (right, eagerly) and still
reads `.dtype` and `.shape`; and `module.to()` goes through `.data`, which is guarded, and not through a swap.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_passes import _compat
from fsdp_passes.sharding.chunks import Chunked
from fsdp_passes.sharding.place import Place


class NeedsWholeParameter(RuntimeError):
    """Elements of other ranks are needed. No TypeError: Python would make NotImplemented of `p - x`."""


class GradStore(Protocol):
    """Where bound parameters keep their gradients, by the parameter's index.

    A deep copy of it puts a copy of each of its parameters into the memo.
    """

    def grad_of(self, index: int) -> Tensor | None: ...

    def set_grad(self, index: int, grad: Tensor | None) -> None: ...

    def set_trained(self, index: int, trained: bool) -> None: ...

    def add_post_hook(self, index: int, hook: Callable[[Tensor], None]) -> Any: ...


class ShardedParam(Chunked, Tensor):
    """A tensor of shape `place.shape` and of `local`'s dtype and device, of which this rank holds `local`.

    local: 1-D, elements [place.start, place.stop) of the flattened parameter, a view of the flat shard.
    is_param: isinstance(p, nn.Parameter) holds. Results of operators are ShardedParams, but no parameters.
    """

    _local: Tensor
    _place: Place
    _store: GradStore | None
    _index: int
    _seen_version: int | None  # of the memory, when `.data` gave this view of it

    def __new__(
        cls, local: Tensor, place: Place, *, requires_grad: bool = False, is_param: bool = True
    ) -> ShardedParam:
        param: ShardedParam = _compat.wrapper_tensor(cls, local, place.shape, requires_grad)
        param._local, param._place = local, place
        param._store, param._index, param._seen_version = None, -1, None
        if is_param:
            _compat.mark_as_parameter(param)
        return param

    @property
    def place(self) -> Place:
        return self._place

    @property
    def store(self) -> GradStore | None:
        return self._store

    @property
    def local(self) -> Tensor:
        """This rank's piece, 1-D, possibly empty; writing to it writes to the flat shard."""
        return self._local

    @torch.no_grad()
    def full_tensor(self) -> Tensor:
        """A new plain tensor with the whole parameter, bit for bit, on every rank. One collective."""
        place = self._place
        full = self._local.new_zeros(place.shape.numel())
        full[place.start : place.stop] = self._local
        if place.world_size > 1 and full.numel():
            place.agreement.check([f"full_tensor of {place.name} ({full.numel()} x {_dtype_name(self)})"])
            # A byte is nonzero on one rank at most: the sum is exact in every dtype, pieces may be ragged.
            dist.all_reduce(full.view(torch.uint8), group=place.process_group)
        return full.view(place.shape)

    def bind(self, store: GradStore, index: int) -> None:
        """Keep `.grad` in `store` under `index`; from now on what would detach the piece is refused."""
        self._refuse_autograd()
        self._store, self._index = store, index
        _compat.mark_as_parameter(self)

    def _refuse_autograd(self) -> None:
        """Autograd would write a gradient that `.grad` never shows."""
        if self.requires_grad and not self._backward_hooks:
            Tensor.register_hook(self, _refuse_gradient)

    @property
    def grad(self) -> Tensor | None:
        return super().grad if self._store is None else self._store.grad_of(self._index)

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        if self._store is None:
            Tensor.grad.__set__(self, grad)  # type: ignore[union-attr]
            return
        if grad is not None and not self._matches(grad):
            raise NeedsWholeParameter(
                "fsdp_passes: .grad of a sharded parameter expects None or a gradient sharded alike, got "
                f"{_kind(grad)}; use torch.empty_like(p).copy_(full)."
            )
        self._store.set_grad(self._index, grad)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> ShardedParam:
        view = ShardedParam(self._local, self._place, is_param=False)
        view._seen_version = self._local._version
        return view

    @data.setter
    def data(self, source: Tensor) -> None:
        """Copies, where torch would share memory."""
        if not self._matches(source):
            raise NeedsWholeParameter(
                f"fsdp_passes: .data of a sharded parameter expects a tensor sharded alike, {self.dtype} on "
                f"{self.device}, got {_kind(source)}; use p.copy_(full); set dtype and device before shard()."
            )
        if source._seen_version not in (None, source._local._version) and not self._shares_memory(source):
            raise NeedsWholeParameter(
                "fsdp_passes: .data of a sharded parameter expects values that stayed what they were when they were "
                "read, got a view that was written since, as where two .data are swapped; read p.data.clone()."
            )
        self.data.copy_(source)

    def _shares_memory(self, other: ShardedParam) -> bool:
        return _compat.storage_id(self._local) == _compat.storage_id(other._local)

    def _matches(self, other: Tensor) -> TypeGuard[ShardedParam]:
        """`other` holds the same piece of a tensor of the same dtype, on the same device."""
        alike = isinstance(other, ShardedParam) and other._place == self._place
        return alike and other.dtype == self.dtype and other.device == self.device

    @property
    def requires_grad(self) -> bool:
        return super().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedParam:
        """Between accumulation windows also of a bound parameter, whose `.grad` stays what it is."""
        if self._store is not None and requires_grad != self.requires_grad:
            self._store.set_trained(self._index, requires_grad)
        Tensor.requires_grad.__set__(self, requires_grad)  # type: ignore[attr-defined]
        if self._store is not None:
            self._refuse_autograd()
        return self

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        if self._store is None:
            return super().register_hook(hook)
        raise NeedsWholeParameter(
            "fsdp_passes: register_hook on a sharded parameter, whose gradient autograd never sees; "
            "use p.register_post_accumulate_grad_hook(hook)."
        )

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """`hook(p)` runs after each reduction that gives the parameter a gradient."""
        if self._store is None or not self.requires_grad:
            return super().register_post_accumulate_grad_hook(hook)  # torch's own error for a frozen one
        return self._store.add_post_hook(self._index, hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParam:
        """Bound: the parameter of a copy of its whole group, so that a model's copy stays whole. Else: a new piece."""
        if self._store is not None:
            copy.deepcopy(self._store, memo)
            return memo[id(self)]
        is_param = isinstance(self, torch.nn.Parameter)
        local = self._local.detach().clone()
        twin = ShardedParam(local, self._place, requires_grad=self.requires_grad, is_param=is_param)
        memo[id(self)] = twin
        if isinstance(self.grad, ShardedParam):
            twin.grad = self.grad.__deepcopy__(memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NeedsWholeParameter(
            "fsdp_passes: pickling a sharded parameter needs the whole parameter; save p.full_tensor(), "
            "fsdp_passes.full_state_dict(model), or fsdp_passes.full_optimizer_state_dict(model, optimizer)."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        place, dtype = self._place, _dtype_name(self)
        here = f"elements {place.start}:{place.stop} of {place.shape.numel()} here"
        return f"ShardedParam(shape={tuple(place.shape)}, dtype={dtype}, {here})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _REFUSED:
            raise NeedsWholeParameter(f"fsdp_passes: {_REFUSED[func]}.")
        return _compat.call_past_torch_function(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not all(issubclass(each, cls) for each in types):
            return NotImplemented  # the other class says what it is, such as a gradient that is not reduced yet
        from fsdp_passes.sharding.param_ops import serve  # the operators need the class, too

        return serve(func, args, kwargs or {})


def whole(tensor: Tensor) -> Tensor:
    """A plain full copy. Of a sharded tensor it is collective."""
    return tensor.full_tensor() if isinstance(tensor, ShardedParam) else tensor.detach().clone()


# Functions that would end in an error of torch's that does not say what to do, or in none.
_REFUSED: dict[Any, str] = {
    torch.autograd.grad: "torch.autograd.grad on a sharded parameter, which autograd never sees; "
    "call backward() and read p.grad",
    Tensor.share_memory_: "a sharded parameter is a part of its group's memory, which is not shared with processes; "
    "use p.full_tensor()",
    Tensor.module_load: "loading by swapping tensors (torch.__future__.set_swap_module_params_on_conversion) would "
    "detach a sharded parameter; switch it off, or use p.copy_(full)",
}
_REFUSED |= {
    function: f"{name} needs the whole parameter, and this rank holds a piece; use p.full_tensor().{name}()"
    for name, function in {"numpy": Tensor.numpy, "tolist": Tensor.tolist, "__array__": Tensor.__array__}.items()
}


def refuse(func: Any, how: str = "") -> NoReturn:
    """`func`, used `how`, is not right on a piece."""
    if _compat.running_backward() is not None:
        _refuse_gradient(None)
    what = f"{func} {how}".strip()
    hint = "p.full_tensor()"
    if "plain" in how:
        hint += ", or shard the other: torch.empty_like(p.data).copy_(full)"
    raise NeedsWholeParameter(
        f"fsdp_passes: {what} needs the whole parameter, and this rank holds a piece; use {hint}."
    )


def _refuse_gradient(grad: Tensor | None) -> NoReturn:
    raise NeedsWholeParameter(
        "fsdp_passes: backward reached a sharded parameter that was used outside its module's forward; "
        "use it under torch.no_grad(), or read it inside the forward."
    )


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _kind(tensor: Tensor) -> str:
    what = "a sharded tensor" if isinstance(tensor, ShardedParam) else "a plain tensor"
    return f"{what} of shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"


_compat.register_foreach_type(ShardedParam)
_compat.skip_optimizer_helpers()
