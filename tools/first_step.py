"""Where the CPU seconds of a first step go, cold and after a restart, for several numbers of equal layers.

python tools/first_step.py --layers 4 8 32
python tools/first_step.py --layers 32 --by-block

Each figure is a process of its own: CPU seconds of one rank, its threads and the compilers that it starts, from the
first forward to the end of the first optimizer step, less those of the second step. Other flags go to train.py (its
--help lists them). Exits with 1 unless all numbers of layers have equally many distinct regions.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import train
from parallel import process_group
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters

from fsdp_passes import backend
from fsdp_passes.codegen import variants

PHASES = ("Dynamo", "AOTAutograd", "passes", "Inductor")
# What each phase is made of; what none of these functions does is Dynamo's.
WRAPPED = {
    (backend, "aot_compile"): "AOTAutograd",
    (backend, "merge_reads"): "passes",
    (backend, "_compile_graph"): "passes",
    (variants, "compile_regions"): "Inductor",
}

Result = dict[str, Any]


class PhaseClock:
    """CPU seconds by phase; a phase inside of another is not counted twice."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PHASES, 0.0)
        self._phase, self._since = PHASES[0], cpu_seconds()

    def switch(self, phase: str) -> str:
        """Count for `phase` from now on; the phase before."""
        now, before = cpu_seconds(), self._phase
        self.spent[before] += now - self._since
        self._phase, self._since = phase, now
        return before

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, counted for `phase`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before = self.switch(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch(before)

        return call


def cpu_seconds() -> float:
    """User and system time of this process and of its finished children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(train_flags: list[str]) -> Result:
    """CPU seconds by phase of a first step in this process, and how many regions there were."""
    flags = train.parse_flags(train_flags)
    with process_group("cpu") as device:
        step = train.build_run(flags, device).step
        clock = PhaseClock()
        for (module, name), phase in WRAPPED.items():
            mock.patch.object(module, name, clock.timed(phase, getattr(module, name))).start()
        step()
        clock.switch("Dynamo")
        spent = dict(clock.spent)
        step()
        clock.switch("Dynamo")
        spent["Dynamo"] -= clock.spent["Dynamo"] - spent["Dynamo"]  # running the step is no phase
    return {"spent": spent, "from_disk": counters["inductor"]["fxgraph_cache_hit"], **counters["fsdp_opt"]}


def run(layers: int, cache: str, train_flags: list[str]) -> Result:
    """`measure` in a process that starts with what `cache`, a folder, holds of Inductor's."""
    command = [sys.executable, __file__, "--measure", "--layers", str(layers), *train_flags]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def table_of(results: list[tuple[int, str, Result]]) -> Table:
    table = Table(title="CPU seconds of the first step, one rank")
    for title in ("layers", "", "regions", "distinct", "from disk", *PHASES, "all"):
        table.add_column(title, justify="right", no_wrap=True)
    for layers, state, result in results:
        spent = [result["spent"][phase] for phase in PHASES]
        counts = (str(result.get(name, 0)) for name in ("regions", "regions_compiled", "from_disk"))
        table.add_row(str(layers), state, *counts, *(f"{seconds:.1f}" for seconds in (*spent, sum(spent))))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 32])
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    flags, train_flags = parser.parse_known_args()
    if flags.measure:
        print(json.dumps(measure(["--layers", str(flags.layers[0]), *train_flags])))
        return 0
    results = []
    for layers in flags.layers:
        with tempfile.TemporaryDirectory() as cache:
            results += [(layers, state, run(layers, cache, train_flags)) for state in ("cold", "warm")]
    console = Console(highlight=False, width=110)
    console.print(table_of(results))
    if len(flags.layers) == 1:
        return 0
    distinct = {result.get("regions_compiled", 0) for _, _, result in results}
    console.print(f"{'yes' if len(distinct) == 1 else 'NO '}  the same distinct regions for every number of layers")
    return 0 if len(distinct) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
