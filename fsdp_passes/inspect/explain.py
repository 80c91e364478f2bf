"""What the compiler did with the graphs of a model: so far, with its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from fsdp_passes.ir.nodes import calls, operand
from fsdp_passes.ir.ops import GRAD_MM, unit_of
from fsdp_passes.ir.passes import Declined
from fsdp_passes.schedule.plan import Accumulate, Plan
from fsdp_passes.sharding.state import sharded_state


@dataclass(frozen=True)
class UnitGradients:
    """One flat group in one backward graph. `unit` is that of the model for which the graph was compiled.

    num_written: gradients that are written where they are added up; of which num_products are products that are added
        up in fp32 (wgrad="fp32").
    whole: they are added up as one tensor of the group's size instead.
    """

    unit: str
    num_written: int
    whole: bool
    num_products: int = 0


@dataclass(frozen=True, eq=False)
class GraphReport:
    """`direction`: "fwd" or "bwd". `declined`: what passes left as it was, and why."""

    direction: str
    num_gathers: int
    num_regions: int
    gradients: tuple[UnitGradients, ...]
    declined: tuple[Declined, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphReport:
        """A copy of a model keeps the reports, and may run the same graphs."""
        return self

    def __str__(self) -> str:
        lines = [f"{self.direction}: {self.num_gathers} gathers, {self.num_regions} regions"]
        for each in self.gradients:
            products = f", {each.num_products} of them products in fp32" if each.num_products else ""
            how = "added up as a whole" if each.whole else f"{each.num_written} written into slices{products}"
            lines.append(f"  {each.unit}: {how}")
        lines += [f"  {left.unit}: {left.node} is left as it is: {left.reason}" for left in self.declined]
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """The graphs that ran, in the order of their first run. `str()` of it is a text."""

    graphs: tuple[GraphReport, ...]

    @property
    def declined(self) -> tuple[Declined, ...]:
        return tuple(left for graph in self.graphs for left in graph.declined)

    def __str__(self) -> str:
        return "\n".join(f"graph {number} {graph}" for number, graph in enumerate(self.graphs)) or "no graph ran yet"


def explain(model: nn.Module) -> Explanation:
    """What was compiled for `model`, after its first step. Equal blocks that are compiled one by one share a graph."""
    reports = sharded_state(model).reports
    return Explanation(tuple(report for report in reports if isinstance(report, GraphReport)))


def report(graph: fx.Graph, plan: Plan, declined: Sequence[Declined]) -> GraphReport:
    """`graph` is the one from which `plan` was cut: its inputs know their units."""
    units = {node.name: unit_of(node) for node in graph.find_nodes(op="placeholder")}
    gradients = []
    for shard in (step.shard for step in plan.reductions):
        whole = any(isinstance(step, Accumulate) and step.shard == shard for step in plan.steps)
        num_written = sum(step.shard == shard for step in plan.grad_slices)
        num_products = sum(operand(operand(node)).name == shard for node in calls(graph, GRAD_MM))
        gradients.append(UnitGradients(units[shard], num_written, whole, num_products))
    return GraphReport(plan.direction, len(plan.gathers), len(plan.regions), tuple(gradients), tuple(declined))
