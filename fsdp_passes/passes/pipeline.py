"""The order of the passes, a reason a line."""

from __future__ import annotations

from fsdp_passes.ir.passes import Pass
from fsdp_passes.options import Options
from fsdp_passes.passes.flat_grad_writes import FlatGradWrites
from fsdp_passes.passes.late_reads import LateReads
from fsdp_passes.passes.lower_reduce_grad import LowerReduceGrad
from fsdp_passes.passes.one_reduction import OneReduction
from fsdp_passes.passes.peel_transposes import PeelTransposes
from fsdp_passes.passes.stride_safe_views import StrideSafeViews
from fsdp_passes.schedule.intervals import GatherOnDemand

FORWARD: tuple[Pass, ...] = (
    StrideSafeViews(),  # first: later passes need not care whether a view is a view or a reshape
    LateReads(),  # before gathers: an unshard's position is where its interval starts
    GatherOnDemand(),  # last: nothing may move across issue, wait and release
)


def backward(options: Options) -> tuple[Pass, ...]:
    writes = FlatGradWrites(separate=options.grad_path == "cat_last", sum_products=options.wgrad == "fp32")
    return (
        StrideSafeViews(),  # as in forward
        OneReduction(),  # the form that lowering knows: one cat a group
        PeelTransposes(),  # before writes, which then read products themselves
        *((writes,) if options.grad_path != "cat" else ()),
        LowerReduceGrad(),  # what has not become writes; before LateReads, which must see who reads a gathered buffer
        LateReads(),  # as in forward
        GatherOnDemand(),  # last, as in forward
    )


def passes_of(direction: str, options: Options) -> tuple[Pass, ...]:
    """The passes over a graph of that `direction`, "fwd" or "bwd"."""
    return FORWARD if direction == "fwd" else backward(options)
