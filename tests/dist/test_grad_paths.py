"""Where gradients are added up ("views", "cat_last", "cat") changes what runs, and not one bit of the numbers."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp_passes as fsdp
from tests.dist import pool
from tests.dist.models import (
    LENGTH,
    WIDTH,
    Block,
    Net,
    backward_window,
    build,
    full_grads,
    microbatches,
    next_token_loss,
)

PATHS = ("cat", "cat_last", "views")
BF16 = fsdp.Precision(param=torch.bfloat16, reduce=torch.float32)
WINDOWS = (5, 1, 2)
COUNT = 3  # microbatches of a window whose operators are recorded

Grads = dict[str, Tensor | None]
aten = torch.ops.aten


def assert_bitwise(got: object, expected: object) -> None:
    """Equal tensors, NaNs included, in equal dicts and lists; None only where None is."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def compile_for(path: str, model: nn.Module, **kwargs: Any) -> Any:
    options = {"grad_path": path, "codegen": "fx", "verify": 1, "poison": False}  # no writes but the program's own
    return torch.compile(model, backend="fsdp_opt", options=options, **kwargs)


def _on_each_path(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    results = {}
    for path in PATHS:
        torch._dynamo.reset()
        results[path] = function(path, *args)
    return results


def run_on_each_path(world_size: int, function: Callable[..., Any], *args: Any) -> list[dict[str, Any]]:
    """`function(path, *args)` by path, for each rank; the same bits on every path."""
    results = pool.run(world_size, _on_each_path, function, *args, timeout=400)
    for by_path in results:
        for path in PATHS:
            assert_bitwise(by_path[path], by_path["cat"])
    return results


def assert_path_taken(model: nn.Module, path: str) -> None:
    """No pass declined: gradients are written into slices exactly if they are not concatenated in each backward."""
    explanation = fsdp.explain(model)
    gradients = [each for graph in explanation.graphs for each in graph.gradients]
    assert gradients and not explanation.declined, explanation
    assert all(each.whole == (path == "cat") for each in gradients), explanation


def assert_nothing_is_held(model: Any) -> None:
    for group in model._fsdp_model.groups:
        assert group.gradients.buffer is None, group.unit
        assert group.gradients.reduced is None, group.unit


def _shard_net(precision: fsdp.Precision | None, **kwargs: Any) -> Any:
    """Two units of several parameters each: the block, and all else."""
    return fsdp.shard(build(Net, blocks=1, **kwargs), units=[Block], precision=precision)


def _train(path: str, precision: fsdp.Precision | None, tied: bool, checkpointing: bool) -> tuple[list[Grads], Any]:
    """Gradients after each window, and parameters after an AdamW step for each."""
    model = _shard_net(precision, tied=tied, checkpointing=checkpointing)
    run = compile_for(path, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    grads = []
    for step, count in enumerate(WINDOWS):
        backward_window(run, model, step, count)
        grads.append(full_grads(model))
        optimizer.step()
        optimizer.zero_grad()
    assert_path_taken(model, path)
    return grads, fsdp.full_state_dict(model)


@pytest.mark.parametrize(
    "world_size, precision, tied, checkpointing",
    [(1, BF16, False, True), (2, BF16, True, False), (3, None, False, False)],
)
def test_gradients_and_parameters_are_the_same_bits_on_each_path(
    world_size: int, precision: fsdp.Precision | None, tied: bool, checkpointing: bool
) -> None:
    for by_path in run_on_each_path(world_size, _train, precision, tied, checkpointing):
        grads, params = by_path["views"]
        assert [len(each) for each in grads] == [len(params) - tied] * len(WINDOWS)
        assert all(grad.isfinite().all() and grad.any() for each in grads for grad in each.values())


def _grads_of_windows(model: nn.Module, run: Any, sync: Callable[[bool], Any]) -> list[Grads]:
    """`sync(last)` is entered for each backward."""
    grads = []
    for step, count in enumerate(WINDOWS):
        for number, tokens in enumerate(microbatches(step, count, dist.get_world_size())):
            loss = next_token_loss(run, tokens[dist.get_rank()]) / count
            with sync(number == count - 1):
                loss.backward()
        grads.append(full_grads(model))
        model.zero_grad()
    return grads


def _views_and_fsdp2(checkpointing: bool, bf16: bool) -> tuple[list[Grads], list[Grads]]:
    model = _shard_net(BF16 if bf16 else None, checkpointing=checkpointing)
    run = compile_for("views", model)
    ours = _grads_of_windows(model, run, lambda last: contextlib.nullcontext() if last else run.no_sync())
    torch._dynamo.reset()
    theirs: Any = build(Net, blocks=1, checkpointing=checkpointing)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=torch.float32 if bf16 else None,
        cast_forward_inputs=False,
    )
    for unit in (theirs.blocks[0], theirs):
        fully_shard(unit, mp_policy=policy)

    @contextlib.contextmanager
    def sync(last: bool) -> Iterator[None]:
        theirs.set_requires_gradient_sync(last)
        theirs.set_is_last_backward(last)
        yield

    return ours, _grads_of_windows(theirs, torch.compile(theirs, backend="eager"), sync)


@pytest.mark.parametrize("checkpointing, bf16", [(True, True), (False, False)])
def test_gradients_of_a_window_are_bitwise_those_of_fsdp2(checkpointing: bool, bf16: bool) -> None:
    for ours, theirs in pool.run(2, _views_and_fsdp2, checkpointing, bf16, timeout=400):
        assert_bitwise(ours, theirs)


@dataclass(frozen=True)
class Call:
    """One call of an operator; the tensors stay alive, so that no two have the same memory by chance."""

    op: Any
    inputs: list[Tensor]
    written: list[Tensor]
    outputs: list[Tensor]


class Turned(Block):
    """The gradient of `turn` is computed transposed: to flatten it is to copy it."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(WIDTH, LENGTH - 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.turn.t())


class Recorder(TorchDispatchMode):
    """Every operator that runs, custom ones and collectives included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        written = [given[a.name] for a in func._schema.arguments if a.name in given and a.is_write]
        self.calls.append(Call(func, *map(_tensors, ((args, kwargs), written, result))))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _record_window(path: str, precision: fsdp.Precision | None, checkpointing: bool, count: int) -> tuple[Any, Any]:
    """The model, and the calls of a whole window, in which its compiled graphs ran.

    No tensor of a forward or backward of it has by chance the size of a flat group.
    """
    net: Any = build(Net, blocks=1, checkpointing=checkpointing)
    net.blocks[0] = Turned()
    model = fsdp.shard(net, units=[Block], precision=precision)
    run = compile_for(path, model)
    backward_window(run, model, 0, 2)  # compiles both kinds of writes
    model.zero_grad()
    # The guards on tensors fail in any dispatch mode, and then the forward would run uncompiled.
    with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True), Recorder() as recorder:
        backward_window(run, model, 1, count)
    counts = Counter(call.op for call in recorder.calls)
    assert counts[aten.gelu_backward.default] == count, "the operators of regions are seen"
    assert counts[torch.ops.fsdp_opt.unshard.default] == 0, "the model ran compiled"
    assert_path_taken(model, path)
    return model, recorder.calls


