"""The types of the graph language: text <-> value.

f32[2,3]                      a contiguous tensor; the dtype as torch abbreviates it
f32[2,3]{1,2}                 any other strides, in elements
bf16[s0,(s0//2),2*s1]@cuda    symbolic sizes; a device other than cpu, without its index
int[5] float[0.5] bool[True]  a Python number, with its value
sym[s0 + 1]                   a SymInt; symfloat[...] and symbool[...] likewise
none                          an output that is absent
(f32[2], none, i64[])         several outputs
graph                         what a higher-order operator calls
?                             not known: the node has no value in its meta
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fsdp_passes import _compat
from fsdp_passes.ir.sizes import SymbolNames, parse_size

UNKNOWN = "?"

Size: TypeAlias = "int | sympy.Basic"

_SYMBOLIC = {torch.SymInt: "sym", torch.SymFloat: "symfloat", torch.SymBool: "symbool"}
_PYTHON: dict[str, Callable[[str], object]] = {
    "int": int,
    "float": float,
    "bool": {"True": True, "False": False}.__getitem__,
}
_TENSOR = re.compile(r"(\w+)\[([^]]*)\](?:\{(.*)\})?(?:@(\w+))?")
_NUMBER = re.compile(r"(int|float|bool|sym|symfloat|symbool)\[(.*)\]")
_SYMBOL = re.compile(r"(s|u|zf)\d+")


def type_text(value: object, names: SymbolNames) -> str:
    """`value` as a type; adds no guard to the ShapeEnv of its sizes."""
    match value:
        case None:
            return "none"
        case Tensor() if value.layout is torch.strided:
            return _tensor_text(value, names)
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return _symbolic_text(value, names)
        case bool() | int() | float():
            return f"{type(value).__name__}[{value!r}]"
        case fx.GraphModule():
            return "graph"
        case tuple() | list():
            parts = [type_text(part, names) for part in value]
            return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    return UNKNOWN


def _tensor_text(tensor: Tensor, names: SymbolNames) -> str:
    sizes, strides = _sizes(tensor.shape), _sizes(tensor.stride())
    text = f"{_compat.dtype_names()[tensor.dtype]}[{','.join(map(names.text, sizes))}]"
    if strides not in (_dense_strides(sizes, 0), _dense_strides(sizes, 1)):
        text += f"{{{','.join(map(names.text, strides))}}}"
    return text if tensor.device.type == "cpu" else f"{text}@{tensor.device.type}"


def _sizes(sizes: Sequence[int | torch.SymInt]) -> list[Size]:
    return [size if isinstance(size, int) else size.node.expr for size in sizes]


def _dense_strides(sizes: list[Size], least: int) -> list[Size]:
    """Strides of a contiguous tensor; a size counts as `least` at least (torch writes both forms)."""
    largest = max if all(isinstance(size, int) for size in sizes) else _compat.sympy_functions().Max
    counted = [largest(least, size) if least else size for size in sizes[:0:-1]]
    return list(itertools.accumulate(counted, operator.mul, initial=1))[::-1] if sizes else []


def _symbolic_text(value: torch.SymInt | torch.SymFloat | torch.SymBool, names: SymbolNames) -> str:
    expr = value.node.expr
    if not expr.free_symbols:
        return type_text(value.node.pytype(expr), names)
    return f"{_SYMBOLIC[type(value)]}[{names.text(expr)}]"


def split_top(text: str) -> list[str]:
    """The parts of `text` between the commas that no bracket encloses."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


