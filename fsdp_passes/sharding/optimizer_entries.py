"""What an optimizer's part of a checkpoint consists of, how what is given differs from it, and loading it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_passes.sharding.entries import TensorSpec, misfit, specs_of
from fsdp_passes.sharding.optimizer_state import initial_state, names_of, params_of
from fsdp_passes.sharding.param import ShardedParam
from fsdp_passes.sharding.shard import original_name, unwrap
from fsdp_passes.sharding.state import sharded_state

KeyPath = tuple[Any, ...]  # of keys of dicts and indices of lists


class OptimizerEntries:
    """What an optimizer's part of a checkpoint consists of, as `Entries` is for a model, and how it is loaded.

    given_groups: the "param_groups" that are loaded, whose hyperparameters decide, too, which state a parameter has.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, given_groups: Any = ()) -> None:
        self.optimizer = optimizer
        self._names, self._params = names_of(model, optimizer), params_of(optimizer)
        index_of = {id(param): index for index, param in enumerate(self._params)}
        every_name = unwrap(model).named_parameters(remove_duplicate=False)
        self.index_of = {original_name(name): index_of[id(p)] for name, p in every_name if id(p) in index_of}
        self._given_groups = given_groups if isinstance(given_groups, (list, tuple)) else (given_groups,)
        self._groups = self._merged_groups()
        self._group_of = {index: group for group in self._groups for index in group["params"]}
        self._device = sharded_state(model).device
        self._first_states: dict[Any, dict[KeyPath, Any] | None] = {}

    def name_of_each(self, given: Collection[str]) -> dict[int, str]:
        """By a parameter's index, the last of its names that is given, as `Entries.given_name` has it."""
        return {index: name for name, index in self.index_of.items() if name in given}

    def _given_group_of_each(self) -> dict[int, int]:
        """By a parameter's index, the number of the given group that it is in."""
        numbers = {
            name: number
            for number, group in enumerate(self._given_groups)
            if _is_group(group)
            for name in group["params"]
        }
        return {index: numbers[name] for index, name in self.name_of_each(numbers).items()}

    def _merged_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups of indices, with the given hyperparameters."""
        number_of, merged, start = self._given_group_of_each(), [], 0
        for group in self.optimizer.param_groups:
            indices = list(range(start, start + len(group["params"])))
            given = self._given_groups[number_of[start]] if indices and start in number_of else {}
            given = {key: value for key, value in given.items() if key not in ("params", "param_names")}
            merged.append({**group, **given, "params": indices})
            start += len(indices)
        return merged

    def misfits(self, state: Any) -> list[str]:
        """How the given state, with tensors or the TensorSpec of each, and the given groups differ from these entries.

        A parameter without state is none: it may have made no step. But one whose first step needs state must have it.
        """
        if not isinstance(state, Mapping):
            return [f"misshapen state: expected a dict by the names of parameters, got {type(state).__name__}"]
        found = self._misfits_of_groups()
        for name, entries in state.items():
            if name not in self.index_of:
                found.append(f"unexpected state of {name}")
            elif not isinstance(entries, Mapping):
                found.append(f"misshapen state of {name}: expected a dict, got a {_kind(entries)}")
            else:
                found += self._misfits_of_param(name, entries)
        empty = {name for name, entries in state.items() if isinstance(entries, Mapping) and not entries}
        with_state = self.name_of_each(state.keys() - empty)
        without = [index for index in range(len(self._params)) if index not in with_state]
        return found + [f"missing state of {self._names[index]}" for index in without if self._starts_with_state(index)]

    def _misfits_of_groups(self) -> list[str]:
        wrong = [_kind(group) for group in self._given_groups if not _is_group(group)]
        found = [f"misshapen param_groups: expected dicts with the names 'params', got a {kind}" for kind in wrong]
        given = dict.fromkeys(name for group in self._given_groups if _is_group(group) for name in group["params"])
        number_of = self._given_group_of_each()
        found += [f"missing {name} in param_groups" for i, name in enumerate(self._names) if i not in number_of]
        found += [f"unexpected {name} in param_groups" for name in given if name not in self.index_of]
        for number, group in enumerate(self._groups):
            if len({number_of[index] for index in group["params"] if index in number_of}) > 1:
                found.append(f"param_groups: the parameters of group {number} are in several groups")
        return found

    def _misfits_of_param(self, name: str, entries: Mapping[str, Any]) -> list[str]:
        expected, given = self._expected(self.index_of[name]), _leaves(entries)
        if expected is None or not given:
            return []
        param = self._params[self.index_of[name]]
        found = [f"missing {_dotted(path)} of {name}" for path in expected if path not in given]
        for path, value in given.items():
            what = f"{_dotted(path)} of {name}"
            if path in expected:
                found += _misfits_of_entry(what, param, expected[path], value)
            elif value is not None:  # which torch once kept where SGD has no momentum
                found.append(f"unexpected {what}")
        return found

    def _expected(self, index: int) -> dict[KeyPath, Any] | None:
        """The entries of a parameter's state: after a first step, else those that it has. None: nothing tells."""
        first = self._first_state(index)
        return first if first is not None else _leaves(self.optimizer.state.get(self._params[index], {})) or None

    def _starts_with_state(self, index: int) -> bool:
        return self._first_state(index) is None and bool(self.optimizer.state.get(self._params[index]))

    def _first_state(self, index: int) -> dict[KeyPath, Any] | None:
        """What the parameter's state is after a first step, in tensors of no elements here. None: no such step.

        One step for all parameters that look alike.
        """
        param, group = self._params[index], self._group_of[index]
        key = (id(group), param.shape, param.dtype)
        if key not in self._first_states:
            nothing = dataclasses.replace(param.place, rank=param.place.world_size)
            like = ShardedParam(torch.empty(0, dtype=param.dtype, device=self._device), nothing)
            try:
                self._first_states[key] = _leaves(initial_state(self.optimizer, group, like))
            except ValueError:
                self._first_states[key] = None
        return self._first_states[key]

    def room(self, name: str, path: KeyPath, spec: TensorSpec) -> Tensor:
        """Where a tensor of the state is read to: the optimizer's own, or a new one."""
        index = self.index_of[name]
        own, sharded = self._own(index, path), self._is_sharded(index, path, spec.shape)
        if isinstance(own, ShardedParam if sharded else Tensor) and (own.shape, own.dtype) == (spec.shape, spec.dtype):
            return own.data if sharded else own.detach()
        if sharded:
            return torch.empty_like(self._params[index].data, dtype=spec.dtype)
        return torch.empty(spec.shape, dtype=spec.dtype)

    def copies(self, state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """The "state" of an `optimizer.state_dict()`, by index, copied; whole plain tensors are cut to pieces.

        What is the optimizer's own memory already is not copied.
        """
        return {index: self._copy(index, (), entries) for index, entries in state.items()}

    def _copy(self, index: int, path: KeyPath, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._copy(index, (*path, key), each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._copy(index, (*path, number), each) for number, each in enumerate(value))
        if isinstance(value, ShardedParam):
            own = self._own(index, path)
            is_own = isinstance(own, ShardedParam) and own.local.data_ptr() == value.local.data_ptr()
            return value if is_own else value.clone()
        if not isinstance(value, Tensor):
            return value
        if not self._is_sharded(index, path, value.shape):
            return value.detach().clone()
        param = self._params[index]
        return torch.empty_like(param.data, dtype=value.dtype).copy_(value)

    def _own(self, index: int, path: KeyPath) -> Any:
        value = self.optimizer.state.get(self._params[index], {})
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def _is_sharded(self, index: int, path: KeyPath, shape: torch.Size) -> bool:
        """Whether a tensor of the state comes in pieces like the parameter.

        A 0-dim parameter has 0-dim entries of both kinds: there the optimizer's first step tells.
        """
        param = self._params[index]
        if shape != param.shape or param.dim():
            return shape == param.shape
        return isinstance((self._expected(index) or {}).get(path), ShardedParam)

    def by_index(self, state: Mapping[str, Any]) -> dict[int, Any]:
        """The state of each parameter, of a tied one by the name that its value has, too."""
        return {index: state[name] for index, name in self.name_of_each(state).items()}

    def load(self, state: Mapping[int, dict[str, Any]]) -> None:
        """Give the optimizer the state, by index, as it is, and the given hyperparameters."""
        self.optimizer.load_state_dict({"state": dict(state), "param_groups": self._groups})
        for index, entries in state.items():
            _keep_dtypes(self.optimizer.state[self._params[index]], entries)


def _is_group(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple))


def _kind(value: Any) -> str:
    return "tensor" if isinstance(value, (Tensor, TensorSpec)) else type(value).__name__


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _leaves(nested: Mapping[Any, Any], start: KeyPath = ()) -> dict[KeyPath, Any]:
    """What is no dict in nested dicts, by its path."""
    leaves: dict[KeyPath, Any] = {}
    for key, value in nested.items():
        leaves |= _leaves(value, (*start, key)) if isinstance(value, Mapping) else {(*start, key): value}
    return leaves


def _misfits_of_entry(what: str, param: ShardedParam, expected: Any, given: Any) -> list[str]:
    """torch takes a number for a tensor of no dimensions, and the reverse."""
    if isinstance(expected, (bool, int, float)):
        expected = torch.tensor(float(expected))
    if isinstance(given, (bool, int, float)):
        given = TensorSpec(torch.Size(), torch.tensor(given).dtype)
    if not isinstance(expected, Tensor):
        return []
    if isinstance(given, ShardedParam) and given.shape == param.shape and given.place != param.place:
        return misfit(what, expected, "tensor that is sharded otherwise")
    if not isinstance(given, TensorSpec):
        given = specs_of({what: given}, Tensor, nn.Parameter, ShardedParam)[what]
    return misfit(what, expected, given)


def _keep_dtypes(loaded: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """torch (2.13) casts all but `step` to the parameter's dtype, such as NAdam's mu_product, a float32 scalar."""
    for key, value in entries.items():
        if isinstance(value, Mapping):
            _keep_dtypes(loaded[key], value)
        elif isinstance(value, Tensor) and not isinstance(value, ShardedParam) and loaded[key].dtype != value.dtype:
            loaded[key] = value.to(loaded[key].device)
