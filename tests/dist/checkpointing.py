"""A model with every kind of parameter, trained in three kinds of sharding, and what its checkpoints hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import fsdp_passes as fsdp
from tests.dist.models import LENGTH, VOCAB, WIDTH, build, next_token_loss

_FULL = StateDictOptions(full_state_dict=True)


class _Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.float()


class Odd(nn.Module):
    """Tied, frozen, 0-dim, 3-D, bfloat16 and one-element parameters, and a buffer."""

    count: Tensor

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.cube = nn.Parameter(torch.rand(3, 5, 7))
        self.bf16 = _Half()
        self.tiny = nn.Parameter(torch.rand(1))
        self.head = nn.Linear(width, VOCAB)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(2))

    def forward(self, tokens: Tensor) -> Tensor:
        self.count += 1
        x = self.embed(tokens)
        x = x + self.frozen(x) * self.scale + F.pad((self.cube * self.cube).sum((0, 1)), (0, 1))
        return self.head(self.bf16(x) + self.tiny)


@dataclass
class Run:
    """A model in training. `full`: the whole values of its state; `load_full` sets them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler

    def train(self, steps: int) -> list[float]:
        """The losses of steps on the same data on every rank, so that all kinds and world sizes train alike."""
        losses = []
        for _ in range(steps):
            seed = int(self.scheduler.last_epoch)
            tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
            loss = next_token_loss(self.model, tokens)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        """What dcp.save takes."""
        return fsdp.state_dict(self.model, self.optimizer)

    def load(self, folder: str) -> None:
        fsdp.load_state_dict(self.model, self.optimizer, folder)

    def full(self) -> dict[str, Any]:
        optim = fsdp.full_optimizer_state_dict(self.model, self.optimizer)
        return {"model": fsdp.full_state_dict(self.model), "optim": optim}

    def load_full(self, full: dict[str, Any]) -> None:
        fsdp.load_state_dict(self.model, self.optimizer, full)


class TorchRun(Run):
    """By torch's own functions: a plain model, or one of FSDP2."""

    def state(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load(self, folder: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    def full(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer, options=_FULL)
        return {"model": model, "optim": optim}

    def load_full(self, full: dict[str, Any]) -> None:
        model, optim = full["model"], full["optim"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optim, options=_FULL)


def ours(lr: float = 0.01, meta: bool = False) -> Run:
    with torch.device("meta" if meta else "cpu"):
        model = build(Odd)
    return _run(Run, fsdp.shard(model), lr)


def fsdp2(lr: float = 0.01) -> Run:
    model: Any = build(Odd)
    fully_shard(model.bf16)
    fully_shard(model, ignored_params={model.scale})  # it refuses 0-dim parameters
    return _run(TorchRun, model, lr)


def plain(lr: float = 0.01) -> Run:
    return _run(TorchRun, build(Odd), lr)


KINDS: dict[str, Callable[..., Run]] = {"ours": ours, "fsdp2": fsdp2, "plain": plain}


def _run(cls: type[Run], model: nn.Module, lr: float) -> Run:
    params = [param for param in model.parameters() if param.requires_grad]
    decayed = [param for param in params if param.dim() > 1]
    others = [param for param in params if param.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=lr)
    return cls(model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))


def differences(got: Any, expected: Any, path: str = "") -> list[str]:
    """Where nested dicts and lists of values differ, bit for bit."""
    if isinstance(expected, dict):
        paths = [f"{path}.{key}" for key in got.keys() ^ expected.keys()]
        common = [key for key in expected if key in got]
        return paths + [each for key in common for each in differences(got[key], expected[key], f"{path}.{key}")]
    if isinstance(expected, list) and len(got) == len(expected):
        pairs = zip(got, expected, strict=True)
        return [each for i, pair in enumerate(pairs) for each in differences(*pair, f"{path}.{i}")]
    if isinstance(expected, Tensor):
        same = got.dtype == expected.dtype and torch.equal(got.cpu(), expected.cpu())
        return [] if same else [path]
    return [] if got == expected else [path]
