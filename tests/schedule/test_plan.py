"""Plans: when values are dropped, and their text."""

from __future__ import annotations

import expecttest
import pytest
import torch

from fsdp_passes.schedule.plan import (
    Accumulate,
    Event,
    Gather,
    GradSlice,
    Peak,
    Plan,
    Reduce,
    Release,
    Run,
    Step,
    Wait,
    WaitReduce,
    reads,
    with_drops,
)
from fsdp_passes.schedule.plan_text import dump_plan, load_plan
from tests.simulated import graph

NEGATE = """
    0 x: bf16[16] = input()
    1 y: bf16[16] = aten.neg(x)
    2 return (y,)
    """
STEPS: tuple[Step, ...] = (
    Gather("full", "s", torch.bfloat16, 16, "up"),
    Wait("full"),
    Run(0, ("full",), ("y",)),
    GradSlice("slice", "s", 0, (2, 3), torch.float32),
    GradSlice("scalar", "s", 2, (), torch.float32, separate=True),
    Run(1, ("slice", "scalar"), ("a", "b")),
    Release("full"),
    Run(2, ("y", "b"), (), ("y",)),
    Accumulate("a", "s", (0, 2), ("a",)),
    Accumulate("b", "s", None),
    Accumulate("b", "s", (), ("b",)),
    Reduce("s", torch.float32, 16),
    WaitReduce("s"),
    WaitReduce("s", ago=2),
    Event(),
    Gather("later", "t", torch.float32, 4, 'the "head"', reshard=False, offset=512, ahead=3, kept_from="full"),
    Gather("more", "t", torch.float32, 4, "", offset=0),
    Gather("most", "u", torch.float32, 4, "norm", offset=1024, for_window=True),
)
OUTPUTS = ("x", None, 3, -0.5, True)


def a_plan(trains: bool = False) -> Plan:
    regions = (graph(NEGATE), graph(NEGATE), graph(NEGATE))
    return Plan(
        "fwd" if trains else "bwd", ("s", None, "x"), STEPS, OUTPUTS, regions, trains, Peak(64, 8, 4, 0, 12, 16)
    )


class TestText(expecttest.TestCase):
    maxDiff = None

    def test_every_kind_of_step(self) -> None:
        got = dump_plan(a_plan())
        self.assertExpectedInline(
            got,
            """\
plan bwd (s, _, x)
peak 92 B: arena 64, stay 8, window 4, returned 0, written 12, reduced 16
   0 issue   full: bf16[16] = gather(s) of "up"
   1 wait    full
   2 run     y = region_0(full)
   3         slice: f32[2,3] = grad_slice(s, 0)
   4         scalar: f32[] = grad_slice(s, 2, separate)
   5 run     a, b = region_1(slice, scalar)
   6 release full
   7 run     region_2(y, b) drop (y)
   8         accumulate(a, s, [0, 2]) drop (a)
   9         accumulate(b, s, None)
  10         accumulate(b, s, []) drop (b)
  11 issue   reduce(s, f32[16])
  12 wait    reduce(s)
  13 wait    reduce(s), graphs ago: 2
  14 event   gathers after compute
  15         later: f32[4] = gather(t) of "the \\"head\\"" at 512, stays, kept from full, graphs ahead: 3
  16 issue   more: f32[4] = gather(t) of "" at 0
  17 issue   most: f32[4] = gather(u) of "norm" at 1024, for the window
  18         return (x, None, 3, -0.5, True)

region_0:
   0         x: bf16[16] = input()
   1         y: bf16[16] = aten.neg(x)
   2         return (y,)

region_1:
   0         x: bf16[16] = input()
   1         y: bf16[16] = aten.neg(x)
   2         return (y,)

region_2:
   0         x: bf16[16] = input()
   1         y: bf16[16] = aten.neg(x)
   2         return (y,)
""",
        )

    def test_an_empty_plan(self) -> None:
        got = dump_plan(Plan("fwd", (), (), (), (), trains=True))
        self.assertExpectedInline(
            got,
            """\
plan fwd trains ()
peak 0 B: arena 0, stay 0, window 0, returned 0, written 0, reduced 0
   0         return ()
""",
        )


@pytest.mark.parametrize("trains", [False, True])
def test_plans_load_back(trains: bool) -> None:
    plan = a_plan(trains)
    loaded = load_plan(dump_plan(plan))
    assert dump_plan(loaded) == dump_plan(plan)
    for field in ("direction", "inputs", "steps", "outputs", "trains", "peak"):
        assert getattr(loaded, field) == getattr(plan, field)
    assert [type(output) for output in loaded.outputs] == [type(output) for output in OUTPUTS]


