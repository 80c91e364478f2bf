"""The texts in graphs/ are what is made now. Accept a change with EXPECTTEST_ACCEPT=1."""

from __future__ import annotations

from pathlib import Path

import expecttest
import pytest
import torch

import fsdp_passes as fsdp
from fsdp_passes.ir.text import dump, load
from tests.capture.dumps import stage_of
from tests.capture.test_two_units import PRECISION, train_two_steps

GRAPHS = Path(__file__).parents[2] / "graphs"


def _train_llama_block(dump_dir: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        use_cache=False,
    )
    model = fsdp.shard(LlamaForCausalLM(config), precision=PRECISION)
    block = model.model.layers[0]
    block.compile(backend="fsdp_opt", options={"dump_dir": dump_dir, "verify": 2, "codegen": "fx"})
    model(input_ids=torch.ones(2, 8, dtype=torch.long)).logits.float().sum().backward()


TRAIN = {"two_units": train_two_steps, "llama_block": _train_llama_block}
STORED = [
    *(f"two_units.{way}.{what}" for way in ("fwd", "bwd") for what in ("captured", "gather_on_demand", "plan")),
    "two_units.order0",
    *(f"llama_block.bwd.{what}" for what in ("captured", "flat_grad_writes", "plan")),
]


@pytest.mark.parametrize("name", STORED)
def test_stored_graphs_are_what_is_made_now(name: str) -> None:
    path = GRAPHS / f"{name}.txt"
    model, _, stage = name.partition(".")
    text = stage_of(TRAIN[model], stage)
    if expecttest.ACCEPT:
        path.write_text(text, encoding="ascii")
    assert path.read_text(encoding="ascii") == text


def test_every_stored_graph_is_tested_and_described() -> None:
    assert {path.name for path in GRAPHS.glob("*.txt")} == {f"{name}.txt" for name in STORED}
    readme = (GRAPHS / "README.md").read_text(encoding="ascii")
    assert [name for name in STORED if f"`{name}.txt`" not in readme] == []


def test_the_stored_block_has_a_cat_before_and_none_after() -> None:
    before, after = (
        (GRAPHS / f"llama_block.bwd.{stage}.txt").read_text() for stage in ("captured", "flat_grad_writes")
    )
    assert ("aten.cat([view" in before, "reduce_grad" in before) == (True, True)
    assert ("aten.cat([view" in after, "reduce_grad" in after) == (False, False)
    assert after.count("fsdp_opt.grad_write(") == 9
    assert dump(load(after)) == after
