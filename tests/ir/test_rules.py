"""The verifier's rules: each on a graph that breaks it, with the whole message; all on a right graph."""

from __future__ import annotations

from collections.abc import Callable

import expecttest
import pytest
import torch
from torch import fx

from fsdp_passes.ir.rules import CHEAP, THOROUGH, Rule
from fsdp_passes.ir.verify import VerifyError, verify
from tests.simulated import graph

RIGHT = """
    0 s: f32[8] = input(shard="up")
    1 x: f32[4,4] = input()
    2 issue gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
    3 wait full: f32[16] = fsdp_opt.wait(gather)
    4 v: f32[4,4] = aten.view(full, [4, 4])
    5 y: f32[4,4] = aten.mm(x, v)
    6 release free = fsdp_opt.release(full)
    7 c: f32[16] = aten.view(y, [16])
    8 add_up = fsdp_opt.accumulate(c, s, [0])
    9 issue send = fsdp_opt.reduce(s, 2, torch.float32)
    10 return (y,)
    """


def named(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.name == name)


def message(text: str, edit: Callable[[fx.GraphModule], object] = lambda gm: None, level: int = 1) -> str:
    """What verify says about the graph that `text` and then `edit` make."""
    gm = graph(text)
    edit(gm)
    with pytest.raises(VerifyError) as caught:
        verify(gm, level, after="Broken(on_purpose=True)")
    return str(caught.value)


def without(line: int) -> str:
    """RIGHT without its line number `line`."""
    return "".join(text + "\n" for at, text in enumerate(RIGHT.splitlines()) if at != line + 1)


def moved(line: int, to: int) -> str:
    """RIGHT with its line number `line` in front of line `to`."""
    lines = RIGHT.splitlines()
    return "\n".join([*lines[: to + 1], lines[line + 1], *lines[to + 1 : line + 1], *lines[line + 2 :]])


@pytest.mark.parametrize("rule", CHEAP + THOROUGH, ids=lambda rule: rule.__name__)
def test_every_rule_holds_for_a_right_graph(rule: Rule) -> None:
    rule(graph(RIGHT))


def test_every_rule_states_an_invariant() -> None:
    assert all(rule.__doc__ and rule.__doc__.endswith(".") for rule in CHEAP + THOROUGH)


