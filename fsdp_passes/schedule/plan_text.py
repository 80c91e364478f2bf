"""The text of a plan: one line a step, then the graph of each region. `load_plan(dump_plan(plan))` is the plan.

    plan fwd trains (primals_1, primals_2, _)
    peak 256 B: arena 256, stay 0, window 0, returned 0, written 0, reduced 0
       0 event   gathers after compute
       1 issue   full: bf16[128] = gather(primals_1) of "embed" at 0
       2 wait    full
       3 run     embedding = region_0(primals_2, full) drop (primals_2)
       4 release full
       5         return (embedding)

    region_0:
       0         primals_2: i64[2,3] = input()
       ...

`_` is an argument that nothing reads. The first column is for readers; `load_plan` does not look at it. A float that is
returned is written as Python writes it; `inf` and `nan` name no values.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields

from fsdp_passes._compat import dtype_names
from fsdp_passes.ir.arguments import quote
from fsdp_passes.ir.text import dump, load
from fsdp_passes.schedule.plan import (
    Accumulate,
    Event,
    Gather,
    GradSlice,
    Output,
    Peak,
    Plan,
    Reduce,
    Release,
    Run,
    Step,
    Wait,
    WaitReduce,
)

_NAME_OF = dtype_names()
_DTYPES = {name: dtype for dtype, name in _NAME_OF.items()}
_HEAD = re.compile(r"plan (fwd|bwd)( trains)? \((.*)\)")
_PEAK = re.compile("peak \\d+ B: " + ", ".join(rf"{each.name} (\d+)" for each in fields(Peak)))
_REGION = re.compile(r"^region_\d+:\n", re.MULTILINE)


def dump_plan(plan: Plan) -> str:
    head = f"plan {plan.direction}{' trains' if plan.trains else ''} {_names(name or '_' for name in plan.inputs)}"
    results = "", f"return {_names('None' if out is None else str(out) for out in plan.outputs)}"
    lines = [head, _peak_text(plan.peak), *_numbered([*map(_step_text, plan.steps), results])]
    regions = [f"\nregion_{number}:\n{dump(region)}" for number, region in enumerate(plan.regions)]
    return "\n".join(line.rstrip() for line in lines) + "\n" + "".join(regions)


def _peak_text(peak: Peak) -> str:
    parts = ", ".join(f"{name} {nbytes}" for name, nbytes in asdict(peak).items())
    return f"peak {peak.nbytes} B: {parts}"


def dump_order(calls: Sequence[tuple[str, Sequence[Step]]], peak: Peak) -> str:
    """The text of graphs that run one after another: of each its direction, and its steps then. For readers only."""
    lines = [f"order of {len(calls)} graphs", _peak_text(peak)]
    for number, (direction, steps) in enumerate(calls):
        lines += ["", f"graph {number}: {direction}", *_numbered(map(_step_text, steps))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _numbered(steps: Iterable[tuple[str, str]]) -> Iterator[str]:
    return (f"{at:4} {lane:7} {text}" for at, (lane, text) in enumerate(steps))


def step_line(step: Step) -> str:
    lane, text = _step_text(step)
    return f"{lane:7} {text}"


def _names(names: Iterable[str]) -> str:
    return f"({', '.join(names)})"


def _step_text(step: Step) -> tuple[str, str]:
    """Lane and line of a step."""
    match step:
        case Event():
            return "event", "gathers after compute"
        case Gather():
            lane = "issue" if step.kept_from is None else ""  # nothing is sent
            return lane, f"{step.buffer}: {_NAME_OF[step.dtype]}[{step.full_elems}] = {_gather_text(step)}"
        case Wait():
            return "wait", step.buffer
        case Release():
            return "release", step.buffer
        case Run():
            results = f"{', '.join(step.outputs)} = " if step.outputs else ""
            return "run", f"{results}region_{step.region}{_names(step.inputs)}{_drop(step.drops)}"
        case GradSlice():
            separate = ", separate" if step.separate else ""
            kind = f"{_NAME_OF[step.dtype]}[{','.join(map(str, step.shape))}]"
            return "", f"{step.name}: {kind} = grad_slice({step.shard}, {step.piece}{separate})"
        case Accumulate():
            pieces = None if step.pieces is None else list(step.pieces)
            return "", f"accumulate({step.full_grad}, {step.shard}, {pieces}){_drop(step.drops)}"
        case Reduce():
            return "issue", f"reduce({step.shard}, {_NAME_OF[step.dtype]}[{step.full_elems}])"
        case WaitReduce():
            return "wait", f"reduce({step.shard}){_graphs(step.ago, 'ago')}"


def _gather_text(step: Gather) -> str:
    place = "" if step.offset is None else f" at {step.offset}"
    kept = "" if step.kept_from is None else f", kept from {step.kept_from}"
    stays = "" if step.reshard else ", stays"
    window = ", for the window" if step.for_window else ""
    return f"gather({step.shard}) of {quote(step.unit)}{place}{stays}{window}{kept}{_graphs(step.ahead, 'ahead')}"


def _graphs(number: int, where: str) -> str:
    return f", graphs {where}: {number}" if number else ""


def _drop(names: tuple[str, ...]) -> str:
    return f" drop {_names(names)}" if names else ""


def load_plan(text: str) -> Plan:
    """The plan that `text` describes; SyntaxError or TypeError names a line that is none of a plan's."""
    main, *graphs = _REGION.split(text)
    head, *lines = [line for line in main.splitlines() if line.strip()] or [""]
    found = _HEAD.fullmatch(head)
    if found is None:
        raise SyntaxError(f"expected 'plan fwd|bwd [trains] (inputs)', got {head!r}")
    peak = _PEAK.fullmatch(lines[0]) if lines else None  # perhaps written by hand, without
    *steps, end = lines[1 if peak else 0 :] or [""]
    outputs = re.fullmatch(r"\s*\d+\s+return \((.*)\)", end)
    if outputs is None:
        raise SyntaxError(f"expected 'return (...)' at the end, got {end!r}")
    plan = Plan(
        direction=found[1],
        inputs=tuple(None if name == "_" else name for name in _split(found[3])),
        steps=tuple(_read_step(line) for line in steps),
        outputs=tuple(_read_output(name) for name in _split(outputs[1])),
        regions=tuple(load(graph) for graph in graphs),
        trains=found[2] is not None,
        peak=Peak(*map(int, peak.groups())) if peak else Peak(),
    )
    for step in plan.steps:
        if isinstance(step, Run) and step.region >= len(graphs):
            raise SyntaxError(f"expected the graph of region_{step.region}, which is called, got {len(graphs)} graphs")
    return plan


