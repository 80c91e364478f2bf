"""The order of the passes, a reason a line."""

from __future__ import annotations

from fsdp_passes.ir.passes import Pass
from fsdp_passes.passes.late_reads import LateReads
from fsdp_passes.passes.lower_reduce_grad import LowerReduceGrad
from fsdp_passes.passes.stride_safe_views import StrideSafeViews
from fsdp_passes.schedule.order import GatherOnDemand

FORWARD: tuple[Pass, ...] = (
    StrideSafeViews(),  # first: later passes need not care whether a view is a view or a reshape
    LateReads(),  # before scheduling: an unshard's position is where its interval starts
    GatherOnDemand(),  # last: nothing may move across issue, wait and release
)

BACKWARD: tuple[Pass, ...] = (
    StrideSafeViews(),  # as in forward
    LowerReduceGrad(),  # before LateReads, which must see who really reads a gathered buffer
    LateReads(),  # as in forward
    GatherOnDemand(),  # last, as in forward
)

PASSES: dict[str, tuple[Pass, ...]] = {"fwd": FORWARD, "bwd": BACKWARD}
