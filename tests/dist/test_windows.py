"""Accumulation windows against a plain model that sees every rank's inputs. All numbers are integers: exact.

A scenario drives a `Pair` through one or more windows; `check` compares the gradients of the two models.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fsdp_passes as fsdp
from fsdp_passes.sharding.state import sharded_state
from tests.dist import pool
from tests.dist.models import Net, compiled, shard_net, whole
from tests.dist.recorded import recorded

ELEMS = 4
BF16 = fsdp.Precision(param=torch.bfloat16, reduce=torch.float32)


class Scale(nn.Module):
    """The gradient of `weight` is 2 * weight * x * grad: backward needs the gathered weight."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(first, first + ELEMS, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.square() * x


class Terms(nn.Module):
    """A sum over the named children; nobody names `c`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Scale(1), Scale(5), Scale(9)

    def forward(self, x: Tensor, names: tuple[str, ...] = ("a", "b")) -> Tensor:
        return torch.stack([getattr(self, name)(x).sum() for name in names]).sum()


def inputs(number: int, rank: int) -> Tensor:
    """[ELEMS], other values for each microbatch and rank; sums divide by 1, 2 and 3 ranks without a rest."""
    return 6.0 * (torch.arange(ELEMS) + 10 * number + 3 * rank + 1)


class Pair:
    """A sharded model, and the plain one whose gradients it must have: on every rank's inputs, divided by ranks."""

    def __init__(self, make: Callable[[], nn.Module], compile: bool, **kwargs: Any) -> None:
        self.make, self.compile = make, compile
        self._start(fsdp.shard(make(), **kwargs))

    def _start(self, model: nn.Module) -> None:
        self.plain: Any = self.make()
        self.model: Any = model
        self.run = compiled(model) if self.compile else model

    def fresh(self) -> Pair:
        """A pair of copies without gradients; what was compiled serves them, too."""
        twin = copy.copy(self)
        twin._start(copy.deepcopy(self.model))
        return twin

    def forward(self, number: int, *args: Any) -> Tensor:
        return self.run(inputs(number, dist.get_rank()), *args)

    def want(self, number: int, *args: Any) -> None:
        """Let the plain model see microbatch `number` of every rank."""
        for rank in range(dist.get_world_size()):
            (self.plain(inputs(number, rank), *args) / dist.get_world_size()).backward()

    def micro(self, number: int, *args: Any, sync: bool = True) -> None:
        with contextlib.nullcontext() if sync else self.run.no_sync():
            self.forward(number, *args).backward()
        self.want(number, *args)

    def clear(self, set_to_none: bool = True) -> None:
        for model in (self.model, self.plain):
            model.zero_grad(set_to_none=set_to_none)

    def params(self) -> list[tuple[str, Any, Any]]:
        pairs = zip(self.model.named_parameters(), self.plain.parameters(), strict=True)
        return [(name, ours, plain) for (name, ours), plain in pairs]

    def check(self, scale: float = 1.0) -> None:
        """Gradients are None where the plain model's are, and else equal to `scale` times them."""
        for name, ours, plain in self.params():
            assert (ours.grad is None) == (plain.grad is None), (name, ours.grad, plain.grad)
        for name, ours, plain in self.params():
            if plain.grad is not None:
                got, expected = whole(ours.grad), scale * plain.grad
                assert torch.equal(got, expected), f"{name}: {got} != {expected}"

    def is_pending(self) -> bool:
        """A gradient is there, and may not be used yet."""
        try:
            self.model.a.weight.grad.norm()
        except RuntimeError as error:
            return "still accumulating" in str(error)
        return False


def sums_over_windows_of_3_1_and_2(pair: Pair) -> None:
    for count in (3, 1, 2):
        for number in range(count):
            pair.micro(number, sync=number == count - 1)
        pair.check()
        pair.clear()
        assert all(ours.grad is None for _, ours, _ in pair.params())


def synchronised_backwards_add(pair: Pair) -> None:
    for number in range(3):
        pair.micro(number)
        pair.check()


