"""What really runs, seen by torch's profiler and by saved-tensor hooks, not by the package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

import fsdp_passes as fsdp
from fsdp_passes.codegen import variants
from fsdp_passes.schedule.plan_text import dump_plan, load_plan
from tests.dist import pool
from tests.dist.models import WIDTH, backward_window, build, compiled, shard_net

BF16 = fsdp.Precision(param=torch.bfloat16, reduce=torch.float32)


def _profiled_window(dump_dir: str, checkpointing: bool) -> dict[str, Any]:
    """A warm window of three microbatches of the small net."""
    model = shard_net(BF16, checkpointing=checkpointing)
    run = compiled(model, dump_dir=dump_dir)
    backward_window(run, model, step=0, count=1)
    return _profiled(lambda: backward_window(run, model, step=1, count=3))


def _profiled_demo_step(dump_dir: str, checkpointing: bool) -> dict[str, Any]:
    """A warm step of the demo, of three microbatches, on a smaller Llama."""
    import train  # tools/train.py

    sizes = "--layers 2 --hidden 32 --intermediate 48 --seq 16 --batch 1 --microbatches 3 --device cpu"
    flags = train.parse_flags([*sizes.split(), "--dump", dump_dir, *["--checkpoint"] * checkpointing])
    setup = train.Setup(torch.device("cpu"), True, (train.LlamaDecoderLayer,), flags.options)
    trainee = train.prepare(train.build_model(flags), "fsdp_opt", setup)
    optimizer = torch.optim.AdamW(trainee.model.parameters())
    batches = iter(torch.randint(0, 256, (6, 1, 16)))
    train.run_step(trainee, optimizer, batches, 3)
    return _profiled(lambda: train.run_step(trainee, optimizer, batches, 3))


def _profiled(step: Callable[[], Any]) -> dict[str, Any]:
    """How often each event occurs in `step`, and the matrix products that run outside of regions."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step()
    events = recorded.events()
    outside = [e.name for e in events if e.name in PRODUCTS and not _is_in_region(e)]
    return {"counts": Counter(e.name for e in events), "products outside": outside}


WORKLOADS = {"net": _profiled_window, "demo": _profiled_demo_step}
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", ATTENTION, f"{ATTENTION}_backward")


def _is_in_region(event: Any) -> bool:
    while event is not None:
        if event.name.startswith("fsdp_opt::region_"):
            return True
        event = event.cpu_parent
    return False


SLOW = [pytest.param("demo", checkpointing, marks=pytest.mark.slow) for checkpointing in (False, True)]


@pytest.mark.parametrize("workload, checkpointing", [("net", True), *SLOW])
def test_what_runs_is_the_printed_plan(tmp_path: Path, workload: str, checkpointing: bool) -> None:
    results = pool.run(2, WORKLOADS[workload], str(tmp_path), checkpointing)
    for rank, result in enumerate(results):
        plans = [load_plan(path.read_text()) for path in (tmp_path / f"rank{rank}").glob("*.plan.txt")]
        assert {plan.direction for plan in plans} == {"fwd", "bwd"}
        counts = result["counts"]
        (order,) = (tmp_path / f"rank{rank}").glob("order*.txt")
        gathers = [line for line in order.read_text().splitlines() if "= gather(" in line and "kept from" not in line]
        assert len(gathers) < sum(len(plan.gathers) for plan in plans)
        assert {name: count for name, count in counts.items() if name.startswith("c10d::")} == {
            "c10d::_allgather_base_": 3 * len(gathers),
            "c10d::_reduce_scatter_base_": sum(len(plan.reductions) for plan in plans),
            "c10d::allreduce_": 1,  # which parameters have a gradient on some rank
            "c10d::allgather_": 3 * len(plans) + 1,  # what ranks are about to send: in each graph, and at the end
        }
        assert sum(len(plan.reductions) for plan in plans) == 5
        regions = sum(count for name, count in counts.items() if name.startswith("fsdp_opt::region_"))
        assert regions == 3 * sum(len(plan.regions) for plan in plans)
        assert counts["fsdp_opt::unshard"] == counts["fsdp_opt::reduce_grad"] == 0
        assert counts["aten::mm"] > 0
        assert (counts[ATTENTION] > 0) == (counts[f"{ATTENTION}_backward"] > 0) == (workload == "demo")
        assert result["products outside"] == []


def test_plans_load_back_from_their_text(tmp_path: Path) -> None:
    pool.run(2, _profiled_window, str(tmp_path), False)
    for path in (tmp_path / "rank0").glob("*.plan.txt"):
        assert dump_plan(load_plan(path.read_text())) == path.read_text()


def test_ranks_print_the_same_graphs(tmp_path: Path) -> None:
    pool.run(2, _profiled_window, str(tmp_path), False)
    texts = [{p.name: p.read_text() for p in (tmp_path / f"rank{rank}").iterdir()} for rank in (0, 1)]
    assert texts[0] == texts[1]
    assert "graph0.bwd.08.plan.txt" in texts[0]


class CastsItsWeight(nn.Module):
    """Computes with an fp32 copy of its weight, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() @ self.weight.float()).sum(-1)


def _saved_bytes_of_cast() -> tuple[int, int]:
    model = fsdp.shard(build(CastsItsWeight), precision=BF16)
    return _bytes_saved(model, torch.ones(1, WIDTH, requires_grad=True)), fsdp.summary(model).groups[0].gathered_bytes


def test_no_copy_of_a_gathered_parameter_is_saved_when_resharding() -> None:
    for saved, gathered in pool.run(2, _saved_bytes_of_cast):
        assert saved < gathered


def _bytes_saved(model: nn.Module, inputs: Tensor) -> int:
    """Bytes of the storages that a compiled forward saves for backward, shards left out."""
    shards = {group.shard.untyped_storage().data_ptr() for group in model._fsdp_model.groups}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shards:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled(model)(inputs)
    return sum(saved.values())


def _saved_bytes(reshard: bool, checkpointing: bool) -> tuple[int, int]:
    """What a forward of one token saves, and the gathered bytes of one block, which are far more."""
    model = shard_net(BF16, reshard=reshard, checkpointing=checkpointing)
    gathered = min(row.gathered_bytes for row in fsdp.summary(model).groups if row.unit.startswith("blocks"))
    return _bytes_saved(model, torch.ones(1, 1, dtype=torch.long)), gathered


@pytest.mark.parametrize(("reshard", "checkpointing"), [(True, False), (True, True), (False, False)])
def test_no_view_of_a_gathered_buffer_is_saved(reshard: bool, checkpointing: bool) -> None:
    """Not even of a unit that stays gathered: that is the schedule's to keep, or to gather again."""
    for saved, gathered in pool.run(2, _saved_bytes, reshard, checkpointing):
        assert saved < gathered


def _settings_seen() -> list[int]:
    """max_fusion_size when regions are compiled: forward's where it is 3, backward's later, in a thread of its own."""
    run, seen = compiled(shard_net(BF16)), []
    compile_regions = variants.compile_regions

    def record(*args: Any) -> Any:
        seen.append(inductor_config.max_fusion_size)
        return compile_regions(*args)

    with mock.patch.object(variants, "compile_regions", record):
        with inductor_config.patch(max_fusion_size=3):
            loss = run(torch.ones(1, 1, dtype=torch.long)).float().sum()
        backward = Thread(target=loss.backward)
        backward.start()
        backward.join()
    return seen


def test_backward_is_compiled_with_the_settings_of_forward() -> None:
    (seen,) = pool.run(1, _settings_seen)
    assert len(seen) >= 2
    assert set(seen) == {3}
