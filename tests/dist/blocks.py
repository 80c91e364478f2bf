"""What users put into blocks: [batch, length, WIDTH] -> the same shape."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from tests.dist.models import WIDTH


class Mixer(nn.Module):
    """A norm and a projection, for blocks to use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> Tensor:
        """[batch, 2, length, WIDTH / 2]"""
        return self.mix(self.norm(x)).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)


class Dropout(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(F.gelu(self.mix(F.dropout(self.norm(x), 0.1))), 0.3)


class AttentionDropout(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        q = self.heads(x)
        return x + F.scaled_dot_product_attention(q, q, q, dropout_p=0.2).transpose(1, 2).flatten(2)


class Noise(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        noisy = self.mix(self.norm(x)) * torch.rand_like(x) + 0.1 * torch.randn_like(x)
        return x + noisy * torch.randint(1, 3, (WIDTH,)) + torch.bernoulli(torch.full((WIDTH,), 0.5))


@torch.library.custom_op("fsdp_passes_tests::sine", mutates_args=())
def sine(x: Tensor) -> Tensor:
    return x.sin()


@torch.library.custom_op("fsdp_passes_tests::sine_grad", mutates_args=())
def sine_grad(grad: Tensor, x: Tensor) -> Tensor:
    return grad * x.cos()


@torch.library.custom_op("fsdp_passes_tests::add_to", mutates_args=("total",))
def add_to(total: Tensor, x: Tensor) -> None:
    total.add_(x)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


sine.register_fake(torch.empty_like)
sine_grad.register_fake(lambda grad, x: torch.empty_like(x))
sine.register_autograd(lambda ctx, grad: sine_grad(grad, *ctx.saved_tensors), setup_context=_save)


class CustomOperator(Mixer):
    """It gets a transposed input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + sine(self.mix(self.norm(x)).transpose(1, 2)).transpose(1, 2)


class WritingOperator(Mixer):
    """It writes into a buffer, which is read afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        add_to(self.total, x.detach().mean((0, 1)))
        return x + self.mix(self.norm(x)) * self.total


class _DoubledGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, 2 * grad.flatten(0, 1).t() @ x.flatten(0, 1)


class AutogradFunction(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        return x + _DoubledGrad.apply(self.norm(x), self.mix.weight)


class Buffers(Mixer):
    """Buffers that forward writes, one of them read through a view that was made before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("average", torch.ones(WIDTH))
        self.statistics = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        before = self.average.view(1, 1, WIDTH)
        self.calls += 1
        self.average.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        y = self.mix(self.norm(self.statistics(x.transpose(1, 2)).transpose(1, 2)))
        return x + y * self.calls + 2 * before


class Constants(Mixer):
    """Tensors that the graph holds, and products that no fused kernel covers."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.mix(self.norm(x)) * torch.tensor([1.0, 2.0] * (WIDTH // 2))
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        weights = (q @ q.transpose(1, 2)).masked_fill(~causal, float("-inf")).softmax(-1)
        return x + weights @ q + torch.arange(WIDTH)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)


class FlexAttention(Mixer):
    """On the CPU torch has no backward for it."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.heads(x)
        y = flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + 0.1 * (i - j))
        return x + y.transpose(1, 2).flatten(2)


class Break(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x)
        torch._dynamo.graph_break()
        return x + self.norm(y) @ self.mix.weight
