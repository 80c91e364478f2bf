"""What `explain` and `summary` say of a model that was compiled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_passes as fsdp
from fsdp_passes.codegen.regions import cut
from fsdp_passes.inspect.explain import GraphReport, report
from fsdp_passes.ir.passes import Declined, run_passes
from fsdp_passes.options import Options
from fsdp_passes.passes.pipeline import passes_of
from fsdp_passes.schedule.order import scheduled
from fsdp_passes.sharding.state import sharded_state
from tests.dist.models import compiled
from tests.simulated import graph


class TwoUnits(nn.Module):
    """Units `up` and `down`; the bias of `down` is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.down.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch._dynamo.reset()
    yield
    dist.destroy_process_group()


def two_units() -> nn.Module:
    return fsdp.shard(TwoUnits(), units=nn.Linear)


def step(run: Any) -> None:
    run(torch.ones(4, 8)).sum().backward()


def gradients_of(model: nn.Module) -> list[str]:
    """The lines on gradients of the last graph."""
    return [line.strip() for line in str(fsdp.explain(model).graphs[-1]).splitlines()[1:]]


@pytest.mark.usefixtures("one_rank")
class TestTexts(expecttest.TestCase):
    maxDiff = None

    def test_graphs_are_explained_as_they_run(self) -> None:
        model = two_units()
        run = compiled(model)
        self.assertExpectedInline(str(fsdp.explain(model)), """no graph ran yet""")
        loss = run(torch.ones(4, 8)).sum()
        self.assertExpectedInline(str(fsdp.explain(model)), """graph 0 fwd: 3 gathers, 2 regions, at most 1,664 B""")
        loss.backward()
        self.assertExpectedInline(
            str(fsdp.explain(model)),
            """\
graph 0 fwd: 3 gathers, 2 regions, at most 1,664 B
graph 1 bwd: 1 gathers, 2 regions, at most 1,664 B
  down: 1 written into slices
  up: 2 written into slices
round of graphs 0, 1: 3 gathers, 1 kept, at most 2,816 B""",
        )
        explained = fsdp.explain(model)
        step(run)
        assert fsdp.explain(run) == explained
        assert explained.declined == ()

    def test_units_that_are_kept_for_a_window_are_named(self) -> None:
        model = two_units()
        step(compiled(model, keep_gathered_bytes=700))
        (known,) = fsdp.explain(model).rounds
        self.assertExpectedInline(
            str(known),
            """\
0, 1: 3 gathers, 1 kept, at most 2,816 B
  kept for a window, 640 B: up""",
        )
        assert known.as_dict()["window_units"] == ["up"]

    def test_the_explanation_is_exported_as_json(self) -> None:
        model = two_units()
        step(compiled(model, in_flight=1))
        exported = json.loads(fsdp.explain(model).to_json())
        forward, backward = exported.pop("graphs")
        now = {"graphs_ahead": 0, "kept_from": None, "for_window": False}
        assert [gather.pop("buffer") for gather in forward["gathers"]] == ["full", "full_1", "full_2"]
        assert forward["gathers"] == [
            {"unit": "up", "dtype": "f32", "bytes": 640, "offset": 0, "stays": False, **now},
            {"unit": "down", "dtype": "f32", "bytes": 512, "offset": 0, "stays": False, **now},
            {"unit": "down", "dtype": "f32", "bytes": 128, "offset": 512, "stays": False, **now},
        ]
        down = {"unit": "down", "num_written": 1, "whole": False, "num_products": 0, "reduced_bytes": 512}
        up = {"unit": "up", "num_written": 2, "whole": False, "num_products": 0, "reduced_bytes": 640}
        assert (backward["gradients"], backward["declined"]) == ([down, up], [])
        parts = {"arena": 512, "stay": 0, "window": 0, "returned": 0, "written": 640, "reduced": 512}
        assert backward["peak"] == {"bytes": 1664, **parts}
        saved = 4 * (4 * 8 + 4 * 16 + 4 * 8 + 4 * 16)  # tangents, relu, input, and what the first region returns
        parts = {"gathered": 512, "stay": 0, "window": 0, "returned": 0, "written": 512, "reduced": 0, "values": saved}
        assert backward["live_at_peak"] == parts
        (known,) = exported["rounds"]
        assert (known["graphs"], known["num_gathers"], known["num_kept"]) == ([0, 1], 3, 1)
        parts = {"arena": 640, "stay": 0, "window": 0, "returned": 0, "written": 640, "reduced": 512}
        assert known["peak"] == {"bytes": 1792, **parts}
        kept = [gather for gathers in known["gathers"] for gather in gathers if gather["kept_from"]]
        assert [(gather["unit"], gather["graphs_ahead"]) for gather in kept] == [("down", 1)]

    def test_a_declined_gradient_has_a_reason(self) -> None:
        """What is computed with a whole flat group has a gradient that is no cat."""
        model = two_units()
        group = sharded_state(model).groups[0]

        def weigh(shard: Tensor, x: Tensor) -> Tensor:
            return torch.ops.fsdp_opt.unshard(shard, 1, torch.float32) * x

        run = torch.compile(weigh, backend="fsdp_opt", options={"codegen": "fx", "verify": 2})
        run(group.shard, torch.ones(group.layout.full_elems)).sum().backward()
        self.assertExpectedInline(
            str(fsdp.explain(model)),
            """\
graph 0 fwd: 1 gathers, 1 regions, at most 640 B
graph 1 bwd: 0 gathers, 1 regions, at most 640 B
  up: added up as a whole
  up: reduce_grad is left as it is: mul_1 is no cat; it is added up as a whole
round of graphs 0, 1: 1 gathers, 0 kept, at most 1,280 B""",
        )
        (left,) = fsdp.explain(model).declined
        assert left == Declined("up", "reduce_grad", "mul_1 is no cat; it is added up as a whole")

    def test_a_summary_tells_which_units_reduce_in_every_backward(self) -> None:
        model = two_units()
        run = compiled(model, accumulate_bytes=700)
        self.assertExpectedInline(
            str(fsdp.summary(model)),
            """\
unit  group       parameters  elements  padding  gathered  shard  after forward  accumulated
up    f32                  2       144       16     640 B  640 B        reshard        640 B
down  f32                  1       128        0     512 B  512 B        reshard        512 B
down  f32 frozen           1         8       24     128 B  128 B        reshard          0 B
2 units, 3 flat groups, 1 ranks
1,152 B of unreduced gradients between microbatches""",
        )
        run(torch.ones(4, 8))
        self.assertExpectedInline(
            str(fsdp.summary(model)),
            """\
unit  group       parameters  elements  padding  gathered  shard  after forward  accumulated
up    f32                  2       144       16     640 B  640 B        reshard        640 B
down  f32                  1       128        0     512 B  512 B        reshard          0 B
down  f32 frozen           1         8       24     128 B  128 B        reshard          0 B
2 units, 3 flat groups, 1 ranks
640 B of unreduced gradients between microbatches
reduced in every backward: down""",
        )


