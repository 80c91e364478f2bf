"""The state of an optimizer by the names of its parameters.

optimizer.state_dict()   {"state": {0: {...}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
named_state()            {"state": {"head.weight": {...}}, "param_groups": [{"lr": 0.1, "params": ["head.weight"]}]}
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_passes.sharding.param import ShardedParam
from fsdp_passes.sharding.shard import original_name, unwrap

Named = dict[str, Any]


def named_state(model: nn.Module, optimizer: Optimizer) -> Named:
    """The optimizer's own tensors, by name. Of an optimizer without state: what its first step starts from."""
    names, params = names_of(model, optimizer), params_of(optimizer)
    state = {n: dict(optimizer.state[p]) for n, p in zip(names, params, strict=True) if p in optimizer.state}
    name_of = {id(param): name for name, param in zip(names, params, strict=True)}
    groups = [group | {"params": [name_of[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    for group in groups:
        if "param_names" in group:
            group["param_names"] = group["params"]
    return {"state": state or _initial_states(names, optimizer), "param_groups": groups}


def names_of(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Of each parameter of the optimizer, the first that the model has for it."""
    name_of = {id(param): original_name(name) for name, param in unwrap(model).named_parameters()}
    params = params_of(optimizer)
    for param in params:
        if id(param) not in name_of:
            raise ValueError(f"optimizer: expected parameters of the model, got {param!r}; make it after shard()")
    return [name_of[id(param)] for param in params]


def params_of(optimizer: Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _initial_states(names: list[str], optimizer: Optimizer) -> Named:
    groups = [(group, param) for group in optimizer.param_groups for param in group["params"]]
    states = {
        name: initial_state(optimizer, group, param)
        for name, (group, param) in zip(names, groups, strict=True)
        if param.requires_grad
    }
    return {name: state for name, state in states.items() if state}


@torch.no_grad()
def initial_state(optimizer: Optimizer, group: Mapping[str, Any], param: ShardedParam) -> dict[str, Any]:
    """What the optimizer would keep of `param` in its first step; `step` is 0.

    A twin of the optimizer steps on a stand-in with a gradient of 0: the optimizer's state and groups, its hooks and
    schedulers, and the parameter are left alone. What else `step` writes to is not: the twin has the same attributes.

    ValueError: `step` fails on the stand-in, such as one that needs a closure.
    """
    stand_in = ShardedParam(torch.zeros_like(param.local), param.place, requires_grad=True)
    stand_in.grad = torch.zeros_like(stand_in)
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer), state=defaultdict(dict), param_groups=[{**group, "params": [stand_in]}])
    try:
        inspect.unwrap(type(optimizer).step)(twin)
    except Exception as error:
        raise ValueError(
            f"optimizer: expected one that has made a step, or whose first step() tells its state, got "
            f"{type(optimizer).__name__}, whose step() raises {error!r}"
        ) from error
    state = dict(twin.state[stand_in])
    if isinstance(state.get("step"), Tensor):
        state["step"] = torch.zeros_like(state["step"])
    return state
