"""Which submodules gather together.

A unit is named after its module; what no other unit claims is the unit "root". A parameter belongs to the
innermost unit around its module, a tied parameter to the first one that is registered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

ROOT = "root"
Units = str | type[nn.Module] | Iterable[str | type[nn.Module]] | Callable[[str, nn.Module], bool]


def find_units(model: nn.Module, units: Units) -> dict[str, nn.Module]:
    """Unit modules by name, in registration order, without the root; ValueError when `units` matches nothing."""
    if isinstance(units, str) and units == "auto":
        return _auto_units(model)
    if isinstance(units, str | type):
        units = [units]
    if callable(units):
        found = {name: module for name, module in _submodules(model) if units(name, module)}
        if not found:
            raise ValueError(
                "units: expected a predicate that accepts at least one submodule, got one that accepts none"
            )
        return found
    if not isinstance(units, Iterable):
        raise ValueError(f'units: expected "auto", module classes, names or a predicate, got {units!r}')
    return _named_units(model, list(units))


def _named_units(model: nn.Module, wanted: list[Any]) -> dict[str, nn.Module]:
    if not wanted:
        raise ValueError('units: expected "auto", module classes, names or a predicate, got an empty collection')
    found: dict[str, nn.Module] = {}
    for item in wanted:
        matches = {name: module for name, module in _submodules(model) if _matches(item, name, module)}
        if not matches:
            raise ValueError(f"units: expected a submodule's name or class, got {item!r}, which matches nothing")
        found |= matches
    return {name: module for name, module in _submodules(model) if name in found}


def _matches(item: Any, name: str, module: nn.Module) -> bool:
    return isinstance(module, item) if isinstance(item, type) else name == item


def _submodules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if name)


def _auto_units(model: nn.Module) -> dict[str, nn.Module]:
    """Children of lists of repeated blocks; outside of them each embedding, and the last linear layer (head)."""
    blocks = _repeated_blocks(model, "")
    inside = {id(inner) for block in blocks.values() for inner in block.modules()}
    outside = [(name, module) for name, module in _submodules(model) if id(module) not in inside]
    embeddings = {name: module for name, module in outside if isinstance(module, nn.Embedding)}
    linears = [(name, module) for name, module in outside if isinstance(module, nn.Linear)]
    chosen = blocks | embeddings | dict(linears[-1:])
    return {name: module for name, module in _submodules(model) if name in chosen}


def _repeated_blocks(module: nn.Module, prefix: str) -> dict[str, nn.Module]:
    """Children of the outermost lists of repeated blocks in `module`, which may be one itself."""
    if _holds_repeated_blocks(module):
        return {f"{prefix}{name}": block for name, block in module.named_children() if _has_parameters(block)}
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        found |= _repeated_blocks(child, f"{prefix}{name}.")
    return found


def _holds_repeated_blocks(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    classes = Counter(type(child) for child in module.children() if _has_parameters(child))
    return max(classes.values(), default=0) >= 2


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def unit_of_modules(model: nn.Module, units: dict[str, nn.Module]) -> dict[int, str]:
    """id(module) -> name of the innermost unit around it (the root outside of all)."""
    root = ROOT if ROOT not in units else f"({ROOT})"
    owner = {id(module): root for module in model.modules()}
    for name, unit in units.items():  # registration order: an inner unit comes after the one around it
        owner.update((id(module), name) for module in unit.modules())
    return owner


@dataclass
class GroupPlan:
    """One flat group to be: parameters of a unit that share dtype and requires_grad, in registration order."""

    unit: str
    params: list[nn.Parameter] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    places: list[list[tuple[nn.Module, str]]] = field(default_factory=list)  # all modules that hold a parameter


def plan_groups(model: nn.Module, units: dict[str, nn.Module]) -> list[GroupPlan]:
    """Every parameter once, in the group of its first owner; groups in order of their first parameter."""
    unit_of = unit_of_modules(model, units)
    groups: dict[tuple[str, torch.dtype, bool], GroupPlan] = {}
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in places:
                key = (unit_of[id(module)], param.dtype, param.requires_grad)
                group = groups.setdefault(key, GroupPlan(key[0]))
                group.params.append(param)
                group.names.append(f"{path}.{name}" if path else name)
                group.places.append(places.setdefault(id(param), []))
            places[id(param)].append((module, name))
    return list(groups.values())