def _check_window(path: str, precision: fsdp.Precision | None, checkpointing: bool, num_cats: dict[str, int]) -> None:
    model, calls = _record_window(path, precision, checkpointing, COUNT)
    full_sizes = Counter(group.layout.full_elems for group in model._fsdp_model.groups)
    assert full_sizes.total() == 2
    cats = [call.outputs[0].numel() for call in calls if call.op is aten.cat.default]
    expected = Counter({size: number * num_cats[path] for size, number in full_sizes.items()})
    assert Counter(size for size in cats if size in full_sizes) == expected
    if path == "views":
        _check_views(model, calls)


def test_only_cat_concatenates_each_microbatch_and_views_never() -> None:
    pool.run(2, _on_each_path, _check_window, None, False, {"cat": COUNT, "cat_last": 1, "views": 0}, timeout=400)


def test_views_makes_no_full_tensor_but_the_buffers() -> None:
    pool.run(2, _check_window, "views", BF16, True, {"views": 0}, timeout=400)


_ALLOCATIONS = (aten.empty.memory_format, aten.new_empty.default)
_COPIES = (aten.clone.default, aten._to_copy.default, aten.copy.default, aten.copy_.default, aten.cat.default)
_GATHER, _REDUCE = torch.ops.c10d._allgather_base_.default, torch.ops.c10d._reduce_scatter_base_.default


