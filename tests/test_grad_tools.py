"""The tools that measure gradients: they run at the smallest sizes, and return what they promise."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import bench
import gpu_check
import pytest
import torch

CHECKOUT = Path(__file__).resolve().parent.parent
TINY = {"layers": 1, "hidden": 16, "heads": 2, "kv-heads": 1, "intermediate": 24, "vocab": 32, "seq": 4}


def run_tool(name: str, folder: Path, *flags: str) -> tuple[dict[str, Any], str]:
    """What the tool writes as JSON, and what it prints."""
    results = folder / "results.json"
    command = [sys.executable, str(CHECKOUT / "tools" / name), f"--json={results}", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=240)
    return json.loads(results.read_text()), done.stdout


def test_bench_times_each_grad_path_for_each_number_of_microbatches(tmp_path):
    flags = ["--microbatches", "1", "2", "--repeats", "2", "--codegen", "fx"]
    results, printed = run_tool("bench.py", tmp_path, *flags, *(f"--{name}={size}" for name, size in TINY.items()))
    kinds = [(each["microbatches"], each["grad_path"]) for each in results["times"]]
    assert kinds == [(count, path) for count in (1, 2) for path in ("cat", "cat_last", "views")]
    for each in results["times"]:
        assert list(each) == [field.name for field in fields(bench.Times)]
        assert 0 < each["wall_p10_s"] <= each["wall_s"] <= each["wall_p90_s"]
        assert 0 < each["cpu_p10_s"] <= each["cpu_s"] <= each["cpu_p90_s"]
    assert (results["codegen"], results["dtype"], results["world_size"]) == ("fx", "bf16", 1)
    assert results["ratios"] == bench.ratios([bench.Times(**each) for each in results["times"]])
    assert printed.rstrip() == bench.report([bench.Times(**each) for each in results["times"]])


def test_bench_compares_medians_with_cat():
    def times(grad_path: str, *spent: tuple[float, float]) -> bench.Times:
        return bench.Times(8, grad_path, *bench._percentiles(list(spent)))

    cat = times("cat", (1.0, 10.0), (3.0, 30.0), (2.0, 20.0))
    views = times("views", (1.0, 5.0), (1.0, 5.0), (9.0, 6.0))
    assert (cat.wall_s, cat.cpu_s) == (2.0, 20.0)
    assert (cat.wall_p10_s, cat.cpu_p90_s) == pytest.approx((1.2, 28.0))
    assert bench.ratios([cat, views]) == [{"microbatches": 8, "grad_path": "views", "wall": 2.0, "cpu": 4.0}]
    assert "8 microbatches: cat / views = 2.000 wall, 4.000 CPU" in bench.report([cat, views])


def test_gpu_check_measures_each_kind_on_a_cpu_too(tmp_path):
    flags = ["--device=cpu", "--small", "--codegen=fx", "--microbatches=2", "--repeats=1"]
    results, printed = run_tool("gpu_check.py", tmp_path, *flags)
    assert (results["device"], results["torch"], results["different"]) == ("cpu", torch.__version__, [])
    assert [(row["grad_path"], row["wgrad"]) for row in results["rows"]] == list(gpu_check.KINDS)
    assert all(list(row) == [field.name for field in fields(gpu_check.Row)] for row in results["rows"])
    assert [row["difference"] == 0 for row in results["rows"]] == [True, True, True, False]
    assert 0 < results["rows"][-1]["difference"] < 1e-2  # products that are not rounded to bf16
    assert all(row["window_s"] > 0 and row["peak_reserved_bytes"] is None for row in results["rows"])
    assert printed.rstrip().endswith(gpu_check.report([gpu_check.Row(**row) for row in results["rows"]]))


def test_gpu_check_tells_which_gradients_differ(monkeypatch):
    """Each grad_path runs twice: "cat", "cat_last", "views"."""
    found = iter([1.0, 1.0, 2.0, 2.0, 1.0, float("nan")])
    monkeypatch.setattr(gpu_check, "build", lambda *args, **options: (torch.nn.Identity(), lambda microbatches: None))
    monkeypatch.setattr(gpu_check, "gradients", lambda model: [torch.tensor(next(found))])
    assert gpu_check.find_different(gpu_check.SMALL, torch.device("cpu")) == ["cat_last", "views"]
