"""`torch.compile(model, backend="fsdp_opt")`: the whole flow.

Dynamo's graph ─ merge_reads ─► AOTAutograd ─ partition ─► forward graph, backward graph
each graph ─ passes ─► graph that gathers on demand ─ cut ─► plan + regions ─ schedule ─► executor
the executors' first step ─► the order of the graphs ─ schedule ─► every later step
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx

from fsdp_passes._compat import (
    aot_compile,
    compiled_autograd_is_on,
    donate_no_saved_tensors,
    inductor_decompositions,
    warn_once,
    with_settings_of_now,
)
from fsdp_passes.capture.joint import partition
from fsdp_passes.capture.reads import merge_reads
from fsdp_passes.capture.shards import find_shards, label_shards, refuse_gradients_in_parts
from fsdp_passes.codegen.regions import cut
from fsdp_passes.codegen.variants import Regions
from fsdp_passes.inspect.dump import DumpFolder
from fsdp_passes.inspect.explain import report
from fsdp_passes.ir.ops import ShardInput
from fsdp_passes.ir.passes import run_passes
from fsdp_passes.options import Options
from fsdp_passes.passes.pipeline import passes_of
from fsdp_passes.runtime.executor import Executor
from fsdp_passes.schedule.order import schedule, scheduled
from fsdp_passes.schedule.plan import Call, Step
from fsdp_passes.schedule.rules import verify_schedule

log = logging.getLogger(__name__)


def fsdp_opt(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """A backend of torch.compile. `options`: see `Options`; ValueError for an unknown name or value."""
    if mode is not None:
        raise ValueError(f"mode: expected None, got {mode!r}; this backend takes options")
    parsed = Options.parse(options)
    shards = find_shards(example_inputs)
    if not shards:
        warn_once(log, "fsdp_opt: a graph reads no sharded parameter; it is compiled as it is")
    if compiled_autograd_is_on():
        warn_once(log, "fsdp_opt: compiled autograd traces backward anew; every backward reduces its gradients")
    merge_reads(gm)
    folder = DumpFolder.next_graph(parsed.dump_dir)
    compile_graph = partial(with_settings_of_now(_compile_graph), shards, parsed, folder)  # backward is compiled later
    return aot_compile(
        gm,
        example_inputs,
        fw_compiler=partial(compile_graph, "fwd", True),
        bw_compiler=partial(compile_graph, "bwd", False),
        inference_compiler=partial(compile_graph, "fwd", False),
        partition_fn=partition,
        decompositions=inductor_decompositions() if parsed.codegen == "inductor" else {},
    )


def _compile_graph(
    shards: Mapping[int, ShardInput],
    options: Options,
    folder: DumpFolder,
    direction: str,
    trains: bool,
    graph: fx.GraphModule,
    inputs: Sequence[Any],
) -> Executor:
    """One graph of AOTAutograd to what runs; `trains`: it is a forward whose backward is to come."""
    if trains:
        donate_no_saved_tensors()
    dumps = folder.stages_of(direction)
    label_shards(graph.graph, shards)
    refuse_gradients_in_parts(graph.graph, shards)
    declined = run_passes(graph, passes_of(direction, options), options.verify, dumps.write_graph)
    plan = scheduled(cut(graph, direction, trains), options.in_flight)
    verify_schedule([Call.alone(plan)], [plan.steps], options.in_flight, options.verify)
    dumps.write_plan(plan)
    regions = Regions(plan.regions, options.codegen, direction)
    schedule_calls = partial(_schedule, folder, options.verify)
    return Executor(plan, regions, schedule_calls, options, report(graph.graph, plan, declined))


def _schedule(
    folder: DumpFolder, level: int, calls: Sequence[Call], in_flight: int | None
) -> Sequence[tuple[Step, ...]]:
    """What graphs do, once it is known that they run one after another; checked at `level`."""
    steps = schedule(calls, in_flight)
    verify_schedule(calls, steps, in_flight, level)
    folder.write_order(calls, steps)
    return steps
