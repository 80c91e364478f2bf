"""Compiler passes for FSDP: `torch.compile(model, backend="fsdp_opt")`."""

import torch

from fsdp_passes._compat import warn_if_untested
from fsdp_passes.backend import fsdp_opt
from fsdp_passes.inspect.explain import explain
from fsdp_passes.inspect.summary import summary
from fsdp_passes.sharding.checkpoint import full_optimizer_state_dict, load_state_dict, state_dict
from fsdp_passes.sharding.full_state import use_full_state_dicts
from fsdp_passes.sharding.load import load_full_state_dict, load_safetensors
from fsdp_passes.sharding.precision import Precision
from fsdp_passes.sharding.shard import shard
from fsdp_passes.sharding.state import clip_grad_norm_, full_state_dict

__all__ = [
    "Precision",
    "clip_grad_norm_",
    "explain",
    "fsdp_opt",
    "full_optimizer_state_dict",
    "full_state_dict",
    "load_full_state_dict",
    "load_safetensors",
    "load_state_dict",
    "shard",
    "state_dict",
    "summary",
    "use_full_state_dicts",
]

warn_if_untested(torch.__version__)
