"""Where in one piece of memory each buffer lies."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_passes.schedule.lifetime import Lifetime

ALIGN_BYTES = 512  # what the caching allocator of CUDA rounds to; vectorised kernels and NCCL need at most 128


def place(lifetimes: Sequence[Lifetime]) -> list[int]:
    """Offsets in bytes, so that nothing that is in use at the same time overlaps.

    Greedy by size (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020): the largest
    first, each at the lowest offset that is free during its lifetime.
    """
    order = sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].nbytes, lifetimes[i].start, i))
    others = _find_overlaps(lifetimes)
    offsets: dict[int, int] = {}
    for index in order:
        taken = sorted((offsets[i], lifetimes[i].nbytes) for i in others[index] if i in offsets)
        offset = 0
        for start, nbytes in taken:
            if offset + lifetimes[index].nbytes <= start:
                break
            offset = max(offset, aligned(start + nbytes))
        offsets[index] = offset
    return [offsets[index] for index in range(len(lifetimes))]


def _find_overlaps(lifetimes: Sequence[Lifetime]) -> list[list[int]]:
    """Of each the others that are in use at the same time: few, however many there are."""
    found: list[list[int]] = [[] for _ in lifetimes]
    live: list[int] = []
    for index in sorted(range(len(lifetimes)), key=lambda i: lifetimes[i].start):
        live = [other for other in live if lifetimes[other].end > lifetimes[index].start]
        for other in live:
            found[index].append(other)
            found[other].append(index)
        live.append(index)
    return found


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
