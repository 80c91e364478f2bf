"""How many bytes are live at each step of a schedule, by what they are for."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, groupby
from operator import itemgetter

from torch import Tensor, fx

from fsdp_passes._compat import example_size
from fsdp_passes.schedule.lifetime import GradLife, Life, Lifetime, Memory, inputs_of, results_of
from fsdp_passes.schedule.plan import Call, Peak, Run, Step, bytes_of_slots, drops


@dataclass(frozen=True)
class LiveBytes:
    """gathered, stay, window, returned: gathered buffers that count in the bound; that stay outside of it, from forward
        to backward or for a window; that are results.

    written, reduced: sums of gradients that are being written, and that are complete and being reduced.
    values: what regions get from outside, and what they hand to each other; not what they allocate inside.
    """

    gathered: int = 0
    stay: int = 0
    window: int = 0
    returned: int = 0
    written: int = 0
    reduced: int = 0
    values: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))

    @property
    def beside_arena(self) -> int:
        """Of what is sent or received, what has memory of its own."""
        return self.returned + self.written + self.reduced


def live_bytes(memory: Memory) -> list[LiveBytes]:
    """What is live while each step is done."""
    return _at_each_step(memory, [*_of_communication(memory), *_of_values(memory)])


def peak_of(memory: Memory) -> Peak:
    live = _at_each_step(memory, _of_communication(memory))
    most = max(live, key=lambda each: each.beside_arena, default=LiveBytes())
    return Peak(
        arena=bytes_of_slots(step for _, step in memory.steps),
        stay=max((each.stay for each in live), default=0),
        window=max((each.window for each in live), default=0),
        returned=most.returned,
        written=most.written,
        reduced=most.reduced,
    )


def _at_each_step(memory: Memory, lifetimes: Iterable[tuple[str, Lifetime]]) -> list[LiveBytes]:
    """`lifetimes` by what they are for."""
    num_steps = len(memory.steps)
    changes = {each.name: [0] * (num_steps + 1) for each in fields(LiveBytes)}
    for kind, lifetime in lifetimes:
        changes[kind][lifetime.start] += lifetime.nbytes
        changes[kind][lifetime.end] -= lifetime.nbytes
    levels = {kind: list(accumulate(deltas)) for kind, deltas in changes.items()}
    return [LiveBytes(**{kind: level[step] for kind, level in levels.items()}) for step in range(num_steps)]


def _of_communication(memory: Memory) -> Iterator[tuple[str, Lifetime]]:
    for life in memory.lives:
        yield _kind(life), Lifetime(life.gather.nbytes, life.start, life.ends[0] if life.ends else len(memory.steps))
    for each in memory.sums:
        yield from _of_sum(each, memory)


def _kind(life: Life) -> str:
    if life.returned:
        return "returned"
    return "window" if life.gather.for_window else "gathered" if life.gather.reshard else "stay"


def _of_sum(this: GradLife, memory: Memory) -> Iterator[tuple[str, Lifetime]]:
    """Several graphs that add to one sum: it is reduced when the whole backward ends."""
    if this.reduce is None:
        return  # a rule refuses that
    waited = this.waits[0] if this.waits else len(memory.steps)
    same = [other for other in memory.sums if other.owner == this.owner]
    if len(same) > 1:
        if this is same[0]:
            yield "written", Lifetime(this.reduce.nbytes, this.start, len(memory.steps))
        return
    yield "reduced", Lifetime(this.reduce.nbytes, this.issue, waited)
    separate = [(position, each.nbytes) for position, each in this.slices if each.separate]
    for position, nbytes in separate:
        yield "written", Lifetime(nbytes, position, this.issue)
    if separate:
        yield "written", Lifetime(this.reduce.nbytes, this.issue, this.issue + 1)  # with zeros, to be concatenated
    else:
        yield "written", Lifetime(this.reduce.nbytes, this.start, this.issue)


def _of_values(memory: Memory) -> Iterator[tuple[str, Lifetime]]:
    start = 0
    for number, numbered in groupby(memory.steps, key=itemgetter(0)):
        steps = [step for _, step in numbered]
        for lifetime in _of_values_of_graph(memory.calls[number], steps):
            yield "values", replace(lifetime, start=start + lifetime.start, end=start + lifetime.end)
        start += len(steps)


def _of_values_of_graph(call: Call, steps: Sequence[Step]) -> Iterator[Lifetime]:
    """Storages of a graph's values, each from where it is made, or the start, to where its last alias is dropped."""
    storage_of: dict[str, Hashable] = {}
    made: dict[Hashable, tuple[int, int]] = {}  # bytes, and where
    last: dict[Hashable, int] = {}
    for position, step in enumerate(steps):
        if isinstance(step, Run):
            for node, name in inputs_of(call, step).items():
                if name in call.plan.inputs and name not in storage_of:
                    storage_of[name] = name
                    made[name] = _storage_bytes(node), 0
            for name, base, taken in results_of(call, step):
                if taken is None:
                    storage_of[name] = step.region, base.name
                    made.setdefault(storage_of[name], (_storage_bytes(base), position))
                elif taken in storage_of:
                    storage_of[name] = storage_of[taken]
        last |= {storage_of[name]: position + 1 for name in drops(step) if name in storage_of}
    last |= {storage_of[name]: len(steps) for name in call.plan.outputs if name in storage_of}
    for storage, end in last.items():
        nbytes, start = made[storage]
        yield Lifetime(nbytes, start, end)


def _storage_bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return example_size(value.untyped_storage().nbytes()) if isinstance(value, Tensor) else 0
