"""The regions of one plan. One that writes gradients has two variants: its writes copy, or they add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from fsdp_passes._compat import graph_module, with_settings_of_now
from fsdp_passes.codegen.compile import Region, compile_regions
from fsdp_passes.ir.nodes import calls, operand
from fsdp_passes.ir.ops import GRAD_MM, GRAD_WRITE, GRADIENT_WRITES


class Regions:
    """Each region as a function of one list of inputs that it empties.

    Compiled at once, unless some write gradients: then all of them when they first run, in the variants that run. What
    has symbolic sizes is always compiled at once, in all its variants: code may take things for granted about sizes,
    which only become guards while the graph is compiled.
    Those that are compiled late have the settings with which this was made (see `with_settings_of_now`).
    """

    def __init__(self, graphs: Sequence[fx.GraphModule], codegen: str, direction: str) -> None:
        self._graphs, self._codegen, self._direction = graphs, codegen, direction
        self._compile_regions = with_settings_of_now(compile_regions)
        self._compiled: dict[tuple[int, bool], Region] = {}
        self._writes = [writes_gradients(graph) for graph in graphs]
        early = [n for n, graph in enumerate(graphs) if not any(self._writes) or has_symbols(graph)]
        for first in (True, False):
            self.compile(dict.fromkeys(early, first))

    @property
    def complete(self) -> bool:
        """Whether each region is compiled in all its variants."""
        return len(self._compiled) == len(self._graphs) + sum(self._writes)

    def compile(self, first: Mapping[int, bool]) -> None:
        """Have these regions ready, by number, in these variants: True, the writes copy; False, they add."""
        wanted = [self._key(number, copies) for number, copies in first.items()]
        missing = [each for each in wanted if each not in self._compiled]
        if not missing:
            return
        graphs = [write_variant(self._graphs[number], copies) for number, copies in missing]
        names = [f"region_{n} of {self._direction}{'' if copies else ', adding'}" for n, copies in missing]
        self._compiled.update(zip(missing, self._compile_regions(graphs, self._codegen, names), strict=True))

    def __call__(self, number: int, first: bool, inputs: list[Any]) -> Sequence[Any]:
        if self._key(number, first) not in self._compiled:
            self.compile({number: first})
        return self._compiled[self._key(number, first)](inputs)

    def _key(self, number: int, first: bool) -> tuple[int, bool]:
        """A region without writes has one variant."""
        return number, first or not self._writes[number]


def has_symbols(graph: fx.GraphModule) -> bool:
    return any(free_symbols(node.meta.get("val")) for node in graph.graph.find_nodes(op="placeholder"))


def writes_gradients(graph: fx.GraphModule) -> bool:
    return any(calls(graph.graph, target) for target in GRADIENT_WRITES)


def write_variant(region: fx.GraphModule, first: bool) -> fx.GraphModule:
    """`region` with writes that copy into the slices of gradients, or that add to them.

    before   grad_write(slice, g); grad_mm(slice_1, a, b)
    after    copy_(slice, g); grad_mm(slice_1, a, b, first=True)      add_(slice, g); grad_mm(slice_1, a, b)
    """
    if not writes_gradients(region):
        return region
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in region.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    for write in calls(graph, GRAD_WRITE):
        write.target = torch.ops.aten.copy_.default if first else torch.ops.aten.add_.Tensor
        write.meta["val"] = operand(write).meta["val"]
    for product in calls(graph, GRAD_MM):
        product.kwargs = {"first": first}
    return graph_module(region, graph, "region")
