"""Large models: planned without values or ranks; and one of a billion parameters, trained by two ranks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_passes as fsdp
from tests.dist import pool

CHECKOUT = Path(__file__).resolve().parents[2]
SMALL = ["--layers=3", "--hidden=64", "--intermediate=128", "--heads=4", "--kv-heads=2", "--vocab=1000", "--seq=16"]


def planned(folder: Path, *flags: str) -> dict[str, Any]:
    """What tools/plan.py writes."""
    command = [sys.executable, str(CHECKOUT / "tools/plan.py"), f"--json={folder / 'plan.json'}", *flags]
    subprocess.run(command, check=True, timeout=600, env=os.environ | {"PYTHONPATH": str(CHECKOUT)})
    return json.loads((folder / "plan.json").read_text())


def check(plan: dict[str, Any], layers: int, layer_elems: int, embedding_elems: int, ranks: int) -> None:
    """Units are gathered in bf16, two at once, and reduced in fp32. Padding is less than 64 elements a rank."""
    padded = [elems + 64 * ranks for elems in (layer_elems, embedding_elems)]
    (known,) = plan["rounds"]
    assert known["num_gathers"] + known["num_kept"] == 2 * (layers + 2) + 1  # the embedding is not needed in backward
    assert 2 * (layer_elems + embedding_elems) <= known["peak"]["arena"] <= 2 * sum(padded) + 4096
    most = 4 * sum(sorted(padded)[-2:]) + 4 * padded[1]
    assert 4 * 2 * embedding_elems <= known["peak"]["bytes"] - known["peak"]["arena"] <= most


def test_a_model_is_planned_without_values_or_ranks(tmp_path: Path) -> None:
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64
    check(planned(tmp_path, *SMALL, "--world-size=8"), 3, layer, 64 * 1000, 8)


@pytest.mark.slow
def test_70_billion_parameters_among_1024_ranks_are_planned(tmp_path: Path) -> None:
    layer = 8192 * (8192 + 1024 + 1024 + 8192) + 3 * 8192 * 28672 + 2 * 8192
    check(planned(tmp_path), 80, layer, 8192 * 128256, 1024)


def _billion(grad_path: str) -> tuple[int, float, str]:
    """Parameters, loss, and a hash of this rank's gradients, after a window of two microbatches."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 20}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))
    fsdp.shard(model)  # in fp32: without instructions for bf16 its products take minutes
    torch.manual_seed(0)
    fsdp.load_full_state_dict(model, None)
    model.compile(backend="fsdp_opt", options={"codegen": "fx", "grad_path": grad_path})
    for number in range(2):
        tokens = (torch.arange(16).view(2, 8) * 37 + number) % 32000
        with contextlib.nullcontext() if number else model.no_sync():
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / 2).backward()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        assert parameter.grad is not None
        digest.update(parameter.grad.local.view(torch.uint8).numpy())
    return sum(parameter.numel() for parameter in model.parameters()), loss.item(), digest.hexdigest()


@pytest.mark.slow
def test_a_billion_parameters_have_the_same_gradients_written_and_concatenated() -> None:
    written, concatenated = (pool.run(2, _billion, grad_path, timeout=1200) for grad_path in ("views", "cat"))
    assert written == concatenated
    assert all(num_params > 1e9 and 5 < loss < 20 for num_params, loss, _ in written)
