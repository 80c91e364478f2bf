"""Gathers, and the views that cut parameters out of them, as late as their first use."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fsdp_passes.ir.alias import views_of
from fsdp_passes.ir.nodes import calls
from fsdp_passes.ir.ops import UNSHARD
from fsdp_passes.ir.passes import Pass


@dataclass(frozen=True)
class LateReads(Pass):
    """Move each unshard, and each view of it, to just before its first user.

    before   w = unshard(s); t = t(w); y = relu(x); z = mm(y, t)
    after    y = relu(x); w = unshard(s); t = t(w); z = mm(y, t)

    Keeps: every value, and the order of the unshards' first uses on every rank.
    """

    def apply(self, gm: fx.GraphModule) -> None:
        for unshard in calls(gm.graph, UNSHARD):
            for node in reversed([unshard, *views_of(unshard)]):
                if node.users:
                    min(node.users).prepend(node)  # nodes compare by their place in the graph
