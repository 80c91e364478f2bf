"""`wgrad`: "fp32" adds products up unrounded; all else is as "round" has it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn

import fsdp_passes as fsdp
from tests.dist import pool
from tests.dist.models import VOCAB, Net, build, full_grads, next_token_loss, relative_error

_F32, _B16 = torch.float32, torch.bfloat16
BF16 = fsdp.Precision(param=_B16, reduce=_F32)
PRODUCTS = {"blocks.0.up.weight", "blocks.0.down.weight", "head.weight"}
COUNTS = (1, 8)
Grads = dict[str, Tensor]
Loss = Callable[[Any, int], Tensor]  # of a model, on the microbatch of this number


def net(tied: bool = False) -> nn.Module:
    """With parameters that bf16 holds, so that models of all dtypes start from the same ones."""
    model = build(Net, blocks=1, tied=tied)
    for param in model.parameters():
        param.data = param.data.to(_B16).float()
    return model


def net_loss(model: Any, number: int) -> Tensor:
    return next_token_loss(model, torch.randint(0, VOCAB, (16, 9), generator=torch.Generator().manual_seed(number)))


def grads_of(model: nn.Module, loss: Loss, precision: fsdp.Precision | None = BF16, **options: Any) -> list[Grads]:
    """Gradients of `model`, which is sharded here, after a window of each of COUNTS; all ranks see the same inputs."""
    fsdp.shard(model, precision=precision)
    run = torch.compile(model, backend="fsdp_opt", options=options)
    return [window(model, run, loss, count) for count in COUNTS]


def window(model: Any, run: Any, loss: Loss, count: int) -> Grads:
    """The gradients of `count` microbatches; they are not kept in the model."""
    for number in range(count):
        waits = number < count - 1 and hasattr(model, "no_sync")
        with model.no_sync() if waits else contextlib.nullcontext():
            loss(run, number).backward()
    grads = {name: grad.clone() for name, grad in full_grads(model).items() if grad is not None}
    model.zero_grad()
    return grads


def differences(got: Grads, expected: Grads) -> set[str]:
    assert got.keys() == expected.keys()
    return {name for name in got if not torch.equal(got[name], expected[name])}


class Integers(nn.Module):
    """Activations are small integers, exact in bf16; gradients of the weights are larger ones, exact in fp32 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
        for param in self.parameters():
            param.data = torch.randint(-1, 2, param.shape).float()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def integers_loss(model: Any, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    x, tangent = (torch.randint(-2, 3, (4096, 8), generator=generator).float() for _ in range(2))
    return (model(x.to(_dtype_of(model))).float() * tangent).sum()


def _dtype_of(model: Any) -> torch.dtype:
    """In which a model computes: bf16, unless it is the reference."""
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype if dtype == torch.float64 else _B16


def _inexact(codegen: str) -> list[dict[str, set[str]]]:
    """For each of COUNTS the gradients that differ from those in float64."""
    reference = build(Integers).double()
    exact = [window(reference, reference, integers_loss, count) for count in COUNTS]
    grads = {w: grads_of(build(Integers), integers_loss, codegen=codegen, wgrad=w) for w in ("round", "fp32")}
    return [
        {wgrad: differences({n: g.double() for n, g in grads[wgrad][i].items()}, exact[i]) for wgrad in grads}
        for i in range(len(COUNTS))
    ]


@pytest.mark.parametrize("codegen", ["fx", "inductor"])
def test_products_are_exact_where_their_operands_are(codegen: str) -> None:
    for windows in pool.run(2, _inexact, codegen):
        for inexact in windows:
            products = {"up.weight", "down.weight"}
            assert products <= inexact["round"]
            assert not products & inexact["fp32"]


def _products_in_float64(model: nn.Module, count: int) -> Grads:
    """What `model`, in bf16 and uncompiled, multiplies for the gradients of its weights; multiplied and summed here."""
    inputs: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor) -> None:
        inputs[name] = x.detach().flatten(0, 1).double()

    def multiply(name: str, grad: Tensor) -> None:
        sums[name] = sums.get(name, 0) + grad.flatten(0, 1).double().t() @ inputs[name]

    for name, module in model.named_modules():
        if f"{name}.weight" in PRODUCTS:
            weight = f"{name}.weight"
            module.register_forward_hook(lambda _, args, out, weight=weight: keep(weight, args[0]))
            module.register_full_backward_hook(lambda _, grads, outs, weight=weight: multiply(weight, outs[0]))
    window(model, model, net_loss, count)
    return sums


