"""Train a small Llama on Python's own source code, with fsdp_opt or with what it is compared to.

python tools/train.py --backend none
torchrun --nproc-per-node 2 tools/train.py --backend fsdp_opt --dump dumps
"""

import argparse
import ast
import contextlib
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from corpus import VOCAB_SIZE, read_corpus, token_batches
from display import step_display
from memory import Meter, open_meter
from parallel import BACKENDS, Setup, Trainee, prepare, process_group
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

# Dense bf16 peaks in TFLOP/s from NVIDIA's data sheets (H100, H200, A100), by torch's name for the device.
PEAK_TFLOPS = (
    ("NVIDIA H100 80GB HBM3", 989.0),
    ("NVIDIA H200", 989.0),
    ("NVIDIA A100-SXM4-40GB", 312.0),
    ("NVIDIA A100-SXM4-80GB", 312.0),
)


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step did; bytes are this rank's, None when nothing counts them."""

    loss: float
    seconds: float
    cpu_seconds: float
    peak_bytes: int | None
    rest_bytes: int | None


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags, with `options` as a dict and `device` as a torch.device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=list(BACKENDS), default="fsdp_opt")
    parser.add_argument("--options", nargs="*", default=[], metavar="KEY=VALUE", help="for fsdp_opt")
    parser.add_argument("--dump", metavar="DIR", help="where fsdp_opt writes its graphs")
    parser.add_argument("--by-block", action="store_true", help="fsdp_opt compiles block by block, not the whole model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where rank 0 writes the results")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="of the compute")
    parser.add_argument("--checkpoint", action="store_true", help="recompute each layer in backward")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    sizes = {"layers": 4, "hidden": 128, "heads": 4, "kv-heads": 2, "intermediate": 384}
    for name, default in (sizes | {"seq": 128, "batch": 4, "microbatches": 2, "steps": 30}).items():
        parser.add_argument(f"--{name}", type=_positive, default=default)
    flags = parser.parse_args(argv)
    if flags.backend != "fsdp_opt" and (flags.options or flags.dump or flags.by_block):
        parser.error(f"--options, --dump and --by-block: expected --backend fsdp_opt, got {flags.backend}")
    try:
        flags.options = dict(_option(text) for text in flags.options)
    except ValueError as error:
        parser.error(f"--options: {error}")
    if flags.dump:
        flags.options["dump_dir"] = flags.dump
    return flags


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def _option(text: str) -> tuple[str, object]:
    """`key=value`: the value as a Python literal where it is one, else as a string."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"expected key=value, got {text!r}")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def build_model(flags: argparse.Namespace) -> LlamaForCausalLM:
    """An untied fp32 Llama, equal on all ranks: the seed alone decides its values."""
    torch.manual_seed(flags.seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=flags.hidden,
        intermediate_size=flags.intermediate,
        num_hidden_layers=flags.layers,
        num_attention_heads=flags.heads,
        num_key_value_heads=flags.kv_heads,
        max_position_embeddings=flags.seq,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    if flags.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def run_step(
    trainee: Trainee, optimizer: torch.optim.Optimizer, batches: Iterator[Tensor], microbatches: int
) -> Tensor:
    """One optimizer step over `microbatches`; the mean loss of this rank, a 0-dim fp32 tensor."""
    losses = []
    for index in range(microbatches):
        tokens = next(batches)
        is_last = index == microbatches - 1
        with contextlib.nullcontext() if is_last else trainee.no_sync():
            loss = trainee.forward(input_ids=tokens, labels=tokens, use_cache=False).loss
            (loss / microbatches).backward()
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).mean()


def measure_step(step: Callable[[], Tensor], device: torch.device, meter: Meter) -> StepRecord:
    """Run `step` and measure it; the losses are averaged over the ranks after the clocks have stopped.

    That collective also lines the ranks up for the next step.
    """
    meter.reset_peak()
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    peak, rest = meter.peak_bytes(), meter.live_bytes()
    dist.all_reduce(loss)
    return StepRecord(loss.item() / dist.get_world_size(), seconds, cpu_seconds, peak, rest)


def build_step(flags: argparse.Namespace, device: torch.device) -> tuple[Callable[[], Tensor], int]:
    """The model and its data as the flags say: one optimizer step as a function, and the number of parameters."""
    model = build_model(flags).to(device)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    setup = Setup(device, flags.dtype == "bf16", (LlamaDecoderLayer,), flags.options, flags.by_block)
    trainee = prepare(model, flags.backend, setup)
    optimizer = torch.optim.AdamW(trainee.model.parameters(), lr=flags.lr)
    batches = token_batches(read_corpus(), batch=flags.batch, seq=flags.seq, seed=flags.seed, rank=dist.get_rank())
    on_device = (tokens.to(device) for tokens in batches)
    return functools.partial(run_step, trainee, optimizer, on_device, flags.microbatches), num_params


def train(flags: argparse.Namespace, device: torch.device) -> tuple[list[StepRecord], int]:
    """Train as the flags say; the records of all steps, and the model's number of parameters."""
    step, num_params = build_step(flags, device)
    meter = open_meter(device)
    records: list[StepRecord] = []
    with step_display(flags.backend, flags.steps, enabled=dist.get_rank() == 0) as show:
        for _ in range(flags.steps):
            records.append(measure_step(step, device, meter))
            last = records[-1]
            show(last.loss, tokens_per_step(flags) / last.seconds, last.peak_bytes)
    return records, num_params


