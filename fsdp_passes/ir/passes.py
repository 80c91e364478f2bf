"""A pass, and the driver that alone recompiles, verifies and dumps between passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from fsdp_passes.ir.verify import verify


class Pass:
    """One rewrite. Subclasses are frozen dataclasses; their fields are their options."""

    def apply(self, gm: fx.GraphModule) -> None:
        """Edit `gm.graph` in place; leave it untouched where there is nothing to do."""
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
) -> None:
    """Apply `passes` in order; after each the graph is verified at `level`, and dumped; at the end it is recompiled."""
    verify(gm, level, after="capture")
    dump("captured", gm)
    for each in passes:
        each.apply(gm)
        verify(gm, level, after=repr(each))
        dump(each.name, gm)
    gm.recompile()
