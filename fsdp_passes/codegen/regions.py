"""From a scheduled graph to a plan: everything between two communications is one region.

A region can be compiled by itself: each symbol in the sizes of its inputs is one of its inputs, and no two of its
inputs share memory that it writes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from fsdp_passes._compat import graph_module
from fsdp_passes.ir.alias import changing, is_view, source
from fsdp_passes.ir.nodes import is_constant, is_repeatable, operand, operands, results
from fsdp_passes.ir.ops import ACCUMULATE, COMMUNICATION, GATHER, GRAD_SLICE, REDUCE, RELEASE, WAIT, unit_of
from fsdp_passes.schedule.plan import (
    Accumulate,
    Gather,
    GradSlice,
    Plan,
    Reduce,
    Release,
    Run,
    Step,
    Wait,
    reads,
    with_drops,
)


def cut(gm: fx.GraphModule, direction: str, trains: bool) -> Plan:
    """The plan of `gm`. Constants, and views of what is gathered or written, are repeated where they are read.

    So no buffer leaves its region as a view. A constant that several equal blocks read would be an output of the first
    one's region, which would differ from the others.
    """
    outputs = tuple(getattr(value, "name", value) for value in results(gm.graph))
    repeated = _find_repeated(gm.graph)
    symbols = _find_symbols(gm.graph)
    steps: list[Step] = []
    regions: list[fx.GraphModule] = []
    for part in _parts(gm.graph, repeated):
        if isinstance(part, fx.Node):
            steps.append(_communication(part))
            continue
        taken = _region_inputs(part, repeated)
        taken += _missing_symbols(taken, part, symbols)
        region, run = _region(gm, part, taken, len(regions))
        regions.append(region)
        steps += [_grad_slice(node) for node in taken if node.target is GRAD_SLICE]
        steps.append(run)
    buffers = {step.buffer for step in steps if isinstance(step, Gather)}
    slices = {step.name for step in steps if isinstance(step, GradSlice)}
    shards = {step.shard for step in steps if isinstance(step, Gather | GradSlice | Accumulate | Reduce)}
    done = with_drops(steps, outputs, buffers | slices | shards)
    used = {name for step in done for name in reads(step)} | {name for name in outputs if isinstance(name, str)}
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    inputs = tuple(name if name in used else None for name in names)
    return Plan(direction, inputs, done, outputs, tuple(regions), trains)


def _find_repeated(graph: fx.Graph) -> set[fx.Node]:
    """Constants, and views of gathered buffers and of what an operator writes into, unless the graph returns them.

    What is made of sizes alone, as zeros([4]), is a constant, too.
    """
    owners = changing(graph)
    returned = set(graph.output_node().all_input_nodes)

    def is_repeated(node: fx.Node) -> bool:
        if node.op == "get_attr" or (is_repeatable(node) and all(map(is_constant, node.all_input_nodes))):
            return True
        return is_view(node) and node.target is not WAIT and (source(node) in owners or source(node).target is GATHER)

    return {node for node in graph.nodes if node not in returned and is_repeated(node)}


def _find_symbols(graph: fx.Graph) -> dict[sympy.Symbol, fx.Node]:
    """The first node whose value is that symbol of the sizes."""
    found: dict[sympy.Symbol, fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
            found.setdefault(value.node.expr, node)
    return found


def _parts(graph: fx.Graph, repeated: set[fx.Node]) -> list[fx.Node | list[fx.Node]]:
    """Communication nodes, and between them the lists of nodes that become regions."""
    parts: list[Any] = [[]]
    home: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node.target is GRAD_SLICE or node in repeated:
            continue
        if node.target in COMMUNICATION:
            parts += [node, []]
            continue
        # An item stays with the tuple that it is taken from.
        home[node] = home.get(operand(node), parts[-1]) if node.target is operator.getitem else parts[-1]
        home[node].append(node)
    return [part for part in parts if part != []]


def _communication(node: fx.Node) -> Step:
    names = [argument.name for argument in node.all_input_nodes]
    if node.target is GATHER:
        buffer, value = next(user for user in node.users if user.target is WAIT), node.meta["val"]
        reshard = bool(node.kwargs.get("reshard", True))
        return Gather(buffer.name, names[0], value.dtype, value.numel(), unit_of(operand(node)), reshard)
    if node.target is WAIT:
        return Wait(node.name)
    if node.target is RELEASE:
        return Release(names[0])
    if node.target is ACCUMULATE:
        return Accumulate(names[0], names[1], None if node.args[2] is None else tuple(operands(node, 2)))
    assert node.target is REDUCE, node.target
    _, world_size, dtype = node.args
    assert isinstance(world_size, int) and isinstance(dtype, torch.dtype)
    return Reduce(names[0], dtype, operand(node).meta["val"].numel() * world_size)


def _grad_slice(node: fx.Node) -> GradSlice:
    value = node.meta["val"]
    piece, separate = node.args[1], node.kwargs.get("separate", False)
    assert isinstance(piece, int) and isinstance(separate, bool)
    return GradSlice(node.name, operand(node).name, piece, tuple(value.shape), value.dtype, separate)


def _region(
    gm: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], number: int
) -> tuple[fx.GraphModule, Run]:
    inside = set(nodes)
    leaving = [node for node in nodes if any(user not in inside for user in node.users)]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = graph.node_copy(node, copy)
        return copies[node]

    for node in nodes:
        copy(node)
    graph.output(tuple(copies[node] for node in leaving))
    run = Run(number, tuple(node.name for node in inputs), tuple(node.name for node in leaving))
    return graph_module(gm, graph, f"region_{number}"), run


def _region_inputs(nodes: Sequence[fx.Node], repeated: set[fx.Node]) -> list[fx.Node]:
    """What `nodes` read from outside, through the views that are repeated inside, in the order of first use."""
    known = set(nodes)
    inputs: list[fx.Node] = []
    pending = [argument for node in nodes for argument in node.all_input_nodes]
    while pending:
        node = pending.pop(0)
        if node in known:
            continue
        known.add(node)
        if node in repeated:
            pending = node.all_input_nodes + pending
        else:
            inputs.append(node)
    return inputs


def _missing_symbols(
    inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], symbols: dict[sympy.Symbol, fx.Node]
) -> list[fx.Node]:
    """Nodes for the symbols in the types of `inputs` that are no inputs themselves; none for what `nodes` define."""
    needed = {symbol for node in inputs for symbol in free_symbols(node.meta.get("val"))}
    found = [node for symbol, node in symbols.items() if symbol in needed]
    return [node for node in found if node not in inputs and node not in nodes]