class TestMessages(expecttest.TestCase):
    maxDiff = None

    def test_names_are_defined_before_use(self) -> None:
        got = message(RIGHT, lambda gm: named(gm, "free").append(named(gm, "v")))
        self.assertExpectedInline(
            got,
            """\
names_are_defined_before_use: y reads v, which is not defined before it
  rule: Every argument is the result of an earlier node of the same graph.
  after: Broken(on_purpose=True)
     1         x: f32[4,4] = input()
     2 issue   gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
     3 wait    full: f32[16] = fsdp_opt.wait(gather)
>    4         y: f32[4,4] = aten.mm(x, v)
     5 release free = fsdp_opt.release(full)
     6         v: f32[4,4] = aten.view(full, [4, 4])
     7         c: f32[16] = aten.view(y, [16])""",
        )

    def test_shards_are_inputs(self) -> None:
        text = """
            0 s: f32[8] = input(shard="up")
            1 p: f32[8] = aten.neg(s)
            2 full: f32[16] = fsdp_opt.unshard(p, 2, torch.float32)
            3 return (full,)
            """
        got = message(text)
        self.assertExpectedInline(
            got,
            """\
shards_are_inputs: full takes p for a shard, but that is computed by aten.neg.default
  rule: Gathers and reductions name the shard itself, an input, not a value computed from it.
  after: Broken(on_purpose=True)
     0         s: f32[8] = input(shard="up")
     1         p: f32[8] = aten.neg(s)
>    2         full: f32[16] = fsdp_opt.unshard(p, 2, torch.float32)
     3         return (full,)""",
        )

    def test_gathers_are_waited_once(self) -> None:
        text = """
            0 s: f32[8] = input(shard="up")
            1 issue gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
            2 x: f32[8] = aten.neg(s)
            3 return (x,)
            """
        got = message(text)
        self.assertExpectedInline(
            got,
            """\
gathers_are_waited_once: gather has 0 waits, expected 1
  rule: A gathered buffer has one wait, and is read through it only.
  after: Broken(on_purpose=True)
     0         s: f32[8] = input(shard="up")
>    1 issue   gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
     2         x: f32[8] = aten.neg(s)
     3         return (x,)""",
        )

    def test_gathers_are_waited_once_and_not_twice(self) -> None:
        got = message(RIGHT.replace("4 v:", "4 wait again: f32[16] = fsdp_opt.wait(gather)\n    4 v:"))
        self.assertExpectedInline(
            got,
            """\
gathers_are_waited_once: gather has 2 waits, expected 1
  rule: A gathered buffer has one wait, and is read through it only.
  after: Broken(on_purpose=True)
     0         s: f32[8] = input(shard="up")
     1         x: f32[4,4] = input()
>    2 issue   gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
     3 wait    full: f32[16] = fsdp_opt.wait(gather)
     4 wait    again: f32[16] = fsdp_opt.wait(gather)
     5         v: f32[4,4] = aten.view(full, [4, 4])""",
        )

    def test_gathers_are_read_through_their_wait(self) -> None:
        got = message(RIGHT.replace("aten.view(full", "aten.view(gather"))
        self.assertExpectedInline(
            got,
            """\
gathers_are_waited_once: v reads gather without its wait
  rule: A gathered buffer has one wait, and is read through it only.
  after: Broken(on_purpose=True)
     1         x: f32[4,4] = input()
     2 issue   gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
     3 wait    full: f32[16] = fsdp_opt.wait(gather)
>    4         v: f32[4,4] = aten.view(gather, [4, 4])
     5         y: f32[4,4] = aten.mm(x, v)
     6 release free = fsdp_opt.release(full)
     7         c: f32[16] = aten.view(y, [16])""",
        )

    def test_buffers_are_released_once(self) -> None:
        got = message(without(6))
        self.assertExpectedInline(
            got,
            """\
buffers_are_released_once: full has 0 releases, expected 1
  rule: A gathered buffer is released once, after its last reader through any view; never if it is an output.
  after: Broken(on_purpose=True)
     0         s: f32[8] = input(shard="up")
     1         x: f32[4,4] = input()
     2 issue   gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
>    3 wait    full: f32[16] = fsdp_opt.wait(gather)
     4         v: f32[4,4] = aten.view(full, [4, 4])
     5         y: f32[4,4] = aten.mm(x, v)
     6         c: f32[16] = aten.view(y, [16])""",
        )

    def test_buffers_are_released_once_and_not_twice(self) -> None:
        got = message(RIGHT.replace("    7 c", "    7 release free_1 = fsdp_opt.release(full)\n    7 c"))
        self.assertExpectedInline(
            got,
            """\
buffers_are_released_once: full has 2 releases, expected 1
  rule: A gathered buffer is released once, after its last reader through any view; never if it is an output.
  after: Broken(on_purpose=True)
     0         s: f32[8] = input(shard="up")
     1         x: f32[4,4] = input()
     2 issue   gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
>    3 wait    full: f32[16] = fsdp_opt.wait(gather)
     4         v: f32[4,4] = aten.view(full, [4, 4])
     5         y: f32[4,4] = aten.mm(x, v)
     6 release free = fsdp_opt.release(full)""",
        )

    def test_buffers_are_released_after_their_last_reader(self) -> None:
        got = message(moved(6, to=5))
        self.assertExpectedInline(
            got,
            """\
buffers_are_released_once: y reads full after free
  rule: A gathered buffer is released once, after its last reader through any view; never if it is an output.
  after: Broken(on_purpose=True)
     3 wait    full: f32[16] = fsdp_opt.wait(gather)
     4         v: f32[4,4] = aten.view(full, [4, 4])
     5 release free = fsdp_opt.release(full)
>    6         y: f32[4,4] = aten.mm(x, v)
     7         c: f32[16] = aten.view(y, [16])
     8         add_up = fsdp_opt.accumulate(c, s, [0])
     9 issue   send = fsdp_opt.reduce(s, 2, torch.float32)""",
        )

    def test_buffers_that_are_returned_are_not_released(self) -> None:
        got = message(RIGHT.replace("return (y,)", "return (y, v)"))
        self.assertExpectedInline(
            got,
            """\
buffers_are_released_once: full has 1 releases, expected 0
  rule: A gathered buffer is released once, after its last reader through any view; never if it is an output.
  after: Broken(on_purpose=True)
     0         s: f32[8] = input(shard="up")
     1         x: f32[4,4] = input()
     2 issue   gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
>    3 wait    full: f32[16] = fsdp_opt.wait(gather)
     4         v: f32[4,4] = aten.view(full, [4, 4])
     5         y: f32[4,4] = aten.mm(x, v)
     6 release free = fsdp_opt.release(full)""",
        )

    def test_gradients_are_reduced(self) -> None:
        got = message(without(9))
        self.assertExpectedInline(
            got,
            """\
gradients_are_reduced: add_up is a gradient of s, which no later node reduces
  rule: The reduction of a shard is issued once, after its last gradient was written or accumulated.
  after: Broken(on_purpose=True)
     5         y: f32[4,4] = aten.mm(x, v)
     6 release free = fsdp_opt.release(full)
     7         c: f32[16] = aten.view(y, [16])
>    8         add_up = fsdp_opt.accumulate(c, s, [0])
     9         return (y,)""",
        )

    def test_gradients_are_reduced_after_the_last_one(self) -> None:
        got = message(moved(9, to=8))
        self.assertExpectedInline(
            got,
            """\
gradients_are_reduced: add_up is a gradient of s, which no later node reduces
  rule: The reduction of a shard is issued once, after its last gradient was written or accumulated.
  after: Broken(on_purpose=True)
     6 release free = fsdp_opt.release(full)
     7         c: f32[16] = aten.view(y, [16])
     8 issue   send = fsdp_opt.reduce(s, 2, torch.float32)
>    9         add_up = fsdp_opt.accumulate(c, s, [0])
    10         return (y,)""",
        )

    def test_gradients_are_reduced_once(self) -> None:
        got = message(
            RIGHT.replace("10 return", "10 issue send_1 = fsdp_opt.reduce(s, 2, torch.float32)\n    10 return")
        )
        self.assertExpectedInline(
            got,
            """\
gradients_are_reduced: send reduces s a second time
  rule: The reduction of a shard is issued once, after its last gradient was written or accumulated.
  after: Broken(on_purpose=True)
     6 release free = fsdp_opt.release(full)
     7         c: f32[16] = aten.view(y, [16])
     8         add_up = fsdp_opt.accumulate(c, s, [0])
>    9 issue   send = fsdp_opt.reduce(s, 2, torch.float32)
    10 issue   send_1 = fsdp_opt.reduce(s, 2, torch.float32)
    11         return (y,)""",
        )

    def test_gathered_buffers_are_not_written(self) -> None:
        got = message(RIGHT.replace("aten.mm(x, v)", "aten.add_.Tensor(v, x)"))
        self.assertExpectedInline(
            got,
            """\
gathered_buffers_are_not_written: y writes v, a view of gather
  rule: Nothing writes into a gathered buffer: it is the parameters.
  after: Broken(on_purpose=True)
     2 issue   gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
     3 wait    full: f32[16] = fsdp_opt.wait(gather)
     4         v: f32[4,4] = aten.view(full, [4, 4])
>    5         y: f32[4,4] = aten.add_.Tensor(v, x)
     6 release free = fsdp_opt.release(full)
     7         c: f32[16] = aten.view(y, [16])
     8         add_up = fsdp_opt.accumulate(c, s, [0])""",
        )

    def test_types_are_what_operators_infer(self) -> None:
        wrong = torch.empty(4, 5)
        got = message(RIGHT, lambda gm: named(gm, "y").meta.update(val=wrong), level=2)
        self.assertExpectedInline(
            got,
            """\
types_are_what_operators_infer: line 6: written f32[4,5], inferred f32[4,4]: 5         y: f32[4,5] = aten.mm(x, v)
  rule: The type written at each node is the one that its operator infers from its arguments.
  after: Broken(on_purpose=True)
     2 issue   gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
     3 wait    full: f32[16] = fsdp_opt.wait(gather)
     4         v: f32[4,4] = aten.view(full, [4, 4])
>    5         y: f32[4,5] = aten.mm(x, v)
     6 release free = fsdp_opt.release(full)
     7         c: f32[16] = aten.view(y, [16])
     8         add_up = fsdp_opt.accumulate(c, s, [0])""",
        )


