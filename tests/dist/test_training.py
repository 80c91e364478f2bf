"""Training on one, two and three ranks gives the numbers of one process, and of FSDP2."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdp_passes as fsdp
from tests.dist import pool
from tests.dist.models import (
    Net,
    backward_window,
    build,
    compiled,
    full_grads,
    next_token_loss,
    relative_error,
    shard_net,
)

pytestmark = pytest.mark.slow

MICROBATCHES = (3, 1, 2)


def _worst_errors(checkpointing: bool, reshard: bool, compile: bool) -> tuple[float, float]:
    """Largest relative error of a gradient and of a parameter over three steps against one process."""
    reference = build(Net, checkpointing=False)
    model = shard_net(checkpointing=checkpointing, reshard=reshard)
    run = compiled(model) if compile else model
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (reference, model)]
    worst = 0.0
    for step, count in enumerate(MICROBATCHES):
        backward_window(run, model, step, count)
        backward_window(reference, None, step, count)
        grads = full_grads(model)
        worst = max(worst, *(relative_error(grads[n], p.grad) for n, p in reference.named_parameters()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    values = fsdp.full_state_dict(model)
    return worst, max(relative_error(values[name], p.detach()) for name, p in reference.named_parameters())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
def test_equals_one_process_on_the_concatenated_batch(world_size: int, checkpointing: bool, reshard: bool) -> None:
    for grad_error, param_error in pool.run(world_size, _worst_errors, checkpointing, reshard, True):
        assert grad_error <= 2e-6
        assert param_error <= 2e-6


def test_uncompiled_sharded_model_gives_the_same_numbers() -> None:
    for grad_error, param_error in pool.run(2, _worst_errors, True, True, False):
        assert grad_error <= 2e-6
        assert param_error <= 2e-6


def _llama(checkpointing: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
    )
    model = build(LlamaForCausalLM, config)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _llama_loss(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def _train_llama(run: Any, params: Any, sync: Any) -> None:
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for count in MICROBATCHES:
        for number in range(count):
            tokens = torch.randint(0, 67, (dist.get_world_size(), 2, 13), generator=generator)
            with sync(number == count - 1):
                (_llama_loss(run, tokens[dist.get_rank()]) / count).backward()
        optimizer.step()
        optimizer.zero_grad()


def _fsdp_opt_llama(checkpointing: bool, bf16: bool) -> dict[str, Tensor]:
    precision = fsdp.Precision(param=torch.bfloat16, reduce=torch.float32) if bf16 else None
    model = fsdp.shard(_llama(checkpointing), precision=precision)
    run = compiled(model)
    _train_llama(run, model.parameters(), lambda last: contextlib.nullcontext() if last else run.no_sync())
    return fsdp.full_state_dict(run)


def _fsdp2_llama(checkpointing: bool, bf16: bool) -> dict[str, Tensor]:
    model = _llama(checkpointing)
    dtypes = (torch.bfloat16, torch.float32) if bf16 else (None, None)
    policy = MixedPrecisionPolicy(*dtypes, cast_forward_inputs=False)
    for unit in (*model.model.layers, model.model.embed_tokens, model.lm_head, model):
        fully_shard(unit, mp_policy=policy)

    @contextlib.contextmanager
    def sync(last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        yield

    _train_llama(torch.compile(model, backend="eager"), model.parameters(), sync)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def _differences_from_fsdp2(checkpointing: bool, bf16: bool) -> list[str]:
    ours = _fsdp_opt_llama(checkpointing, bf16)
    torch._dynamo.reset()
    theirs = _fsdp2_llama(checkpointing, bf16)
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize("checkpointing, bf16", [(False, True), (True, True), (False, False)])
def test_parameters_are_bitwise_those_of_fsdp2(checkpointing: bool, bf16: bool) -> None:
    for different in pool.run(2, _differences_from_fsdp2, checkpointing, bf16, timeout=400):
        assert different == []


_ADAMW = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def _decayed(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """The usual rule: no decay for biases and norms, told by the number of dimensions."""
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def _clipped_training(kind: str, clip: bool) -> tuple[list[str], float, float]:
    """Every rank trains on the same batch, so that gradients equal the unsharded model's bit for bit."""
    reference, model = build(Net), shard_net()
    runs = {"unsharded": (reference, reference), "sharded": (model, compiled(model))}
    norms, values = {}, {}
    for name, (owner, run) in runs.items():
        optimizer = torch.optim.AdamW(_decayed(list(owner.parameters())), lr=1e-2, **_ADAMW[kind])
        for step in range(3):
            tokens = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(step))
            next_token_loss(run, tokens).backward()
            if clip:
                norms[name] = float(torch.nn.utils.clip_grad_norm_(owner.parameters(), 0.05))
            optimizer.step()
            optimizer.zero_grad()
        values[name] = owner.state_dict() if name == "unsharded" else fsdp.full_state_dict(owner)
    different = [n for n, v in values["unsharded"].items() if not torch.equal(v, values["sharded"][n])]
    errors = [relative_error(values["sharded"][n], v) for n, v in values["unsharded"].items()]
    norm_error = abs(norms["sharded"] / norms["unsharded"] - 1) if clip else 0.0
    return different, max(errors), norm_error


@pytest.mark.parametrize("kind", _ADAMW)
def test_adamw_with_a_decay_rule_is_bitwise_the_unsharded_one(kind: str) -> None:
    for different, _, _ in pool.run(2, _clipped_training, kind, False):
        assert different == []


def test_clipping_gives_the_unsharded_norm_and_parameters() -> None:
    for _, param_error, norm_error in pool.run(2, _clipped_training, "foreach", True):
        assert norm_error < 1e-6
        assert param_error < 1e-6


def _package_clip() -> tuple[float, float]:
    model = shard_net()
    twin = copy.deepcopy(model)
    for each in (model, twin):
        next_token_loss(each, torch.ones(2, 5, dtype=torch.long)).backward()
    return float(fsdp.clip_grad_norm_(model, 1.0)), float(torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0))


def test_clip_grad_norm_is_torchs_own() -> None:
    for ours, theirs in pool.run(2, _package_clip):
        assert ours == theirs > 0