class TypeReader:
    """Type text -> fake value, in a fake mode of its own; `hints` are the example values of new symbols."""

    def __init__(self, hints: Iterator[int]) -> None:
        self._env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        self._mode = _compat.fake_mode(self._env)
        self._names = SymbolNames()
        self._hints = hints
        self._examples: dict[sympy.Symbol, int] = {}

    def infer(self, target: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        """What `target` gives for fake values; TypeError if it refuses them or fixes a symbol."""
        try:
            with _compat.type_inference(self._mode):
                result = target(*args, **kwargs)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise TypeError(f"the operator does not take these arguments ({reason})") from error
        self._refuse_fixed_symbols()
        return result

    def _refuse_fixed_symbols(self) -> None:
        """A symbol that became its example value would make later checks true that should not be."""
        for symbol in self._examples:
            size = self._env.replace(symbol)
            if size.is_number and not symbol.name.startswith("u"):
                raise TypeError(f"the operator fixes {self._names.text(symbol)} to {size}")

    def check(self, text: str, inferred: object) -> object:
        """The value of the type `text`; TypeError unless `inferred`, the operator's result, has that type."""
        found = type_text(inferred, self._names)
        if found == text:
            return inferred
        for symbol in set().union(*(leaf.free_symbols for leaf in _leaves(inferred) if _is_symbolic(leaf))):
            self._examples.setdefault(symbol, next(self._hints))
        written = self.read(text)
        if not self._same(written, inferred):
            raise TypeError(f"written {text}, inferred {found}")
        return written

    def read(self, text: str) -> Any:
        """A value of the type `text`, with new symbols for new names; SyntaxError if it is no type."""
        if text == "none":
            return None
        if text.startswith("(") and text.endswith(")"):
            return tuple(self.read(part) for part in split_top(text[1:-1]))
        if found := _NUMBER.fullmatch(text):
            return self._number(found[1], found[2])
        if found := _TENSOR.fullmatch(text):
            return self._tensor(found[1], found[2], found[3], found[4] or "cpu")
        raise SyntaxError(f"not a type: {text!r}")

    def _number(self, kind: str, text: str) -> Any:
        if kind in _PYTHON:
            try:
                return _PYTHON[kind](text)
            except (ValueError, LookupError):
                raise SyntaxError(f"not a value of type {kind}: {text!r}") from None
        expr = parse_size(text, self._symbol)
        if kind == "symbool":
            return self._env.create_symboolnode(expr)
        if kind == "symfloat":
            return self._env.create_symfloatnode(expr, hint=float(self._at(expr, 1)))
        return self._env.create_symintnode(expr, hint=self._at(expr, 1))

    def _tensor(self, dtype: str, sizes: str, strides: str | None, device: str) -> Tensor:
        dtypes = {name: dtype for dtype, name in _compat.dtype_names().items()}
        if dtype not in dtypes:
            raise SyntaxError(f"unknown dtype {dtype!r}")
        shape = [self._number("sym", size) for size in split_top(sizes)]
        steps = None if strides is None else [self._number("sym", step) for step in split_top(strides)]
        try:
            with _compat.type_inference(self._mode):
                if steps is None:
                    return torch.empty(shape, dtype=dtypes[dtype], device=device)
                return torch.empty_strided(shape, steps, dtype=dtypes[dtype], device=device)
        except RuntimeError as error:
            raise SyntaxError(f"no tensor has this type ({error})") from error

    def _symbol(self, name: str) -> sympy.Symbol:
        if (known := self._names.find(name)) is not None:
            return known
        if (found := _SYMBOL.fullmatch(name)) is None:
            raise SyntaxError(f"unknown symbol {name!r}")
        example = next(self._hints)
        symbol = self._new_symbol(found[1], name, example)
        self._names.give(symbol, name)
        self._examples[symbol] = example
        return symbol

    def _new_symbol(self, prefix: str, name: str, example: int) -> sympy.Symbol:
        if prefix != "u":
            return _compat.named_symbol(self._env, name, example if prefix == "s" else float(example))
        size = self._env.create_unbacked_symint()
        torch._check(size >= 0)
        return size.node.expr

    def _same(self, written: object, inferred: object) -> bool:
        """Equal in every size and stride at two points.

        torch writes one size in several ways, depending on what guards told it. One point would not do: there
        a symbol equals the integer that is its example.
        """
        pair = _leaves(written), _leaves(inferred)
        for factor in (1, 3):
            first, second = ([self._at(leaf, factor) for leaf in leaves] for leaves in pair)
            if first != second:
                return False
        return True

    def _at(self, leaf: Any, factor: int) -> Any:
        """A size where each symbol is `factor` times its example value; anything else as it is."""
        if not _is_symbolic(leaf):
            return leaf
        value = leaf.xreplace({symbol: sympy.Integer(n * factor) for symbol, n in self._examples.items()})
        return int(value) if value.is_integer else float(value) if value.is_number else bool(value)


def _is_symbolic(leaf: object) -> bool:
    return isinstance(leaf, sympy.Basic)


def _leaves(value: object) -> list[Any]:
    """What two values must have in common to have the same type."""
    match value:
        case Tensor():
            sizes = _sizes(value.shape) + _sizes(value.stride())
            return [value.dtype, value.device.type, len(sizes), *sizes]
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return [value.node.expr]
        case tuple() | list():
            return [len(value), *(leaf for part in value for leaf in _leaves(part))]
    return [value]
