"""`accumulate_bytes`: which units reduce in every backward, what a rank holds meanwhile, and that sums stay right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_passes as fsdp
from fsdp_passes.options import Options
from fsdp_passes.sharding.pending import PendingGrad
from tests.dist import pool
from tests.dist.models import build, compiled, full_grads, relative_error

# Of the unreduced gradients of each unit on two ranks; there is no padding, and no shard is as large as a whole.
BYTES = {"a": 8 * 8 * 4, "b": 24 * 8 * 4, "c": 24 * 24 * 4}
ALL = sum(BYTES.values())
# Limit: the units that fill it best.
DEFERRED = {
    None: "abc",
    0: "",
    BYTES["a"]: "a",
    BYTES["c"] - 1: "ab",
    ALL - 1: "bc",
    ALL: "abc",
}
ROUNDING = 1e-6  # another order of an fp32 sum: norm of the difference over the norm


class Block(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Stack(nn.Module):
    """Three units of different sizes; the sizes of the inputs are nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (Block(*sizes, bias=False) for sizes in ((8, 8), (8, 24), (24, 24)))

    def forward(self, x: Tensor, names: str = "abc") -> Tensor:
        for name in names:
            x = getattr(self, name)(x)
        return x.square().mean()


@dataclass
class Window:
    """What was seen after each microbatch, and the gradients in the end.

    reduced: units whose gradients were reduced. held: see `held_bytes`.
    """

    reduced: list[str] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    pending: list[bool] = field(default_factory=list)
    grads: dict[str, Tensor | None] = field(default_factory=dict)


class _Reductions(TorchDispatchMode):
    """Elements of what each reduce-scatter reads, as torch dispatches them."""

    def __init__(self) -> None:
        super().__init__()
        self.elems: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "c10d::_reduce_scatter_base_":
            self.elems.append(args[1].numel())
        return func(*args, **(kwargs or {}))


def sharded() -> Any:
    model = fsdp.shard(build(Stack), units=["a", "b", "c"])
    assert {row.unit: row.num_elems * 4 for row in fsdp.summary(model).groups} == BYTES
    assert all(row.padding_elems == 0 for row in fsdp.summary(model).groups)
    return model


def whole_model(model: Any, **options: Any) -> Callable[..., Tensor]:
    return compiled(model, verify=1, **options)


def block_by_block(model: Any, **options: Any) -> Callable[..., Tensor]:
    for block in model.children():
        block.compile(backend="fsdp_opt", options={"codegen": "fx", **options})
    return model


def window(model: Any, run: Callable[..., Tensor], calls: tuple[str, ...] = ("abc",) * 3) -> Window:
    """A microbatch for each of `calls`, of which the last one synchronises."""
    seen = Window()
    for number, names in enumerate(calls):
        microbatch(model, run, seen, number, number == len(calls) - 1, names)
    seen.grads = {name: None if grad is None else grad.clone() for name, grad in full_grads(model).items()}
    return seen


def microbatch(
    model: Any, run: Callable[..., Tensor], seen: Window, number: int, sync: bool, names: str = "abc"
) -> None:
    backward(model, forward(run, number, names), seen, sync)


def forward(run: Callable[..., Tensor], number: int, names: str = "abc") -> Tensor:
    return run(inputs(number, dist.get_rank()), names)


def inputs(number: int, rank: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * number + rank))