@pytest.mark.parametrize("plan", [Plan("bwd", (), (), (), ()), Plan("fwd", (None, None), (), (None,), ())])
def test_plans_without_steps_load_back(plan: Plan) -> None:
    assert load_plan(dump_plan(plan)) == plan


@pytest.mark.parametrize("output", [float("inf"), float("-inf"), float("nan")])
def test_numbers_without_a_literal_load_back(output: float) -> None:
    (loaded,) = load_plan(dump_plan(Plan("fwd", (), (), (output,), ()))).outputs
    assert repr(loaded) == repr(output)
    assert isinstance(loaded, float)


def test_indices_and_blank_lines_are_for_readers() -> None:
    text = dump_plan(a_plan()).replace("   7 run ", "\n  77 run ")
    assert load_plan(text).steps == STEPS


def test_collectives_of_a_plan() -> None:
    assert a_plan().gathers == (STEPS[0], STEPS[-2], STEPS[-1])
    assert a_plan().reductions == (STEPS[11],)
    assert a_plan().grad_slices == STEPS[3:5]


HEAD = "plan fwd (x)\n"
END = "   1         return (x)\n"
REFUSED = {
    "head": ("plan up (x)\n" + END, "expected 'plan fwd|bwd [trains] (inputs)', got 'plan up (x)'"),
    "no head": (END, "expected 'plan fwd|bwd [trains] (inputs)', got '   1         return (x)'"),
    "no return": (HEAD + "   0 wait    a\n", "expected 'return (...)' at the end, got '   0 wait    a'"),
    "a word": (HEAD + "   0 hold    a\n" + END, "expected a step of a plan, got '   0 hold    a'"),
    "a step after return": (
        HEAD + END + "   2 wait    a\n",
        "expected 'return (...)' at the end, got '   2 wait    a'",
    ),
    "pieces": (HEAD + "   0         accumulate(a, s, 3)\n" + END, "expected a step of a plan, got"),
    "half a gather": (HEAD + "   0 issue   full = gather(s)\n" + END, "expected a step of a plan, got"),
    "a region's graph": (HEAD + END + "\nregion_0:\n   0 wrong\n", "not a line of a graph"),
    "nothing": ("", "expected 'plan fwd|bwd [trains] (inputs)'"),
    "head only": (HEAD, "expected 'return (...)' at the end"),
    "a dtype": (HEAD + "   0 issue   full: f99[8] = gather(s)\n" + END, "expected a step of a plan, got"),
    "a number": (HEAD + "   0         accumulate(a, s, [b])\n" + END, "expected a step of a plan, got"),
    "the wrong lane": (HEAD + "   0 issue   accumulate(a, s, [1])\n" + END, "expected a step of a plan, got"),
    "a region that is not there": (HEAD + "   0 run     y = region_0(x)\n" + END, "region_0"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_plan_is_refused(what: str) -> None:
    text, message = REFUSED[what]
    with pytest.raises(SyntaxError) as caught:
        load_plan(text)
    assert message in str(caught.value)


def test_a_value_is_dropped_by_the_last_step_that_reads_it() -> None:
    steps = (
        Run(0, ("x",), ("y", "z")),
        Run(1, ("x", "y"), ("u",)),
        Run(2, ("z", "z", "u"), ("v",)),
        Accumulate("v", "s", None),
        Accumulate("v", "s", (1,)),
    )
    drops = [step.drops for step in with_drops(steps, (), kept={"s"}) if isinstance(step, Run | Accumulate)]
    assert drops == [(), ("x", "y"), ("z", "u"), (), ("v",)]


def test_results_and_kept_names_are_never_dropped() -> None:
    steps = (Run(0, ("x", "full", "s"), ("y",)), Run(1, ("y", "full"), ("z",)), Release("full"))
    assert with_drops(steps, ("y", None, 3, "z"), kept={"full", "s"}) == (
        Run(0, ("x", "full", "s"), ("y",), ("x",)),
        *steps[1:],
    )


def test_drops_of_nothing() -> None:
    assert with_drops((), ("x", None), set()) == ()


@pytest.mark.parametrize(
    ("step", "names"),
    [
        (Gather("full", "s", torch.float32, 8, "up"), ("s",)),
        (Wait("full"), ("full",)),
        (Run(0, ("a", "b"), ("c",)), ("a", "b")),
        (Release("full"), ("full",)),
        (Accumulate("g", "s", None), ("g", "s")),
        (Reduce("s", torch.float32, 16), ("s",)),
        (Event(), ()),
        (WaitReduce("s", ago=1), ("s",)),
    ],
)
def test_reads(step: Step, names: tuple[str, ...]) -> None:
    assert reads(step) == names
