"""What must hold for a graph, each rule a function whose docstring is the invariant."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import fx

from fsdp_passes.ir.alias import readers_of, source, writes
from fsdp_passes.ir.nodes import calls, operand
from fsdp_passes.ir.ops import (
    ACCUMULATE,
    GATHER,
    GRAD_SLICE,
    GRADIENT_WRITES,
    REDUCE,
    REDUCE_GRAD,
    RELEASE,
    UNSHARD,
    WAIT,
)
from fsdp_passes.ir.text import dump, load


class Broken(Exception):
    """A rule does not hold at `node`."""

    def __init__(self, node: fx.Node | None, what: str) -> None:
        super().__init__(what)
        self.node = node


_SHARD_ARGUMENT = {UNSHARD: 0, GATHER: 0, GRAD_SLICE: 0, REDUCE: 0, REDUCE_GRAD: 1, ACCUMULATE: 1}


def names_are_defined_before_use(gm: fx.GraphModule) -> None:
    """Every argument is the result of an earlier node of the same graph."""
    seen: set[fx.Node] = set()
    for node in gm.graph.nodes:
        for argument in node.all_input_nodes:
            if argument not in seen:
                raise Broken(node, f"{node} reads {argument}, which is not defined before it")
        seen.add(node)


def shards_are_inputs(gm: fx.GraphModule) -> None:
    """Gathers and reductions name the shard itself, an input, not a value computed from it."""
    for node in gm.graph.nodes:
        if node.target in _SHARD_ARGUMENT:
            shard = operand(node, _SHARD_ARGUMENT[node.target])
            if shard.op != "placeholder":
                raise Broken(node, f"{node} takes {shard} for a shard, but that is computed by {shard.target}")


def gathers_are_waited_once(gm: fx.GraphModule) -> None:
    """A gathered buffer has one wait, and is read through it only."""
    for gather in calls(gm.graph, GATHER):
        waits = [user for user in gather.users if user.target is WAIT]
        if len(waits) != 1:
            raise Broken(gather, f"{gather} has {len(waits)} waits, expected 1")
        for reader in gather.users:
            if reader is not waits[0]:
                raise Broken(reader, f"{reader} reads {gather} without its wait")


def buffers_are_released_once(gm: fx.GraphModule) -> None:
    """A gathered buffer is released once, after its last reader through any view; never if it is an output."""
    for wait in calls(gm.graph, WAIT):
        readers = readers_of(wait)
        releases = [reader for reader in readers if reader.target is RELEASE]
        expected = 0 if gm.graph.output_node() in readers else 1
        if len(releases) != expected:
            raise Broken(wait, f"{wait} has {len(releases)} releases, expected {expected}")
        for reader in readers:
            if releases and reader > releases[0]:
                raise Broken(reader, f"{reader} reads {wait} after {releases[0]}")


def gradients_are_reduced(gm: fx.GraphModule) -> None:
    """The reduction of a shard is issued once, after its last gradient was written or accumulated."""
    reduced: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        if node.target is REDUCE:
            if operand(node) in reduced:
                raise Broken(node, f"{node} reduces {operand(node)} a second time")
            reduced.add(operand(node))
        shard = _shard_of_gradient(node)
        if shard is not None and shard not in reduced:
            raise Broken(node, f"{node} is a gradient of {shard}, which no later node reduces")


def _shard_of_gradient(node: fx.Node) -> fx.Node | None:
    if node.target is ACCUMULATE:
        return operand(node, 1)
    return operand(operand(node)) if node.target in GRADIENT_WRITES else None


def gradients_are_written_once(gm: fx.GraphModule) -> None:
    """A slice of the sum of gradients is taken once for each piece of a shard, and used by one write, as its place."""
    taken: set[object] = set()
    for slice_ in calls(gm.graph, GRAD_SLICE):
        shard, piece = slice_.args[:2]
        if (shard, piece) in taken:
            raise Broken(slice_, f"{slice_} is piece {piece} of {shard} a second time")
        taken.add((shard, piece))
        uses = [user for user in slice_.users for use in user.args if use is slice_]
        if [use.target in GRADIENT_WRITES for use in uses] != [True]:
            raise Broken(slice_, f"{slice_} is used by {', '.join(map(str, uses)) or 'nobody'}, expected one write")


def gathered_buffers_are_not_written(gm: fx.GraphModule) -> None:
    """Nothing writes into a gathered buffer: it is the parameters."""
    for node in gm.graph.nodes:
        for argument in writes(node):
            if source(argument).target in (GATHER, UNSHARD):
                raise Broken(node, f"{node} writes {argument}, a view of {source(argument)}")


def types_are_what_operators_infer(gm: fx.GraphModule) -> None:
    """The type written at each node is the one that its operator infers from its arguments."""
    try:
        load(dump(gm))
    except TypeError as error:
        line = re.match(r"line (\d+):", str(error))
        nodes = dict(enumerate(gm.graph.nodes, 1))  # lines after them are of graphs that this one calls
        raise Broken(nodes.get(int(line[1])) if line else None, str(error)) from None


Rule = Callable[[fx.GraphModule], None]
CHEAP: tuple[Rule, ...] = (
    names_are_defined_before_use,
    shards_are_inputs,
    gathers_are_waited_once,
    buffers_are_released_once,
    gradients_are_reduced,
    gradients_are_written_once,
    gathered_buffers_are_not_written,
)
THOROUGH: tuple[Rule, ...] = (types_are_what_operators_infer,)