def test_level_0_checks_nothing_and_1_no_types() -> None:
    unreleased, mistyped = graph(without(6)), graph(RIGHT)
    named(mistyped, "y").meta["val"] = torch.empty(4, 5)
    verify(unreleased, 0, after="")
    verify(mistyped, 1, after="")
    for level in (1, 2):
        with pytest.raises(VerifyError, match="buffers_are_released_once"):
            verify(unreleased, level, after="")
    with pytest.raises(VerifyError, match="types_are_what_operators_infer"):
        verify(mistyped, 2, after="")


def test_the_marked_line_is_the_offender_and_no_other_of_a_longer_name() -> None:
    """GatherOnDemand names releases `release`, like their lane, and gathers `gather`, `gather_1`."""
    text = """
        0 s: f32[8] = input(shard="up")
        1 issue gather_1: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
        2 wait full_1: f32[16] = fsdp_opt.wait(gather_1)
        3 release release_1 = fsdp_opt.release(full_1)
        4 issue gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)
        5 release release = fsdp_opt.release(gather)
        6 return (None,)
        """
    marked = [line for line in message(text).splitlines() if line.startswith(">")]
    assert marked == [">    4 issue   gather: f32[16] = fsdp_opt.gather(s, 2, torch.float32)"]


def test_an_offending_output_is_shown() -> None:
    def drop(gm: fx.GraphModule) -> None:
        gm.graph.output_node().prepend(named(gm, "x"))
        gm.graph.output_node().append(named(gm, "y"))

    text = """
        0 x: f32[4] = input()
        1 y: f32[4] = aten.neg(x)
        2 return (y,)
        """
    assert ">    1         return (y,)" in message(text, drop)


def test_a_wrong_type_is_shown() -> None:
    wrong = torch.empty(4, 5)
    got = message(RIGHT, lambda gm: named(gm, "y").meta.update(val=wrong), level=2)
    assert ">    5         y: f32[4,5] = aten.mm(x, v)" in got
