"""Models that are hard to capture: graph breaks, dynamic shapes, mutated buffers, tied weights, blocks one by one."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fsdp_passes as fsdp
from tests.dist import pool
from tests.dist.models import WIDTH, Block, Net, build, compiled, full_grads, relative_error


def _errors(make: Callable[..., nn.Module], inputs: Tensor, compile: Callable[[nn.Module], Any]) -> dict[str, float]:
    """Relative error of each gradient after two steps' backwards; every rank sees the same inputs."""
    reference = build(make)
    model = fsdp.shard(build(make))
    run = compile(model)
    for each in (run, reference):
        for _ in range(2):
            each(inputs).square().mean().backward()
    grads = full_grads(model)
    for name, buffer in reference.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name
    return {name: _error(grads[name], p.grad) for name, p in reference.named_parameters()}


def _error(got: Tensor | None, expected: Tensor | None) -> float:
    if got is None or expected is None:
        return 0.0 if got is expected else float("inf")
    return relative_error(got, expected)


class GraphBreak(nn.Module):
    """`first` is read in the first graph, in eager code between the graphs, and in the second graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(F.gelu(self.first(x)))
        return self.second(x @ self.first.weight)

    @torch.compiler.disable
    def between(self, x: Tensor) -> Tensor:
        return x * self.first.bias.exp()


class EagerFirst(nn.Module):
    """Eager code reads the unit, then one graph does: in backward that graph comes first, and is not the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.before(x))

    @torch.compiler.disable
    def before(self, x: Tensor) -> Tensor:
        return x * self.first.bias.exp()


