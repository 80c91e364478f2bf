"""From a scheduled graph to a plan: everything between two communications is one region."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from fsdp_passes.ir.alias import is_view, source
from fsdp_passes.ir.nodes import operand, operands, results
from fsdp_passes.ir.ops import ACCUMULATE, COMMUNICATION, GATHER, REDUCE, RELEASE, WAIT
from fsdp_passes.schedule.plan import (
    Accumulate,
    Gather,
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
    """The plan of `gm`. Views of gathered buffers, and constants, are repeated in each region that reads them."""
    outputs = tuple(getattr(value, "name", value) for value in results(gm.graph))
    steps: list[Step] = []
    regions: list[fx.GraphModule] = []
    for part in _parts(gm.graph):
        if isinstance(part, fx.Node):
            steps.append(_communication(part))
            continue
        region, run = _region(gm, part, len(regions))
        regions.append(region)
        steps.append(run)
    buffers = {step.buffer for step in steps if isinstance(step, Gather)}
    shards = {step.shard for step in steps if isinstance(step, Gather | Accumulate | Reduce)}
    done = with_drops(steps, outputs, buffers | shards)
    used = {name for step in done for name in reads(step)} | {name for name in outputs if isinstance(name, str)}
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    inputs = tuple(name if name in used else None for name in names)
    return Plan(direction, inputs, done, outputs, tuple(regions), trains)


def _parts(graph: fx.Graph) -> list[fx.Node | list[fx.Node]]:
    """Communication nodes, and between them the lists of nodes that become regions."""
    parts: list[Any] = [[]]
    home: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or _is_repeated(node):
            continue
        if node.target in COMMUNICATION:
            parts += [node, []]
            continue
        # An item stays with the tuple that it is taken from.
        home[node] = home.get(operand(node), parts[-1]) if node.target is operator.getitem else parts[-1]
        home[node].append(node)
    return [part for part in parts if part != []]


def _is_repeated(node: fx.Node) -> bool:
    """Constants and views of gathered buffers, unless the graph returns them."""
    if any(user.op == "output" for user in node.users):
        return False
    return node.op == "get_attr" or (is_view(node) and source(node).target is GATHER and node.target is not WAIT)


def _communication(node: fx.Node) -> Step:
    names = [argument.name for argument in node.all_input_nodes]
    if node.target is GATHER:
        buffer = next(user for user in node.users if user.target is WAIT)
        return Gather(buffer.name, names[0], node.meta["val"].dtype, node.meta["val"].numel())
    if node.target is WAIT:
        return Wait(node.name)
    if node.target is RELEASE:
        return Release(names[0])
    if node.target is ACCUMULATE:
        return Accumulate(names[0], names[1], None if node.args[2] is None else tuple(operands(node, 2)))
    assert node.target is REDUCE, node.target
    return Reduce(names[0])


def _region(gm: fx.GraphModule, nodes: Sequence[fx.Node], number: int) -> tuple[fx.GraphModule, Run]:
    inside = set(nodes)
    inputs = _region_inputs(nodes)
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
    return fx.GraphModule(gm, graph, class_name=f"region_{number}"), run


def _region_inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """What `nodes` read from outside, through the views that are repeated inside, in the order of first use."""
    known = set(nodes)
    inputs: list[fx.Node] = []
    pending = [argument for node in nodes for argument in node.all_input_nodes]
    while pending:
        node = pending.pop(0)
        if node in known:
            continue
        known.add(node)
        if _is_repeated(node):
            pending = node.all_input_nodes + pending
        else:
            inputs.append(node)
    return inputs
