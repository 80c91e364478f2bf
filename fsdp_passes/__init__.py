"""Compiler passes for FSDP: `torch.compile(model, backend="fsdp_opt")`."""

import torch

from fsdp_passes._compat import warn_if_untested
from fsdp_passes.backend import fsdp_opt
from fsdp_passes.inspect.explain import explain
from fsdp_passes.inspect.summary import summary
from fsdp_passes.sharding.precision import Precision
from fsdp_passes.sharding.shard import shard
from fsdp_passes.sharding.state import clip_grad_norm_, full_state_dict

__all__ = ["Precision", "clip_grad_norm_", "explain", "fsdp_opt", "full_state_dict", "shard", "summary"]

warn_if_untested(torch.__version__)
