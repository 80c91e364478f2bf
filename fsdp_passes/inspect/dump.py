"""Graphs and plans as files: `<dump_dir>/rank<r>/graph<g>.<fwd|bwd>.<NN>.<stage or pass>.txt`.

What graphs do once the order is known in which they run is `<dump_dir>/rank<r>/order<n>.txt`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch import fx

from fsdp_passes.ir.text import dump
from fsdp_passes.schedule.lifetime import Memory
from fsdp_passes.schedule.live_bytes import peak_of
from fsdp_passes.schedule.plan import Call, Plan, Step
from fsdp_passes.schedule.plan_text import dump_order, dump_plan


@dataclass(frozen=True)
class DumpFolder:
    """Where this rank writes one captured graph, as number `graph`; nowhere when `path` is None."""

    path: Path | None
    graph: int = 0

    @classmethod
    def next_graph(cls, dump_dir: Path | None) -> DumpFolder:
        """The next free number in `<dump_dir>/rank<r>`, which is made if need be."""
        if dump_dir is None:
            return cls(None)
        rank = dist.get_rank() if dist.is_initialized() else 0
        path = dump_dir / f"rank{rank}"
        path.mkdir(parents=True, exist_ok=True)
        numbers = [int(found[1]) for file in path.iterdir() if (found := re.match(r"graph(\d+)\.", file.name))]
        return cls(path, max(numbers, default=-1) + 1)

    def write_order(self, calls: Sequence[Call], steps: Sequence[Sequence[Step]]) -> None:
        """What `calls`, that run one after another, do then: `<dump_dir>/rank<r>/order<n>.txt`."""
        if self.path is not None:
            number = len(list(self.path.glob("order*.txt")))
            graphs = [(call.plan.direction, each) for call, each in zip(calls, steps, strict=True)]
            text = dump_order(graphs, peak_of(Memory.of(calls, steps)))
            (self.path / f"order{number}.txt").write_text(text, encoding="ascii")

    def stages_of(self, direction: str) -> GraphDumps:
        return GraphDumps(self, direction)


@dataclass
class GraphDumps:
    """Writes the stages of one graph and direction, numbered in order."""

    folder: DumpFolder
    direction: str
    _num_stages: int = field(default=0, init=False)

    def write_graph(self, stage: str, gm: fx.GraphModule) -> None:
        self._write(stage, lambda: dump(gm))

    def write_plan(self, plan: Plan) -> None:
        self._write("plan", lambda: dump_plan(plan))

    def _write(self, stage: str, text: Callable[[], str]) -> None:
        if self.folder.path is None:
            return
        name = f"graph{self.folder.graph}.{self.direction}.{self._num_stages:02}.{stage}.txt"
        (self.folder.path / name).write_text(text(), encoding="ascii")
        self._num_stages += 1
