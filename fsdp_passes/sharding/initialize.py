"""Values for a model that was sharded on the meta device: those that its own modules start with.

    module (children first)   its parameters, whole     reset_parameters(), _init_weights(module)    their pieces
    embed                     f32[50257,768] of NaN  ->  f32[50257,768]                          ->  f32[19298688]

One module's parameters at a time are whole, on every rank; all ranks draw rank 0's random numbers, and each keeps its
pieces. New memory is marked as unwritten: what no initialiser writes is an error.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_passes._compat import non_persistent_buffers
from fsdp_passes.runtime.collectives import agree, any_rank, object_from
from fsdp_passes.sharding.group import FlatGroup
from fsdp_passes.sharding.model import ShardedModel
from fsdp_passes.sharding.param import ShardedParam
from fsdp_passes.sharding.poison import has_unwritten, is_unwritten, poison
from fsdp_passes.sharding.shard import original_name, unwrap

_WITHOUT_ARGUMENT = ("reset_parameters", "_reset_parameters", "_init_weights")
_META = torch.device("meta")


@contextlib.contextmanager
def filling(model: nn.Module, state: ShardedModel) -> Iterator[list[str]]:
    """Inside, what is on the meta device has memory, unwritten; an exception puts it back there. Collective.

    Gives the names of such buffers. Tensors that are made or written inside are ordinary ones, in inference mode, too.
    """
    groups = [group for group in state.groups if group.shard.is_meta]
    names = [name for name, buffer in model.named_buffers(remove_duplicate=False) if buffer.is_meta]
    owners = [(model.get_submodule(path)._buffers, key) for path, _, key in (name.rpartition(".") for name in names)]
    meta: list[Any] = [entries[key] for entries, key in owners]
    moved: list[FlatGroup] = []

    def move() -> None:
        for group in groups:
            group.move_to(state.device)
            moved.append(group)

    with torch.inference_mode(False), torch.no_grad():
        try:
            agree(move, state.process_group)
            memory = {id(buffer): torch.empty_like(buffer, device=state.device) for buffer in meta}
            for tensor in memory.values():
                poison(tensor)
            for (entries, key), buffer in zip(owners, meta, strict=True):
                entries[key] = memory[id(buffer)]  # one where modules share it
            yield names
        except BaseException:
            for group in moved:
                group.move_to(_META)
            for (entries, key), buffer in zip(owners, meta, strict=True):
                entries[key] = buffer
            raise


def initialize(model: nn.Module, state: ShardedModel, blank: list[str]) -> None:
    """Give all parameters, and the buffers `blank`, their initial values; inside of `filling`. Collective.

    ValueError, on all ranks: names those that no initialiser wrote.
    """
    _run_initialisers(model, state)
    pieces = {name: param.local for name, param in state.named_params()}
    _refuse_unwritten({**pieces, **{name: model.get_buffer(name) for name in blank}}, state)


def initialize_buffers(model: nn.Module, state: ShardedModel, blank: list[str]) -> None:
    """Give those of the buffers `blank` that no state dict holds their initial values; inside of `filling`. Collective.

    ValueError, on all ranks: names those that no initialiser wrote.
    """
    non_persistent = non_persistent_buffers(model)
    computed = [name for name in blank if name in non_persistent]
    if not computed:
        return
    _run_initialisers(model, state, {id(model.get_submodule(name.rpartition(".")[0])) for name in computed})
    _refuse_unwritten({name: model.get_buffer(name) for name in computed}, state)


def _run_initialisers(model: nn.Module, state: ShardedModel, modules: set[int] | None = None) -> None:
    """Of the modules with these ids (None: of all); their parameters get what was written."""
    with _random_numbers_of_rank_0(state), state.device:
        for module, initialisers in _visits(model):
            if modules is None or id(module) in modules:
                with _whole(module, state.device) as params:
                    for initialise in initialisers:
                        initialise()
                    for key, param in params.items():
                        value = module._parameters[key]
                        if value is not None and not is_unwritten(value):
                            param.copy_(value)


def _visits(
    module: nn.Module, of_model: Any = None, seen: set[int] | None = None
) -> Iterator[tuple[nn.Module, list[Callable[[], Any]]]]:
    """Each module once, children first, with what sets its values, in order.

    of_model: `_init_weights` of the innermost model around it, which takes one of its modules (transformers, timm).
    """
    seen, module = set() if seen is None else seen, unwrap(module)
    if id(module) in seen:
        return
    seen.add(id(module))
    takes_module = getattr(module, "_init_weights", None)
    if callable(takes_module) and _accepts(takes_module, module) and not _accepts(takes_module):
        of_model = takes_module
    for child in module.children():
        yield from _visits(child, of_model, seen)
    own = [getattr(module, name) for name in _WITHOUT_ARGUMENT if callable(getattr(module, name, None))]
    first = [each for each in own if _accepts(each)][:1]
    yield module, first + ([lambda: of_model(module)] if of_model is not None else [])


def _accepts(function: Callable[..., Any], *args: Any) -> bool:
    try:
        inspect.signature(function).bind(*args)
    except TypeError:
        return False
    return True


@contextlib.contextmanager
def _whole(module: nn.Module, device: torch.device) -> Iterator[dict[str, ShardedParam]]:
    """Inside, the module's own parameters are whole, plain and unwritten."""
    sharded: dict[str, Any] = {
        key: param for key, param in module._parameters.items() if isinstance(param, ShardedParam)
    }
    try:
        for key, param in sharded.items():
            value = torch.empty(param.shape, dtype=param.dtype, device=device)
            poison(value)
            module._parameters[key] = nn.Parameter(value, param.requires_grad)
        yield sharded
    finally:
        module._parameters.update(sharded)


@contextlib.contextmanager
def _random_numbers_of_rank_0(state: ShardedModel) -> Iterator[None]:
    """All ranks draw what rank 0 draws; ranks whose generators were in another state get that state back."""
    generators = [torch.random] + ([] if state.device.type == "cpu" else [torch.get_device_module(state.device.type)])
    own = [generator.get_rng_state() for generator in generators]
    first = object_from(0, own, state.process_group)
    for generator, numbers in zip(generators, first, strict=True):
        generator.set_rng_state(numbers)
    try:
        yield
    finally:
        for generator, numbers, before in zip(generators, first, own, strict=True):
            if not torch.equal(numbers, before):
                generator.set_rng_state(before)


def _refuse_unwritten(tensors: dict[str, Tensor], state: ShardedModel) -> None:
    holes = any_rank([has_unwritten(each) for each in tensors.values()], state.device, state.process_group)
    unset = [original_name(name) for name, hole in zip(tensors, holes, strict=True) if hole]
    if unset:
        raise ValueError(
            "fsdp_passes: expected an initialiser (reset_parameters() of the module, or _init_weights(module) of the "
            f"model) for all that has no value, got none that sets all of {', '.join(unset)}"
        )
