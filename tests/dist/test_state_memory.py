"""What a rank holds while a model of 268 MB is loaded and saved: bytes as tools/alloc_meter.c counts them."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from memory import open_meter
from torch import Tensor, nn

import fsdp_passes as fsdp
from tests.dist import metered, pool

BLOCKS, WIDTH, HIDDEN = 8, 1024, 4096
KINDS = ("state dict", "initial values", "safetensors")


def _stack() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)) for _ in range(BLOCKS))
    )


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return _stack()


def _loading_bytes(kind: str, folder: str) -> dict[str, int]:
    """On a rank: its shards, the largest unit, and the peak above what was held before there was a model."""
    given = {}
    if kind != "initial values" and dist.get_rank() == 0:
        given = {name: torch.full(value.shape, 0.5) for name, value in _on_meta().state_dict().items()}
    if kind == "safetensors":
        given = _stored(given, folder)
    loads: dict[str, Callable[[Any], None]] = {
        "state dict": lambda model: fsdp.load_full_state_dict(model, given or None),
        "initial values": lambda model: fsdp.load_full_state_dict(model, None),
        "safetensors": lambda model: fsdp.load_safetensors(model, folder),
    }
    gc.collect()
    models: list[Any] = []

    def load() -> None:
        models.append(fsdp.shard(_on_meta()))
        loads[kind](models[0])

    measured = _measured(load)
    shards = sum(param.local.nbytes for param in models[0].parameters())
    unit = sum(param.numel() * param.itemsize for param in models[0][0].parameters())
    return {"shards": shards, "unit": unit} | measured


def _stored(given: dict[str, Tensor], folder: str) -> dict[str, Tensor]:
    if given:
        safetensors.torch.save_file(given, Path(folder, "model.safetensors"))
    dist.barrier()
    return {}


def _checkpoint_bytes(folder: str) -> dict[str, dict[str, int]]:
    """On a rank, with an optimizer that keeps one number a parameter: of a save, and of a load into the same."""
    model = fsdp.shard(_on_meta())
    fsdp.load_full_state_dict(model, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param.data)
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    shards = 2 * sum(param.local.nbytes for param in model.parameters())
    unit = sum(param.numel() * param.itemsize for param in model[0].parameters())
    return {
        "save": {"shards": shards, "unit": unit}
        | _measured(lambda: dcp.save(fsdp.state_dict(model, optimizer), checkpoint_id=folder)),
        "load": {"shards": shards, "unit": unit} | _measured(lambda: fsdp.load_state_dict(model, optimizer, folder)),
    }


def _measured(call: Callable[[], Any]) -> dict[str, int]:
    """What `call` adds to what is held, at its peak and after its end: gloo's thread lets go a moment later."""
    meter = open_meter(torch.device("cpu"))
    meter.reset_peak()
    before = meter.live_bytes()
    call()
    peak = meter.peak_bytes() - before
    time.sleep(1)
    return {"peak": peak, "rest": meter.live_bytes() - before}


def main(world_size: int) -> None:
    """Print what each rank held, by kind of loading, then while it saved and loaded a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        held = {kind: pool.run(world_size, _loading_bytes, kind, folder) for kind in KINDS}
        checkpoint = pool.run(world_size, _checkpoint_bytes, str(Path(folder, "checkpoint")))
    print(json.dumps(held | {kind: [each[kind] for each in checkpoint] for kind in ("save", "load")}))


@pytest.fixture(scope="module")
def held() -> dict[str, list[dict[str, int]]]:
    return metered.run(__name__, "main(2)")


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_holds_its_shards_and_two_units(held: dict[str, list[dict[str, int]]], kind: str) -> None:
    """Rank 0 besides what it was given, which it held before."""
    for rank in held[kind]:
        assert rank["shards"] > 100e6
        assert rank["shards"] <= rank["rest"] < 1.01 * rank["shards"]
        assert rank["peak"] <= rank["shards"] + 2 * rank["unit"]


def test_files_are_read_piece_by_piece(held: dict[str, list[dict[str, int]]]) -> None:
    for rank in held["safetensors"]:
        assert rank["peak"] <= rank["shards"] + 8e6


@pytest.mark.parametrize("kind", ["save", "load"])
def test_a_checkpoint_takes_no_second_copy(held: dict[str, list[dict[str, int]]], kind: str) -> None:
    """Beside what the model and the optimizer hold: two units at most."""
    for rank in held[kind]:
        assert rank["shards"] > 200e6
        assert rank["peak"] <= 2 * rank["unit"]
        assert rank["rest"] < 0.01 * rank["shards"]
