"""`torch.compile(model, backend="fsdp_opt")`: the whole flow.

Dynamo's graph ─ merge_reads ─► AOTAutograd ─ partition ─► forward graph, backward graph
each graph ─ passes ─► scheduled graph ─ cut ─► plan + regions ─► executor
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from fsdp_passes._compat import aot_compile, compiled_autograd_is_on, donate_no_saved_tensors
from fsdp_passes.capture.joint import partition
from fsdp_passes.capture.reads import merge_reads
from fsdp_passes.capture.shards import label_shards
from fsdp_passes.codegen.compile import compile_region
from fsdp_passes.codegen.regions import cut
from fsdp_passes.inspect.dump import GraphDumps, open_folder
from fsdp_passes.ir.ops import is_shard
from fsdp_passes.options import Options
from fsdp_passes.passes.base import Pass, run_passes
from fsdp_passes.passes.pipeline import BACKWARD, FORWARD
from fsdp_passes.runtime.executor import Executor

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
    if not any(is_shard(tensor) for tensor in example_inputs):
        _say_unsharded()
    if compiled_autograd_is_on():
        _say_compiled_autograd()
    merge_reads(gm)
    folder, number = open_folder(parsed.dump_dir)

    def compiler(direction: str, passes: Sequence[Pass], trains: bool = False) -> Callable[..., Executor]:
        def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Executor:
            donate_no_saved_tensors()
            dumps = GraphDumps(folder, number, direction)
            label_shards(graph.graph, example_inputs)
            run_passes(graph, passes, parsed.verify, dumps.write_graph)
            plan = cut(graph, direction, trains)
            dumps.write_plan(plan)
            return Executor(plan, [compile_region(region, parsed.codegen) for region in plan.regions])

        return compile_graph

    return aot_compile(
        gm,
        example_inputs,
        fw_compiler=compiler("fwd", FORWARD, trains=True),
        bw_compiler=compiler("bwd", BACKWARD),
        inference_compiler=compiler("fwd", FORWARD),
        partition_fn=partition,
    )


@functools.cache
def _say_unsharded() -> None:
    log.warning("fsdp_opt: this graph reads no sharded parameter; it is compiled as it is")


@functools.cache
def _say_compiled_autograd() -> None:
    log.warning("fsdp_opt: compiled autograd traces backward anew; gradients are reduced in every backward")
