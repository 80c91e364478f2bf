"""What really runs, seen by torch's profiler and by saved-tensor hooks, not by the package."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

import fsdp_passes as fsdp
from fsdp_passes.schedule.plan_text import dump_plan, load_plan
from tests.dist import pool
from tests.dist.models import backward_window, compiled, shard_net

BF16 = fsdp.Precision(param=torch.bfloat16, reduce=torch.float32)


def _profiled_window(dump_dir: str, checkpointing: bool) -> dict[str, Any]:
    """Events of one warm window of three microbatches, and the plans that were printed."""
    model = shard_net(BF16, checkpointing=checkpointing)
    run = compiled(model, dump_dir=dump_dir)
    backward_window(run, model, step=0, count=1)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        backward_window(run, model, step=1, count=3)
    events = recorded.events()
    outside = [e.name for e in events if e.name in ("aten::mm", "aten::addmm") and not _is_in_region(e)]
    return {"counts": Counter(e.name for e in events), "products outside": outside}


def _is_in_region(event: Any) -> bool:
    while event is not None:
        if event.name.startswith("fsdp_opt::region_"):
            return True
        event = event.cpu_parent
    return False


@pytest.mark.parametrize("checkpointing", [False, True])
def test_collectives_are_those_of_the_printed_plan(tmp_path: Path, checkpointing: bool) -> None:
    results = pool.run(2, _profiled_window, str(tmp_path), checkpointing)
    for rank, result in enumerate(results):
        plans = [load_plan(path.read_text()) for path in (tmp_path / f"rank{rank}").glob("*.plan.txt")]
        assert {plan.direction for plan in plans} == {"fwd", "bwd"}
        counts = result["counts"]
        assert counts["c10d::_allgather_base_"] == 3 * sum(len(plan.gathers) for plan in plans) > 0
        assert counts["c10d::_reduce_scatter_base_"] == sum(len(plan.reductions) for plan in plans) == 5
        regions = sum(count for name, count in counts.items() if name.startswith("fsdp_opt::region_"))
        assert regions == 3 * sum(len(plan.regions) for plan in plans)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_eager_kernels_never_run_and_products_run_in_regions(tmp_path: Path, checkpointing: bool) -> None:
    for result in pool.run(2, _profiled_window, str(tmp_path), checkpointing):
        assert result["counts"]["fsdp_opt::unshard"] == 0
        assert result["counts"]["fsdp_opt::reduce_grad"] == 0
        assert result["counts"]["aten::mm"] > 0
        assert result["products outside"] == []


def test_plans_load_back_from_their_text(tmp_path: Path) -> None:
    pool.run(2, _profiled_window, str(tmp_path), False)
    for path in (tmp_path / "rank0").glob("*.plan.txt"):
        assert dump_plan(load_plan(path.read_text())) == path.read_text()


def test_ranks_print_the_same_graphs(tmp_path: Path) -> None:
    pool.run(2, _profiled_window, str(tmp_path), False)
    texts = [{p.name: p.read_text() for p in (tmp_path / f"rank{rank}").iterdir()} for rank in (0, 1)]
    assert texts[0] == texts[1]
    assert "graph0.bwd.05.plan.txt" in texts[0]


def _saved_bytes(reshard: bool, checkpointing: bool) -> tuple[int, int]:
    """Bytes that forward saves for backward: in storages of at least a block's gather; and one such gather."""
    model = shard_net(BF16, reshard=reshard, checkpointing=checkpointing)
    gathered = min(row.gathered_bytes for row in fsdp.summary(model).groups if row.unit.startswith("blocks"))
    shards = {group.shard.untyped_storage().data_ptr() for group in model._fsdp_model.groups}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shards:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.ones(1, 1, dtype=torch.long)  # activations of a few bytes
    run = compiled(model)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run(tokens)
        del output
    return sum(nbytes for nbytes in saved.values() if nbytes >= gathered), gathered


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_view_of_a_gathered_buffer_is_saved_when_resharding(checkpointing: bool) -> None:
    for saved, _ in pool.run(2, _saved_bytes, True, checkpointing):
        assert saved == 0


def test_gathered_buffers_are_saved_without_resharding() -> None:
    for saved, gathered in pool.run(2, _saved_bytes, False, False):
        assert saved >= 2 * gathered
