"""Views that do not depend on the strides that were inferred at capture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fsdp_passes.ir.nodes import calls
from fsdp_passes.ir.passes import Pass


@dataclass(frozen=True)
class StrideSafeViews(Pass):
    """Make every `view` a `reshape`, which copies where the real strides allow no view.

    before   v = aten.view(x, [8])
    after    v = aten.reshape(x, [8])

    Keeps: every value, bit for bit. Needed because a few meta kernels infer other strides than the real ones.
    Costs: nothing where `view` would have worked.
    """

    def apply(self, gm: fx.GraphModule) -> None:
        for node in calls(gm.graph, torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default