class Convolutions(nn.Module):
    """BatchNorm mutates its buffers in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class ReadsParameters(nn.Module):
    """Asks its parameters for their dtype and values in forward, as model code does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_parameter("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in self.parameters())
        return self.inner(x.to(next(self.parameters()).dtype)) * self.scale + penalty


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class TwoGradModes(nn.Module):
    """One weight read with and without gradient in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.linear(x)
        return self.linear(x * 2) - target


class Unread(nn.Module):
    """`unused` is never read; `dead` is read and its result thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.dead, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.dead(x)
        return self.used(x)


class Twice(nn.Module):
    """The same block twice in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


class Containers(nn.Module):
    """Asks containers for their parameters, calls a slice of one, and has an expanded buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.tail = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.register_buffer("scale", torch.full((1,), 0.5).expand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(next(self.blocks.parameters()).dtype) * self.scale
        for block in self.blocks[:2]:
            x = block(x)
        return self.tail[:2](x) + sum(p.square().sum() for p in self.blocks.parameters())


class CheckpointedMethod(nn.Module):
    """What is recomputed is no module: a method that reads its own module's parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


class AsksWhatItReads(nn.Module):
    """Branches on what its parameters are, as model code does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        factor = 2 if isinstance(self.linear.weight, nn.Parameter) or torch.compiler.is_compiling() else 3
        bias = self.get_parameter("linear.bias") if not torch.compiler.is_compiling() else self.linear.bias
        return self.linear(x) * factor + bias


class TiedNet(Net):
    def __init__(self) -> None:
        super().__init__(tied=True)


class TiedCheckpointedNet(Net):
    def __init__(self) -> None:
        super().__init__(tied=True, checkpointing=True)


_X = torch.linspace(-1, 1, 4 * WIDTH).reshape(1, 4, WIDTH)
_TOKENS = torch.arange(6).reshape(2, 3)
_IMAGES = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)
_CASES = {
    "graph break": (GraphBreak, _X),
    "eager first": (EagerFirst, _X),
    "batch norm": (Convolutions, _IMAGES),
    "parameters() in forward": (ReadsParameters, _X),
    "lstm": (Recurrent, _X),
    "two grad modes": (TwoGradModes, _X),
    "unread": (Unread, _X),
    "block twice": (Twice, _X),
    "containers": (Containers, _X),
    "checkpointed method": (CheckpointedMethod, _X),
    "asks what it reads": (AsksWhatItReads, _X),
    "tied": (TiedNet, _TOKENS),
    "tied, checkpointed": (TiedCheckpointedNet, _TOKENS),
}


def _case_errors(case: str, compile: bool) -> dict[str, float]:
    make, inputs = _CASES[case]
    return _errors(make, inputs, compiled if compile else lambda model: model)


@pytest.mark.parametrize("case", _CASES)
def test_gradients_of_compiled_models(case: str) -> None:
    for errors in pool.run(2, _case_errors, case, True):
        assert errors
        assert {name: error for name, error in errors.items() if not error <= 2e-6} == {}


@pytest.mark.parametrize("case", [case for case in _CASES if case != "unread"])
def test_gradients_of_uncompiled_models(case: str) -> None:
    for errors in pool.run(2, _case_errors, case, False):
        assert {name: error for name, error in errors.items() if not error <= 2e-6} == {}


def _uncompiled_none() -> dict[str, bool]:
    model = fsdp.shard(build(Unread))
    model(_X).sum().backward()
    return {name: p.grad is None for name, p in model.named_parameters()}


def test_uncompiled_a_flat_group_that_is_read_gives_zeros_to_all_its_parameters() -> None:
    for is_none in pool.run(2, _uncompiled_none):
        assert [name for name, none in is_none.items() if none] == ["unused.weight", "unused.bias"]  # a unit of its own


def _num_compiles_of_equal_blocks() -> tuple[int, float]:
    make = lambda: Net(blocks=32)  # noqa: E731
    reference, model = build(make), fsdp.shard(build(make))
    counters.clear()
    for block in model.blocks:
        block.compile(backend="fsdp_opt", options={"codegen": "fx"})
    for each in (reference, model):
        each(_TOKENS).square().mean().backward()
    compiles = counters["stats"]["unique_graphs"]
    grads = full_grads(model)
    return compiles, max(relative_error(grads[n], p.grad) for n, p in reference.named_parameters())


def test_32_equal_blocks_compiled_one_by_one_are_one_compile() -> None:
    for compiles, error in pool.run(2, _num_compiles_of_equal_blocks):
        assert compiles == 1
        assert error <= 2e-6


def _compiles_and_errors_of_lengths() -> tuple[int, list[float]]:
    reference, model = build(Net), fsdp.shard(build(Net))
    run = compiled(model)
    counters.clear()
    errors = []
    for length in (12, 13, 20):
        tokens = torch.arange(length).remainder(7)[None]
        for each in (run, reference):
            each.zero_grad()
            each(tokens).square().mean().backward()
        grads = full_grads(model)
        errors.append(max(relative_error(grads[n], p.grad) for n, p in reference.named_parameters()))
    return counters["stats"]["unique_graphs"], errors


def test_three_lengths_are_two_compiles() -> None:
    for compiles, errors in pool.run(2, _compiles_and_errors_of_lengths):
        assert compiles == 2
        assert max(errors) <= 2e-6


def _modes() -> dict[str, bool]:
    """train, no_grad and inference_mode give the same outputs; gradients are right afterwards."""
    model, reference = fsdp.shard(build(Net)), build(Net)
    run = compiled(model)
    outputs = {"train": run(_TOKENS)}
    with torch.no_grad():
        outputs["no_grad"] = run(_TOKENS)
    with torch.inference_mode():
        outputs["inference"] = run(_TOKENS)
    run.eval()
    outputs["eval"] = run(_TOKENS)
    expected = reference(_TOKENS)
    expected.sum().backward()
    outputs["train"].sum().backward()
    grads = full_grads(model)
    same = {mode: torch.equal(output, expected) for mode, output in outputs.items()}
    return same | {n: relative_error(grads[n], p.grad) <= 2e-6 for n, p in reference.named_parameters()}


def test_modes_agree() -> None:
    for same in pool.run(2, _modes):
        assert all(same.values()), same


def _gradient_of_an_input(way: str) -> dict[str, bool]:
    """Asked for an input's gradient only, backward leaves parameters alone; training goes on as if it never ran."""
    reference, model = build(TwoGradModes), fsdp.shard(build(TwoGradModes))
    run = compiled(model)
    x = _X.clone().requires_grad_()
    loss = run(x).square().mean()
    if way == "autograd.grad":
        torch.autograd.grad(loss, x)
    else:
        loss.backward(inputs=[x])
    untouched = all(p.grad is None for p in model.parameters())
    for each in (run, reference):
        each(_X).square().mean().backward()
    grads = full_grads(model)
    right = all(relative_error(grads[n], p.grad) <= 2e-6 for n, p in reference.named_parameters())
    return {"untouched": untouched, "right afterwards": right}


@pytest.mark.parametrize("way", ["autograd.grad", "backward(inputs)"])
def test_the_gradient_of_an_input_leaves_parameters_alone(way: str) -> None:
    for holds in pool.run(2, _gradient_of_an_input, way):
        assert all(holds.values()), holds


def _reads_after_a_failed_recomputation() -> bool:
    """A backward that raises where it recomputes leaves no forward open."""
    model: Any = fsdp.shard(build(CheckpointedMethod))
    body, calls = type(model).body, []

    def fails_when_recomputed(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) == 2:
            _ = model.weight
            raise ValueError("on purpose")
        return body(model, x)

    model.body = fails_when_recomputed
    with contextlib.suppress(ValueError):
        model(_X).sum().backward()
    return type(model.weight).__name__ == "ShardedParam" and len(calls) == 2


def test_an_exception_while_recomputing_closes_the_forward() -> None:
    assert pool.run(2, _reads_after_a_failed_recomputation) == [True, True]


def _reduced_once_where_eager_code_reads() -> tuple[list[str], int]:
    """Names of the hooks that ran, and reduce-scatters, in one backward of graphs with eager code between them."""
    model = fsdp.shard(build(EagerFirst))
    called: list[str] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: called.append(name))
    loss = compiled(model)(_X).sum()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        loss.backward()
    return called, sum(event.name == "c10d::_reduce_scatter_base_" for event in recorded.events())


