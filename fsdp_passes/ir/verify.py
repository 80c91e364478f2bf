"""Checking a graph between passes: the first rule that does not hold names the line that breaks it."""

from __future__ import annotations

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
    lines = dump(gm).splitlines()  # one a node, in order
    at = list(gm.graph.nodes).index(broken.node)
    shown = range(max(0, at - _CONTEXT_LINES), min(len(gm.graph.nodes), at + _CONTEXT_LINES + 1))
    return "\n".join([head, *(f"{'>' if i == at else ' '} {lines[i]}" for i in shown)])
