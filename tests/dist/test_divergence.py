"""Ranks that do not send the same: an error on each of them, that says what they do. Late ranks: none."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_passes as fsdp
from fsdp_passes.codegen.variants import Regions
from fsdp_passes.runtime import agreement
from fsdp_passes.runtime.agreement import Agreement, difference
from fsdp_passes.runtime.collectives import another_group
from fsdp_passes.sharding.state import sharded_state
from tests.dist import pool
from tests.dist.models import build, compiled, full_grads

WIDTH = 8
X = torch.linspace(-1, 1, 6 * WIDTH).view(6, WIDTH).requires_grad_()  # so that all blocks are compiled once
PROMISED_S = 10  # from the arrival of the last rank to the error on every rank
COMPILED, UNCOMPILED, OTHER = "fsdp_opt", "uncompiled", "aot_eager"


class Block(nn.Module):
    """Quick to compile, and of two biases uses one, or none."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(hidden, WIDTH, bias=False)
        self.bias, self.other = nn.Parameter(torch.zeros(hidden)), nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor, bias: str = "bias") -> Tensor:
        x = self.up(x)
        return self.down(x + getattr(self, bias) if bias else x)


def _blocks(hidden: tuple[int, ...] = (12, 12, 12)) -> nn.Module:
    return nn.ModuleList(Block(each) for each in hidden)


def _sharded(backend: str, hidden: tuple[int, ...] = (12, 12, 12), **options: Any) -> Any:
    """Blocks "0", "1" and "2", each a unit, compiled one by one."""
    blocks: Any = fsdp.shard(build(_blocks, hidden), units=[Block])
    options = {"codegen": "fx", **options}
    for block in blocks if backend != UNCOMPILED else []:
        block.compile(backend=backend, options=options if backend == COMPILED else None)
    return blocks


def _forward(blocks: Any, order: str = "012") -> Tensor:
    x = X
    for digit in order:
        x = blocks[int(digit)](x)
    return x.square().mean()


def _train(blocks: Any, order: str = "012") -> None:
    _forward(blocks, order).backward()


def skips_a_unit(blocks: Any, differs: bool) -> None:
    _train(blocks)
    _train(blocks, "02" if differs else "012")


def runs_more_microbatches(blocks: Any, differs: bool) -> None:
    for _ in range(2):
        with blocks.no_sync():
            for _ in range(2 if differs else 1):
                _train(blocks)
        _train(blocks)


def runs_one_more_of_the_last_window(blocks: Any, differs: bool) -> None:
    for number in (3, 3, 3 + differs):
        with blocks.no_sync():
            for _ in range(number):
                _train(blocks)
        _train(blocks)


def does_not_synchronise(blocks: Any, differs: bool) -> None:
    _train(blocks)
    with blocks.no_sync() if differs else contextlib.nullcontext():
        _train(blocks)
    _train(blocks)


def evaluates(blocks: Any, differs: bool) -> None:
    _train(blocks)
    with torch.no_grad():
        for _ in range(differs):
            _forward(blocks)
    _train(blocks)


def runs_no_backward(blocks: Any, differs: bool) -> None:
    loss = _forward(blocks)
    if not differs:
        loss.backward()
    _train(blocks)


def edits_between_graphs(blocks: Any, differs: bool) -> None:
    for _ in range(2):
        _train(blocks)
    x = blocks[0](X)
    if differs:
        blocks[1].bias.local.add_(1.0)  # after it was gathered
    blocks[2](blocks[1](x)).sum().backward()


def edits_between_microbatches(blocks: Any, differs: bool) -> None:
    with blocks.no_sync():
        for _ in range(3):
            _train(blocks)
        if differs:
            blocks[1].bias.local.add_(1.0)
        _train(blocks)


def fails_in_a_forward(blocks: Any, differs: bool) -> None:
    """One rank goes on with the next batch; the others do not wait for it in this one."""
    for _ in range(2):
        _train(blocks)
    with _failing_region("fwd") if differs else contextlib.nullcontext():
        _train(blocks)
    _train(blocks)


