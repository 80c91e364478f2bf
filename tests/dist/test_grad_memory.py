"""What a window of four microbatches holds at its peak, by `grad_path`: bytes as tools/alloc_meter.c counts them."""

from __future__ import annotations

import contextlib
import gc
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from memory import open_meter
from torch import Tensor, nn

import fsdp_passes as fsdp
from fsdp_passes.sharding.state import sharded_state
from tests.dist import metered, pool
from tests.dist.models import build, compiled

PATHS = ("views", "cat_last", "cat")
WIDTH, HIDDEN, PAIRS_PER_BLOCK = 512, (1152, 1216, 1280), 4
MICROBATCHES = 4


class Block(nn.Module):
    """Many weights of one size: the largest gradient is small, compared with what a unit's gradients take."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, hidden) for _ in range(PAIRS_PER_BLOCK))
        self.down = nn.ModuleList(nn.Linear(hidden, WIDTH, bias=False) for _ in range(PAIRS_PER_BLOCK))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.relu(up(x)))
        return x


def _stack() -> nn.Module:
    """Units of different sizes, the largest reduced first, when most else is still held."""
    return nn.Sequential(*(Block(hidden) for hidden in HIDDEN))


def _window_bytes(grad_path: str) -> dict[str, int]:
    """On a rank: bytes at rest, the peak of a window after that, and the parts of what it needs."""
    precision = fsdp.Precision(param=torch.bfloat16, reduce=torch.float32)
    model = fsdp.shard(build(_stack), precision=precision, reshard_after_forward=False)
    run, meter = compiled(model, grad_path=grad_path, verify=0), open_meter(torch.device("cpu"))
    _run_window(model, run, 2)  # compiles, and casts the shards
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    state = sharded_state(model)
    rest, groups = meter.live_bytes() - state.timeline.buffers.arena.nbytes, state.groups  # its memory stays
    meter.reset_peak()
    _run_window(model, run, MICROBATCHES)
    full_elems = sum(group.layout.full_elems for group in groups)
    return {
        "rest": rest,
        "peak": meter.peak_bytes(),
        "gathered": full_elems * precision.param.itemsize,
        "gradients": full_elems * precision.reduce.itemsize,
        "largest_gradient": max(parameter.numel() for parameter in model.parameters()) * precision.param.itemsize,
        "largest_unit": max(group.layout.full_elems for group in groups) * precision.param.itemsize,
    }


def _run_window(model: Any, run: Any, count: int) -> None:
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16)  # what forward keeps is too small for the counter, 16 KiB a tensor
    for number in range(count):
        with contextlib.nullcontext() if number == count - 1 else model.no_sync():
            (run(x).float().square().mean() / count).backward()


def main(world_size: int) -> None:
    """Print what rank 0 held, by grad_path."""
    print(json.dumps({grad_path: pool.run(world_size, _window_bytes, grad_path)[0] for grad_path in PATHS}))


@pytest.fixture(scope="module")
def held() -> dict[str, dict[str, int]]:
    """Measured on one rank, in a process with the counter."""
    return metered.run(__name__, "main(1)")


def needed(parts: dict[str, int]) -> int:
    """At rest, all parameters in the compute dtype, all gradients in the reduce dtype, and one gradient to be added."""
    return parts["rest"] + parts["gathered"] + parts["gradients"] + parts["largest_gradient"]


def test_written_gradients_take_their_buffers_and_one_gradient(held: dict[str, dict[str, int]]) -> None:
    """Nothing of a unit's size but the buffers."""
    assert 0.98 * needed(held["views"]) < held["views"]["peak"] <= 1.02 * needed(held["views"])


@pytest.mark.parametrize("grad_path", ["cat_last", "cat"])
def test_a_concatenation_takes_more(held: dict[str, dict[str, int]], grad_path: str) -> None:
    """The gradients of a unit once more: at least in the compute dtype, or in the reduce dtype less the parameters."""
    above_rest = {path: parts["peak"] - parts["rest"] for path, parts in held.items()}
    assert above_rest[grad_path] > above_rest["views"] + held["views"]["largest_unit"] / 3
