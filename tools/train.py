"""Train a small Llama on Python's own source code, with fsdp_opt or with what it is compared to.

python tools/train.py --backend none
torchrun --nproc-per-node 2 tools/train.py --backend fsdp_opt --dump dumps
torchrun --nproc-per-node 2 tools/train.py --steps 20 --save runs --save-every 10
torchrun --nproc-per-node 3 tools/train.py --steps 30 --resume runs --save runs
"""

import argparse
import ast
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import torch
import torch.distributed as dist
from corpus import VOCAB_SIZE, read_corpus, token_batches
from display import step_display
from memory import Meter, open_meter
from parallel import BACKENDS, Setup, Trainee, prepare, process_group
from results import StepRecord, summarize, tokens_per_step
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


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
    parser.add_argument("--lr", type=float, default=1e-3, help="at its highest")
    parser.add_argument("--warmup", type=_count, default=0, metavar="STEPS", help="in which it rises from 0")
    parser.add_argument("--decay", action="store_true", help="let it fall to a tenth, as a cosine, until --steps")
    parser.add_argument("--save", type=Path, metavar="DIR", help="where checkpoints go: step_<n>, the last step always")
    parser.add_argument("--save-every", type=_count, default=0, metavar="STEPS")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on from the newest whole checkpoint in it")
    parser.add_argument("--eval-every", type=_count, default=0, metavar="STEPS", help="measure the held-out loss")
    parser.add_argument("--seed", type=int, default=0)
    sizes = {"layers": 4, "hidden": 128, "heads": 4, "kv-heads": 2, "intermediate": 384}
    for name, default in (sizes | {"seq": 128, "batch": 4, "microbatches": 2, "steps": 30}).items():
        parser.add_argument(f"--{name}", type=_positive, default=default)
    flags = parser.parse_args(argv)
    if flags.backend != "fsdp_opt" and (flags.options or flags.dump or flags.by_block):
        parser.error(f"--options, --dump and --by-block: expected --backend fsdp_opt, got {flags.backend}")
    try:
        flags.options = dict(option(text) for text in flags.options)
    except ValueError as error:
        parser.error(f"--options: {error}")
    if flags.dump:
        flags.options["dump_dir"] = flags.dump
    return flags


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected at least 0, got {value}")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def option(text: str) -> tuple[str, object]:
    """`key=value`: the value as a Python literal where it is one, else as a string."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"expected key=value, got {text!r}")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def llama_config(flags: argparse.Namespace, vocab_size: int) -> LlamaConfig:
    """An untied Llama of the sizes in `flags`."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=flags.hidden,
        intermediate_size=flags.intermediate,
        num_hidden_layers=flags.layers,
        num_attention_heads=flags.heads,
        num_key_value_heads=flags.kv_heads,
        max_position_embeddings=flags.seq,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )


def build_model(flags: argparse.Namespace) -> LlamaForCausalLM:
    """In fp32, equal on all ranks: the seed alone decides its values."""
    torch.manual_seed(flags.seed)
    model = LlamaForCausalLM(llama_config(flags, VOCAB_SIZE))
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


def measure_step(step: Callable[[], Tensor], meter: Meter) -> StepRecord:
    """Run `step` and measure it; the losses are averaged over the ranks after the clocks have stopped.

    That collective also lines the ranks up for the next step.
    """
    meter.reset_peak()
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step()
    if loss.device.type == "cuda":
        torch.cuda.synchronize()
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    peak, rest = meter.peak_bytes(), meter.live_bytes()
    return StepRecord(mean_over_ranks(loss), seconds, cpu_seconds, peak, rest)


