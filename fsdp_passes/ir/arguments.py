"""The arguments of the graph language: text <-> value.

    x                               the value of an earlier line
    [1, x, None]  (x,)  {"a": 1}    list, tuple, dict with names as keys
    3  -0.0  inf  nan  True  "a"    numbers and strings; complex(0.0, -1.0)
    torch.bfloat16 torch.strided    dtypes, layouts, memory formats
    device("cuda")                  without an index: it would depend on the rank
    slice(0, x, None)
    op("aten.native_dropout")       an operator that another one is to call

Operators are called by namespace, name and overload (`aten.add.Tensor`; the default overload is left out), by
`higher_order.` and their name, or as a function that torch traces on sizes (`operator.mul`, `math.ceil`,
`torch.sym_max`, `builtins.round`). `x[1]` picks one of several outputs.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fsdp_passes import _compat

_MODULES = {"operator": operator, "math": math, "torch": torch, "builtins": builtins}
_BUILTINS = frozenset({"abs", "bool", "float", "int", "max", "min", "pow", "round"})
_CONSTANTS = {"inf": math.inf, "nan": math.nan}
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def operator_text(target: Any) -> str:
    """How a call names `target`; ValueError for a function that the language has no name for."""
    if _compat.is_higher_order(target):
        return f"higher_order.{target.name()}"
    if _compat.is_operator(target):
        return str(target.name()).replace("::", ".")
    name = getattr(target, "__name__", "")
    for module, namespace in _MODULES.items():
        if _is_size_function(module, name) and getattr(namespace, name, None) is target:
            return f"{module}.{name}"
    raise ValueError(f"expected a torch operator or a function of sizes, got {target!r}")


def find_operator(text: str) -> Any:
    """The inverse of `operator_text`; SyntaxError if there is none."""
    module, _, name = text.partition(".")
    try:
        if module in _MODULES and _is_size_function(module, name):
            return getattr(_MODULES[module], name)
        if module == "higher_order":
            return getattr(torch.ops.higher_order, name)
        name, _, overload = name.partition(".")
        return getattr(getattr(getattr(torch.ops, module), name), overload or "default")
    except AttributeError:
        raise SyntaxError(f"unknown operator {text!r}") from None


def _is_size_function(module: str, name: str) -> bool:
    if module == "builtins":
        return name in _BUILTINS
    if module == "torch":
        return name.startswith(("sym_", "_sym_"))
    return name.isidentifier()


def argument_text(value: object) -> str:
    """`value` as an argument; ValueError if the language cannot write it."""
    match value:
        case fx.Node():
            return value.name
        case None | bool() | int() | float():
            return repr(value)
        case complex():
            return f"complex({value.real!r}, {value.imag!r})"
        case str():
            return quote(value)
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
        case torch.device():
            return f"device({quote(value.type)})"
        case slice():
            return f"slice{argument_text((value.start, value.stop, value.step))}"
        case tuple() | list() | dict():
            return _container_text(value)
    return f"op({quote(operator_text(value))})"


def _container_text(value: tuple[Any, ...] | list[Any] | dict[Any, Any]) -> str:
    if isinstance(value, dict):
        pairs = [f"{argument_text(key)}: {argument_text(item)}" for key, item in value.items()]
        return f"{{{', '.join(pairs)}}}"
    parts = ", ".join(map(argument_text, value))
    if isinstance(value, list):
        return f"[{parts}]"
    return f"({parts},)" if len(value) == 1 else f"({parts})"


def quote(text: str) -> str:
    """A Python literal of ASCII characters on one line."""
    return '"' + text.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'


def read_argument(expr: ast.expr, nodes: Mapping[str, fx.Node]) -> Any:
    """The inverse of `argument_text`; SyntaxError for a name that no earlier line defines."""
    match expr:
        case ast.Name(id=name):
            return _named(name, nodes)
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() | ast.Name(id="inf" | "nan") as operand):
            return -read_argument(operand, {})
        case ast.List(elts=items):
            return [read_argument(item, nodes) for item in items]
        case ast.Tuple(elts=items):
            return tuple(read_argument(item, nodes) for item in items)
        case ast.Dict(keys=keys, values=items) if None not in keys:
            values = [read_argument(item, nodes) for item in items]
            return dict(zip((read_argument(key, {}) for key in keys if key), values, strict=True))
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return _torch_constant(name)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _MAKERS:
            return _make(name, [read_argument(arg, nodes) for arg in args])
    raise SyntaxError(f"not an argument: {ast.unparse(expr)!r}")


_MAKERS: Mapping[str, Callable[..., Any]] = {
    "complex": complex,
    "device": torch.device,
    "op": find_operator,
    "slice": slice,
}


def _make(name: str, args: list[Any]) -> Any:
    try:
        return _MAKERS[name](*args)
    except (TypeError, RuntimeError, AttributeError):
        raise SyntaxError(f"not an argument: {name}{tuple(args)!r}") from None


def _named(name: str, nodes: Mapping[str, fx.Node]) -> Any:
    if name in nodes:
        return nodes[name]
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    raise SyntaxError(f"unknown name {name!r}")


def _torch_constant(name: str) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, _TORCH_CONSTANTS):
        raise SyntaxError(f"unknown constant 'torch.{name}'")
    return value