def _check_views(model: Any, calls: Sequence[Call]) -> None:
    groups = model._fsdp_model.groups
    gathered = {_memory(call.inputs[0]) for call in calls if call.op is _GATHER}
    sums = {_memory(call.inputs[1]): call.inputs[1].numel() for call in calls if call.op is _REDUCE}
    assert sorted(sums.values()) == sorted(group.layout.full_elems for group in groups), "one buffer a group and window"
    own_work = [call for call in calls if call.op.namespace != "c10d"]
    for call in own_work:
        _check_full_sizes(call, gathered | sums.keys(), set(sums.values()))
        assert not any(_memory(tensor) in gathered for tensor in call.written), f"{call.op} writes what was gathered"
        read = any(_memory(tensor) in gathered for tensor in call.inputs)
        assert not (read and call.op in _COPIES), f"{call.op} copies a parameter"
    for memory, full_elems in sums.items():
        group = next(group for group in groups if group.layout.full_elems == full_elems)
        *writes, received = (call for call in own_work if any(_memory(tensor) == memory for tensor in call.written))
        _check_writes(writes, group.layout)
        for call in writes:
            if call.op is not aten.zero_.default:
                _check_source(call.inputs[1], own_work, group.compute_dtype)
        piece = _place(received.written[0])  # gloo's copy of what it received
        assert piece == (dist.get_rank() * group.layout.shard_elems, group.layout.shard_elems), piece


def _check_full_sizes(call: Call, flat: set[int], full_sizes: set[int]) -> None:
    """What has a flat group's size is a buffer that is allocated, or a view of one."""
    for output in call.outputs:
        if output.numel() in full_sizes:
            is_view = not call.written and any(_memory(output) == _memory(tensor) for tensor in call.inputs)
            assert _memory(output) in flat and (is_view or call.op in _ALLOCATIONS), f"{call.op} makes a full tensor"


def _check_writes(writes: Sequence[Call], layout: Any) -> None:
    """Each parameter is copied once, then added to; padding is zeroed once."""
    found: dict[tuple[int, int], list[Any]] = {}
    for call in writes:
        assert call.written[0].is_contiguous()
        found.setdefault(_place(call.written[0]), []).append(call.op)
    params = set(zip(layout.offsets, layout.numels, strict=True))
    pieces = list(zip(itertools.accumulate(layout.sizes, initial=0), layout.sizes, strict=False))
    adds = [aten.copy_.default] + [aten.add_.Tensor] * (COUNT - 1)
    assert found == {piece: adds if piece in params else [aten.zero_.default] for piece in pieces}, found


def _place(tensor: Tensor) -> tuple[int, int]:
    return int(tensor.storage_offset()), tensor.numel()


def _check_source(grad: Tensor, calls: Sequence[Call], dtype: torch.dtype) -> None:
    """`grad` is what an operator computed, in the dtype and size in which it did."""
    producer = next(call for call in calls if any(_memory(output) == _memory(grad) for output in call.outputs))
    assert producer.op not in _COPIES + _ALLOCATIONS, f"a gradient comes from {producer.op}"
    assert grad.dtype == dtype
    assert grad.untyped_storage().nbytes() == grad.nbytes, f"{producer.op} computes more than a gradient"