def a_window_adds_to_what_is_reduced(pair: Pair) -> None:
    pair.micro(0)
    pair.micro(1, sync=False)
    assert pair.is_pending()
    pair.micro(2)
    pair.check()


def first_used_in_the_last_microbatch(pair: Pair) -> None:
    pair.micro(0, ("a",), sync=False)
    pair.micro(1, ("a", "b"))
    pair.check()


def used_only_in_an_earlier_microbatch(pair: Pair) -> None:
    pair.micro(0, ("a", "b"), sync=False)
    pair.micro(1, ("a",), sync=False)
    pair.micro(2, ("a",))
    pair.check()


def another_set_is_used_in_the_next_window(pair: Pair) -> None:
    pair.micro(0, ("b",))
    pair.check()
    pair.clear()
    pair.micro(1, ("a",))
    pair.check()


def backward_decides_whether_to_reduce(pair: Pair) -> None:
    loss = pair.forward(0)
    with pair.run.no_sync():
        loss.backward()
        loss = pair.forward(1)
    assert pair.is_pending()
    loss.backward()
    for number in (0, 1):
        pair.want(number)
    pair.check()


def set_requires_gradient_sync_is_no_sync(pair: Pair) -> None:
    loss = pair.forward(0)
    pair.run.set_requires_gradient_sync(False)
    loss.backward()
    loss = pair.forward(1)
    assert pair.is_pending()
    pair.run.set_requires_gradient_sync(True)
    loss.backward()
    for number in (0, 1):
        pair.want(number)
    pair.check()


def the_divide_factor_replaces_the_number_of_ranks(pair: Pair) -> None:
    pair.run.set_gradient_divide_factor(4.0)
    pair.micro(0, sync=False)
    pair.micro(1)
    pair.check(scale=dist.get_world_size() / 4)
    for factor in (0, -1.0):
        with pytest.raises(ValueError, match=f"factor: expected a finite number above 0, got {factor}"):
            pair.run.set_gradient_divide_factor(factor)


def no_sync_nests_and_ends_with_an_exception(pair: Pair) -> None:
    with pytest.raises(ZeroDivisionError), pair.run.no_sync():
        with pair.run.no_sync():
            pass
        pair.micro(0)
        assert pair.is_pending()
        _ = 1 / 0
    pair.micro(1)
    pair.check()


def zero_grad_discards_what_is_pending(pair: Pair) -> None:
    pair.micro(0)
    pair.micro(1, sync=False)
    pair.clear()
    pair.micro(2, sync=False)
    pair.micro(3)
    pair.check()


def none_discards_one_parameter(pair: Pair) -> None:
    pair.micro(0, sync=False)
    for model in (pair.model, pair.plain):
        model.a.weight.grad = None
    pair.micro(1, ("b",), sync=False)
    assert pair.model.a.weight.grad is None
    pair.micro(2, ("b",))
    pair.check()
    pair.micro(3, sync=False)
    for model in (pair.model, pair.plain):
        model.a.weight.grad = None
    pair.micro(4)
    pair.check()


def zeroing_in_place_discards(pair: Pair) -> None:
    pair.micro(0)
    pair.clear(set_to_none=False)
    pair.check()
    pair.micro(1, sync=False)
    pair.clear(set_to_none=False)
    pair.micro(2)
    pair.check()


def optimizer_zeroing_in_place_discards(pair: Pair) -> None:
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (pair.model, pair.plain)]
    for sync in (True, False):
        pair.micro(0, sync=sync)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
    pair.micro(1)
    pair.check()


def zeroing_in_place_discards_for_good(pair: Pair) -> None:
    """A pending gradient that is zeroed may become None or zero: nothing of it comes back."""
    pair.micro(0, ("a", "b"), sync=False)
    pair.clear(set_to_none=False)
    pair.micro(1, ("b",))
    grad = pair.model.a.weight.grad
    assert grad is None or not whole(grad).any()
    assert torch.equal(whole(pair.model.b.weight.grad), pair.plain.b.weight.grad)