@contextlib.contextmanager
def _failing_region(direction: str, after: int = 0, fails: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A region of `direction` fails once `after` others of it have run."""
    call, calls = Regions.__call__, itertools.count()

    def fail(self: Regions, number: int, first: bool, inputs: list[Any]) -> Any:
        if self._direction == direction and next(calls) >= after:
            fails()
            raise KeyError("an error of one rank")
        return call(self, number, first, inputs)

    with mock.patch.object(Regions, "__call__", fail), pytest.raises(KeyError):
        yield


def clips(blocks: Any, differs: bool) -> None:
    _train(blocks)
    if differs:
        fsdp.clip_grad_norm_(blocks, 1.0)
    _train(blocks)


def reads_a_whole_parameter(blocks: Any, differs: bool) -> None:
    if differs:
        blocks[1].up.weight.full_tensor()
    _train(blocks)


def trains_another_model(blocks: Any, differs: bool) -> None:
    """Of the same units: the steps tell them apart."""
    other = _sharded(UNCOMPILED)
    _train(blocks)
    _train(other if differs else blocks)


Scenario = Callable[[Any, bool], None]


@dataclass(frozen=True)
class Case:
    """What ranks 0 and 1 are said to send in `scenario`, which rank 1 runs otherwise; `kwargs` are of `_sharded`."""

    scenario: Scenario
    backend: str
    said: tuple[str, str] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.scenario.__name__, self.backend, *self.kwargs])


OTHER_SIZES = {"hidden": (12, 20, 12)}
CASES = (
    Case(skips_a_unit, COMPILED, ('step 1: backward gather of unit "0"', 'step 1: forward gather of unit "2"')),
    pytest.param(
        Case(
            skips_a_unit,
            COMPILED,
            ('step 1: backward gather of unit "0"', 'step 1: forward gather of unit "2"'),
            OTHER_SIZES,
        ),
        marks=pytest.mark.slow,
    ),
    Case(skips_a_unit, UNCOMPILED, ('step 1: gather of unit "1"', 'step 1: gather of unit "2"')),
    Case(skips_a_unit, UNCOMPILED, ('step 1: gather of unit "1"', 'step 1: gather of unit "2"'), OTHER_SIZES),
    pytest.param(
        Case(
            runs_more_microbatches,
            COMPILED,
            ('step 0: reduce-scatter of unit "2"', 'step 0: nothing after the backward gather of unit "0"'),
        ),
        marks=pytest.mark.slow,
    ),
    Case(
        runs_more_microbatches,
        COMPILED,
        ("step 0: all-reduce at the end of a synchronised backward", 'step 0: forward gather of unit "0"'),
        {"accumulate_bytes": 0},
    ),
    Case(runs_more_microbatches, UNCOMPILED, ('step 0: reduce-scatter of unit "0"', 'step 0: gather of unit "0"')),
    Case(
        does_not_synchronise,
        COMPILED,
        ('step 1: reduce-scatter of unit "2"', 'step 1: nothing after the backward gather of unit "0"'),
    ),
    Case(does_not_synchronise, UNCOMPILED, ('step 1: reduce-scatter of unit "0"', 'step 1: gather of unit "0"')),
    Case(evaluates, COMPILED, ('step 1: backward gather of unit "0"', 'step 1: forward gather of unit "0"')),
    Case(evaluates, UNCOMPILED, ('step 1: reduce-scatter of unit "0"', 'step 1: gather of unit "0"')),
    pytest.param(
        Case(runs_no_backward, COMPILED, ('step 0: backward gather of unit "2"', 'step 0: forward gather of unit "0"')),
        marks=pytest.mark.slow,
    ),
    Case(runs_no_backward, UNCOMPILED, ('step 0: reduce-scatter of unit "0"', 'step 0: gather of unit "0"')),
    Case(runs_no_backward, OTHER, ('step 0: reduce-scatter of unit "2"', 'step 0: gather of unit "0"')),
    Case(
        edits_between_graphs,
        COMPILED,
        ('step 2: backward gather of unit "0"', 'step 2: gather after an edit of unit "1"'),
    ),
    Case(
        edits_between_microbatches,
        COMPILED,
        ('step 0: forward use of the kept copy of unit "1"', 'step 0: forward gather of unit "1"'),
        {"keep_gathered_bytes": 1 << 20},
    ),
    Case(
        runs_one_more_of_the_last_window,
        COMPILED,
        ('step 2: reduce-scatter of unit "2"', 'step 2: forward use of the kept copy of unit "0"'),
        {"keep_gathered_bytes": 1 << 20},
    ),
    Case(fails_in_a_forward, COMPILED, ('step 2: backward gather of unit "0"', 'step 2: forward gather of unit "0"')),
    pytest.param(
        Case(
            clips,
            COMPILED,
            ('step 1: forward gather of unit "0"', "step 1: norm, sum or other reduction of parameters"),
        ),
        marks=pytest.mark.slow,
    ),
    Case(clips, UNCOMPILED, ('step 1: gather of unit "0"', "step 1: norm, sum or other reduction of parameters")),
    Case(reads_a_whole_parameter, UNCOMPILED, ('step 0: gather of unit "0"', "step 0: full_tensor of 1.up.weight")),
    Case(trains_another_model, UNCOMPILED, ('step 1: gather of unit "0"', 'step 0: gather of unit "0"')),
)


@dataclass(frozen=True)
class Outcome:
    """The error's text on one rank; when this rank came to compare, and when it raised."""

    message: str
    arrived: float
    raised: float


def _outcome(case: Case) -> Outcome:
    arrivals: list[float] = []
    compare = agreement.numbers_of_ranks

    def arrive(number: int, group: dist.ProcessGroup) -> list[int]:
        arrivals.append(time.monotonic())
        return compare(number, group)

    blocks = _sharded(case.backend, **case.kwargs)
    with mock.patch.object(agreement, "numbers_of_ranks", arrive), pytest.raises(RuntimeError) as error:
        case.scenario(blocks, dist.get_rank() == 1)
    return Outcome(str(error.value), arrivals[-1], time.monotonic())


def _message(world_size: int, case: Case) -> str:
    """The error's text, the same on every rank, in time; without the advice at its end."""
    outcomes = pool.run(world_size, _outcome, case)
    last_arrival = max(outcome.arrived for outcome in outcomes)
    assert all(outcome.raised - last_arrival < PROMISED_S for outcome in outcomes)
    (message,) = {outcome.message for outcome in outcomes}
    return _without_advice(message)


def _without_advice(message: str) -> str:
    found, _, advice = message.rpartition("\n")
    assert advice.startswith("Every rank must use the same units, options and trained parameters, run as many")
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_rank_is_told_what_all_do(case: Case) -> None:
    _, *lines = _message(2, case).splitlines()
    said = [re.sub(r" \(.*?\)", "", line.strip()) for line in lines]
    assert said == [f"rank {rank} in {what}" for rank, what in enumerate(case.said)]


class TestText(expecttest.TestCase):
    @pytest.mark.slow
    def test_of_three_ranks(self) -> None:
        self.assertExpectedInline(
            _message(3, Case(skips_a_unit, UNCOMPILED)),
            """\
fsdp_passes: expected every rank to send the same, got
    ranks 0, 2 in step 1: gather of unit "1" (288 x float32, from 1.bias on)
    rank 1 in step 1: gather of unit "2" (288 x float32, from 2.bias on)""",
        )

    def test_of_a_reduction_of_parameters(self) -> None:
        self.assertExpectedInline(
            _message(2, Case(clips, UNCOMPILED)),
            """\
fsdp_passes: expected every rank to send the same, got
    rank 0 in step 1: gather of unit "0" (256 x float32, from 0.bias on)
    rank 1 in step 1: norm, sum or other reduction of parameters (12 x float32, from 0.bias on)""",
        )

    def test_of_the_end_of_a_backward(self) -> None:
        case = Case(runs_more_microbatches, COMPILED, None, {"accumulate_bytes": 0})
        self.assertExpectedInline(
            _message(2, case),
            """\
fsdp_passes: expected every rank to send the same, got
    rank 0 in step 0: all-reduce at the end of a synchronised backward (12 parameters, 2 backwards in its window)
    rank 1 in step 0: forward gather of unit "0" (256 x float32, from 0.bias on)""",
        )

    def test_of_a_step_alone(self) -> None:
        self.assertExpectedInline(
            _without_advice(difference({0: (2, ["gather"]), 4: (3, ["gather"]), 5: (2, ["gather"])})),
            """\
fsdp_passes: expected every rank to send the same, got
    ranks 0, 5 in step 2: gather
    rank 4 in step 3: gather""",
        )


def _late(seconds: float) -> list[dict[str, Tensor]]:
    """Gradients of windows in which rank 1 is late, by another time in each place."""
    blocks, gradients = _sharded(COMPILED), []
    for late in (0, seconds):
        blocks.zero_grad()
        with blocks.no_sync():
            _train(blocks)
        time.sleep(late * dist.get_rank())
        loss = _forward(blocks)
        time.sleep(late / 5 * dist.get_rank())
        loss.backward()
        gradients.append({name: grad for name, grad in full_grads(blocks).items() if grad is not None})
    return gradients


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_a_late_rank_is_waited_for(seconds: float) -> None:
    for in_time, late in pool.run(2, _late, seconds):
        assert len(in_time) == len(late) == 9
        for name, grad in in_time.items():
            assert torch.equal(grad, late[name])


def _computes_otherwise() -> None:
    """From the second step on rank 1, which compiles anew, uses other parameters of each unit, or fewer."""
    blocks = _sharded(COMPILED)
    for step, bias in enumerate(("bias", "other", "other", "", "")):
        blocks.zero_grad()
        x = X
        for block in blocks:
            x = block(x, bias if dist.get_rank() == 1 else "bias")
        x.square().mean().backward()
        with_gradient = {name.partition(".")[2] for name, grad in full_grads(blocks).items() if grad is not None}
        assert with_gradient == {"up.weight", "down.weight", "bias", *(("other",) if bias == "other" else ())}, step


def test_ranks_may_compile_apart_and_use_other_parameters_of_a_unit() -> None:
    pool.run(2, _computes_otherwise)


def _evaluate_and_train(failing_rank: int | None, failing: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of evaluations, in one of which the last block of a rank fails, and gradients after them."""
    blocks, losses = _sharded(COMPILED), []
    for number in range(3):
        fails = number == failing and dist.get_rank() == failing_rank
        with torch.no_grad(), _failing_region("fwd", after=2) if fails else contextlib.nullcontext():
            losses.append(_forward(blocks).item())
    _train(blocks)
    return losses, {name: grad for name, grad in full_grads(blocks).items() if grad is not None}


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_in_a_graph_sends_what_the_others_wait_for(failing: int) -> None:
    """Where all send the same afterwards, it may go on: also if that was the round whose order is learnt."""
    losses, grads = pool.run(2, _evaluate_and_train, None, failing)[0]
    others = pool.run(2, _evaluate_and_train, 1, failing)
    assert [len(each) for each, _ in others] == [3, 2]
    for other_losses, other_grads in others:
        assert other_losses == losses[: len(other_losses)]
        assert grads.keys() == other_grads.keys()
        assert all(torch.equal(grads[name], other_grads[name]) for name in grads)


def _train_windows(losing: str, keep: int, backend: str) -> tuple[list[str], list[dict[str, Tensor]]]:
    """Errors, and gradients, of three windows of four microbatches, of which rank 1 loses one in the second window."""
    model: Any = fsdp.shard(
        build(lambda: nn.Sequential(*_blocks())), units=[Block], reshard_after_forward=losing != "stays"
    )
    run = compiled(model, keep_gathered_bytes=keep, in_flight=None) if backend == COMPILED else model
    errors, grads = [], []
    for window in range(3):
        with pytest.raises(RuntimeError) if window == 1 and losing else contextlib.nullcontext() as raised:
            for number in range(4):
                loses = losing if (window, number, dist.get_rank()) == (1, 1, 1) else ""
                with model.no_sync() if number < 3 else contextlib.nullcontext():
                    _microbatch(run, loses)
        errors.append("" if raised is None else str(raised.value))
        if raised is None:
            grads.append({name: grad for name, grad in full_grads(model).items() if grad is not None})
        model.zero_grad()
    return errors, grads


def _microbatch(run: Any, loses: str) -> None:
    with torch.no_grad() if loses == "evaluates" else contextlib.nullcontext():
        loss = run(X).square().mean()
    fails = loses == "fails in backward"
    with _failing_region("bwd") if fails else contextlib.nullcontext():
        if loses in ("", "fails in backward"):
            loss.backward()


LOSING = [
    ("evaluates", 0, COMPILED),
    ("evaluates", 1 << 20, COMPILED),
    ("evaluates", 0, UNCOMPILED),
    ("runs no backward", 0, UNCOMPILED),
    ("runs no backward", 1 << 20, COMPILED),
    ("fails in backward", 0, COMPILED),
    ("fails in backward", 1 << 20, COMPILED),
]


@pytest.mark.parametrize(("losing", "keep", "backend"), LOSING)
def test_a_microbatch_that_one_rank_loses_is_told_of_at_the_end_of_the_window(
    losing: str, keep: int, backend: str
) -> None:
    """Though ranks send the same. Once all have called `zero_grad()` they go on."""
    (_, expected), _ = pool.run(2, _train_windows, "", keep, backend)
    for errors, grads in pool.run(2, _train_windows, losing, keep, backend):
        assert errors[0] == errors[2] == ""
        assert "rank 0 in step 1: all-reduce at the end of a synchronised backward (12 parameters, 4 back" in errors[1]
        assert "rank 1 in step 1: all-reduce at the end of a synchronised backward (12 parameters, 3 back" in errors[1]
        assert len(grads) == 2
        for got, other in zip(grads, expected[::2], strict=True):
            assert got.keys() == other.keys()
            assert all(torch.equal(got[name], grad) for name, grad in other.items())


def _fail_in_backward(
    compile_whole: bool, options: dict[str, Any], window: int | None, rank: int | None
) -> tuple[list[str], float, dict[str, Tensor]]:
    """What ended backwards; after how long; and gradients of a later one, once both ranks have discarded the others.

    Of `window` None no backward fails, of `rank` None those of all ranks.
    """
    model: Any = fsdp.shard(build(lambda: nn.Sequential(*_blocks())), units=[Block])
    run, errors, took = compiled(model, **options) if compile_whole else model, [], 0.0
    for block in [] if compile_whole else model:
        block.compile(backend=COMPILED, options={"codegen": "fx", **options})
    for number in range(5):
        model.zero_grad()
        fails, start = number == window and rank in (None, dist.get_rank()), time.monotonic()
        with _failing_region("bwd", after=1) if fails else contextlib.nullcontext():
            try:
                run(X).square().mean().backward()
            except RuntimeError as error:
                errors.append(str(error))
                took = time.monotonic() - start
    return errors, took, {name: grad for name, grad in full_grads(model).items() if grad is not None}


@pytest.mark.parametrize("options", [{}, {"keep_gathered_bytes": 1 << 20}], ids=["", "keep"])
@pytest.mark.parametrize("compile_whole", [True, False])
def test_a_backward_that_fails_on_one_rank_is_told_of_on_the_others(
    compile_whole: bool, options: dict[str, Any]
) -> None:
    """That rank raises its own error; if all fail alike, each raises its own. Once discarded, nothing is left of it."""
    expected = pool.run(2, _fail_in_backward, compile_whole, options, None, None)[0][2]
    for window, rank, told in ((0, 1, 0), (3, 1, 0), (3, None, None)):
        outcomes = pool.run(2, _fail_in_backward, compile_whole, options, window, rank)
        for number, (errors, took, grads) in enumerate(outcomes):
            assert len(errors) == (number == told)
            assert took < PROMISED_S
            if errors:
                assert f"rank 1 in step {window}: nothing, because of a KeyError in backward" in errors[0]
                assert f"rank 0 in step {window}: " in errors[0]
            assert grads.keys() == expected.keys() and len(grads) == 9
            assert all(torch.equal(grads[name], grad) for name, grad in expected.items())


def _skip_a_unit_and_go_on(keep: int, differs: bool) -> tuple[int, dict[str, Tensor]]:
    """How often ranks differed, and gradients of the last window: one unit is skipped by rank 1 in one before."""
    blocks, differences = _sharded(COMPILED, keep_gathered_bytes=keep), 0
    for number in range(5):
        blocks.zero_grad()
        skips = differs and number == 2 and dist.get_rank() == 1
        try:
            with blocks.no_sync():
                for _ in range(2):
                    _train(blocks, "02" if skips else "012")
            _train(blocks)
        except RuntimeError:
            differences += 1
    return differences, {name: grad for name, grad in full_grads(blocks).items() if grad is not None}


@pytest.mark.parametrize("keep", [0, 1 << 20])
def test_ranks_that_differed_can_go_on_once_they_discard(keep: int) -> None:
    expected = pool.run(2, _skip_a_unit_and_go_on, keep, False)[0][1]
    for differences, grads in pool.run(2, _skip_a_unit_and_go_on, keep, True):
        assert differences == 1
        assert all(torch.equal(grads[name], grad) for name, grad in expected.items()) and len(grads) == 9


def _discard_with_a_frozen_parameter() -> None:
    for backend in (COMPILED, UNCOMPILED):
        blocks = _sharded(backend)
        blocks[1].bias.requires_grad_(False)
        with blocks.no_sync():
            _train(blocks)
        state = sharded_state(blocks)
        assert state.backwards == 1
        blocks.zero_grad()
        assert state.backwards == 0 and all(group.gradients.is_empty for group in state.groups)
        blocks[1].bias.requires_grad_(True)


def test_nothing_is_left_once_gradients_are_discarded() -> None:
    pool.run(2, _discard_with_a_frozen_parameter)


def _compared_later() -> str:
    """As on a device where the host does not wait for each comparison."""
    ranks = Agreement(another_group(dist.group.WORLD, "a test", backend="gloo"), at_once=False)
    ranks.check(["gather"], host_waits=True)
    ranks.check([f"gather of rank {dist.get_rank()}"])
    with pytest.raises(RuntimeError) as error:
        ranks.check(["reduce-scatter"], host_waits=True)
    return str(error.value)


def test_comparisons_that_are_put_off() -> None:
    for message in pool.run(2, _compared_later):
        assert "rank 0 in step 0: gather of rank 0\n    rank 1 in step 0: gather of rank 1\n" in message


def _alone() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    blocks = fsdp.shard(build(_blocks), mesh=mesh["shards"])
    with mock.patch.object(Agreement, "_compare", side_effect=AssertionError):
        for _ in range(1 + dist.get_rank()):
            _train(blocks)


def test_a_rank_that_shards_alone_compares_nothing() -> None:
    pool.run(2, _alone)


def _left_by_rank_1() -> tuple[str, str]:
    blocks = _sharded(UNCOMPILED)
    _train(blocks)
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(RuntimeError) as error:
        _train(blocks)
    return str(error.value), str(error.value.__cause__)


def _left_in_a_graph(direction: str, in_flight: int | None) -> tuple[str, str]:
    run = compiled(fsdp.shard(build(lambda: nn.Sequential(*_blocks())), units=[Block]), in_flight=in_flight)
    run(X).sum().backward()
    if dist.get_rank() == 1:
        with _failing_region(direction, fails=lambda: os._exit(0)):
            run(X).sum().backward()
    with pytest.raises(RuntimeError) as error:
        run(X).sum().backward()
    return str(error.value), str(error.value.__cause__)


@pytest.mark.parametrize(
    ("direction", "in_flight", "what"), [("fwd", 1, 'gather of unit "1"'), ("bwd", None, 'reduce-scatter of unit "2"')]
)
def test_a_rank_that_ended_in_a_graph_is_told_of(direction: str, in_flight: int | None, what: str) -> None:
    (message, cause), _ = pool.run(2, _left_in_a_graph, direction, in_flight, leaving=1)
    assert message.startswith(f"fsdp_passes: rank 0, in step 1, waited for the {what} (256 x float32, from ")
    assert "onnection" in cause


def test_a_rank_that_has_ended_is_told_of() -> None:
    (message, cause), _ = pool.run(2, _left_by_rank_1, leaving=1)
    assert message.startswith(
        'fsdp_passes: rank 0, in step 1, is about to send: gather of unit "0" (256 x float32, from 0.bias on). '
        "It waited for the other ranks to say the same, but one has ended"
    )
    assert "onnection" in cause  # gloo: "Connection closed by peer", or "Connection reset"
