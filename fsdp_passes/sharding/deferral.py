"""Which units add up their gradients unreduced, when a rank may hold only so many bytes of them."""

from __future__ import annotations

from collections.abc import Mapping

_STEPS = 1 << 14  # sizes are rounded up to this fraction of the limit


def choose_deferred(bytes_of: Mapping[str, int], limit: int) -> frozenset[str]:
    """The units that together fill `limit` bytes best.

    What a unit saves, its reduction in each microbatch but the last, is in proportion to its bytes, as is what it
    costs: so the largest sum within the limit saves most. It is found by dynamic programming over the sums that can be
    reached (subset sum), and is the largest to within 1/16384 of the limit a unit.
    """
    step = max(1, limit // _STEPS)
    steps = {unit: -(-size // step) for unit, size in bytes_of.items()}
    reached, before = 1, []  # bit n: some units need n steps
    for size in steps.values():
        before.append(reached)
        reached |= (reached << size) & ((2 << limit // step) - 1)
    rest, chosen = reached.bit_length() - 1, set()
    for (unit, size), without in zip(reversed(steps.items()), reversed(before), strict=True):
        if not without >> rest & 1:
            chosen.add(unit)
            rest -= size
    return frozenset(chosen)
