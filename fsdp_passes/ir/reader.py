"""Reading the graph language: see `text` for the language itself."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

from torch import fx

from fsdp_passes import _compat
from fsdp_passes.ir.arguments import find_operator, read_argument
from fsdp_passes.ir.ops import LANES, ShardInput
from fsdp_passes.ir.types import UNKNOWN, TypeReader

_LINE = re.compile(
    r"\s*\d+\s+(?:return (?P<result>.+)"
    r"|(?:(?P<lane>issue|wait|release)\s+)?(?P<name>\w+)(?:: (?P<type>.+?))? = (?P<operation>.+))"
)
_HEADER = re.compile(r"graph ([\w.]+):")
_CALL = re.compile(r"([A-Za-z_][\w.]*)\((.*)\)")
_PICK = re.compile(r"(\w+)\[(\d+)\]")
GETITEM = find_operator("operator.getitem")


def lane(node: fx.Node) -> str:
    """issue, wait, release or nothing: what the operator does to the order of things."""
    return LANES.get(node.target, "") if node.op == "call_function" else ""


def body_path(path: str, node: fx.Node) -> str:
    """Path of the graph that `node`, a get_attr in the graph at `path`, reads."""
    return f"{path}.{node.target}" if path else str(node.target)


@dataclass(frozen=True)
class _Line:
    number: int
    text: str


@dataclass(frozen=True)
class _Call:
    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Reader:
    """Reads each graph when a line asks for it; `_at` is the line that is being read, for errors."""

    def __init__(self, text: str, types: TypeReader) -> None:
        self.types = types
        self._at = _Line(1, "")
        self._lines: dict[str, list[_Line]] = {"": []}
        self._graphs: dict[str, fx.GraphModule] = {}
        self._text = text

    def read(self) -> fx.GraphModule:
        """The main graph; SyntaxError and TypeError name the line."""
        try:
            self._split()
            return self.graph("")
        except (SyntaxError, TypeError) as error:
            raise type(error)(f"line {self._at.number}: {error}: {self._at.text.strip()}") from error

    def _split(self) -> None:
        """Path of each graph ("" is the main one) -> its lines."""
        path = ""
        for number, text in enumerate(self._text.splitlines(), 1):
            self._at = _Line(number, text)
            if header := _HEADER.fullmatch(text):
                path = header[1]
                if path in self._lines:
                    raise SyntaxError(f"graph {path} is defined twice")
                self._lines[path] = []
            elif text.strip() and not text.lstrip().startswith("#"):
                self._lines[path].append(self._at)

    def graph(self, path: str) -> fx.GraphModule:
        """The graph at `path`, read at the first call."""
        if path not in self._lines:
            raise SyntaxError(f"there is no line 'graph {path}:'")
        if path not in self._graphs:
            caller, graph = self._at, _GraphReader(self, path)
            for line in self._lines[path]:
                self._at = line
                graph.read(line.text)
            self._graphs[path] = graph.finish()
            self._at = caller
        return self._graphs[path]


class _GraphReader:
    """One graph: its nodes by name, and the fake value of each node of known type."""

    def __init__(self, reader: Reader, path: str) -> None:
        self._reader, self._path = reader, path
        self._graph = fx.Graph()
        self._nodes: dict[str, fx.Node] = {}
        self._values: dict[fx.Node, Any] = {}
        self._attributes: dict[str, Any] = {}
        self._returned = False

    def finish(self) -> fx.GraphModule:
        if not self._returned:
            raise SyntaxError("the graph ends without return")
        return fx.GraphModule(self._attributes, self._graph)

    def read(self, line: str) -> None:
        found = _LINE.fullmatch(line)
        if found is None:
            raise SyntaxError("not a line of a graph")
        if self._returned:
            raise SyntaxError("a line after return")
        if found["result"]:
            self._graph.output(read_argument(_parse(found["result"]), self._nodes))
            self._returned = True
            return
        name = found["name"]
        if name in self._nodes:
            raise SyntaxError(f"{name!r} is defined twice")
        self._nodes[name] = node = self._node(name, found["type"], found["operation"])
        if node.name != name:
            raise SyntaxError(f"{name!r} cannot be the name of a node")
        if (found["lane"] or "") != lane(node):
            raise SyntaxError(f"expected lane {lane(node)!r}, got {found['lane'] or ''!r}")

    def _node(self, name: str, written: str | None, operation: str) -> fx.Node:
        if pick := _PICK.fullmatch(operation):
            source = read_argument(ast.Name(pick[1]), self._nodes)
            return self._operator(name, written, GETITEM, (source, int(pick[2])), {})
        call = self._call(operation)
        if call.function == "input":
            return self._input(name, written, call)
        if call.function == "get_attr":
            return self._get_attr(name, written, call)
        return self._operator(name, written, find_operator(call.function), call.args, call.kwargs)

    def _call(self, operation: str) -> _Call:
        called = _CALL.fullmatch(operation)
        call = _parse(f"f({called[2]})") if called else None
        if called is None or not isinstance(call, ast.Call) or None in (word.arg for word in call.keywords):
            raise SyntaxError(f"not an operation: {operation!r}")
        args = tuple(read_argument(arg, self._nodes) for arg in call.args)
        kwargs = {str(word.arg): read_argument(word.value, self._nodes) for word in call.keywords}
        return _Call(called[1], args, kwargs)

    def _input(self, name: str, written: str | None, call: _Call) -> fx.Node:
        unit = call.kwargs.get("shard", "")
        if written is None or call.args or call.kwargs.keys() - {"shard"} or not isinstance(unit, str):
            raise SyntaxError('expected "name: type = input()" or "... = input(shard="unit")"')
        node = self._graph.placeholder(name)
        if call.kwargs:
            node.meta["fsdp"] = ShardInput(unit)
        if written != UNKNOWN:
            self._set(node, self._reader.types.read(written))
        return node

    def _get_attr(self, name: str, written: str | None, call: _Call) -> fx.Node:
        if written is None or call.kwargs or len(call.args) != 1 or not isinstance(call.args[0], str):
            raise SyntaxError('expected "name: type = get_attr("path")"')
        (path,) = call.args
        node = self._graph.create_node("get_attr", path, name=name)
        if written == "graph":
            self._values[node] = self._reader.graph(body_path(self._path, node))
        else:
            self._set(node, self._reader.types.read(written))
        self._attributes[path] = self._values[node]
        return node

    def _operator(
        self, name: str, written: str | None, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> fx.Node:
        if (written is None) != _compat.returns_nothing(target):
            raise SyntaxError(f"expected {'a' if written is None else 'no'} type for this operator")
        node = self._graph.create_node("call_function", target, args, kwargs, name=name)
        if written != UNKNOWN:
            self._set(node, self._value(node, written))
        return node

    def _value(self, node: fx.Node, written: str | None) -> object:
        types = self._reader.types
        if not all(operand in self._values for operand in node.all_input_nodes):
            return None if written is None else types.read(written)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__)
        inferred = types.infer(node.target, args, kwargs)  # type: ignore[arg-type]
        return None if written is None else types.check(written, inferred)

    def _set(self, node: fx.Node, value: object) -> None:
        node.meta["val"] = self._values[node] = value


def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        raise SyntaxError(f"not an argument: {text!r}") from None
