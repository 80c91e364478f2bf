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
    flags = ["--microbatches", "1", "2", "--repeats", "2", "--codegen", "fx", "--dtype", "bf16"]
    results, printed = run_tool("bench.py", tmp_path, *flags, *(f"--{name}={size}" for name, size in TINY.items()))
    kinds = [(each["microbatches"], each["grad_path"]) for each in results["times"]]
    assert kinds == [(count, path) for count in (1, 2) for path in ("cat", "cat_last", "views")]
    for each in results["times"]:
        assert list(each) == [field.name for field in fields(bench.Times)]
        for seconds in (each["wall_s"], each["cpu_s"]):
            assert 0 < seconds["p10"] <= seconds["median"] <= seconds["p90"]
    assert (results["codegen"], results["dtype"], results["world_size"]) == ("fx", "bf16", 1)
    # Each is measured by itself.
    assert len({each["wall_s"]["median"] for each in results["times"]}) == len(kinds)
    assert printed.rstrip() == bench.report([_read_times(each) for each in results["times"]])


def _read_times(row: dict[str, Any]) -> bench.Times:
    return bench.Times(
        **{name: bench.Spread(**value) if isinstance(value, dict) else value for name, value in row.items()}
    )


def test_bench_compares_with_cat_in_the_same_round():
    """Wall and CPU seconds of three rounds; the last is a slow one, for both."""
    rounds = [
        {"cat": (1.0, 10.0), "views": (2.0, 5.0)},
        {"cat": (3.0, 30.0), "views": (1.0, 10.0)},
        {"cat": (40.0, 80.0), "views": (20.0, 20.0)},
    ]
    cat, views = (bench.compare(rounds, 8, grad_path) for grad_path in ("cat", "views"))
    assert (views.wall_s.median, views.cpu_s.median) == (2.0, 10.0)
    assert (views.cat_by_this_wall.median, views.cat_by_this_cpu.median) == (2.0, 3.0)
    assert (views.cat_by_this_wall.p10, views.cat_by_this_cpu.p90) == pytest.approx((0.8, 3.8))
    assert cat.cat_by_this_wall == bench.Spread(1.0, 1.0, 1.0)
    last = bench.report([cat, views]).splitlines()[-1]
    assert last.split("  ")[-2:] == ["2.000 (0.800 to 2.800)", "3.000 (2.200 to 3.800)"]


@pytest.mark.slow
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
