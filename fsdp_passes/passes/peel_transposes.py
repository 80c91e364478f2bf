"""Transposes that undo each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fsdp_passes.ir.nodes import erase_unused, operand, operands
from fsdp_passes.ir.passes import Pass

_T = torch.ops.aten.t.default
_TRANSPOSE = torch.ops.aten.transpose.int
_PERMUTE = torch.ops.aten.permute.default


@dataclass(frozen=True)
class PeelTransposes(Pass):
    """Read the tensor itself where a chain of transposes comes back to it.

    before   t = t(mm); u = t(t); v = relu(u)
    after    v = relu(mm)

    Keeps: values and strides. Autograd transposes a weight's gradient once for the product and once for the weight.
    """

    def apply(self, gm: fx.GraphModule) -> None:
        for node in list(gm.graph.nodes):
            origin = find_origin(node)
            if origin is not None:
                node.replace_all_uses_with(origin)
                erase_unused(node)


def find_origin(node: fx.Node) -> fx.Node | None:
    """What the chain of transposes that ends with `node` comes back to; None: nothing."""
    total: list[int] = []
    while (dims := permutation(node)) is not None:
        total = [dims[dim] for dim in total] if total else dims
        node = operand(node)
        if total == sorted(total):
            return node
    return None


def permutation(node: fx.Node) -> list[int] | None:
    """For each dimension of `node` which one of its operand's it is; None: it is no transpose."""
    if node.target not in (_T, _TRANSPOSE, _PERMUTE):
        return None
    dims = list(range(operand(node).meta["val"].ndim))
    if node.target is _PERMUTE:
        return [dims[dim] for dim in operands(node, 1)]
    first, second = (0, -1) if node.target is _T else (node.args[1], node.args[2])
    if dims:
        dims[first], dims[second] = dims[second], dims[first]  # type: ignore[index]
    return dims
