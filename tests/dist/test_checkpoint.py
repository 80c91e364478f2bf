"""Checkpoints of ours, of FSDP2 and of plain models load into each other, at any world size, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.dist import pool
from tests.dist.checkpointing import KINDS, differences

WORLD_SIZES = (1, 2, 3)


def _write(root: str) -> None:
    """For each kind a checkpoint after two steps, and its whole values."""
    for kind, make in KINDS.items():
        run = make()
        run.train(2)
        folder = f"{root}/{kind}-{dist.get_world_size()}"
        dcp.save(run.state(), checkpoint_id=folder)
        full = run.full()
        if dist.get_rank() == 0:
            torch.save(full, f"{folder}.full")


def _read(root: str, writers: list[str]) -> list[str]:
    """For each kind of reader what is not as it was written, or goes on otherwise than after loading whole values."""
    wrong = []
    for kind, make in KINDS.items():
        for writer in writers:
            if "ours" not in (kind, writer.partition("-")[0]):
                continue
            expected: Any = torch.load(f"{root}/{writer}.full")
            loaded, reference = make(lr=0.5), make(lr=0.5)
            loaded.load(f"{root}/{writer}")
            wrong += [f"{writer} -> {kind}: {path}" for path in differences(loaded.full(), expected)]
            reference.load_full(expected)
            if loaded.train(2) != reference.train(2) or differences(loaded.full(), reference.full()):
                wrong.append(f"{writer} -> {kind}: goes on otherwise")
    return wrong


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for world_size in WORLD_SIZES:
        pool.run(world_size, _write, str(root))
    return root


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_round_trip_between_kinds_and_world_sizes(written: Path, world_size: int) -> None:
    writers = [f"{kind}-{size}" for kind in KINDS for size in WORLD_SIZES]
    for wrong in pool.run(world_size, _read, str(written), writers):
        assert wrong == []
