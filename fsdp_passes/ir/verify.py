"""Checking a graph between passes: the first rule that does not hold names the line that breaks it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fsdp_passes.ir.rules import CHEAP, THOROUGH, Broken
from fsdp_passes.ir.text import dump

_CONTEXT_LINES = 3


class VerifyError(Exception):
    """A pass, ours, produced a graph that breaks a rule."""


def verify(gm: fx.GraphModule, level: int, after: str) -> None:
    """Check `gm` at `level` (0 nothing, 1 cheap rules, 2 every rule); VerifyError names `after`, the last pass."""
    rules = () if level == 0 else CHEAP if level == 1 else CHEAP + THOROUGH
    for rule in rules:
        try:
            rule(gm)
        except Broken as broken:
            raise VerifyError(_explain(gm, rule.__name__, rule.__doc__, broken, after)) from None


def _explain(gm: fx.GraphModule, rule: str, invariant: str | None, broken: Broken, after: str) -> str:
    head = f"{rule}: {broken}\n  rule: {invariant}\n  after: {after}"
    if broken.node is None:
        return head
    lines = dump(gm).splitlines()[: len(gm.graph.nodes)]  # one a node, in order; then those of graphs that it calls
    return "\n".join([head, *lines_around(lines, list(gm.graph.nodes).index(broken.node))])


def lines_around(lines: Sequence[str], at: int) -> list[str]:
    """Line number `at`, marked, and some before and after it."""
    shown = range(max(0, at - _CONTEXT_LINES), min(len(lines), at + _CONTEXT_LINES + 1))
    return [f"{'>' if i == at else ' '} {lines[i]}" for i in shown]