def a_gradient_can_be_edited_and_assigned(pair: Pair) -> None:
    pair.micro(0)
    for _, ours, plain in pair.params():
        for param in (ours, plain):
            if param.grad is not None:
                param.grad.mul_(2)
    pair.check()
    for model in (pair.model, pair.plain):
        model.b.weight.grad = torch.ones_like(model.b.weight)
        model.c.weight.grad = torch.ones_like(model.c.weight)
    pair.check()
    pair.micro(1, sync=False)
    pair.micro(2)
    pair.check()


def a_forward_without_backward(pair: Pair) -> None:
    pair.forward(5)
    pair.micro(0, sync=False)
    pair.forward(6)
    pair.micro(1)
    pair.check()


def no_sync_without_backward(pair: Pair) -> None:
    with pair.run.no_sync():
        pair.forward(5)
    pair.micro(0)
    pair.check()


def an_evaluation_between_microbatches(pair: Pair) -> None:
    expected = pair.plain(inputs(5, dist.get_rank())).detach()
    pair.micro(0, sync=False)
    pair.run.eval()
    with torch.no_grad():
        assert torch.equal(pair.forward(5), expected)
    with torch.inference_mode():
        assert torch.equal(pair.forward(5), expected)
    assert torch.equal(pair.forward(5), expected)
    pair.run.train()
    pair.micro(1)
    pair.check()


def a_forward_that_raises(pair: Pair) -> None:
    for sync in (False, True):
        with pytest.raises(Exception, match="nowhere"):
            pair.forward(5, ("a", "nowhere"))
        pair.micro(int(sync), sync=sync)
    pair.check()


def two_forwards_then_two_backwards(pair: Pair) -> None:
    losses = [pair.forward(number) for number in (0, 1, 2)]
    with pair.run.no_sync():
        losses[1].backward()
    losses[0].backward()
    losses[2].backward()
    for number in (0, 1, 2):
        pair.want(number)
    pair.check()


def one_backward_through_two_forwards(pair: Pair) -> None:
    (pair.forward(0) + pair.forward(1, ("b",))).backward()
    pair.want(0)
    pair.want(1, ("b",))
    pair.check()


def one_module_twice_in_a_forward(pair: Pair) -> None:
    pair.micro(0, ("a", "b", "a"), sync=False)
    pair.micro(1, ("b", "a", "b"))
    pair.check()


def retain_graph(pair: Pair) -> None:
    loss = pair.forward(0)
    with pair.run.no_sync():
        loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    for _ in range(3):
        pair.want(0)
    pair.check()


def hooks_fire_once_after_the_reduction(pair: Pair) -> None:
    fired: Counter[str] = Counter()

    def hook(name: str, plain: Tensor) -> Callable[[Tensor], None]:
        def check(param: Tensor) -> None:
            fired[name] += 1
            assert plain.grad is not None
            assert torch.equal(whole(param.grad), plain.grad), name

        return check

    handles = [ours.register_post_accumulate_grad_hook(hook(name, plain)) for name, ours, plain in pair.params()]
    pair.micro(0, sync=False)
    assert not fired
    pair.want(1)
    pair.forward(1).backward()
    assert fired == {"a.weight": 1, "b.weight": 1}
    handles[0].remove()
    pair.want(2)
    pair.forward(2).backward()
    assert fired == {"a.weight": 1, "b.weight": 2}


def an_optimizer_inside_a_hook(pair: Pair) -> None:
    def step(param: Tensor) -> None:
        with torch.no_grad():
            param.add_(param.grad, alpha=-0.5)
        param.grad = None

    for param in pair.model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for number in range(2):
        pair.micro(number)
        for _, _, plain in pair.params():
            if plain.grad is not None:
                step(plain)
    pair.check()
    full = fsdp.full_state_dict(pair.model)
    assert all(torch.equal(full[name], plain) for name, _, plain in pair.params())


def windows_of_two_models_are_their_own(pair: Pair) -> None:
    other = Pair(Terms, compile=False, units=_UNITS["a group each"])
    with pair.run.no_sync():
        (pair.forward(0) + other.forward(0)).backward()
    other.want(0)
    other.check()
    pair.want(0)
    assert pair.is_pending()
    pair.micro(1)
    pair.check()
    other.check()


_SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        sums_over_windows_of_3_1_and_2,
        synchronised_backwards_add,
        a_window_adds_to_what_is_reduced,
        first_used_in_the_last_microbatch,
        used_only_in_an_earlier_microbatch,
        another_set_is_used_in_the_next_window,
        backward_decides_whether_to_reduce,
        set_requires_gradient_sync_is_no_sync,
        the_divide_factor_replaces_the_number_of_ranks,
        no_sync_nests_and_ends_with_an_exception,
        zero_grad_discards_what_is_pending,
        none_discards_one_parameter,
        zeroing_in_place_discards,
        optimizer_zeroing_in_place_discards,
        zeroing_in_place_discards_for_good,
        a_gradient_can_be_edited_and_assigned,
        a_forward_without_backward,
        no_sync_without_backward,
        an_evaluation_between_microbatches,
        a_forward_that_raises,
        two_forwards_then_two_backwards,
        one_backward_through_two_forwards,
        one_module_twice_in_a_forward,
        retain_graph,
        hooks_fire_once_after_the_reduction,
        an_optimizer_inside_a_hook,
        windows_of_two_models_are_their_own,
    )
}
_UNITS = {"one group": "auto", "a group each": ["a", "b", "c"]}


def _play(units: str, compile: bool, scenarios: list[str]) -> int:
    """Play `scenarios` on copies of one model; returns the number of compiled graphs."""
    first = Pair(Terms, compile, units=_UNITS[units])
    assert len(fsdp.summary(first.model).groups) == (1 if units == "one group" else 3)
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        for name in scenarios:
            _SCENARIOS[name](first.fresh())
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("units", _UNITS)
def test_scenarios_compiled(units: str) -> None:
    """Copies share what is compiled: a graph for each set of names and each mode, not for each scenario."""
    for num_graphs in pool.run(2, _play, units, True, list(_SCENARIOS)):
        assert 0 < num_graphs < len(_SCENARIOS)


# Uncompiled, a unit that is read gives zeros to all its parameters: with one group, scenarios that use some differ.
@pytest.mark.parametrize("scenario", _SCENARIOS)
def test_scenario_uncompiled(scenario: str) -> None:
    pool.run(2, _play, "a group each", False, [scenario])


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_numbers_of_ranks(world_size: int) -> None:
    scenarios = ["sums_over_windows_of_3_1_and_2", "none_discards_one_parameter"]
    pool.run(world_size, _play, "one group", True, scenarios)


def _set_of_another_rank() -> None:
    """Rank 1 alone uses `b`: on both ranks its gradient is the mean of zero and what rank 1 has."""
    pair = Pair(Terms, compile=True)
    names = [("a",), ("a", "b")]
    pair.forward(0, names[dist.get_rank()]).backward()
    for rank in range(2):
        (pair.plain(inputs(0, rank), names[rank]) / 2).backward()
    pair.check()


def test_the_set_of_differentiated_parameters_is_the_union_over_ranks() -> None:
    pool.run(2, _set_of_another_rank, timeout=60)


