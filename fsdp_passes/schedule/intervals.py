"""What is gathered together, and what is gathered again: the uses of a unit as intervals."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from fsdp_passes.ir.alias import readers_of, source, views_of
from fsdp_passes.ir.nodes import calls, operand
from fsdp_passes.ir.ops import COMMUNICATION, GATHER, RELEASE, UNSHARD, WAIT, unit_of
from fsdp_passes.ir.passes import Pass


@dataclass(frozen=True)
class GatherOnDemand(Pass):
    """Gather a unit where an interval of its uses begins, release it at the first communication after it.

    before   w = unshard(s); y = mm(x, w); v = unshard(t); z = mm(y, v); o = mm(z, w)
    after    g = gather(s); w = wait(g); y = mm(x, w); release(w); ... v ...; g_1 = gather(s); w_1 = wait(g_1);
             o = mm(z, w_1); release(w_1)

    All flat groups of the unit that an interval uses are gathered, and released, together. Releases wait for the next
    communication because they must not cut a region in two: regions do not depend on the schedule, which moves gathers.
    What the graph returns, in whole or as a view, is gathered once, and not released: who receives it keeps it.

    Costs: a gather for each further interval, unless the schedule can keep the buffer.
    """

    def apply(self, gm: fx.GraphModule) -> None:
        _merge_equal(gm.graph)
        _split_uses(gm.graph)
        gathered = [(interval, _gather(gm.graph, interval)) for interval in find_intervals(gm.graph)]
        next_stop = _next_communication(gm.graph)
        output = gm.graph.output_node()
        for interval, waits in gathered:
            readers = {reader for each in interval.readers.values() for reader in each} - {output}
            last = max(readers, default=waits[-1])
            for wait, own_readers in zip(waits, interval.readers.values(), strict=True):
                if output not in own_readers:
                    _release(gm.graph, wait, next_stop[last])


@dataclass(frozen=True)
class Interval:
    """Uses of a unit in a graph with no use of another unit between them: one gather.

    readers: of each unshard of the unit, the nodes that compute with it here, in order.
    """

    unit: str
    readers: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)


def find_intervals(graph: fx.Graph) -> list[Interval]:
    """The intervals of all units, in the order of their first uses. What the graph returns has one of its own."""
    reads: dict[fx.Node, list[fx.Node]] = {}
    for unshard in calls(graph, UNSHARD):
        for reader in readers_of(unshard):
            reads.setdefault(reader, []).append(unshard)
    returned = set(reads.get(graph.output_node(), ()))
    open_: dict[tuple[str, bool], Interval] = {}  # by unit, and whether it is returned
    found: list[Interval] = []
    for node in (node for node in graph.nodes if node in reads):
        used = [(unit_of(operand(unshard)), unshard in returned) for unshard in reads[node]]
        units = {unit for unit, _ in used}
        open_ = {key: interval for key, interval in open_.items() if key[0] in units or key[1]}
        for key, unshard in zip(used, reads[node], strict=True):
            if key not in open_:
                found.append(Interval(key[0]))
                open_[key] = found[-1]
            open_[key].readers.setdefault(unshard, []).append(node)
    return found


def _merge_equal(graph: fx.Graph) -> None:
    """One unshard for each shard and dtype; none that nobody reads."""
    first: dict[object, fx.Node] = {}
    for unshard in calls(graph, UNSHARD):
        if not readers_of(unshard):
            for node in reversed([unshard, *views_of(unshard)]):
                graph.erase_node(node)
        elif (kept := first.setdefault(unshard.args, unshard)) is not unshard:
            unshard.replace_all_uses_with(kept)
            graph.erase_node(unshard)


def _split_uses(graph: fx.Graph) -> None:
    """Give each interval an unshard of its own, and the views through which it is read."""
    seen: set[fx.Node] = set()
    for interval in find_intervals(graph):
        for unshard, readers in interval.readers.items():
            if unshard in seen:
                _read_copies(graph, unshard, readers)
            seen.add(unshard)


def _read_copies(graph: fx.Graph, unshard: fx.Node, readers: list[fx.Node]) -> None:
    """Have `readers` read copies of `unshard` and of its views, made before the first of them."""
    copies: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies and source(node) is unshard:
            viewed = {argument: copy(argument) for argument in node.all_input_nodes}
            copies[node] = graph.node_copy(node, lambda argument: viewed[argument])
        return copies.get(node, node)

    for reader in readers:
        with graph.inserting_before(reader):
            reader.args, reader.kwargs = fx.node.map_arg((reader.args, reader.kwargs), copy)


def _gather(graph: fx.Graph, interval: Interval) -> list[fx.Node]:
    """Turn the unshards of `interval` into gathers and their waits, all before the first of them; returns the waits."""
    first = min(interval.readers)
    with graph.inserting_before(first):
        gathers = [_node(graph, GATHER, unshard, unshard.args, "gather") for unshard in interval.readers]
        waits = [_node(graph, WAIT, gather, (gather,), "full") for gather in gathers]
    for unshard, gather, wait in zip(interval.readers, gathers, waits, strict=True):
        if not unshard.kwargs.get("reshard", True):
            gather.kwargs = {"reshard": False}
        unshard.replace_all_uses_with(wait)
        graph.erase_node(unshard)
    return waits


def _node(graph: fx.Graph, target: object, like: fx.Node, args: tuple[object, ...], name: str) -> fx.Node:
    node = graph.create_node("call_function", target, args, {}, name=name)  # type: ignore[arg-type]
    node.meta = dict(like.meta)
    return node


def _next_communication(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the first communication after it, or the output."""
    following: dict[fx.Node, fx.Node] = {}
    stop = graph.output_node()
    for node in reversed(graph.nodes):
        following[node] = stop
        if node.target in COMMUNICATION:
            stop = node
    return following


def _release(graph: fx.Graph, wait: fx.Node, before: fx.Node) -> None:
    with graph.inserting_before(before):
        graph.create_node("call_function", RELEASE, (wait,), {}, name="release").meta["val"] = None