@pytest.mark.parametrize("grad_path", ["views", "cat_last", "cat"])
def test_how_gradients_are_added_up_is_said(grad_path: str, one_rank: None) -> None:
    model = two_units()
    step(compiled(model, grad_path=grad_path))
    how = [(each.unit, each.num_written, each.whole) for each in fsdp.explain(model).graphs[-1].gradients]
    if grad_path == "cat":
        assert how == [("down", 0, True), ("up", 0, True)]
        assert gradients_of(model) == ["down: added up as a whole", "up: added up as a whole"]
    else:
        assert how == [("down", 1, False), ("up", 2, False)]
        assert gradients_of(model) == ["down: 1 written into slices", "up: 2 written into slices"]


def test_equal_blocks_share_a_graph(one_rank: None) -> None:
    model = fsdp.shard(nn.Sequential(TwoUnits(), TwoUnits()), units=TwoUnits)
    for block in model.children():
        block.compile(backend="fsdp_opt", options={"codegen": "fx"})
    model(torch.ones(4, 8, requires_grad=True)).sum().backward()
    graphs = fsdp.explain(model).graphs
    assert [(each.direction, each.num_gathers) for each in graphs] == [("fwd", 2), ("bwd", 1)]
    assert [each.unit for each in graphs[-1].gradients] == ["0"]


def test_a_model_that_is_not_sharded_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected a model that shard"):
        fsdp.explain(nn.Linear(2, 2))


def reported(text: str, **options: Any) -> GraphReport:
    """What is reported of a backward graph."""
    gm = graph(text)
    declined = run_passes(gm, passes_of("bwd", Options.parse(options)), 2, lambda stage, gm: None)
    return report(gm.graph, scheduled(cut(gm, "bwd", trains=False), None), declined)


BACKWARD = """
    0 s: f32[8] = input(shard="up")
    1 p: f32[8] = input(shard="down")
    2 o: f32[8] = input(shard="head")
    3 g: f32[4,4] = input()
    4 v: f32[16] = aten.view(g, [16])
    5 zeros: f32[8] = aten.zeros([8])
    6 h: f32[8] = aten.exp(p)
    7 c: f32[16] = aten.cat([h, zeros])
    8 r: f32[8] = fsdp_opt.reduce_grad(c, s, 2)
    9 q: f32[8] = fsdp_opt.reduce_grad(v, p, 2)
    10 d: f32[16] = aten.cat([v])
    11 l: f32[8] = fsdp_opt.reduce_grad(d, o, 2)
    12 n: f32[8] = aten.neg(l)
    13 return (r, q, n)
    """


class TestReport(expecttest.TestCase):
    maxDiff = None

    def test_written_concatenated_and_through_autograd(self) -> None:
        self.assertExpectedInline(
            str(reported(BACKWARD)),
            """\
bwd: 0 gathers, 2 regions, at most 128 B
  up: 1 written into slices
  down: added up as a whole
  down: q is left as it is: v is no cat; it is added up as a whole
  head: l is left as it is: not only the output reads it; it goes through autograd, and is reduced in every backward""",
        )

    def test_the_reference_concatenates(self) -> None:
        self.assertExpectedInline(
            str(reported(BACKWARD, grad_path="cat")),
            """\
bwd: 0 gathers, 2 regions, at most 128 B
  up: added up as a whole
  down: added up as a whole
  head: l is left as it is: not only the output reads it; it goes through autograd, and is reduced in every backward""",
        )


def test_what_is_declined_is_logged() -> None:
    with expecttest.TestCase().assertLogs("fsdp_passes", "WARNING") as logs:
        reported(BACKWARD)
    assert [record.getMessage() for record in logs.records] == [
        "q of unit 'down' is left as it is: v is no cat; it is added up as a whole",
        "l of unit 'head' is left as it is: not only the output reads it; it goes through autograd, and is reduced "
        "in every backward",
    ]