class Chain(nn.Module):
    """Blocks one after the other, by name; `between` sees what flows from `a` to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scale(1), Scale(2)
        self.between: Callable[[Tensor], None] = lambda x: None
        self.call: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor, names: str = "ab") -> Tensor:
        for name in names:
            x = self.call(getattr(self, name), x)
            if name == "a":
                self.between(x)
        return x.sum()


class ChainPair(Pair):
    """The blocks are compiled one by one, or nothing is."""

    def __init__(self, compile: bool) -> None:
        super().__init__(Chain, False, units=["a", "b"])
        if compile:
            for block in (self.model.a, self.model.b):
                block.compile(backend="fsdp_opt", options={"verify": 2, "codegen": "fx"})


def _raise_in_backward(grad: Tensor) -> None:
    raise ZeroDivisionError("in backward")


def _exception_in_backward(compile: bool, sync: bool) -> None:
    """`b` has its gradient, `a` never gets one; nothing of it may reach the next step."""
    pair = ChainPair(compile)
    pair.micro(0, "ab")
    pair.clear()
    pair.model.between = lambda x: x.requires_grad and x.register_hook(_raise_in_backward)
    with contextlib.nullcontext() if sync else pair.run.no_sync(), pytest.raises(ZeroDivisionError):
        pair.forward(1, "ab").backward()
    pair.model.between = lambda x: None
    pair.model.zero_grad()
    assert all(ours.grad is None for _, ours, _ in pair.params())
    pair.micro(3, "ab", sync=False)
    pair.micro(4, "ab")
    pair.check()


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("compile", [True, False])
def test_an_exception_in_backward_leaves_nothing(compile: bool, sync: bool) -> None:
    pool.run(2, _exception_in_backward, compile, sync)


def _reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def _not_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


class CheckpointedChain(Chain):
    """`names` in capitals are called without a checkpoint."""

    def forward(self, x: Tensor, names: str = "ab") -> Tensor:
        for name in names:
            block = getattr(self, name.lower())
            x = block(x) if name.isupper() else self.call(block, x)
        return x.sum()


_CHECKPOINTS = {"reentrant": _reentrant, "not reentrant": _not_reentrant}


def _checkpointed(way: str, compile: str) -> dict[str, str]:
    """What went wrong, by the order of calls; the same on every rank."""
    first = Pair(CheckpointedChain, compile == "model", units=["a", "b"])
    wrong = {}
    for names in ("ab", "aa", "aA", "Aa"):
        pair = first.fresh()
        pair.model.call = _CHECKPOINTS[way]
        if compile == "blocks":
            for block in (pair.model.a, pair.model.b):
                block.compile(backend="fsdp_opt", options={"verify": 2, "codegen": "fx"})
        try:
            _checkpointed_window(pair, names)
        except Exception as error:
            wrong[names] = str(error)[:200]
    return wrong


def _checkpointed_window(pair: Pair, names: str) -> None:
    for number, sync in enumerate((False, True, True)):
        with contextlib.nullcontext() if sync else pair.run.no_sync():
            pair.run(inputs(number, dist.get_rank()).requires_grad_(), names).backward()
        pair.want(number, names)
    pair.check()


@pytest.mark.parametrize(
    "way, compile",
    [
        ("not reentrant", "model"),
        ("not reentrant", "blocks"),
        ("not reentrant", "nothing"),
        ("reentrant", "blocks"),  # Dynamo captures the others only
        ("reentrant", "nothing"),
    ],
)
def test_a_checkpoint_never_accumulates_twice(way: str, compile: str) -> None:
    assert pool.run(2, _checkpointed, way, compile) == [{}, {}]


class _Collectives(TorchDispatchMode):
    """Counts the collectives that torch dispatches; the profiler loses events on a busy machine."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def _collectives(function: Callable[[], Any]) -> Counter[str]:
    with _Collectives() as collectives:
        function()
    return collectives.counts


_GATHER, _REDUCE, _COMPARE = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allgather_"


def _collectives_of_backwards(compile: bool) -> list[Counter[str]]:
    model: Any = shard_net()
    run = compiled(model) if compile else model
    tokens = torch.ones(1, 3, dtype=torch.long)

    def backward(sync: bool) -> None:
        loss = run(tokens).sum()
        with contextlib.nullcontext() if sync else run.no_sync():
            counts.append(_collectives(loss.backward))

    counts: list[Counter[str]] = []
    for sync in (False, False, True, True):
        backward(sync)
    return counts


@pytest.mark.parametrize("compile", [True, False])
def test_no_sync_communicates_no_gradient_and_sync_reduces_each_group_once(compile: bool) -> None:
    for counts in pool.run(2, _collectives_of_backwards, compile):
        assert all(set(count) <= {_GATHER, _COMPARE} for count in counts[:2]), counts
        assert [count[_REDUCE] for count in counts] == [0, 0, 5, 5]


