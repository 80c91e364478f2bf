"""Hugging Face Accelerate trains a sharded model: it enters no_sync, clips, saves and resumes by its own calls."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import fsdp_passes as fsdp
from tests.dist import pool
from tests.dist.models import LENGTH, VOCAB, compiled, next_token_loss, shard_net

BATCHES, ACCUMULATION, BATCH = 16, 4, 2


def _tokens() -> Tensor:
    """For all ranks: a batch of this rank follows one of the next."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCAB, (BATCHES * BATCH * dist.get_world_size(), LENGTH), generator=generator)


def _parts() -> tuple[Any, Any, Any]:
    model = shard_net(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _by_hand() -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer, schedule = _parts()
    run, losses = compiled(model), []
    batches = _tokens().view(BATCHES, dist.get_world_size(), BATCH, LENGTH)[:, dist.get_rank()]
    for number, tokens in enumerate(batches):
        last = number % ACCUMULATION == ACCUMULATION - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = next_token_loss(run, tokens)
            (loss / ACCUMULATION).backward()
        losses.append(loss.item())
        if last:
            fsdp.clip_grad_norm_(model, 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return losses, fsdp.full_state_dict(model)


class _Training:
    """Accelerate's loop, as its documentation writes it."""

    def __init__(self) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=ACCUMULATION, step_scheduler_with_optimizer=False
        )
        self.model, optimizer, schedule = _parts()
        fsdp.use_full_state_dicts(self.model, optimizer)
        self.run = compiled(self.model)
        # Registered as it is: without evaluation_mode it would be wrapped by DistributedDataParallel.
        self.run = self.accelerator.prepare_model(compiled(self.model), evaluation_mode=True)
        loader = DataLoader(TensorDataset(_tokens()), batch_size=BATCH)
        self.optimizer, self.loader, self.schedule = self.accelerator.prepare(optimizer, loader, schedule)

    def train(self, first: int, stop: int) -> list[float]:
        losses = []
        loader = self.accelerator.skip_first_batches(self.loader, first) if first else self.loader
        for number, (tokens,) in enumerate(loader, first):
            if number == stop:
                break
            with self.accelerator.accumulate(self.run):
                loss = next_token_loss(self.run, tokens)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                if self.accelerator.sync_gradients:
                    self.schedule.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def _by_accelerate(folder: str) -> dict[str, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in ranks.items()}):
        whole = _Training()
        losses = whole.train(0, BATCHES)
        half = _Training()
        first_half = half.train(0, BATCHES // 2)
        half.accelerator.save_state(folder)
        half.accelerator.wait_for_everyone()
        resumed = _Training()
        with torch.no_grad():
            for param in resumed.model.parameters():
                param.fill_(7)
        resumed.accelerator.load_state(folder)
        second_half = resumed.train(BATCHES // 2, BATCHES)
    return {
        "losses": losses,
        "resumed": first_half + second_half,
        "values": fsdp.full_state_dict(whole.model),
        "saved values": fsdp.full_state_dict(half.model),
        "resumed values": fsdp.full_state_dict(resumed.model),
    }


def test_accelerate_trains_as_the_loop_by_hand(tmp_path: Path) -> None:
    by_hand = pool.run(2, _by_hand)
    by_accelerate = pool.run(2, _by_accelerate, str(tmp_path))
    for (losses, values), theirs in zip(by_hand, by_accelerate, strict=True):
        assert theirs["losses"] == theirs["resumed"] == losses
        assert len(set(losses)) == BATCHES
        for name, value in values.items():
            assert torch.equal(theirs["values"][name], value), name
            assert torch.equal(theirs["resumed values"][name], value), name
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for name, value in saved.items():  # the tied weight is stored once
        assert torch.equal(value, by_accelerate[0]["saved values"][name.removeprefix("_orig_mod.")]), name
    assert len(saved) == len(by_accelerate[0]["saved values"]) - 1
