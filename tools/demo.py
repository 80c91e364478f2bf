"""Train the same small Llama on two ranks with two backends, and print both side by side.

Exits with 1 unless every loss falls by more than one nat and both agree at every step.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from display import mebibytes
from rich.console import Console
from rich.table import Table

CHECKOUT = Path(__file__).resolve().parent.parent
NUM_RANKS = 2
LEAST_FALL_NATS = 1.0
LARGEST_LOSS_DIFFERENCE = 1e-2  # bf16 keeps 8 bits: losses near 4 are then known to about 0.01

Result = dict[str, Any]  # what train.py --json writes

COST_ROWS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("seconds per step", lambda result: f"{result['step_s']:.3f}"),
    ("CPU seconds per step, rank 0", lambda result: f"{result['cpu_s']:.3f}"),
    ("tokens/s, all ranks", lambda result: f"{result['tokens_per_s']:,.0f}"),
    ("extra seconds in the first step", lambda result: f"{result['compile_s']:.1f}"),
    ("peak within a step, rank 0", lambda result: mebibytes(result["peak_bytes"])),
    ("resting between steps, rank 0", lambda result: mebibytes(result["rest_bytes"])),
)


def build_meter(console: Console) -> Path | None:
    """Compile the allocation counter into build/; None, with a line that says why, where that fails."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        console.print("Memory is not measured: that needs Linux and a C compiler.")
        return None
    library = CHECKOUT / "build" / "alloc_meter.so"
    library.parent.mkdir(exist_ok=True)
    source = CHECKOUT / "tools" / "alloc_meter.c"
    command = [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode == 0:
        return library
    console.print(f"Memory is not measured: the counter did not compile.\n{built.stderr}", markup=False)
    return None


def run_backend(backend: str, train_flags: list[str], meter: Path | None) -> Result:
    """Run train.py on two ranks; its results. Raises CalledProcessError when it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if meter is not None:
        environment["LD_PRELOAD"] = str(meter)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={NUM_RANKS}", str(CHECKOUT / "tools" / "train.py")]
        command += ["--backend", backend, "--device", "cpu", "--json", str(results), *train_flags]
        subprocess.run(command, env=environment, check=True)
        return json.loads(results.read_text())


def compare(left: Result, right: Result) -> tuple[Table, list[tuple[bool, str]]]:
    """The table of both results, and each promise as (kept, sentence)."""
    table = Table(title=f"{left['num_params']:,} parameters, {NUM_RANKS} ranks, the same data")
    table.add_column("")
    for result in (left, right):
        table.add_column(result["backend"], justify="right")
    for step in _shown_steps(len(left["losses"])):
        losses = (f"{result['losses'][step]:.4f}" for result in (left, right))
        table.add_row(f"loss, step {step + 1}", *losses)
    table.add_section()
    for title, cell in COST_ROWS:
        table.add_row(title, cell(left), cell(right))
    return table, [_loss_fell(left), _loss_fell(right), _losses_agree(left, right)]


def _shown_steps(num_steps: int, num_shown: int = 6) -> list[int]:
    """The first step, the last, and some between them, evenly spread."""
    num_shown = min(num_steps, num_shown)
    return sorted({round(index * (num_steps - 1) / max(1, num_shown - 1)) for index in range(num_shown)})


def _loss_fell(result: Result) -> tuple[bool, str]:
    first, last = result["losses"][0], result["losses"][-1]
    fall = f"{first:.3f} -> {last:.3f}, a fall of more than {LEAST_FALL_NATS:g} nat"
    return first - last > LEAST_FALL_NATS, f"{result['backend']}: loss {fall}"


def _losses_agree(left: Result, right: Result) -> tuple[bool, str]:
    differences = [abs(a - b) for a, b in zip(left["losses"], right["losses"], strict=True)]
    largest = math.nan if any(map(math.isnan, differences)) else max(differences)  # max() can skip a NaN
    sentence = f"largest difference in loss {largest:.2e}, at most {LARGEST_LOSS_DIFFERENCE:g} at every step"
    return largest <= LARGEST_LOSS_DIFFERENCE, sentence


def parse_flags(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The demo's own flags, and the rest, which both runs of train.py get."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="Other flags go to tools/train.py.")
    parser.add_argument("--backends", nargs=2, default=["fsdp_opt", "fsdp2"], metavar="BACKEND")
    return parser.parse_known_args(argv)


def main() -> int:
    flags, train_flags = parse_flags()
    console = Console(highlight=False)
    meter = build_meter(console)
    try:
        left, right = (run_backend(backend, train_flags, meter) for backend in flags.backends)
    except subprocess.CalledProcessError as error:
        console.print(f"A run failed with exit status {error.returncode}; its output is above.")
        return 1
    table, promises = compare(left, right)
    console.print(table)
    for kept, sentence in promises:
        console.print(f"{'yes' if kept else 'NO '}  {sentence}")
    return 0 if all(kept for kept, _ in promises) else 1


if __name__ == "__main__":
    sys.exit(main())
