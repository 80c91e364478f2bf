"""What the ways to add gradients up cost on one GPU: peak bytes, and the time of a window of microbatches.

python tools/gpu_check.py --json gpu.json
python tools/gpu_check.py --device cpu --small

First, with codegen="fx", every `grad_path` must give the gradients of "cat" bit for bit; else it exits with 1. Then,
with codegen="inductor", each is measured by itself, parameters kept gathered. The model is the Llama-type stack of
tools/bench.py, without biases. On a CPU bytes are those of tools/alloc_meter.c if it is preloaded. Needs torch alone.
"""

import argparse
import contextlib
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench import GRAD_PATHS, Sizes, build, positive, text_table, timed
from memory import open_meter
from parallel import process_group
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# 2.0e9 parameters: 8 GB of fp32 gradients, as many master weights, and twice 4 GB of bf16 parameters.
LARGE = Sizes(8, hidden=4096, heads=32, kv_heads=8, intermediate=14336, vocab=32000, batch=1, seq=2048)
SMALL = Sizes(1, hidden=128, heads=4, kv_heads=2, intermediate=384, vocab=512, batch=1, seq=32)
# The first is what the others are compared to.
KINDS = (("cat", "round"), ("cat_last", "round"), ("views", "round"), ("views", "fp32"))


@dataclass(frozen=True)
class Row:
    """What one kind took; bytes are None where nothing counts them.

    window_s: median. difference: of all gradients from those of "cat", norm over norm.
    """

    grad_path: str
    wgrad: str
    rest_bytes: int | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    window_s: float
    difference: float


def gradients(model: nn.Module) -> list[Tensor]:
    """On the host, so that they take no memory that is measured."""
    return [parameter.grad.full_tensor().cpu() for parameter in model.parameters()]  # type: ignore[union-attr]


def drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@contextlib.contextmanager
def fresh(device: torch.device) -> Iterator[None]:
    """Leaves no graph and no memory of what ran inside."""
    try:
        yield
    finally:
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def find_different(sizes: Sizes, device: torch.device) -> list[str]:
    """Each `grad_path` with gradients that are not bit for bit the first ones of "cat"; each runs twice.

    If "cat" itself is among them, the device adds up in another order each time, and the check says nothing.
    """
    sizes = replace(sizes, layers=min(2, sizes.layers), seq=min(256, sizes.seq))
    expected: list[Tensor] = []
    different: dict[str, None] = {}
    for grad_path in GRAD_PATHS:
        # The other kernels of attention may add up in another order each time.
        with fresh(device), sdpa_kernel(SDPBackend.MATH):
            model, window = build(sizes, device, vectors=False, codegen="fx", grad_path=grad_path)
            for _ in range(2):
                drop_gradients(model)
                window(3)
                got = gradients(model)
                expected = expected or got
                if not all(map(torch.equal, got, expected)):
                    different[grad_path] = None
            del model, window
    return list(different)


def measure(
    sizes: Sizes, device: torch.device, kind: tuple[str, str], flags: argparse.Namespace, expected: list[Tensor]
) -> Row:
    """One kind. The first fills `expected`, which is empty then."""
    meter, (grad_path, wgrad) = open_meter(device), kind
    with fresh(device):
        model, window = build(sizes, device, vectors=False, codegen=flags.codegen, grad_path=grad_path, wgrad=wgrad)
        window(2)  # compiles what copies and what adds
        drop_gradients(model)
        gc.collect()
        _forget_peaks(device)
        meter.reset_peak()
        rest, seconds = meter.live_bytes(), []
        for _ in range(flags.repeats):
            drop_gradients(model)
            seconds.append(timed(window, flags.microbatches, device)[0])
        peak, reserved = meter.peak_bytes(), _peak_reserved(device)
        got = gradients(model)
        expected += [] if expected else got
        difference = _difference(got, expected)
        del model, window
    median = torch.tensor(seconds, dtype=torch.float64).quantile(0.5).item()
    return Row(grad_path, wgrad, rest, peak, reserved, median, difference)


def _forget_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak_reserved(device: torch.device) -> int | None:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def _difference(got: list[Tensor], expected: list[Tensor]) -> float:
    square = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(got, expected, strict=True))
    return (square / sum(float(b.double().square().sum()) for b in expected)) ** 0.5


def report(rows: list[Row]) -> str:
    titles = ("grad_path", "wgrad", "rest MiB", "peak MiB", "reserved MiB", "window s", "difference")
    return text_table(titles, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    sizes = (row.rest_bytes, row.peak_allocated_bytes, row.peak_reserved_bytes)
    mebibytes = ["-" if size is None else f"{size / 2**20:,.1f}" for size in sizes]
    return [row.grad_path, row.wgrad, *mebibytes, f"{row.window_s:.4f}", f"{row.difference:.1e}"]


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a model for trying the script out")
    parser.add_argument("--codegen", choices=["inductor", "fx"], default="inductor", help="of what is measured")
    parser.add_argument("--microbatches", type=positive, default=8, help="in a window")
    parser.add_argument("--repeats", type=positive, default=5, help="windows that are measured, of each kind")
    parser.add_argument("--limit-s", type=positive, default=400, help="after so long no other kind is started")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after each kind")
    return parser.parse_args(argv)


def main() -> int:
    flags, start = parse_flags(), time.monotonic()
    sizes = SMALL if flags.small else LARGE
    with process_group(flags.device) as device:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        different = find_different(sizes, device)
        print(f"{name}, torch {torch.__version__}")
        verdict = f"NO   not bit for bit those of cat: {different}" if different else "yes  those of cat, bit for bit"
        print(f"{verdict}: gradients of 3 microbatches, fx", flush=True)
        results: dict[str, Any] = {"device": name, "torch": torch.__version__, "sizes": asdict(sizes)}
        results |= {"microbatches": flags.microbatches, "different": different, "rows": []}
        rows: list[Row] = []
        expected: list[Tensor] = []
        for kind in KINDS:
            if time.monotonic() - start > flags.limit_s:
                print(f"not measured, for lack of time: {kind}")
                continue
            rows.append(measure(sizes, device, kind, flags, expected))
            print(report(rows[-1:]), flush=True)
            results["rows"].append(asdict(rows[-1]))
            if flags.json:
                flags.json.write_text(json.dumps(results, indent=1) + "\n")
        print(report(rows))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