def _collectives_of_a_block_used_twice() -> Counter[str]:
    pair = ChainPair(compile=True)
    pair.micro(0, "aba")
    loss = pair.forward(1, "aba")
    return _collectives(loss.backward)


def test_a_block_used_twice_is_reduced_once() -> None:
    for counts in pool.run(2, _collectives_of_a_block_used_twice):
        assert counts[_REDUCE] == 2


def _gathers_of_a_microbatch(reshards: Callable[[str], bool]) -> tuple[list[str], int]:
    asked: list[str] = []
    torch.manual_seed(0)
    model = fsdp.shard(Net(), reshard_after_forward=lambda unit: asked.append(unit) or reshards(unit))
    run = compiled(model, in_flight=1)
    tokens = torch.ones(1, 3, dtype=torch.long)
    run(tokens).sum().backward()
    with recorded(model) as events:
        run(tokens).sum().backward()
    return asked, sum(event.kind == "gather" for event in events)


def _is_block(unit: str) -> bool:
    return unit.startswith("blocks")


def _always(unit: str) -> bool:
    return True


def _never(unit: str) -> bool:
    return False


def test_reshard_after_forward_can_be_a_predicate() -> None:
    # Backward does not read the embedding, and starts with the head, which forward ends with.
    for reshards, expected in ((_always, 5 + 3), (_is_block, 5 + 2), (_never, 5)):
        for asked, num_gathers in pool.run(2, _gathers_of_a_microbatch, reshards):
            assert set(asked) == {"embed", "blocks.0", "blocks.1", "head", "root"}
            assert num_gathers == expected


class Product(nn.Module):
    """The gradient of each element is `first`, plus `second`, which is used in the same graph or in another one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ELEMS, dtype=dtype))

    def forward(self, first: float, second: float = 0, breaks: bool = False) -> Tensor:
        total = (self.weight * first).sum().float()
        if breaks:
            torch._dynamo.graph_break()
        return total + (self.weight * second).sum().float() if second else total


def _product_grad(
    compile: bool, dtype: torch.dtype, calls: list[list[tuple[float, ...]]], breaks: bool
) -> tuple[float, torch.dtype]:
    """calls[rank] are the microbatches of that rank."""
    model: Any = fsdp.shard(Product(dtype), precision=BF16)
    run = compiled(model) if compile else model
    mine = calls[dist.get_rank() % len(calls)]
    for number, factors in enumerate(mine):
        with contextlib.nullcontext() if number == len(mine) - 1 else model.no_sync():
            run(*factors, breaks=breaks).backward()
    grad = model.weight.grad.full_tensor()
    assert grad.eq(grad[0]).all()
    return float(grad[0]), grad.dtype


_F32, _B16 = torch.float32, torch.bfloat16
_SUMS = {
    "microbatches are summed in fp32": (_F32, [[(256,), (1,)]], False, 257),
    "uses in one microbatch are summed in bf16": (_F32, [[(256, 1)]], False, 256),
    "uses in two graphs are summed in fp32": (_F32, [[(256, 1)]], True, 257),
    "ranks are summed in fp32, then divided": (_F32, [[(256,)], [(1,)]], False, 128.5),
    "one cast to the parameter's dtype, after the mean": (_B16, [[(256,), (1,)], [(256,), (5,)]], False, 260),
}


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("case", _SUMS)
def test_where_sums_are_rounded(case: str, compile: bool) -> None:
    dtype, calls, breaks, expected = _SUMS[case]
    if breaks and not compile:
        pytest.skip("without a compiler there is one graph")
    assert pool.run(2, _product_grad, compile, dtype, calls, breaks) == [(expected, dtype)] * 2


class Whole(nn.Module):
    """One parameter that fills its flat group on one and on two ranks: no padding, hence no cat."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(64.0).reshape(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight + x


