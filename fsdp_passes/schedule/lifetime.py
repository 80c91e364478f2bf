"""What is in use when: the uses of a unit as intervals, and the lifetimes of memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from fsdp_passes.ir.alias import readers_of
from fsdp_passes.ir.nodes import calls, operand
from fsdp_passes.ir.ops import UNSHARD, unit_of


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


@dataclass(frozen=True)
class Lifetime:
    """`nbytes` of memory that are in use from before step `start` until before step `end`."""

    nbytes: int
    start: int
    end: int