def mean_over_ranks(value: Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@dataclass
class Run:
    """What one run trains, and how far it has come."""

    flags: argparse.Namespace
    trainee: Trainee
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    batches: Iterator[Tensor]
    held_out: list[Tensor]
    num_params: int
    steps: int = 0

    def step(self) -> Tensor:
        """One optimizer step; the mean loss of this rank, a 0-dim fp32 tensor."""
        loss = run_step(self.trainee, self.optimizer, self.batches, self.flags.microbatches)
        self.schedule.step()
        self.steps += 1
        return loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss over the held-out batches of all ranks; between steps, it changes no gradient."""
        self.trainee.model.eval()
        losses = [self.trainee.forward(input_ids=t, labels=t, use_cache=False).loss for t in self.held_out]
        self.trainee.model.train()
        return mean_over_ranks(torch.stack(losses).float().mean())

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds; the batches follow from the number of steps."""
        progress = {"steps": self.steps, "schedule": self.schedule.state_dict()}
        return {**self.trainee.get_state(self.optimizer), "progress": progress}

    def resume(self, folder: Path) -> None:
        state = checkpoints.load_newest(folder, self.state())
        self.trainee.set_state(self.optimizer, state)
        self.schedule.load_state_dict(state["progress"]["schedule"])
        self.steps = state["progress"]["steps"]
        for _ in range(self.steps * self.flags.microbatches):
            next(self.batches)


def build_run(flags: argparse.Namespace, device: torch.device) -> Run:
    """The model, sharded and compiled, its optimizer and its data, as the flags say."""
    model = build_model(flags).to(device)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    setup = Setup(device, flags.dtype == "bf16", (LlamaDecoderLayer,), flags.options, flags.by_block)
    trainee = prepare(model, flags.backend, setup)
    optimizer = torch.optim.AdamW(trainee.model.parameters(), lr=flags.lr)
    schedule = LambdaLR(optimizer, lambda step: lr_factor(step, flags))
    batches, held_out = (_batches(flags, device, seed) for seed in (flags.seed, flags.seed + 1))
    return Run(flags, trainee, optimizer, schedule, batches, [next(held_out) for _ in range(4)], num_params)


def _batches(flags: argparse.Namespace, device: torch.device, seed: int) -> Iterator[Tensor]:
    batches = token_batches(read_corpus(), batch=flags.batch, seq=flags.seq, seed=seed, rank=dist.get_rank())
    return (tokens.to(device) for tokens in batches)


def lr_factor(step: int, flags: argparse.Namespace) -> float:
    """Of `--lr` in step number `step`, from 0 on."""
    if step < flags.warmup:
        return (step + 1) / (flags.warmup + 1)
    done = (step - flags.warmup) / max(1, flags.steps - flags.warmup)
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, done)) if flags.decay else 1.0


def train(run: Run) -> tuple[list[StepRecord], dict[int, float]]:
    """Train to the number of steps in the flags: the records of these steps, and held-out losses by step."""
    flags, meter = run.flags, open_meter(next(run.trainee.model.parameters()).device)
    records: list[StepRecord] = []
    held_out: dict[int, float] = {}
    with step_display(flags.backend, flags.steps, first=run.steps, enabled=dist.get_rank() == 0) as show:
        while run.steps < flags.steps:
            records.append(measure_step(run.step, meter))
            last = records[-1]
            show(last.loss, tokens_per_step(flags) / last.seconds, last.peak_bytes)
            if _is_due(run.steps, flags.eval_every):
                held_out[run.steps] = run.evaluate()
            if flags.save and (_is_due(run.steps, flags.save_every) or run.steps == flags.steps):
                checkpoints.save(flags.save, run.steps, run.state())
    return records, held_out


def _is_due(steps: int, every: int) -> bool:
    return every > 0 and steps % every == 0


def main() -> None:
    flags = parse_flags()
    with process_group(flags.device) as device:
        run = build_run(flags, device)
        if flags.resume:
            run.resume(flags.resume)
        if run.steps >= flags.steps:
            raise SystemExit(f"--steps: expected more than the {run.steps} that are done, got {flags.steps}")
        records, held_out = train(run)
        if flags.json and dist.get_rank() == 0:
            results = summarize(flags, records, run.num_params) | {"held_out": held_out}
            flags.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
