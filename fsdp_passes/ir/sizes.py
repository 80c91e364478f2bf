"""Symbolic sizes of the graph language: text <-> sympy, with names that do not depend on the capture.

s0, u0, zf0           backed, unbacked (data-dependent), backed float; numbered as the text shows them
2*s0  s0 + 1  (s0//2)  Max(1, s0 - 2)  Mod(s0, 8)  s0 >= 2  Eq(s0, 4)      as sympy prints them
"""

from __future__ import annotations

import ast
import functools
import itertools
import operator
import re
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]

from fsdp_passes import _compat

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
}
_RELATIONS: dict[str, Any] = {"Eq": sympy.Eq, "Ne": sympy.Ne}


class SymbolNames:
    """torch's symbols -> the names that the text gives them, in the order of asking.

    torch numbers its symbols by a hash of where the size came from.
    """

    def __init__(self) -> None:
        self._renamed: dict[sympy.Symbol, sympy.Symbol] = {}

    def text(self, size: int | sympy.Basic) -> str:
        if isinstance(size, int):
            return str(size)
        for symbol in sorted(size.free_symbols - self._renamed.keys(), key=_prefix_and_number):
            self.give(symbol, self._unused(_prefix_and_number(symbol)[0]))
        # sympy puts FloorDiv, which has its own parentheses, into parentheses.
        return re.sub(r"\(\(([^()]*)\)\)", r"(\1)", str(size.xreplace(self._renamed)))

    def give(self, symbol: sympy.Symbol, name: str) -> None:
        self._renamed[symbol] = sympy.Symbol(name, **symbol.assumptions0)

    def find(self, name: str) -> sympy.Symbol | None:
        """The symbol that the text calls `name`."""
        return next((symbol for symbol, new in self._renamed.items() if new.name == name), None)

    def _unused(self, prefix: str) -> str:
        taken = {symbol.name for symbol in self._renamed.values()}
        return next(name for i in itertools.count() if (name := f"{prefix}{i}") not in taken)


def _prefix_and_number(symbol: sympy.Symbol) -> tuple[str, int]:
    prefix = symbol.name.rstrip("0123456789")
    return prefix, int(symbol.name[len(prefix) :] or 0)


def parse_size(text: str, symbol: Callable[[str], sympy.Symbol]) -> sympy.Basic:
    """The inverse of `SymbolNames.text`: `symbol` finds the symbol of a name; SyntaxError: no size."""
    try:
        return _to_sympy(ast.parse(text, mode="eval").body, symbol)
    except (SyntaxError, TypeError, AttributeError, LookupError):
        raise SyntaxError(f"not a size: {text!r}") from None


def _to_sympy(node: ast.expr, symbol: Callable[[str], sympy.Symbol]) -> sympy.Basic:
    read = functools.partial(_to_sympy, symbol=symbol)
    match node:
        case ast.Name(id=name):
            return symbol(name)
        case ast.Constant(value=bool() | int() | float() as number):
            return sympy.sympify(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -read(operand)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~read(operand)
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            return _compat.sympy_functions().FloorDiv(read(left), read(right))
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](read(left), read(right))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _COMPARE[type(op)](read(left), read(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return _function(name)(*map(read, args))
    raise SyntaxError(f"not a size: {ast.unparse(node)!r}")


def _function(name: str) -> Callable[..., sympy.Basic]:
    """sympy's relation, or torch's sympy function, of that name."""
    function = _RELATIONS.get(name) or getattr(_compat.sympy_functions(), name)
    if not (isinstance(function, type) and issubclass(function, sympy.Basic)):
        raise LookupError(name)
    return function
