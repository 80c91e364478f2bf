"""Small models, and training loops over them, that the ranks of several tests run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_passes as fsdp

VOCAB, WIDTH, LENGTH = 11, 8, 5


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, norm, head: with shard()'s "auto" units embed, blocks.i, head and root (the norm)."""

    def __init__(self, blocks: int = 2, tied: bool = False, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(self.norm(x))


def build(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """The same values at every call and on every rank."""
    torch.manual_seed(0)
    return make(*args, **kwargs)


def microbatches(step: int, count: int, world_size: int, batch: int = 2) -> Iterator[Tensor]:
    """`count` tensors of tokens for all ranks: [world_size, batch, LENGTH]."""
    generator = torch.Generator().manual_seed(step)
    for _ in range(count):
        yield torch.randint(0, VOCAB, (world_size, batch, LENGTH), generator=generator)


def next_token_loss(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="fsdp_opt", options={"verify": 2, "codegen": "fx", **options})


def backward_window(model: Any, sharded: nn.Module | None, step: int, count: int) -> None:
    """One accumulation window: this rank's share on a sharded model, everything on an unsharded one."""
    world_size = dist.get_world_size()
    for number, tokens in enumerate(microbatches(step, count, world_size)):
        last = number == count - 1
        mine = tokens.flatten(0, 1) if sharded is None else tokens[dist.get_rank()]
        with contextlib.nullcontext() if sharded is None or last else sharded.no_sync():
            (next_token_loss(model, mine) / count).backward()


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def full_grads(model: nn.Module) -> dict[str, Tensor | None]:
    """Collective: whole gradients by name."""
    return {name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard_net(precision: fsdp.Precision | None = None, reshard: bool = True, **kwargs: Any) -> nn.Module:
    return fsdp.shard(build(Net, **kwargs), precision=precision, reshard_after_forward=reshard)
