"""What the compiler did with the graphs of a model: gathers, gradients, memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx, nn

from fsdp_passes._compat import dtype_names
from fsdp_passes.ir.nodes import calls, operand
from fsdp_passes.ir.ops import GRAD_MM, unit_of
from fsdp_passes.ir.passes import Declined
from fsdp_passes.runtime.order import Order, as_scheduled
from fsdp_passes.runtime.timeline import Timeline
from fsdp_passes.schedule.lifetime import Memory
from fsdp_passes.schedule.live_bytes import LiveBytes, live_bytes, peak_of
from fsdp_passes.schedule.plan import Accumulate, Call, Gather, Peak, Plan
from fsdp_passes.sharding.state import sharded_state


@dataclass(frozen=True)
class UnitGradients:
    """One flat group in one backward graph. `unit` is that of the model for which the graph was compiled.

    num_written: gradients that are written where they are added up; of which num_products are products that are added
        up in fp32 (wgrad="fp32").
    whole: they are added up as one tensor of the group's size instead.
    reduced_bytes: what is reduced, when the backward synchronises.
    """

    unit: str
    num_written: int
    whole: bool
    num_products: int = 0
    reduced_bytes: int = 0

    def __str__(self) -> str:
        products = f", {self.num_products} of them products in fp32" if self.num_products else ""
        how = "added up as a whole" if self.whole else f"{self.num_written} written into slices{products}"
        return f"{self.unit}: {how}"


@dataclass(frozen=True, eq=False)
class GraphReport:
    """plan: what runs where the order of graphs is not known. declined: what passes left as it was, and why."""

    plan: Plan
    gradients: tuple[UnitGradients, ...]
    declined: tuple[Declined, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphReport:
        """A copy of a model keeps the reports, and may run the same graphs."""
        return self

    @property
    def direction(self) -> str:
        """Either "fwd" or "bwd"."""
        return self.plan.direction

    @property
    def num_gathers(self) -> int:
        return len(self.plan.gathers)

    @property
    def live_at_peak(self) -> LiveBytes:
        """At the step at which most is live, values included."""
        return _most_live(Memory.of([Call.alone(self.plan)], [self.plan.steps]))

    def __str__(self) -> str:
        head = f"{self.direction}: {self.num_gathers} gathers, {len(self.plan.regions)} regions"
        left = [f"{each.unit}: {each.node} is left as it is: {each.reason}" for each in self.declined]
        return "\n  ".join([f"{head}, at most {self.plan.peak_bytes:,} B", *map(str, self.gradients), *left])

    def as_dict(self) -> dict[str, Any]:
        return {
            "direction": self.direction,
            "num_regions": len(self.plan.regions),
            "gathers": [_gather_as_dict(step) for step in self.plan.steps if isinstance(step, Gather)],
            "gradients": [asdict(each) for each in self.gradients],
            "peak": _peak_as_dict(self.plan.peak),
            "live_at_peak": asdict(self.live_at_peak),
            "declined": [asdict(each) for each in self.declined],
        }


@dataclass(frozen=True)
class RoundReport:
    """Graphs that are known to run one after another, from a forward to the end of its backward.

    graphs: their numbers. gathers: what each of them issues then, or keeps.
    """

    graphs: tuple[int | None, ...]
    gathers: tuple[tuple[Gather, ...], ...]
    peak: Peak
    live_at_peak: LiveBytes

    @property
    def num_kept(self) -> int:
        return sum(gather.kept_from is not None for gathers in self.gathers for gather in gathers)

    @property
    def num_gathers(self) -> int:
        """Those that communicate, in the first round of a window."""
        return sum(map(len, self.gathers)) - self.num_kept

    @property
    def window_units(self) -> tuple[str, ...]:
        """Units that are kept for the rest of a window."""
        kept = (gather.unit for gathers in self.gathers for gather in gathers if gather.for_window)
        return tuple(dict.fromkeys(kept))

    def __str__(self) -> str:
        graphs = ", ".join("?" if graph is None else str(graph) for graph in self.graphs)
        kept = (
            f"\n  kept for a window, {self.peak.window:,} B: {', '.join(self.window_units)}"
            if self.window_units
            else ""
        )
        return f"{graphs}: {self.num_gathers} gathers, {self.num_kept} kept, at most {self.peak.nbytes:,} B{kept}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "graphs": list(self.graphs),
            "num_gathers": self.num_gathers,
            "num_kept": self.num_kept,
            "window_units": list(self.window_units),
            "gathers": [[_gather_as_dict(gather) for gather in gathers] for gathers in self.gathers],
            "peak": _peak_as_dict(self.peak),
            "live_at_peak": asdict(self.live_at_peak),
        }


@dataclass(frozen=True)
class Explanation:
    """The graphs that ran, in the order of their first run, and the rounds that are known. `str()` of it is a text."""

    graphs: tuple[GraphReport, ...]
    rounds: tuple[RoundReport, ...] = ()

    @property
    def declined(self) -> tuple[Declined, ...]:
        return tuple(left for graph in self.graphs for left in graph.declined)

    def to_json(self, indent: int | None = 2) -> str:
        """All of it, with the gathers, their places in the arena (bytes), and live bytes by what they are for."""
        return json.dumps(
            {"graphs": [each.as_dict() for each in self.graphs], "rounds": [each.as_dict() for each in self.rounds]},
            indent=indent,
        )

    def __str__(self) -> str:
        graphs = [f"graph {number} {graph}" for number, graph in enumerate(self.graphs)]
        rounds = [f"round of graphs {each}" for each in self.rounds]
        return "\n".join([*graphs, *rounds]) or "no graph ran yet"


def explain(model: nn.Module) -> Explanation:
    """What was compiled for `model`, after its first step. Equal blocks that are compiled one by one share a graph."""
    state = sharded_state(model)
    graphs = tuple(each for each in state.reports if isinstance(each, GraphReport))
    orders = state.timeline.orders if isinstance(state.timeline, Timeline) else ()
    return Explanation(graphs, tuple(_report_round(order, graphs) for order in orders))


def _report_round(order: Order, graphs: Sequence[GraphReport]) -> RoundReport:
    numbers = {id(graph.plan): number for number, graph in enumerate(graphs)}
    memory = Memory.of(as_scheduled(order.calls), order.steps)
    return RoundReport(
        tuple(numbers.get(id(call.plan)) for call in order.calls),
        tuple(tuple(step for step in steps if isinstance(step, Gather)) for steps in order.steps),
        peak_of(memory),
        _most_live(memory),
    )


def _most_live(memory: Memory) -> LiveBytes:
    return max(live_bytes(memory), key=lambda each: each.total, default=LiveBytes())


def report(graph: fx.Graph, plan: Plan, declined: Sequence[Declined]) -> GraphReport:
    """`graph` is the one from which `plan` was cut: its inputs know their units."""
    units = {node.name: unit_of(node) for node in graph.find_nodes(op="placeholder")}
    gradients = []
    for reduction in plan.reductions:
        shard = reduction.shard
        whole = any(isinstance(step, Accumulate) and step.shard == shard for step in plan.steps)
        num_written = sum(step.shard == shard for step in plan.grad_slices)
        num_products = sum(operand(operand(node)).name == shard for node in calls(graph, GRAD_MM))
        gradients.append(UnitGradients(units[shard], num_written, whole, num_products, reduction.nbytes))
    return GraphReport(plan, tuple(gradients), tuple(declined))


def _gather_as_dict(gather: Gather) -> dict[str, Any]:
    return {
        "unit": gather.unit,
        "buffer": gather.buffer,
        "dtype": dtype_names()[gather.dtype],
        "bytes": gather.nbytes,
        "offset": gather.offset,
        "stays": not gather.reshard,
        "graphs_ahead": gather.ahead,
        "kept_from": gather.kept_from,
        "for_window": gather.for_window,
    }


def _peak_as_dict(peak: Peak) -> dict[str, int]:
    return {"bytes": peak.nbytes, **asdict(peak)}
