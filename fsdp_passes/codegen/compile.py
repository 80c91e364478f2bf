"""A region as a function of one list of inputs that it empties."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fsdp_passes._compat import (
    boxed,
    compile_lock,
    count,
    emulates_eager,
    inductor_compile,
    inductor_state,
    is_elementwise,
    leave_to_aten,
    size_facts,
    size_facts_hold,
    warn_once,
)
from fsdp_passes.codegen.key import canonical, region_key
from fsdp_passes.ir.alias import is_view
from fsdp_passes.ir.nodes import calls, is_repeatable

log = logging.getLogger(__name__)

Region = Callable[[list[Any]], Sequence[Any]]


def compile_regions(regions: Sequence[fx.GraphModule], codegen: str, names: Iterable[str]) -> list[Region]:
    """`codegen="fx"`: a region's operators, called one by one in the order of the graph.

    "inductor": code that Inductor generates, once for all equal regions of a process. A region that it cannot compile
    runs as under "fx", which the log says, once, with the region's name among `names`.
    """
    if codegen == "fx":
        return [boxed(region) for region in regions]
    with compile_lock():
        state = inductor_state()
        found = [_CACHE.find_or_compile(region, state, name) for region, name in zip(regions, names, strict=True)]
        for each in found:
            each.finish()
        _CACHE.forget_failures()
    return [each.call or boxed(region) for each, region in zip(found, regions, strict=True)]


@dataclass
class _Compiled:
    """`call` is None where Inductor failed. `facts`: what it took for granted about symbolic sizes."""

    name: str
    call: Region | None = None
    facts: str | None = None
    load: Callable[[], None] | None = None

    def start(self, gm: fx.GraphModule, inputs: list[Any]) -> None:
        try:
            self.call, self.load = inductor_compile(gm)
            self.facts = size_facts(inputs)
        except Exception as error:
            self._give_up(error)

    def finish(self) -> None:
        """Wait for the kernels; once more after an interrupt."""
        try:
            if self.load is not None:
                self.load()
        except Exception as error:
            self._give_up(error)
        self.load = None

    def _give_up(self, error: Exception) -> None:
        self.call = None
        count("regions_not_compiled")
        reason = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
        warn_once(log, f"{self.name} runs operator by operator, because Inductor cannot compile it: {reason}")
        log.debug("%s", self.name, exc_info=error)


@dataclass
class _Cache:
    """Equal regions may take different facts for granted, hence a list for each key. To be used under the lock."""

    _by_key: dict[tuple[str, str], list[_Compiled]] = field(default_factory=dict)

    def find_or_compile(self, region: fx.GraphModule, state: str, name: str) -> _Compiled:
        count("regions")
        gm = canonical(region)
        _prepare(gm.graph)
        key, inputs = region_key(gm), [node.meta.get("val") for node in region.graph.find_nodes(op="placeholder")]
        known = [] if key is None else self._by_key.setdefault((key, state), [])
        for each in known:
            if size_facts_hold(each.facts, inputs):
                return each
        count("regions_compiled")
        compiled = _Compiled(f"{name} ({_operators(region.graph)})")
        compiled.start(gm, inputs)
        known.append(compiled)
        return compiled

    def forget_failures(self) -> None:
        """Equal regions of one graph fail once; the next graph may find a compiler that works."""
        for known in self._by_key.values():
            known[:] = [each for each in known if each.call is not None]


def _operators(graph: fx.Graph, num_shown: int = 5) -> str:
    """The names of the first operators that are no views."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function" and not is_view(node)]
    return ", ".join([*names[:num_shown], "..."] if len(names) > num_shown else names)


def _prepare(graph: fx.Graph) -> None:
    """aten.zeros, which capture keeps whole, becomes what Inductor knows: zeros([2]) -> full([2], 0, dtype=f32).

    While Inductor emulates the roundings of eager, what is not elementwise is left to ATen's kernels: it would add up
    in another order.
    """
    for node in calls(graph, torch.ops.aten.zeros.default):
        node.target, node.args = torch.ops.aten.full.default, (*node.args, 0)
        node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}
    if emulates_eager():
        for node in graph.nodes:
            if is_repeatable(node) and not is_view(node) and not is_elementwise(node.target):
                leave_to_aten(node)


# The one state of the package that models share: a region of one model may be a region of the next.
_CACHE = _Cache()