def _split(names: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (names or "").split(",") if name.strip())


def _read_output(text: str) -> Output:
    if text.lstrip("-") in ("inf", "nan"):
        return float(text)
    try:
        value: Output = ast.literal_eval(text)
    except ValueError:
        return text
    return value


def _pieces(text: str) -> tuple[int, ...] | None:
    return None if text == "None" else _ints(text[1:-1])


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in _split(text))


_STEPS: tuple[tuple[str, Callable[[re.Match[str]], Step]], ...] = (
    (r"event +gathers after compute", lambda m: Event()),
    (
        rf"(?:issue +)?(\w+): ({'|'.join(_DTYPES)})\[(\d+)\] = gather\((\w+)\) of (\".*\")(?: at (\d+))?(, stays)?"
        r"(, for the window)?(?:, kept from (\w+))?(?:, graphs ahead: (\d+))?",
        lambda m: Gather(
            buffer=m[1],
            shard=m[4],
            dtype=_DTYPES[m[2]],
            full_elems=int(m[3]),
            unit=ast.literal_eval(m[5]),
            reshard=m[7] is None,
            offset=None if m[6] is None else int(m[6]),
            ahead=int(m[10] or 0),
            kept_from=m[9],
            for_window=m[8] is not None,
        ),
    ),
    (r"wait +(\w+)", lambda m: Wait(m[1])),
    (r"release +(\w+)", lambda m: Release(m[1])),
    (
        r"run +(?:([\w, ]+) = )?region_(\d+)\((.*?)\)(?: drop \((.*)\))?",
        lambda m: Run(int(m[2]), _split(m[3]), _split(m[1]), _split(m[4])),
    ),
    (
        rf"(\w+): ({'|'.join(_DTYPES)})\[([\d,]*)\] = grad_slice\((\w+), (\d+)(, separate)?\)",
        lambda m: GradSlice(m[1], m[4], int(m[5]), _ints(m[3]), _DTYPES[m[2]], m[6] is not None),
    ),
    (
        r"accumulate\((\w+), (\w+), (None|\[[\d, ]*\])\)(?: drop \((.*)\))?",
        lambda m: Accumulate(m[1], m[2], _pieces(m[3]), _split(m[4])),
    ),
    (
        rf"issue +reduce\((\w+), ({'|'.join(_DTYPES)})\[(\d+)\]\)",
        lambda m: Reduce(m[1], _DTYPES[m[2]], int(m[3])),
    ),
    (r"wait +reduce\((\w+)\)(?:, graphs ago: (\d+))?", lambda m: WaitReduce(m[1], int(m[2] or 0))),
)


def _read_step(line: str) -> Step:
    text = re.sub(r"^\s*\d+\s+", "", line)
    for pattern, make in _STEPS:
        if found := re.fullmatch(pattern, text):
            return make(found)
    raise SyntaxError(f"expected a step of a plan, got {line!r}")
