"""A pass, and the driver that alone recompiles, verifies and dumps between passes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from fsdp_passes.ir.verify import verify

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Declined:
    """What a pass left as it was: the node, as printed, of that unit, and why."""

    unit: str
    node: str
    reason: str


class Pass:
    """One rewrite. Subclasses are frozen dataclasses; their fields are their options."""

    def apply(self, gm: fx.GraphModule) -> list[Declined] | None:
        """Edit `gm.graph` in place, and leave it untouched where there is nothing to do; what was declined, if any."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Lower-case words of the class name, as in dump files: LowerReduceGrad -> lower_reduce_grad."""
        letters = (f"_{letter.lower()}" if letter.isupper() else letter for letter in type(self).__name__)
        return "".join(letters).lstrip("_")


def run_passes(
    gm: fx.GraphModule,
    passes: Iterable[Pass],
    level: int,
    dump: Callable[[str, fx.GraphModule], None],
) -> tuple[Declined, ...]:
    """Apply `passes` in order; after each the graph is verified at `level`, and dumped; at the end it is recompiled.

    Returns what they declined, which the log says, too.
    """
    verify(gm, level, after="capture")
    dump("captured", gm)
    declined: list[Declined] = []
    for each in passes:
        declined += each.apply(gm) or ()
        verify(gm, level, after=repr(each))
        dump(each.name, gm)
    gm.recompile()
    for left in declined:
        log.warning("%s of unit %r is left as it is: %s", left.node, left.unit, left.reason)
    return tuple(declined)
