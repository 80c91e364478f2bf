"""Which units keep gradients, or parameters, between microbatches, when a rank may hold only so many bytes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

_MAX_STEPS = 1 << 20  # bits of the sums that are told apart: 128 KiB a unit


def choose_units(bytes_of: Mapping[str, int], limit: int) -> frozenset[str]:
    """The units that together fill `limit` bytes best, in the order of `bytes_of` where several choices do.

    What a unit saves, its reduction or its gathers in each microbatch but one, is in proportion to its bytes, as is
    what it costs: so the largest sum within the limit saves most. It is found by dynamic programming over the sums that
    can be reached (subset sum), in steps of the sizes' greatest common divisor. Where those are more than 2**20, the
    steps are limit / 2**20, a size counts as the next multiple of it, and units that fit into the rest are added.
    """
    if sum(bytes_of.values()) <= limit:
        return frozenset(bytes_of)
    step = max(math.gcd(*bytes_of.values()), limit // _MAX_STEPS)
    steps = {unit: -(-size // step) for unit, size in bytes_of.items() if size <= limit}
    reached, before = 1, []  # bit n: some units need n steps
    for size in steps.values():
        before.append(reached)
        reached |= (reached << size) & ((2 << limit // step) - 1)
    total, chosen = reached.bit_length() - 1, set()
    for (unit, size), without in zip(reversed(steps.items()), reversed(before), strict=True):
        if not without >> total & 1:
            chosen.add(unit)
            total -= size
    rest = limit - sum(bytes_of[unit] for unit in chosen)
    for unit in (unit for unit in steps if unit not in chosen):
        if bytes_of[unit] <= rest:
            chosen.add(unit)
            rest -= bytes_of[unit]
    return frozenset(chosen)
