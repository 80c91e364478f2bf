"""What a training run measured, and how it is written down."""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from corpus import VOCAB_SIZE

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


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _largest(values: Iterator[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