class Scale(nn.Module):
    def __init__(self, first: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(first, first + 4, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.square() * x).sum()


class Uses(nn.Module):
    """Children by name: the loss sums those `used`, reads those `detached`, and does not depend on those `aside`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Scale(0), Scale(1), Scale(2)

    def forward(self, x: Tensor, used: str, detached: str = "", aside: str = "") -> tuple[Tensor, Tensor]:
        loss = torch.stack([getattr(self, name)(x) for name in used]).sum()
        for name in detached:
            loss = loss + (getattr(self, name).weight.detach() * x).sum()
        return loss, torch.stack([getattr(self, name)(x) for name in aside]).sum() if aside else x


# Microbatches, each with what it uses and a factor of its input; parameters without a gradient; those with zeros.
_USES: dict[str, tuple[list[tuple[float, tuple[str, ...]]], str, str]] = {
    "never differentiated": ([(1, ("a",)), (1, ("a",))], "bc", ""),
    "read without a gradient": ([(1, ("a", "b")), (1, ("a", "b"))], "bc", ""),
    "read for what the loss does not depend on": ([(1, ("a", "", "b")), (1, ("a", "", "b"))], "c", "b"),
    "first used in the last microbatch": ([(1, ("a",)), (1, ("a",)), (1, ("abc",))], "", ""),
    "used in the first microbatch only": ([(1, ("abc",)), (1, ("a",)), (1, ("a",))], "", ""),
    "infinite": ([(1, ("abc",)), (float("inf"), ("abc",)), (1, ("a",))], "", ""),
}


def _grads_of_uses(path: str) -> dict[str, Grads]:
    first = fsdp.shard(Uses(), units=["c"], precision=BF16)  # a unit of two parameters, and one of one
    grads = {}
    for case, (calls, _, _) in _USES.items():
        model: Any = copy.deepcopy(first)
        run = compile_for(path, model)
        for number, (factor, names) in enumerate(calls):
            x = factor * (torch.arange(1, 5) + 10 * number + 5 * dist.get_rank()).bfloat16()
            with contextlib.nullcontext() if number == len(calls) - 1 else run.no_sync():
                run(x, *names)[0].backward()
        grads[case] = full_grads(model)
        assert_nothing_is_held(model)
    return grads


def test_none_and_zero_are_the_same_on_each_path() -> None:
    for by_path in run_on_each_path(2, _grads_of_uses):
        for case, (_, without, zero) in _USES.items():
            grads = {name[0]: grad for name, grad in by_path["views"][case].items()}
            assert "".join(name for name, grad in grads.items() if grad is None) == without, case
            assert "".join(name for name, grad in grads.items() if grad is not None and not grad.any()) == zero, case
        assert by_path["views"]["infinite"]["a.weight"].isnan().any()


def _sum_of_256_and_1(path: str) -> float:
    model: Any = fsdp.shard(nn.Linear(1, 1, bias=False), precision=BF16)
    run = compile_for(path, model)
    with run.no_sync():
        run(torch.tensor([[256.0]], dtype=torch.bfloat16)).sum().backward()
    run(torch.tensor([[1.0]], dtype=torch.bfloat16)).sum().backward()
    return model.weight.grad.full_tensor().item()


def test_bf16_gradients_are_summed_in_fp32() -> None:
    assert pool.run(2, _on_each_path, _sum_of_256_and_1) == [dict.fromkeys(PATHS, 257.0)] * 2


class Folded(nn.Module):
    """`first`, a graph break, `second` and `first` again: `first` has a gradient in two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.seen: Callable[[Tensor], Any] = lambda x: None

    @torch.compiler.disable
    def between(self, x: Tensor) -> Tensor:
        self.seen(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.first(x))
        return self.first(self.second(x)).square().mean()


class Window:
    """One model's microbatches. Each has its number, and a length, for which it is compiled."""

    def __init__(self, model: Any, path: str) -> None:
        self.model = model
        self.run = compile_for(path, model, dynamic=False)

    def input(self, number: int, length: int = 4) -> Tensor:
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        return torch.randn(2, length, WIDTH, generator=generator).bfloat16().requires_grad_()

    def micro(self, number: int, sync: bool = True, length: int = 4) -> None:
        with contextlib.nullcontext() if sync else self.run.no_sync():
            self.run(self.input(number, length)).backward()


def microbatches_1_2_3(window: Window) -> None:
    window.micro(1, sync=False)
    window.micro(2, sync=False)
    window.micro(3)


def two_lengths(window: Window) -> None:
    window.micro(1, sync=False)
    window.micro(2, sync=False, length=6)
    window.micro(3)


def two_lengths_backwards(window: Window) -> None:
    """Graphs that have run only first in a window run last, and the other way round."""
    window.micro(1, sync=False, length=6)
    window.micro(2, sync=False)
    window.micro(3, length=6)


def three_forwards_then_three_backwards(window: Window) -> None:
    losses = [window.run(window.input(number)) for number in (1, 2, 3)]
    with window.run.no_sync():
        losses[0].backward()
        losses[1].backward()
    losses[2].backward()


def zero_grad_between_microbatches(window: Window) -> None:
    window.micro(7, sync=False)
    window.micro(8, sync=False)
    window.model.zero_grad()
    assert_nothing_is_held(window.model)
    microbatches_1_2_3(window)


def _raise(grad: Tensor) -> None:
    raise ZeroDivisionError("in backward")


def an_exception_in_backward(window: Window) -> None:
    for sync in (False, True):
        window.micro(7, sync=False)
        window.model.seen = lambda x: x.register_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            window.micro(8, sync)
        window.model.seen = lambda x: None
        window.model.zero_grad()
        assert_nothing_is_held(window.model)
    microbatches_1_2_3(window)


def gradients_of_inputs_between_microbatches(window: Window) -> None:
    """Before a window, in it, and between a forward and its backward."""

    def input_grad(number: int) -> None:
        x = window.input(number)
        torch.autograd.grad(window.run(x), x)

    input_grad(7)
    assert_nothing_is_held(window.model)
    window.micro(1, sync=False)
    input_grad(8)
    loss = window.run(window.input(2))
    input_grad(9)
    with window.run.no_sync():
        loss.backward()
    x = window.input(3)
    loss = window.run(x)
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    assert x.grad is not None
    assert_bitwise(x.grad, expected)


_CLEAN = (microbatches_1_2_3, two_lengths, two_lengths_backwards)
_DISTURBED = (
    three_forwards_then_three_backwards,
    zero_grad_between_microbatches,
    an_exception_in_backward,
    gradients_of_inputs_between_microbatches,
)


def _play(path: str) -> dict[str, Grads]:
    """Each scenario on a copy of one model; what was compiled serves them all."""
    first = fsdp.shard(build(Folded), units=[nn.Sequential], precision=BF16)
    grads = {}
    for scenario in (*_CLEAN, *_DISTURBED):
        model: Any = copy.deepcopy(first)
        scenario(Window(model, path))
        grads[scenario.__name__] = full_grads(model)
        assert_nothing_is_held(model)
        assert_path_taken(model, path)
        num_lengths = 2 if "lengths" in scenario.__name__ else 1
        assert len(fsdp.explain(model).graphs) == 2 * 2 * num_lengths, "forward and backward of two graphs a length"
    return grads


def test_windows_of_several_graphs_and_disturbed_windows() -> None:
    for by_path in run_on_each_path(2, _play):
        for path in PATHS:
            clean = by_path[path]["microbatches_1_2_3"]
            assert all(grad.any() for grad in clean.values())
            for scenario in _DISTURBED:
                assert_bitwise(by_path[path][scenario.__name__], clean)
