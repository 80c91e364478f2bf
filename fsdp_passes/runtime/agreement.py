"""Ranks compare what they are about to send, and send it only if it is the same: on the CPU, that is.

A collective pairs with whatever another rank sends. Another kind of collective hangs, another size aborts the process
from gloo's thread, and an equal size of another unit mixes the two without an error. What is sent is compared as text,
one line a collective, so that nothing depends on how late a rank is: the others wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from fsdp_passes.runtime.collectives import Done, another_group, is_dry_run, numbers_of_ranks, objects_of_ranks

_MOST_UNCOMPARED = 10_000  # lines, where the host does not wait: evaluations are compared now and then, too


class LostRank(RuntimeError):
    """Another rank has ended, or is too late."""


class Agreement:
    """Between the ranks of one sharded model; among one rank, or without ranks, nothing is compared.

    step: synchronised backwards of the model, and of copies of it, that ended.
    differences: comparisons that failed; on all ranks, so that each can forget what others may not know.
    """

    def __init__(self, ranks: dist.ProcessGroup | None = None, at_once: bool = True) -> None:
        self._ranks, self._at_once = ranks, at_once
        self._uncompared: list[str] = []
        self.step = self.differences = 0

    @classmethod
    def among(cls, group: dist.ProcessGroup, device: torch.device) -> Agreement:
        """Between the ranks of `group`, over a group of their own on the host.

        On the CPU each `check` compares. Elsewhere the host must not wait so often: what was sent is compared when a
        window ends, where the host waits anyway; if what was sent hangs before, nobody gets there. That has not run
        on a GPU yet.
        """
        if group.size() == 1 or is_dry_run(group):
            return cls()
        return cls(another_group(group, "agreement", backend="gloo"), at_once=device.type == "cpu")

    def __deepcopy__(self, memo: dict[int, Any]) -> Agreement:
        return self  # a copy of the model lives on the same ranks

    def check(self, sends: Iterable[str], host_waits: bool = False) -> None:
        """`sends`, a line a collective, in order, are sent next: RuntimeError on every rank if they differ.

        A line holds nothing in which ranks may differ, such as the graph that one of them has compiled anew.
        """
        if self._ranks is None:
            return
        self._uncompared += sends
        if self._uncompared and (self._at_once or host_waits or len(self._uncompared) > _MOST_UNCOMPARED):
            lines, self._uncompared = tuple(self._uncompared), []
            self._compare(self._ranks, lines)

    @contextlib.contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """What is waited for inside is `what`, a line as for `check`: RuntimeError names it if that fails."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as lost:
            raise LostRank(
                f"fsdp_passes: rank {dist.get_rank()}, in step {self.step}, waited for the {what}, which failed: "
                "another rank has ended, or is later than the process group's timeout"
            ) from lost

    def _compare(self, ranks: dist.ProcessGroup, lines: tuple[str, ...]) -> None:
        try:
            if len(set(numbers_of_ranks(_digest(self.step, lines), ranks))) == 1:
                return
            of_ranks = objects_of_ranks((self.step, lines), ranks)
        except RuntimeError as lost:
            raise LostRank(
                f"fsdp_passes: rank {dist.get_rank()}, in step {self.step}, is about to send: {lines[0]}. It waited "
                "for the other ranks to say the same, but one has ended, or is later than the process group's timeout"
            ) from lost
        self.differences += 1
        raise RuntimeError(difference(dict(zip(dist.get_process_group_ranks(ranks), of_ranks, strict=True))))


@dataclass(frozen=True)
class Sent:
    """A collective under way. `what` it is, a line as for `check`, is named if its wait fails."""

    work: dist.Work | Done
    what: str
    agreement: Agreement

    def wait(self) -> None:
        with self.agreement.waiting_for(self.what):
            self.work.wait()


def _digest(step: int, lines: Sequence[str]) -> int:
    """64 bits, the same in every process."""
    text = "\n".join((str(step), *lines))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), signed=True)


def difference(of_ranks: Mapping[int, tuple[int, Sequence[str]]]) -> str:
    """The error's text: the first line in which the (step, lines) of these ranks differ."""
    in_turn = enumerate(zip_longest(*(lines for _, lines in of_ranks.values())))
    first = next((number for number, each in in_turn if len(set(each)) > 1), 0)
    ranks_of: dict[str, list[str]] = {}
    for rank, (step, lines) in of_ranks.items():
        what = lines[first] if first < len(lines) else f"nothing after the {lines[-1]}"
        ranks_of.setdefault(f"in step {step}: {what}", []).append(str(rank))
    found = [f"\n    rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} {what}" for what, ranks in ranks_of.items()]
    return (
        f"fsdp_passes: expected every rank to send the same, got{''.join(found)}\n"
        "Every rank must use the same units, options and trained parameters, run as many forwards and backwards, and "
        "synchronise the same backwards."
    )
