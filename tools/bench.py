"""The time of one optimizer window, less the optimizer, by the way in which gradients are added up (`grad_path`).

python tools/bench.py --microbatches 1 8
torchrun --nproc-per-node 2 tools/bench.py --codegen fx --json times.json

The model is a stack of Llama-type layers (grouped attention and gated MLP, without rotary embedding) with a bias to
each product and norms for queries and keys: in a layer 7 large weights and 11 vectors. Sequences are short, 8 tokens,
so that gradients are a good part of the work. Parameters stay gathered from forward to backward. All grad_paths run in
turn in one process, window by window, each on a model of its own with the same values; ratios
compare windows of one round. Needs torch alone.
"""

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel import process_group
from torch import Tensor, nn

import fsdp_passes as fsdp

GRAD_PATHS = ("cat", "cat_last", "views")

Window = Callable[[int], None]  # of that many microbatches


@dataclass(frozen=True)
class Sizes:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    batch: int
    seq: int


class Layer(nn.Module):
    """A Llama-type layer; `vectors` adds biases, and norms of queries and keys."""

    def __init__(self, sizes: Sizes, vectors: bool) -> None:
        super().__init__()
        head, hidden = sizes.hidden // sizes.heads, sizes.hidden
        self.head = head
        self.norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.query = nn.Linear(hidden, hidden, bias=vectors)
        self.key = nn.Linear(hidden, sizes.kv_heads * head, bias=vectors)
        self.value = nn.Linear(hidden, sizes.kv_heads * head, bias=vectors)
        self.out = nn.Linear(hidden, hidden, bias=vectors)
        self.query_norm, self.key_norm = (nn.RMSNorm(head) if vectors else nn.Identity() for _ in range(2))
        self.gate = nn.Linear(hidden, sizes.intermediate, bias=vectors)
        self.up = nn.Linear(hidden, sizes.intermediate, bias=vectors)
        self.down = nn.Linear(sizes.intermediate, hidden, bias=vectors)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, key, value = (part(normed).unflatten(-1, (-1, self.head)) for part in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in (self.query_norm(query), self.key_norm(key), value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """Tokens [batch, seq] to logits [batch, seq, vocab]; embedding and head are not tied."""

    def __init__(self, sizes: Sizes, vectors: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes, vectors) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(
    sizes: Sizes, device: torch.device, *, low_precision: bool = True, vectors: bool = True, **options: Any
) -> tuple[nn.Module, Window]:
    """A sharded decoder that stays gathered, the same values at each call, and its windows. `options`: the backend's.

    `low_precision`: parameters are gathered and used in bf16, gradients reduced in fp32; else fp32 throughout.
    """
    torch.manual_seed(0)
    with device:
        whole = Decoder(sizes, vectors)
        tokens = torch.randint(0, sizes.vocab, (sizes.batch, sizes.seq + 1))
    precision = fsdp.Precision(torch.bfloat16, torch.float32) if low_precision else None
    model: Any = fsdp.shard(whole, precision=precision, reshard_after_forward=False)
    run = torch.compile(model, backend="fsdp_opt", options=options)

    def window(microbatches: int) -> None:
        for number in range(microbatches):
            with contextlib.nullcontext() if number == microbatches - 1 else model.no_sync():
                logits = run(tokens[:, :-1])
                loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
                (loss / microbatches).backward()

    return model, window


def timed(window: Window, microbatches: int, device: torch.device) -> tuple[float, float]:
    """Wall and CPU seconds of one window, from when all ranks are ready."""
    dist.barrier()
    synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    window(microbatches)
    synchronize(device)
    return time.perf_counter() - wall, time.process_time() - cpu


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Spread:
    """The median, and the 10th and 90th percentile."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        marks = torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)
        return cls(*torch.tensor(values, dtype=torch.float64).quantile(marks).tolist())

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.p10:{spec}} to {self.p90:{spec}})"


@dataclass(frozen=True)
class Times:
    """Seconds of a window on this rank, and how many times as long "cat" takes in the same round."""

    microbatches: int
    grad_path: str
    wall_s: Spread
    cpu_s: Spread
    cat_by_this_wall: Spread
    cat_by_this_cpu: Spread


def measure(flags: argparse.Namespace, device: torch.device) -> list[Times]:
    sizes = Sizes(**{name: getattr(flags, name) for name in Sizes.__annotations__})
    options = {"codegen": flags.codegen, "verify": 0}
    built = {
        grad_path: build(sizes, device, low_precision=flags.dtype == "bf16", grad_path=grad_path, **options)
        for grad_path in GRAD_PATHS
    }
    rounds: dict[int, list[dict[str, tuple[float, float]]]] = {each: [] for each in flags.microbatches}
    for repeat in range(-1, flags.repeats):  # the first compiles, and does not count
        for microbatches in flags.microbatches:
            spent = {}
            for number in range(len(GRAD_PATHS)):
                grad_path = GRAD_PATHS[(number + repeat) % len(GRAD_PATHS)]  # each comes first in turn
                model, window = built[grad_path]
                spent[grad_path] = timed(window, microbatches if repeat >= 0 else max(2, microbatches), device)
                for parameter in model.parameters():
                    parameter.grad = None
            if repeat >= 0:
                rounds[microbatches].append(spent)
    return [compare(rounds[count], count, grad_path) for count, grad_path in product(flags.microbatches, GRAD_PATHS)]


def compare(rounds: Sequence[Mapping[str, tuple[float, float]]], microbatches: int, grad_path: str) -> Times:
    """`rounds`: wall and CPU seconds by grad_path."""
    spent = [each[grad_path] for each in rounds]
    ratios = [[cat / this for cat, this in zip(each["cat"], each[grad_path], strict=True)] for each in rounds]
    spreads = [Spread.of(values) for values in (*zip(*spent, strict=True), *zip(*ratios, strict=True))]
    return Times(microbatches, grad_path, *spreads)


def text_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under their titles, aligned to the right."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (titles, *rows))
    return "\n".join(lines)


def report(times: Sequence[Times]) -> str:
    titles = (
        "microbatches",
        "grad_path",
        "wall s (10 to 90 %)",
        "CPU s (10 to 90 %)",
        "cat / this, wall",
        "cat / this, CPU",
    )
    rows = [
        [
            str(each.microbatches),
            each.grad_path,
            f"{each.wall_s:.4f}",
            f"{each.cpu_s:.4f}",
            f"{each.cat_by_this_wall:.3f}",
            f"{each.cat_by_this_cpu:.3f}",
        ]
        for each in times
    ]
    return text_table(titles, rows)


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=positive, nargs="+", default=[1, 8], help="in a window")
    parser.add_argument("--repeats", type=positive, default=20, help="windows that are measured, of each kind")
    parser.add_argument("--codegen", choices=["inductor", "fx"], default="inductor")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="fp32", help="of the compute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where rank 0 writes the results")
    sizes = Sizes(layers=4, hidden=512, heads=8, kv_heads=4, intermediate=1536, vocab=8192, batch=1, seq=8)
    for name, default in asdict(sizes).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, default=default)
    return parser.parse_args(argv)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def main() -> None:
    flags = parse_flags()
    with process_group(flags.device) as device:
        times = measure(flags, device)
        if dist.get_rank() > 0:
            return
        print(report(times))
        if flags.json:
            setup = {"codegen": flags.codegen, "dtype": flags.dtype, "world_size": dist.get_world_size()}
            results = {**setup, "times": [asdict(each) for each in times]}
            flags.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
