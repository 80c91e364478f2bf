"""Graphs and plans as files: `<dump_dir>/rank<r>/graph<g>.<fwd|bwd>.<NN>.<stage or pass>.txt`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch import fx

from fsdp_passes.ir.text import dump
from fsdp_passes.schedule.plan import Plan
from fsdp_passes.schedule.plan_text import dump_plan


@dataclass
class GraphDumps:
    """Writes the stages of one graph and direction, numbered in order; nothing when `folder` is None."""

    folder: Path | None
    graph: int
    direction: str
    _stages: int = field(default=0, init=False)

    def write_graph(self, stage: str, gm: fx.GraphModule) -> None:
        self._write(stage, lambda: dump(gm))

    def write_plan(self, plan: Plan) -> None:
        self._write("plan", lambda: dump_plan(plan))

    def _write(self, stage: str, text) -> None:
        if self.folder is None:
            return
        path = self.folder / f"graph{self.graph}.{self.direction}.{self._stages:02}.{stage}.txt"
        path.write_text(text(), encoding="ascii")
        self._stages += 1


def open_folder(dump_dir: Path | None) -> tuple[Path | None, int]:
    """This rank's folder, made if need be, and the number of the next graph in it."""
    if dump_dir is None:
        return None, 0
    rank = dist.get_rank() if dist.is_initialized() else 0
    folder = dump_dir / f"rank{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(found[1]) for path in folder.iterdir() if (found := re.match(r"graph(\d+)\.", path.name))]
    return folder, max(numbers, default=-1) + 1
