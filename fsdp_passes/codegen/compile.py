"""A region as a function of one list of inputs that it empties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fsdp_passes._compat import boxed

Region = Callable[[list[Any]], Sequence[Any]]


def compile_region(region: fx.GraphModule, codegen: str) -> Region:
    """`codegen="fx"`: the region's operators, called one by one in the order of the graph."""
    assert codegen == "fx", codegen
    return boxed(region)
