"""Wrong schedules of real models are refused; what is not refused is right in every order that streams may choose."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_passes as fsdp
from fsdp_passes.runtime.order import as_scheduled
from fsdp_passes.runtime.timeline import Timeline
from fsdp_passes.schedule.order import schedule
from fsdp_passes.schedule.plan import Call, Gather, GradSlice, Reduce, Run, Step, WaitReduce
from fsdp_passes.schedule.plan_text import dump_plan, load_plan
from fsdp_passes.sharding.state import sharded_state
from tests.dist import pool
from tests.dist.models import Net, build
from tests.schedule.test_rules import Schedule, is_accepted, is_right, mutants

TOKENS = torch.arange(10).view(2, 5)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # in_flight
    "llama": (_llama, 2),
    "net": (lambda: Net(blocks=3), 3),
    "tied": (lambda: Net(tied=True), 2),
    "stays": (lambda: Net(checkpointing=True), 1),
    "block by block": (lambda: Net(blocks=3), 2),
    "concatenated": (Net, 2),
    "kept": (lambda: Net(blocks=3), 1),
}


def _learnt(name: str) -> list[tuple[str, dict[str, tuple[str, int]], frozenset[str]]]:
    """Of each graph of a round its plan, as text, to whom its shards belong, and what is kept for a window."""
    make, in_flight = MODELS[name]
    model: Any = fsdp.shard(build(make), reshard_after_forward=name != "stays")
    options = {"codegen": "fx", "in_flight": in_flight, "grad_path": "cat" if name == "concatenated" else "views"}
    options["keep_gathered_bytes"] = 2500 if name == "kept" else 0  # blocks have 1,024 bytes
    for each in model.blocks if name == "block by block" else [model]:
        each.compile(backend="fsdp_opt", options=options)
    for _ in range(2):
        out = model(TOKENS)
        getattr(out, "logits", out).sum().backward()
    (order,) = Timeline.of(sharded_state(model)).orders
    return [(dump_plan(call.plan), dict(call.owners), call.for_window) for call in as_scheduled(order.calls)]


@functools.cache
def learnt(name: str) -> list[Call]:
    on_rank_0, on_rank_1 = pool.run(2, _learnt, name)
    assert on_rank_0 == on_rank_1
    return [Call(load_plan(text), *rest) for text, *rest in on_rank_0]


def others(steps: Schedule) -> Iterator[Schedule]:
    """They do something else than the graphs: they leave out, double, swap or change what is computed, or sent."""
    for call, own in enumerate(steps):
        shards = sorted({step.shard for step in own if isinstance(step, Gather)})
        for at, step in enumerate(own):
            later = next((i for i in range(at + 1, len(own)) if type(own[i]) is type(step)), at)
            instead: list[list[Step]] = []
            match step:
                case Run():
                    instead = [
                        [],
                        [step, step],
                        [replace(step, drops=step.inputs)],
                        [replace(step, region=step.region + 1)],
                    ]
                case GradSlice():
                    instead = [[], [step, step], [replace(step, piece=step.piece + 1)]]
                case Reduce():
                    instead = [
                        [step, WaitReduce(step.shard), step],
                        [replace(step, dtype=torch.bfloat16)],
                        [replace(step, full_elems=step.full_elems // 2)],
                    ]
                case Gather():
                    another = next(shard for shard in [*shards, "none"] if shard != step.shard)
                    instead = [[replace(step, shard=another)], [replace(step, dtype=torch.float16)]]
                    instead += [
                        [replace(step, full_elems=step.full_elems // 2)],
                        [replace(step, reshard=not step.reshard)],
                    ]
            for each in (each for each in instead if each != [step]):
                yield *steps[:call], (*own[:at], *each, *own[at + 1 :]), *steps[call + 1 :]
            if isinstance(step, Run) and later != at:
                swapped = list(own)
                swapped[at], swapped[later] = own[later], own[at]
                yield *steps[:call], tuple(swapped), *steps[call + 1 :]


@pytest.mark.parametrize("name", MODELS)
def test_what_is_something_else_than_the_plans_is_refused(name: str) -> None:
    steps, in_flight = schedule(learnt(name), MODELS[name][1]), MODELS[name][1]
    accepted = [is_accepted(learnt(name), other, in_flight) for other in others(steps)]
    assert len(accepted) > 50 and not any(accepted)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_refused_is_right(name: str) -> None:
    """The rules refuse a mutant where some order of the streams goes wrong, and only there."""
    calls, in_flight = learnt(name), MODELS[name][1]
    steps = schedule(calls, in_flight)
    assert is_accepted(calls, steps, in_flight) and is_right(calls, steps, in_flight)
    verdicts = [is_accepted(calls, mutant, in_flight) for mutant in mutants(steps)]
    assert verdicts == [is_right(calls, mutant, in_flight) for mutant in mutants(steps)]
    assert len(verdicts) > 100 and sum(verdicts) < len(verdicts) / 3
