"""One reduction a flat group, of one cat: the form that the passes after it rewrite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fsdp_passes.ir.alias import changing, source
from fsdp_passes.ir.nodes import call, calls, erase_unused, is_fresh_zeros, operand, operands, results
from fsdp_passes.ir.ops import REDUCE_GRAD
from fsdp_passes.ir.passes import Pass

_ADD = torch.ops.aten.add.Tensor
_CAT = torch.ops.aten.cat.default


@dataclass(frozen=True)
class OneReduction(Pass):
    """Add up the gradients of a flat group before they are reduced, and parameter by parameter.

    before   p = reduce_grad(cat([a, b]), s, 2); q = reduce_grad(cat([c, zeros]), s, 2); return add(p, q)
    after    return reduce_grad(cat([add(a, c), b]), s, 2)

    Keeps: the order of the additions, which are in the compute dtype, as those of several uses of a parameter are.
    Declines: a sum of anything else than reductions of one shard, or than cats of equal pieces, and of what the graph
        writes into, which must be read before that; it stays as it is, and later passes say so.
    """

    def apply(self, gm: fx.GraphModule) -> None:
        changing_memory = changing(gm.graph)
        for result in results(gm.graph):
            reductions = find_terms(result, REDUCE_GRAD)
            kinds = {(each.args[1:], *each.kwargs.items()) for each in reductions}
            if len(kinds) == 1 and changing_memory.isdisjoint(source(operand(each)) for each in reductions):
                _reduce_sum(result, reductions)
        for reduction in calls(gm.graph, REDUCE_GRAD):
            cats = find_terms(operand(reduction), _CAT)
            pieces = [piece for cat in cats for piece in operands(cat)]
            sizes = {tuple(len(piece.meta["val"]) for piece in operands(cat)) for cat in cats}
            if len(sizes) == 1 and changing_memory.isdisjoint(map(source, pieces)):
                _sum_pieces(operand(reduction), cats)


def find_terms(total: Any, target: object) -> list[fx.Node]:
    """The calls of `target` that are added up to `total` and read by nobody else; empty: others are added, too."""
    if not isinstance(total, fx.Node) or len(total.users) != 1:
        return []
    if total.target is target:
        return [total]
    if total.target is not _ADD or len(total.all_input_nodes) != 2 or total.kwargs:
        return []
    left, right = find_terms(total.args[0], target), find_terms(total.args[1], target)
    return left + right if left and right else []


def _reduce_sum(total: fx.Node, reductions: list[fx.Node]) -> None:
    """before   add(reduce_grad(c, s), reduce_grad(d, s))      after    reduce_grad(add(c, d), s)"""
    if total in reductions:
        return
    with total.graph.inserting_before(total):
        full_grad = _add_up(total, {each: operand(each) for each in reductions})
        _replace(total, call(total.graph, REDUCE_GRAD, full_grad, *reductions[0].args[1:], **reductions[0].kwargs))


def _sum_pieces(total: fx.Node, cats: list[fx.Node]) -> None:
    """before   add(cat([a, b]), cat([c, d]))      after    cat([add(a, c), add(b, d)])"""
    if total in cats:
        return
    with total.graph.inserting_before(total):
        columns = zip(*map(operands, cats), strict=True)
        pieces = [_add_up(total, dict(zip(cats, terms, strict=True))) for terms in columns]
        _replace(total, call(total.graph, _CAT, pieces))


def _add_up(total: fx.Node, terms: dict[fx.Node, fx.Node]) -> fx.Node:
    """The additions that make up `total`, with `terms` in place of what it adds up; fresh zeros are left out."""
    if total in terms:
        return terms[total]
    left, right = _add_up(operand(total, 0), terms), _add_up(operand(total, 1), terms)
    if is_fresh_zeros(left) or is_fresh_zeros(right):
        return right if is_fresh_zeros(left) else left
    return call(total.graph, _ADD, left, right)


def _replace(old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    erase_unused(old)