def backward(model: Any, loss: Tensor, seen: Window, sync: bool) -> None:
    with contextlib.nullcontext() if sync else model.no_sync(), _Reductions() as reductions:
        loss.backward()
    units = {size // 4: unit for unit, size in BYTES.items()}
    seen.reduced.append("".join(sorted(units[elems] for elems in reductions.elems)))
    seen.held.append(held_bytes(model))
    seen.pending.append(all(isinstance(p.grad, PendingGrad) for p in model.parameters()))


def held_bytes(model: Any) -> int:
    """Bytes of the storages into which groups have written gradients, and which they keep."""
    buffers = [g.gradients.buffer for g in model._fsdp_model.groups if g.gradients.buffer is not None]
    storages = [buffer.slice(piece).untyped_storage() for buffer in buffers for piece in buffer.written]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def is_close(got: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> bool:
    return all(_close(got[name], grad) for name, grad in expected.items())


def _close(got: Tensor | None, expected: Tensor | None) -> bool:
    if got is None or expected is None:
        return got is expected
    return relative_error(got, expected) <= ROUNDING


def _two_windows(compile: Any, grad_path: str, limit: int | None) -> dict[str, Any]:
    """The second window adds to the gradients of the first one."""
    model = sharded()
    run = compile(model, grad_path=grad_path, accumulate_bytes=limit)
    windows = [window(model, run), window(model, run)]
    table = fsdp.summary(model)
    return {
        "windows": windows,
        "undeferred": "".join(table.undeferred_units),
        "accumulated": table.accumulated_bytes,
    }


def _by_limit(compile: Any, grad_path: str, limits: list[int | None]) -> dict[int | None, dict[str, Any]]:
    results = {}
    for limit in limits:
        torch._dynamo.reset()
        results[limit] = _two_windows(compile, grad_path, limit)
    return results


@pytest.mark.parametrize(
    "compile, grad_path, limits",
    [
        (whole_model, "views", list(DEFERRED)),
        (whole_model, "cat_last", [None, 0, ALL - 1]),
        (whole_model, "cat", [None, 0, ALL - 1]),
        (block_by_block, "views", [None, 0, ALL - 1]),
    ],
)
def test_units_beyond_the_limit_reduce_in_every_backward(
    compile: Any, grad_path: str, limits: list[int | None]
) -> None:
    for results in pool.run(2, _by_limit, compile, grad_path, limits):
        for limit in limits:
            result, deferred = results[limit], DEFERRED[limit]
            undeferred = "".join(unit for unit in "abc" if unit not in deferred)
            held = sum(BYTES[unit] for unit in deferred)
            assert limit is None or held <= limit
            assert (result["undeferred"], result["accumulated"]) == (undeferred, held), limit
            for number, seen in enumerate(result["windows"]):
                assert seen.reduced == [undeferred, undeferred, "abc"], limit
                assert seen.held == [held, held, 0], limit
                assert seen.pending == [True, True, False], limit
                expected = results[None]["windows"][number].grads
                assert is_close(seen.grads, expected), (limit, number)
                if deferred == "abc":
                    assert all(torch.equal(seen.grads[name], grad) for name, grad in expected.items()), limit


def _a_block_that_ends_early(limit: int | None) -> list[Window]:
    """`c` is used in the first microbatch alone; and, in another window, in the last one alone."""
    model = sharded()
    run = whole_model(model, accumulate_bytes=limit)
    windows = []
    for calls in (("abc", "ab", "ab"), ("ab", "ab", "abc"), ("ab", "ab")):
        windows.append(window(model, run, calls))
        model.zero_grad()
    return windows


def _unsharded(calls: tuple[str, ...]) -> dict[str, Tensor | None]:
    """Gradients of one process that sees the inputs of both ranks."""
    model = build(Stack)
    for number, names in enumerate(calls):
        for rank in range(2):
            (model(inputs(number, rank), names) / 2).backward()
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("limit", [None, 0, BYTES["a"]])
def test_a_block_need_not_be_used_in_every_microbatch(limit: int | None) -> None:
    for first, last, never in pool.run(2, _a_block_that_ends_early, limit):
        assert is_close(first.grads, _unsharded(("abc", "ab", "ab")))
        assert is_close(last.grads, _unsharded(("ab", "ab", "abc")))
        assert never.grads["c.weight"] is None
        assert is_close(never.grads, _unsharded(("ab", "ab")))


def _zero_grad_in_the_middle(limit: int, set_to_none: bool) -> dict[str, bool]:
    """Gradients of before are gone: reduced ones, and those that are not."""
    model = sharded()
    run = whole_model(model, accumulate_bytes=limit)
    clean = window(model, run).grads
    model.zero_grad()
    seen = Window()
    for number in (3, 4):
        microbatch(model, run, seen, number, sync=False)
    model.zero_grad(set_to_none)
    gone = all(p.grad is None or (not set_to_none and not bool(p.grad.any())) for p in model.parameters())
    freed = held_bytes(model) == 0
    again = window(model, run).grads
    return {"gone": gone, "freed": freed, "clean": all(torch.equal(again[name], clean[name]) for name in clean)}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("limit", [0, BYTES["a"]])
def test_zero_grad_in_the_middle_of_a_window_discards(limit: int, set_to_none: bool) -> None:
    expected = {"gone": True, "freed": True, "clean": True}
    assert pool.run(2, _zero_grad_in_the_middle, limit, set_to_none) == [expected] * 2


def _two_models() -> list[list[str]]:
    """Models of the same code, with a limit each: forwards of both, then backwards of both."""
    models = [sharded(), sharded()]
    runs = [whole_model(model, accumulate_bytes=limit) for model, limit in zip(models, (0, None), strict=True)]
    windows = [Window(), Window()]
    for number in range(3):
        losses = [forward(run, number) for run in runs]
        for model, loss, seen in zip(models, losses, windows, strict=True):
            backward(model, loss, seen, sync=number == 2)
    return [seen.reduced for seen in windows]


def test_each_model_keeps_its_own_limit() -> None:
    assert pool.run(2, _two_models) == [[["abc"] * 3, ["", "", "abc"]]] * 2


@pytest.mark.parametrize("value", [-1, 1.5, "1", True, [0]])
def test_what_is_no_number_of_bytes_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"options\['accumulate_bytes'\]: expected None or a number of bytes, got "):
        Options.parse({"accumulate_bytes": value})
