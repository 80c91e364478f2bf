"""The memory that a rank of a large model needs for communication: planned without values, and without other ranks.

python tools/plan.py                                          # a Llama of 70 billion parameters among 1024 ranks
python tools/plan.py --layers 32 --hidden 4096 --intermediate 14336 --heads 32 --world-size 64 --options in_flight=3

The model is on the meta device, and its process group is torch's "fake" one: two steps run as shapes alone.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bench import positive
from train import llama_config, option
from transformers import LlamaForCausalLM

import fsdp_passes as fsdp
from fsdp_passes.inspect.explain import Explanation
from fsdp_passes.options import Options

SIZES = {
    "layers": 80,
    "hidden": 8192,
    "intermediate": 28672,
    "heads": 64,
    "kv-heads": 8,
    "vocab": 128256,
    "seq": 4096,
    "world-size": 1024,
}


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--options", nargs="*", default=[], metavar="KEY=VALUE", help="for fsdp_opt")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all that was planned is written")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    flags = parser.parse_args(argv)
    try:
        flags.options = {"codegen": "fx", **dict(map(option, flags.options))}
        Options.parse(flags.options)
    except ValueError as error:
        parser.error(f"--options: {error}")
    if flags.hidden % (2 * flags.heads) or flags.heads % flags.kv_heads:
        sizes = f"--hidden {flags.hidden} --heads {flags.heads} --kv-heads {flags.kv_heads}"
        parser.error(f"expected --hidden as a multiple of 2 x --heads, and --heads of --kv-heads, got {sizes}")
    if flags.json and not flags.json.parent.is_dir():
        parser.error(f"--json: expected a file in a folder that exists, got {flags.json}")
    return flags


def build(flags: argparse.Namespace) -> LlamaForCausalLM:
    """An untied Llama on the meta device."""
    config = llama_config(flags, flags.vocab)
    config.use_cache = False
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def plan(model: LlamaForCausalLM, flags: argparse.Namespace) -> Explanation:
    """What a step of rank 0 does, in bf16, with gradients in fp32; the second one knows the order of the graphs."""
    fsdp.shard(model, precision=fsdp.Precision(param=torch.bfloat16, reduce=torch.float32))
    model.compile(backend="fsdp_opt", options=flags.options)
    tokens = torch.zeros(1, flags.seq, dtype=torch.long, device="meta")
    for _ in range(2):
        model(input_ids=tokens).logits.float().sum().backward()
    return fsdp.explain(model)


def main() -> None:
    flags, start = parse_flags(), time.monotonic()
    dist.init_process_group("fake", rank=0, world_size=flags.world_size, store=dist.HashStore())
    model = build(flags)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    explanation = plan(model, flags)
    seconds = time.monotonic() - start
    print(f"{num_params / 1e9:.1f} billion parameters, {flags.world_size} ranks, planned in {seconds:.0f} s")
    print("\n".join(f"round of graphs {each}" for each in explanation.rounds))
    for each in explanation.rounds:
        print(json.dumps(each.as_dict()["peak"]))
    if flags.json:
        flags.json.write_text(explanation.to_json())


if __name__ == "__main__":
    main()
