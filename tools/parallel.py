"""One model, four ways to train it on several ranks, behind the same two calls."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.parallel import DistributedDataParallel

State = dict[str, Any]
NoSync = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def process_group(device_flag: str) -> Iterator[torch.device]:
    """Join torchrun's ranks, or make a group of one; gives this rank's device."""
    use_cuda = device_flag == "cuda" or (device_flag == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if use_cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Setup:
    """What a backend needs to know.

    `low_precision`: parameters are gathered and used in bf16 and gradients reduced in fp32; master weights
    are fp32 either way. `options` goes to the fsdp_opt backend; `by_block` has it compile each block by itself,
    the first for all, and leave the rest of the model to eager.
    """

    device: torch.device
    low_precision: bool
    blocks: tuple[type[nn.Module], ...]
    options: dict[str, Any] = field(default_factory=dict)
    by_block: bool = False


@dataclass(frozen=True)
class Trainee:
    """A model ready to train: call `forward`, inside `no_sync` for all but the last microbatch."""

    model: nn.Module
    forward: Callable[..., Any]
    no_sync: NoSync

    def get_state(self, optimizer: torch.optim.Optimizer) -> State:
        """The state of model and optimizer, sharded as they are, with the same names for every backend."""
        model, optim = get_state_dict(self.model, optimizer)
        return {"model": model, "optim": optim}

    def set_state(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Take on what torch.distributed.checkpoint loaded into `get_state`'s result."""
        set_state_dict(self.model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


class ShardedTrainee(Trainee):
    """One whose model fsdp_passes has sharded."""

    def get_state(self, optimizer: torch.optim.Optimizer) -> State:
        import fsdp_passes as fsdp

        return fsdp.state_dict(self.model, optimizer)

    def set_state(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        import fsdp_passes as fsdp

        fsdp.load_state_dict(self.model, optimizer, state)


def prepare(model: nn.Module, backend: str, setup: Setup) -> Trainee:
    """Shard and compile `model` (fp32, on the device, equal on all ranks) for one of `BACKENDS`."""
    return BACKENDS[backend](model, setup)


def _fsdp_opt(model: nn.Module, setup: Setup) -> Trainee:
    import fsdp_passes as fsdp

    precision = fsdp.Precision(param=torch.bfloat16, reduce=torch.float32) if setup.low_precision else None
    model = fsdp.shard(model, precision=precision)
    no_sync = cast(NoSync, model.no_sync)
    if not setup.by_block:
        return ShardedTrainee(model, torch.compile(model, backend="fsdp_opt", options=setup.options), no_sync)
    for block in model.modules():
        if isinstance(block, setup.blocks):
            block.compile(backend="fsdp_opt", options=setup.options)
    return ShardedTrainee(model, model, no_sync)


def _fsdp2(model: nn.Module, setup: Setup) -> Trainee:
    mesh = dist.init_device_mesh(setup.device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if setup.low_precision:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for unit in _units(model, setup.blocks):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    root = fully_shard(model, mesh=mesh, mp_policy=policy)

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        root.set_is_last_backward(False)
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)
            root.set_is_last_backward(True)

    # Dynamo without code generation: the same kernels as eager, and the same branches of the model's code
    # as under any other compiled backend.
    return Trainee(model, torch.compile(model, backend="eager"), no_sync)


def _units(model: nn.Module, blocks: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    """The blocks, the embedding and the head: what gathers together; the rest belongs to the root."""
    units = [module for module in model.modules() if isinstance(module, blocks)]
    return [*units, model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[operator]


def _fsdp1(model: nn.Module, setup: Setup) -> Trainee:
    precision = MixedPrecision(cast_forward_inputs=False, cast_root_forward_inputs=False)
    if setup.low_precision:
        precision = MixedPrecision(
            torch.bfloat16, torch.float32, cast_forward_inputs=False, cast_root_forward_inputs=False
        )
    units = set(_units(model, setup.blocks))
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: module in units),
        mixed_precision=precision,
        use_orig_params=True,
        device_id=setup.device,  # without it FSDP1 refuses a machine that has no accelerator
    )
    return Trainee(sharded, sharded, sharded.no_sync)


def _none(model: nn.Module, setup: Setup) -> Trainee:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(setup.device.type, torch.bfloat16, enabled=setup.low_precision):
            return replica(*args, **kwargs)

    if dist.get_world_size() == 1:
        replica: nn.Module = model
        return Trainee(model, forward, contextlib.nullcontext)
    replica = DistributedDataParallel(model)
    return Trainee(replica, forward, replica.no_sync)


BACKENDS: Mapping[str, Callable[[nn.Module, Setup], Trainee]] = {
    "fsdp_opt": _fsdp_opt,
    "fsdp2": _fsdp2,
    "fsdp1": _fsdp1,
    "none": _none,
}