class TwoWhole(nn.Module):
    """Two parameters with one and the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Whole(), Whole()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def _tangents() -> dict[str, Tensor]:
    return {
        "plain": torch.arange(64.0).reshape(8, 8),
        "transposed": torch.arange(64.0).reshape(8, 8).t(),
        "stride 0": torch.ones(()).expand(8, 8),
        "a row of a larger one": torch.arange(128.0).reshape(2, 8, 8)[1],
    }


def _aliases(make: Callable[[], nn.Module], compile: bool) -> None:
    """The gradient is the tangent itself; neither may change with the other."""
    model: Any = fsdp.shard(make(), units=["first", "second"] if make is TwoWhole else "auto")
    assert all(row.padding_elems == 0 for row in fsdp.summary(model).groups)
    run = compiled(model) if compile else model
    values = fsdp.full_state_dict(model)
    for name, tangent in _tangents().items():
        before = tangent.clone()
        output = run(torch.zeros(8, 8))
        with model.no_sync():
            output.backward(tangent, retain_graph=True)
        assert torch.equal(tangent, before), name
        overwritten = tangent.clone()  # keeps no stride 0, which cannot be written
        output.backward(overwritten)
        overwritten.fill_(-1)
        for param in model.parameters():
            assert torch.equal(whole(param.grad), 2 * before), name
            param.grad.mul_(3)
            assert torch.equal(whole(param.grad), 6 * before), name
        assert torch.equal(tangent, before), name
        after = fsdp.full_state_dict(model)
        assert all(torch.equal(after[key], value) for key, value in values.items()), name
        model.zero_grad()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("make", [Whole, TwoWhole])
def test_gradients_alias_nothing(make: Callable[[], nn.Module], compile: bool, world_size: int) -> None:
    pool.run(world_size, _aliases, make, compile)


def _sum_of_all(compile: bool) -> None:
    """The gradient has stride 0."""
    model: Any = fsdp.shard(Whole())
    run = compiled(model) if compile else model
    for number in range(2):
        with model.no_sync() if number == 0 else contextlib.nullcontext():
            run(torch.zeros(8, 8)).sum().backward()
    assert torch.equal(whole(model.weight.grad), torch.full((8, 8), 2.0))


@pytest.mark.parametrize("compile", [True, False])
def test_gradient_of_a_sum(compile: bool) -> None:
    pool.run(2, _sum_of_all, compile)


class Records(nn.Module):
    """Remembers the dtypes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ELEMS))
        self.inner = Product()

    def forward(self, x: Tensor, pair: dict[str, Tensor], flag: bool = True) -> tuple[Any, ...]:
        return x.dtype, pair["float"].dtype, pair["int"].dtype, flag, self.weight.dtype, self.inner(1).dtype


def _input_dtypes(cast_inputs: bool, compile: bool) -> tuple[Any, ...]:
    model = fsdp.shard(Records(), precision=fsdp.Precision(_B16, cast_inputs=cast_inputs))
    x = torch.ones(ELEMS)
    return (compiled(model) if compile else model)(x, pair={"float": x, "int": x.long()})


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("cast_inputs, dtype", [(True, _B16), (False, _F32)])
def test_inputs_are_cast_only_if_asked(cast_inputs: bool, dtype: torch.dtype, compile: bool) -> None:
    for dtypes in pool.run(2, _input_dtypes, cast_inputs, compile):
        assert dtypes == (dtype, dtype, torch.int64, True, _B16, _F32)


def _uses_of_a_pending_gradient(model: Any) -> dict[str, Callable[[], Any]]:
    params, grad = list(model.parameters()), model.a.weight.grad
    uses: dict[str, Callable[[], Any]] = {
        "torch's clipping": lambda: torch.nn.utils.clip_grad_norm_(params, 1.0),
        "clipping by value": lambda: torch.nn.utils.clip_grad_value_(params, 1.0),
        "the package's clipping": lambda: fsdp.clip_grad_norm_(model, 1.0),
        "norm": lambda: grad.norm(),
        "add": lambda: grad + 1,
        "of a parameter": lambda: model.a.weight.detach() + grad,
        "float": lambda: float(grad.sum()),
        "item": lambda: grad[0].item(),
        "tolist": lambda: grad.tolist(),
        "numpy": lambda: grad.numpy(),
        "clone": lambda: grad.clone(),
        "mul_": lambda: grad.mul_(2),
        "full_tensor": lambda: grad.full_tensor(),
        "copy to a plain tensor": lambda: torch.zeros(ELEMS).copy_(grad),
        "equal": lambda: torch.equal(grad, grad),
        "unscaling": lambda: _unscale(params),
    }
    for kind, optimizer in {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}.items():
        for way in ("foreach", "fused", "loop"):
            flags = {"foreach": False} if way == "loop" else {way: True}
            uses[f"{kind} {way}"] = optimizer(params, lr=0.5, weight_decay=0.5, **flags).step
    return uses