def tokens_per_step(flags: argparse.Namespace) -> int:
    """Tokens that all ranks together see in one optimizer step."""
    return flags.batch * flags.seq * flags.microbatches * dist.get_world_size()


def summarize(flags: argparse.Namespace, records: list[StepRecord], num_params: int) -> dict[str, object]:
    """The results as `--json` writes them. The first step compiles, so medians and bytes leave it out.

    `cpu_s`, `peak_bytes` and `rest_bytes` are rank 0's, `tokens_per_s` all ranks', `model_tflops` one rank's
    share; `mfu` is None where the device's peak is unknown.
    """
    steady = records[1:] or records
    step_s = statistics.median(record.seconds for record in steady)
    tokens_per_s = tokens_per_step(flags) / step_s
    tflops = flops_per_token(flags, num_params) * tokens_per_s / dist.get_world_size() / 1e12
    peak_tflops = dict(PEAK_TFLOPS).get(_device_name()) if flags.dtype == "bf16" else None
    return {
        "backend": flags.backend,
        "world_size": dist.get_world_size(),
        "num_params": num_params,
        "losses": [record.loss for record in records],
        "step_s": step_s,
        "cpu_s": statistics.median(record.cpu_seconds for record in steady),
        "tokens_per_s": tokens_per_s,
        "model_tflops": tflops,
        "mfu": tflops / peak_tflops if peak_tflops else None,
        "compile_s": max(0.0, records[0].seconds - step_s),
        "peak_bytes": _largest(record.peak_bytes for record in steady),
        "rest_bytes": _largest(record.rest_bytes for record in steady),
    }


def flops_per_token(flags: argparse.Namespace, num_params: int) -> float:
    """6 per matrix weight and 12 layers * hidden * seq for attention: PaLM (arXiv 2204.02311), appendix B."""
    num_weights = num_params - VOCAB_SIZE * flags.hidden  # looking an embedding up is no product
    return 6.0 * num_weights + 12.0 * flags.layers * flags.hidden * flags.seq


def main() -> None:
    flags = parse_flags()
    with process_group(flags.device) as device:
        records, num_params = train(flags, device)
        if flags.json and dist.get_rank() == 0:
            flags.json.write_text(json.dumps(summarize(flags, records, num_params), indent=1) + "\n")


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _largest(values: Iterator[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


if __name__ == "__main__":
    main()