def _errors(codegen: str) -> list[dict[str, float]]:
    """For each of COUNTS that of all products of a net against float64: norm of the difference over the norm."""
    exact = [_products_in_float64(net().bfloat16(), count) for count in COUNTS]
    with inductor_config.patch(emulate_precision_casts=True):  # the operands are then eager's
        grads = {w: grads_of(net(), net_loss, codegen=codegen, wgrad=w) for w in ("round", "fp32")}
    return [
        {wgrad: relative_error(_products(grads[wgrad][i]), _products(exact[i])) for wgrad in grads}
        for i in range(len(COUNTS))
    ]


def _products(grads: Grads) -> Tensor:
    return torch.cat([grads[name].flatten().double() for name in sorted(PRODUCTS)])


@pytest.mark.parametrize("codegen", ["fx", "inductor"])
def test_products_of_the_same_operands_are_a_hundred_times_closer_to_float64(codegen: str) -> None:
    (windows,) = pool.run(1, _errors, codegen)
    for errors in windows:
        assert errors["fp32"] < 0.01 * errors["round"]


def _compared(precision: fsdp.Precision | None, tied: bool) -> list[tuple[float, set[str]]]:
    """For each of COUNTS, "fp32" against "round": the largest error, and which gradients are not the same bits."""
    grads = {w: grads_of(net(tied), net_loss, precision, codegen="fx", wgrad=w) for w in ("round", "fp32")}
    pairs = zip(grads["fp32"], grads["round"], strict=True)
    return [(max(relative_error(a[name], b[name]) for name in b), differences(a, b)) for a, b in pairs]


@pytest.mark.parametrize("tied, changed", [(False, PRODUCTS), (True, PRODUCTS - {"head.weight"})])
def test_only_products_change(tied: bool, changed: set[str]) -> None:
    """A tied head is no product, but the sum of one with the gradient of the embedding."""
    for windows in pool.run(2, _compared, BF16, tied):
        assert [different for _, different in windows] == [changed, changed]


def test_in_fp32_there_is_nothing_to_round() -> None:
    (windows,) = pool.run(1, _compared, None, False)
    for error, _ in windows:
        assert error <= 1e-6  # sums of fp32 products in another order


def test_sums_in_bf16_stay_rounded() -> None:
    (windows,) = pool.run(1, _compared, fsdp.Precision(_B16, _B16), False)
    assert [different for _, different in windows] == [set(), set()]


def _round_beside_fp32() -> list[set[str]]:
    """What differs from the reference path where "round" is compiled beside "fp32"."""
    reference = grads_of(net(), net_loss, codegen="fx", grad_path="cat")
    grads_of(net(), net_loss, codegen="fx", wgrad="fp32")
    others = [grads_of(net(), net_loss, codegen="fx", **options) for options in ({}, {"wgrad": "round"})]
    return [differences(got, expected) for grads in others for got, expected in zip(grads, reference, strict=True)]


def test_round_is_the_default_and_the_reference() -> None:
    assert pool.run(1, _round_beside_fp32) == [[set()] * 4]


def _refusal() -> str:
    with pytest.raises(Exception) as refused:  # torch wraps what a backend raises
        grads_of(net(), net_loss, grad_path="cat", wgrad="fp32")
    return str(refused.value)


def test_fp32_needs_slices() -> None:
    assert "ValueError: options['wgrad']: expected 'round' with grad_path='cat'" in pool.run(1, _refusal)[0]