def _unscale(params: list[nn.Parameter]) -> None:
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def _use_inside_a_window() -> dict[str, str]:
    """What is wrong with each use; and the window goes on as if nothing had happened."""
    pair = Pair(Terms, compile=False, units=_UNITS["a group each"])
    before = fsdp.full_state_dict(pair.model)
    pair.micro(0, sync=False)
    wrong = {}
    for name, use in _uses_of_a_pending_gradient(pair.model).items():
        wrong[name] = _refusal_of(use)
        after = fsdp.full_state_dict(pair.model)
        if not all(torch.equal(after[key], value) for key, value in before.items()):
            wrong[name] += " and changed parameters"
        before = after
    pair.micro(1)
    pair.check()
    return {name: text for name, text in wrong.items() if text}


def _refusal_of(use: Callable[[], Any]) -> str:
    try:
        use()
    except RuntimeError as error:
        return "" if "still accumulating" in str(error) and "no_sync()" in str(error) else f"says {error}"
    except Exception as error:
        return f"raises {error!r}"
    return "raises nothing"


def test_a_pending_gradient_is_refused_with_a_sentence() -> None:
    assert pool.run(2, _use_inside_a_window) == [{}, {}]


def _autograd_grad(compile: bool) -> str:
    pair = Pair(Terms, compile, units=_UNITS["a group each"])
    loss = pair.forward(0)
    try:
        torch.autograd.grad(loss, [pair.model.a.weight])
    except RuntimeError as error:
        return str(error)
    return "raises nothing"


@pytest.mark.parametrize("compile", [True, False])
def test_torch_autograd_grad_is_refused_with_a_sentence(compile: bool) -> None:
    for sentence in pool.run(2, _autograd_grad, compile):
        assert "fsdp_passes: torch.autograd.grad on a sharded parameter" in sentence


class Odd(nn.Module):
    """Its flat group has a size that nothing else in the process has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(99_991))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.square() * x).sum()


def _live_flat_buffers() -> dict[str, int]:
    """Full-size tensors that Python still knows, after each way to end a microbatch."""
    model: Any = fsdp.shard(Odd())
    run = compiled(model)
    full_elems = model.weight.place.shard_elems * dist.get_world_size()
    x = torch.ones(())

    def live() -> int:
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is Tensor and each.numel() == full_elems]
        slots = {
            each.data_ptr() for each in sharded_state(model).timeline.buffers.arena.slots
        }  # kept for the next gather
        return len({each.untyped_storage().data_ptr() for each in tensors} - slots)

    def settled() -> int:
        """What is live once nothing more is freed: gloo's thread lets go of a gather a moment after its wait."""
        count, since = live(), time.monotonic()
        while time.monotonic() < since + 1:
            time.sleep(0.01)
            if (fewer := live()) != count:
                count, since = fewer, time.monotonic()
        return count

    run(x).backward()
    counts = {"after a synchronised backward": settled()}
    with model.no_sync():
        run(x).backward()
    counts["inside a window"] = settled()
    model.zero_grad()
    counts["after zero_grad inside a window"] = settled()
    run(x)
    counts["after a forward without backward"] = settled()
    with torch.no_grad():
        run(x)
    counts["after an evaluation"] = settled()
    return counts


def test_full_buffers_live_only_inside_a_window() -> None:
    for counts in pool.run(2, _live_flat_buffers):
        assert counts.pop("inside a window") == 1
        assert set(counts.values()) == {0}, counts