def test_a_group_that_eager_code_reads_is_reduced_once() -> None:
    for called, reductions in pool.run(2, _reduced_once_where_eager_code_reads):
        assert sorted(called) == ["first.bias", "first.weight"]
        assert reductions == 1


def _what_stays_alive() -> dict[str, bool]:
    model: Any = fsdp.shard(build(Net))
    run: Any = compiled(model)
    tokens = _TOKENS.clone()
    run(tokens).sum().backward()
    alive = {"input": weakref.ref(tokens), "group": weakref.ref(model._fsdp_model.groups[0])}
    del tokens
    gc.collect()
    still = {"input": alive["input"]() is not None}
    del model, run
    torch._dynamo.reset()
    gc.collect()
    return still | {"group": alive["group"]() is not None}


def test_models_and_inputs_are_freed() -> None:
    for still in pool.run(2, _what_stays_alive):
        assert still == {"input": False, "group": False}


def _names_and_copies() -> dict[str, bool]:
    model = fsdp.shard(build(Net, tied=True))
    run = compiled(model)
    names = [name for name, _ in build(Net, tied=True).named_parameters()]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        next(twin.parameters()).zero_()
    full, plain = fsdp.full_state_dict(run), build(Net, tied=True).state_dict()
    return {
        "named_parameters": [name for name, _ in model.named_parameters()] == names,
        "shapes": all(p.shape == plain[n].shape for n, p in model.named_parameters()),
        "class": type(model.head).__name__ == "Linear" and isinstance(model.head, nn.Linear),
        "state dict keys": list(full) == list(plain),
        "state dict values": all(torch.equal(full[name], plain[name]) for name in plain),
        "copies are independent": bool(fsdp.full_state_dict(twin)["head.weight"].eq(0).all())
        and not bool(full["head.weight"].eq(0).any()),
        "load_state_dict": str(model.load_state_dict(plain)) == "<All keys matched successfully>",
    }


def test_names_shapes_and_copies() -> None:
    for holds in pool.run(2, _names_and_copies):
        assert all(holds.values()), holds


def _functional_calls() -> list[bool]:
    """Zeros in place of the parameters give zeros, and the model's own values afterwards."""
    model = fsdp.shard(build(Net))
    run = compiled(model)
    results = []
    for each, prefix in ((model, ""), (run, "_orig_mod.")):
        expected = each(_TOKENS)
        zeros = {prefix + name: torch.zeros(p.shape) for name, p in model.named_parameters()}
        results.append(bool(torch.func.functional_call(each, zeros, _TOKENS).eq(0).all()))
        results.append(torch.equal(each(_TOKENS), expected) and bool(expected.ne(0).any()))
    return results


def test_functional_call_reads_what_it_is_given() -> None:
    for results in pool.run(2, _functional_calls):
        assert all(results), results


def _foreign_backend(backend: str) -> float:
    """A sharded model under another backend is the slow fallback, with the same numbers."""
    reference, model = build(Net), fsdp.shard(build(Net))
    for each in (reference, torch.compile(model, backend=backend)):
        each(_TOKENS).square().mean().backward()
    grads = full_grads(model)
    return max(relative_error(grads[n], p.grad) for n, p in reference.named_parameters())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_backends(backend: str) -> None:
    assert max(pool.run(2, _foreign_backend, backend)) <= 2e-6


def _rank_values() -> bool:
    """Ranks start from different values and buffers; all end with rank 0's."""
    torch.manual_seed(torch.distributed.get_rank())
    model = fsdp.shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.float64))
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.float64).state_dict()
    return all(torch.equal(value, expected[name]) for name, value in fsdp.full_state_dict(model).items())


def test_every_rank_ends_with_rank_0s_values() -> None:
    assert pool.run(3, _rank_values) == [True] * 3


def _mixed_parameters() -> dict[str, bool]:
    """Layouts that other systems ask people to change: mixed dtypes, frozen, 0-dim, empty, non-contiguous, integer."""
    torch.manual_seed(0)
    module = nn.Module()
    module.a = nn.Parameter(torch.randn(3, 5, dtype=torch.float32).t())
    module.b = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
    module.c = nn.Parameter(torch.randn((), dtype=torch.float64))
    module.d = nn.Parameter(torch.zeros(0, 4))
    module.e = nn.Parameter(torch.arange(6), requires_grad=False)
    module.f = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
    module.g = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    module.h = nn.Parameter(torch.randn(2, 2), requires_grad=False)
    plain = copy.deepcopy(module.state_dict())
    fsdp.shard(module, precision=fsdp.Precision(param=torch.bfloat16))
    full = fsdp.full_state_dict(module)
    return {name: torch.equal(full[name], value) and full[name].dtype == value.dtype for name, value in plain.items()}


def test_every_kind_of_parameter_is_placed() -> None:
    for same in pool.run(3, _mixed_parameters):
        assert len(same) == 8
        assert all(same.values()), same
