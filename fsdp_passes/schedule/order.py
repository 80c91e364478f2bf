"""When gathers are issued, waited for and released: here, on demand."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fsdp_passes.ir.alias import readers_of
from fsdp_passes.ir.nodes import calls
from fsdp_passes.ir.ops import COMMUNICATION, GATHER, RELEASE, UNSHARD, WAIT
from fsdp_passes.ir.passes import Pass


@dataclass(frozen=True)
class GatherOnDemand(Pass):
    """Gather where a unit is first used, release at the first communication after its last use.

    before   w = unshard(s, 2, bf16); y = mm(x, w); z = relu(y)
    after    gather = gather(s, 2, bf16); full = wait(gather); y = mm(x, full); z = relu(y); release(full)

    Releases wait for the next communication because they must not cut a region in two.
    A buffer that the graph returns, in whole or as a view, is not released: who receives it keeps it.
    """

    def apply(self, gm: fx.GraphModule) -> None:
        waits = [_issue_and_wait(gm.graph, unshard) for unshard in calls(gm.graph, UNSHARD)]
        next_stop = _next_communication(gm.graph)
        for wait in waits:
            readers = readers_of(wait)
            if gm.graph.output_node() not in readers:
                _release(gm.graph, wait, next_stop[max(readers, default=wait)])


def _issue_and_wait(graph: fx.Graph, unshard: fx.Node) -> fx.Node:
    with graph.inserting_before(unshard):
        gather = graph.create_node("call_function", GATHER, unshard.args, {}, name="gather")
        wait = graph.create_node("call_function", WAIT, (gather,), {}, name="full")
    gather.meta = dict(unshard.meta)
    wait.meta = dict(unshard.meta)
    unshard.replace_all_uses_with(wait)
    graph.erase_node(unshard)
    return wait


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
