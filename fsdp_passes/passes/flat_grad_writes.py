"""From gradients that are concatenated to gradients that are written where they are added up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fsdp_passes.ir.alias import changing, source
from fsdp_passes.ir.nodes import call, is_fresh_zeros, operand, operands
from fsdp_passes.ir.ops import GRAD_MM, GRAD_SLICE, GRAD_WRITE
from fsdp_passes.ir.passes import Declined, Pass
from fsdp_passes.passes.lower_reduce_grad import decline, find_reductions, reduce_after, reduce_dtype

aten = torch.ops.aten
_CAT = aten.cat.default
_MM = aten.mm.default
# They keep values and their order: a write reads through them, so that no copy is made for it.
_SAME_VALUES = (
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.clone.default,
    aten.contiguous.default,
)


@dataclass(frozen=True)
class FlatGradWrites(Pass):
    """Write each gradient into its slice of the flat sum of gradients, as soon as it is computed.

    before   m = mm(t, x); v = reshape(m, [64]); c = cat([v, zeros, b]); r = reduce_grad(c, s, 2); return r
    after    m = mm(t, x); grad_write(grad_slice(s, 0, [8, 8]), m); grad_write(grad_slice(s, 2, [16]), b)
             reduce(s, 2, f32); return None

    Whether a write copies or adds, and whether the reduction communicates, is decided when the graph runs. A piece that
    autograd filled with zeros has no gradient, and is not written.
    separate ("cat_last"): a slice is a tensor of its own, and the reduction concatenates; else a view of one buffer.
    sum_products (wgrad="fp32"): a product that is nothing but a gradient is added up in its slice's fp32, unrounded.

    Keeps: every value, bit for bit, without sum_products.
    Costs: nothing; without separate there is no tensor of the group's size but the buffer.
    Declines: a gradient that is no cat, or that somebody else reads; LowerReduceGrad takes it as a whole.
    """

    separate: bool = False
    sum_products: bool = False

    def apply(self, gm: fx.GraphModule) -> list[Declined]:
        declined: list[Declined] = []
        changing_memory = changing(gm.graph)
        for reduction in find_reductions(gm.graph):
            reason = why_not(reduction)
            if reason:
                declined.append(decline(reduction, reason))
                continue
            cat = operand(reduction)
            chains = [(i, find_chain(piece)) for i, piece in enumerate(operands(cat)) if not is_fresh_zeros(piece)]
            chains.sort(key=lambda each: each[1][-1])  # names then count in the order of the graph
            writes = [self._write(reduction, i, chain, changing_memory) for i, chain in chains]
            reduce_after(max(writes, default=cat), reduction)
        return declined

    def _write(self, reduction: fx.Node, number: int, chain: list[fx.Node], changing_memory: set[fx.Node]) -> fx.Node:
        """Write piece `number` of the cat that `reduction` reduces where it is computed: `chain` leads back there."""
        graph, cat, shard = reduction.graph, operand(reduction), operand(reduction, 1)
        dtype = reduce_dtype(reduction)
        settled = not any(source(node) in changing_memory for node in chain)
        gradient = chain[-1] if settled else chain[0]  # only in the cat's place it is sure to be what the cat saw
        shape, options = list(gradient.meta["val"].shape), {"separate": True} if self.separate else {}
        with graph.inserting_before(_first_after(gradient) if settled else cat):
            slice_ = call(graph, GRAD_SLICE, shard, number, shape, dtype, **options)
            if self.sum_products and settled and is_product_for(chain, cat, dtype):
                return call(graph, GRAD_MM, slice_, *gradient.args)
            return call(graph, GRAD_WRITE, slice_, gradient)


def why_not(reduction: fx.Node) -> str:
    """Why the gradient that `reduction` reduces cannot be written in pieces; empty: it can."""
    full_grad = operand(reduction)
    if full_grad.target is not _CAT:
        return f"{full_grad} is no cat; it is added up as a whole"
    if len(full_grad.users) > 1:
        readers = ", ".join(user.name for user in full_grad.users if user is not reduction)
        return f"{readers} reads {full_grad}, too; it is added up as a whole"
    return ""


def find_chain(piece: fx.Node) -> list[fx.Node]:
    """From `piece` back to the gradient that was reshaped to it, in the shape in which that was computed."""
    chain = [piece]
    while chain[-1].target in _SAME_VALUES and all(isinstance(n, int) for n in operand(chain[-1]).meta["val"].shape):
        chain.append(operand(chain[-1]))
    return chain


def is_product_for(chain: list[fx.Node], cat: fx.Node, dtype: torch.dtype) -> bool:
    """Whether the gradient is a product that only this piece of `cat` reads, and `dtype` is fp32 and no less exact."""
    if chain[-1].target is not _MM or dtype != torch.float32 or operands(cat).count(chain[0]) > 1:
        return False
    if chain[-1].meta["val"].dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    return all(len(node.users) == 1 for node in chain)


def _first_after(node: fx.Node) -> fx.Node:
    """The node after `node`; after an input, the first that is none."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node
