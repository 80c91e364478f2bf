"""What users do with parameters, on a sharded model against the same on an unsharded one, on one and two ranks.

All cases of a table run in one call of the pool: a rank reports what differed, or what was said, by case.
"""

from __future__ import annotations

import copy
import io
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune
from torch.optim import swa_utils

import fsdp_passes as fsdp
from tests.dist import pool

WORLDS = (1, 2)
TOKENS = torch.arange(12).reshape(2, 6) % 13


class Net(nn.Module):
    """On two ranks embed has pieces of 64 and 1 elements, lin.weight, scale and zero of all and none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 5)
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.embed.weight
        self.lin = nn.Linear(5, 3)
        self.back = nn.Linear(3, 5)
        self.conv = nn.Conv1d(5, 7, 2)
        self.frozen = nn.Linear(5, 17, bias=False).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.zero = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.back(torch.tanh(self.lin(x))) * self.scale + self.zero
        conv = self.conv(x.transpose(1, 2)).square().mean()
        return self.head(x).square().mean() + conv + self.frozen(x).mean()


Case = Callable[[Any], Any]


def make(sharded: bool) -> Any:
    torch.manual_seed(0)
    model = Net()
    return fsdp.shard(model, units=["embed", "lin", "conv", "frozen"]) if sharded else model


def backward(model: Any, step: int = 0) -> Tensor:
    """The same tokens on all ranks: the mean over ranks is the unsharded gradient."""
    loss = model((TOKENS + step) % 13)
    loss.backward()
    return loss.detach()


def trained(model: Any) -> list[Any]:
    return [p for p in model.parameters() if p.requires_grad]


def whole(value: Any) -> Any:
    """`value` with plain tensors, of its own memory, for sharded ones."""
    if isinstance(value, Tensor):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    return [whole(each) for each in value] if isinstance(value, list | tuple) else value


def state(model: Any) -> list[Any]:
    return [(name, whole(p), whole(p.grad)) for name, p in sorted(model.named_parameters())]


def difference(want: Any, got: Any, path: str = "") -> str | None:
    if isinstance(want, dict) and isinstance(got, dict):
        want, got = list(want.items()), list(got.items())
    if isinstance(want, list | tuple) and isinstance(got, list | tuple) and len(want) == len(got):
        found = (difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(want, got, strict=True)))
        return next(filter(None, found), None)
    if isinstance(want, Tensor) and isinstance(got, Tensor):
        try:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6, equal_nan=True)
        except AssertionError as error:
            return f"{path}: {error}"
        return None
    if isinstance(want, float) and isinstance(got, float):
        return None if math.isclose(want, got, rel_tol=1e-5, abs_tol=2e-6) else f"{path}: {want} and {got}"
    return None if type(want) is type(got) and want == got else f"{path}: {want!r} and {got!r}"


# Right: results, parameters, gradients and the state of the random numbers equal the unsharded ones.


def optimizer(name: str, pick: Callable[[Any], Any] = trained, reload: bool = False, **options: Any) -> Case:
    def run(model: Any) -> list[Any]:
        opt = getattr(torch.optim, name)(pick(model), **options)
        for step in range(3):
            opt.zero_grad()
            backward(model, step)
            opt.step()
            if reload and step == 1:
                saved = copy.deepcopy(opt.state_dict())
                opt = getattr(torch.optim, name)(pick(model), **options)
                opt.load_state_dict(saved)
        return list(opt.state.values())

    return run


def with_dims(model: Any) -> list[Any]:
    return [p for p in trained(model) if p.ndim]


def vectors(model: Any) -> list[Any]:
    return [p for p in trained(model) if p.ndim == 1]


def average(**options: Any) -> Case:
    def run(model: Any) -> Any:
        ema = swa_utils.AveragedModel(model, **options)
        opt = torch.optim.SGD(trained(model), lr=0.1)
        for step in range(3):
            opt.zero_grad()
            backward(model, step)
            opt.step()
            ema.update_parameters(model)
        return ema(TOKENS), state(ema), ema.n_averaged

    return run


def copy_trains_alone(model: Any) -> Any:
    opt = torch.optim.AdamW(trained(model), lr=0.1)
    backward(model)
    opt.step()
    twin, twin_opt = copy.deepcopy((model, opt))
    twin_opt.zero_grad()
    backward(twin, 1)
    twin_opt.step()
    return state(twin), twin(TOKENS), model(TOKENS), twin.head.weight is twin.embed.weight


def copy_of_optimizer(model: Any) -> Any:
    opt = torch.optim.AdamW(trained(model), lr=0.1)
    backward(model)
    opt.step()
    twin = copy.deepcopy(opt)
    twin.step()
    return [group["params"] for group in twin.param_groups]


def copy_of_parameter(model: Any) -> Any:
    backward(model)
    twin = copy.deepcopy(model.embed.weight)
    with torch.no_grad():
        twin.mul_(3)
    return twin, twin.grad, twin.is_leaf, isinstance(twin, nn.Parameter)


def optimizer_in_backward(model: Any) -> None:
    for param in trained(model):
        opt = torch.optim.SGD([param], lr=0.1, momentum=0.9)

        def hook(p: Any, opt: Any = opt) -> None:
            opt.step()
            opt.zero_grad()

        param.register_post_accumulate_grad_hook(hook)
    backward(model)
    backward(model, 1)


def optimizer_hooks(model: Any) -> list[str]:
    seen: list[str] = []
    opt = torch.optim.SGD(trained(model), lr=0.1)
    opt.register_step_pre_hook(lambda *_: seen.append("pre"))
    opt.register_step_post_hook(lambda *_: seen.append("post"))
    backward(model)
    opt.step()
    return seen


def module_hooks(model: Any) -> list[Any]:
    shapes: list[Any] = []

    def double(module: Any, args: Any, out: Tensor) -> Tensor:
        shapes.append(tuple(module.weight.shape))
        return out * 2

    model.lin.register_forward_hook(double)
    model.lin.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    backward(model)
    return shapes


def decay_by_ndim(model: Any) -> list[int]:
    groups = [
        {"params": [p for p in trained(model) if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in trained(model) if p.ndim < 2], "weight_decay": 0.0},
    ]
    opt = torch.optim.AdamW(groups, lr=0.1)
    backward(model)
    opt.step()
    return [len(group["params"]) for group in opt.param_groups]


def scaled(model: Any) -> list[float]:
    """An inf that one rank holds, in the second of three steps; unscaled before clipping."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    opt, seen = torch.optim.AdamW(trained(model), lr=0.1, fused=True), []
    for step in range(3):
        opt.zero_grad()
        scaler.scale(model(TOKENS)).backward()
        if step == 1:
            grad = whole(model.embed.weight.grad)
            grad[-1, -1] = math.inf
            model.embed.weight.grad.copy_(grad)
        scaler.unscale_(opt)
        seen.append(float(nn.utils.clip_grad_norm_(trained(model), 0.1)))
        scaler.step(opt)
        scaler.update()
        seen.append(scaler.get_scale())
    return seen


def error_of_clipping(model: Any) -> str:
    backward(model)
    grad = whole(model.embed.weight.grad)
    grad[-1, -1] = math.nan
    model.embed.weight.grad.copy_(grad)
    with pytest.raises(RuntimeError, match="non-finite") as error:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, math.inf, error_if_nonfinite=True)
    return str(error.value)


def after_backward(edit: Case) -> Case:
    def run(model: Any) -> Any:
        backward(model)
        return [edit(param) for param in trained(model)]

    return run


def loaded(model: Any) -> Tensor:
    saved = io.BytesIO()
    torch.save({name: whole(p) * 2 for name, p in model.state_dict().items()}, saved)
    saved.seek(0)
    model.load_state_dict(torch.load(saved))
    return model(TOKENS)


def snapshot(model: Any) -> Tensor:
    saved = {name: p.detach().cpu().clone() for name, p in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    model.load_state_dict(saved)
    return model(TOKENS)


def functional_gradient(model: Any) -> Any:
    plain = {name: whole(p) * 2 for name, p in model.named_parameters()}
    return torch.func.grad(lambda values: functional_call(model, values, (TOKENS,)))(plain)


def initialised(model: Any) -> None:
    model.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if hasattr(m, "weight") else None)
    model.lin.reset_parameters()
    nn.init.orthogonal_(model.conv.weight)
    nn.init.trunc_normal_(model.frozen.weight, std=0.02)


RIGHT: dict[str, Case] = {
    **{
        f"{name}_{way}": optimizer(name, foreach=way == "foreach", maximize=way == "maximize", **options)
        for name, options in {
            "Adamax": {"weight_decay": 0.1},
            "RAdam": {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1},
            "Adadelta": {"lr": 0.5},
            "ASGD": {"t0": 1.0, "weight_decay": 0.1},
        }.items()
        for way in ("loop", "foreach", "maximize")
    },
    **{f"Rprop_{way}": optimizer("Rprop", with_dims, lr=0.01, foreach=way == "foreach") for way in ("loop", "foreach")},
    "Adafactor_of_vectors": optimizer("Adafactor", vectors),
    "SGD_tensor_lr": optimizer("SGD", lr=torch.tensor(0.1)),
    "SGD_reloaded": optimizer("SGD", reload=True, lr=0.1, momentum=0.9),
    "AdamW_reloaded": optimizer("AdamW", reload=True),
    "AdamW_with_frozen": optimizer("AdamW", lambda model: list(model.parameters()), fused=True),
    "ema": average(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
    "ema_one_by_one": average(avg_fn=swa_utils.get_ema_avg_fn(0.9)),
    "swa": average(use_buffers=True),
    "copy_of_model_and_optimizer": copy_trains_alone,
    "copy_of_optimizer": copy_of_optimizer,
    "copy_of_parameter": copy_of_parameter,
    "optimizer_in_backward": optimizer_in_backward,
    "optimizer_hooks": optimizer_hooks,
    "module_hooks": module_hooks,
    "decay_by_ndim": decay_by_ndim,
    "scaler": scaled,
    "error_if_nonfinite": error_of_clipping,
    "clip_value": lambda model: (backward(model), nn.utils.clip_grad_value_(model.parameters(), 0.01))[1],
    "clip_one": lambda model: (backward(model), nn.utils.clip_grad_norm_(model.embed.weight, 0.1))[1],
    "grad_scaled": after_backward(lambda p: p.grad.mul_(0.5)),
    "grad_replaced": after_backward(lambda p: setattr(p, "grad", p.grad + p.detach() * 0.1)),
    "grad_normalised": after_backward(lambda p: p.grad.div_(p.grad.norm() + 1e-8)),
    "grad_deleted": after_backward(lambda p: delattr(p, "grad")),
    "load_saved": loaded,
    "snapshot": snapshot,
    "functional_gradient": functional_gradient,
    "init": initialised,
    "item": lambda model: [(p.norm().item(), f"{float(p.abs().max()):.4f}") for p in model.parameters()],
    "moved_nowhere": lambda model: model.to("cpu").float().cpu().to(memory_format=torch.channels_last)(TOKENS),
    "penalty_of_frozen": lambda model: (model(TOKENS) + model.frozen.weight.square().sum()).backward(),
}


def compare(table: str) -> dict[str, str | None]:
    """What differs, by case of a table; None: nothing."""
    found: dict[str, str | None] = {}
    for name, case in globals()[table].items():
        answers = []
        for model in (make(False), make(True)):
            torch.manual_seed(5)
            result = whole(case(model))
            answers.append((result, state(model), torch.rand(2)))
        found[name] = difference(*answers)
    return found


@pytest.mark.parametrize("world_size", WORLDS)
def test_users_get_what_the_unsharded_model_gives(world_size: int) -> None:
    for rank, found in enumerate(pool.run(world_size, compare, "RIGHT", timeout=120)):
        assert set(found) == set(RIGHT)
        assert {name: text for name, text in found.items() if text} == {}, f"rank {rank}"


# An edit reaches the next forward, which computes with a cast of the shard that is made once.

EDITS: dict[str, Case] = {
    "in_place": lambda p: p.mul_(0.5),
    "data": lambda p: p.data.mul_(0.5),
    "data_assigned": lambda p: setattr(p, "data", p.data.mul_(0.5)),
    "view": lambda p: p.data.unsqueeze(0).squeeze(0).view(-1).mul_(0.5),
    "mask": lambda p: p.data.view(-1).__setitem__(p.data.view(-1) != 0, 0.5),
    "copy": lambda p: p.copy_(torch.ones(p.shape)),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
}


def edited() -> dict[str, bool]:
    found = {}
    for name, edit in EDITS.items():
        torch.manual_seed(0)
        model, fresh = (fsdp.shard(Net(), precision=fsdp.Precision(param=torch.bfloat16)) for _ in range(2))
        before = model(TOKENS)
        with torch.no_grad():
            for param in trained(model):
                if param.ndim:
                    edit(param)
        fresh.load_state_dict(fsdp.full_state_dict(model))
        after = model(TOKENS)
        found[name] = bool(after == fresh(TOKENS)) and bool(after != before)
    return found


def test_edits_reach_the_next_forward() -> None:
    for found in pool.run(2, edited):
        assert found == dict.fromkeys(EDITS, True)


# One norm over all ranks.

ORDERS = (2.0, 1.0, 3.0, math.inf)


def norms() -> list[tuple[float, float]]:
    """Of the unsharded gradients and of the sharded ones, then of the gradients that clipping left."""
    plain, sharded = make(False), make(True)
    for model in (plain, sharded):
        backward(model)
    found = []
    for order in ORDERS:
        found += [
            (float(nn.utils.clip_grad_norm_(plain.parameters(), 0.3, order)), float(clip(order)))
            for clip in (
                lambda order: fsdp.clip_grad_norm_(sharded, 0.3, order),
                lambda order: sharded.clip_grad_norm_(0.3, order),
                lambda order: nn.utils.get_total_norm([p.grad for p in trained(sharded)], order),
            )
        ]
    return found


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_norms_are_those_of_one_process(world_size: int) -> None:
    """A tied parameter counts once, a frozen one not, whichever pieces are empty."""
    for found in pool.run(world_size, norms):
        assert all(got == pytest.approx(want, rel=1e-6) for want, got in found), found
        assert found[0][0] > 1.0 > found[1][0]


# Compiled around the model: the loop sees the parameters and their gradients.


def loop(model: Any) -> list[Any]:
    opt, seen = torch.optim.SGD(trained(model), lr=0.1), []

    def step(tokens: Tensor) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        loss = model(tokens)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.99)
        opt.step()
        return loss.detach(), norm

    run = torch.compile(step, backend="eager") if hasattr(model, "no_sync") else step
    for number in range(2):
        seen.append(run((TOKENS + number) % 13))
    return seen


def compiled_step(name: str, **options: Any) -> Case:
    def run(model: Any) -> None:
        opt = getattr(torch.optim, name)(trained(model), lr=0.01, **options)
        step = torch.compile(opt.step, backend="aot_eager") if hasattr(model, "no_sync") else opt.step
        for number in range(3):
            opt.zero_grad()
            backward(model, number)
            step()

    return run


class Task:
    """Whose method is called as a module's, and is none."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        self.model(tokens).backward()
        return nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


def loop_called_forward(model: Any) -> Tensor:
    forward = Task(model).forward
    return (torch.compile(forward, backend="eager") if hasattr(model, "no_sync") else forward)(TOKENS)


COMPILED = {
    "loop_called_forward": loop_called_forward,
    "loop": loop,
    "AdamW_foreach": compiled_step("AdamW", foreach=True),
    "AdamW_loop": compiled_step("AdamW", foreach=False),
    "AdamW_fused": compiled_step("AdamW", fused=True),
    "SGD": compiled_step("SGD", momentum=0.9),
}


class Cast(nn.Module):
    """Asks for the dtype of its parameters behind a graph break, in a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def cast(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        dtype = next(self.parameters()).dtype
        self.seen.append(dtype)
        return x.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.cast(x))


def dtypes_behind_a_graph_break() -> list[torch.dtype]:
    model = fsdp.shard(Cast(), precision=fsdp.Precision(param=torch.bfloat16))
    torch.compile(model, backend="fsdp_opt", options={"codegen": "fx"})(torch.ones(2, 4)).sum().backward()
    return [*model.seen, next(model.parameters()).dtype]  # type: ignore[misc]


def test_parameters_behind_a_graph_break_are_those_of_the_forward() -> None:
    assert pool.run(1, dtypes_behind_a_graph_break) == [[torch.bfloat16, torch.float32]]


def test_compiled_loops_and_optimizers() -> None:
    for found in pool.run(2, compare, "COMPILED"):
        assert found == dict.fromkeys(COMPILED)


# Refused on every rank, before a collective, and the parameters keep their values.


def step_with(name: str, **options: Any) -> Case:
    def run(model: Any) -> None:
        matrices = [p for p in trained(model) if p.ndim == 2]
        for param in matrices:
            param.grad = torch.ones_like(param)
        getattr(torch.optim, name)(matrices, **options).step(lambda: 0.0 if name == "LBFGS" else None)

    return run


def save_optimizer(model: Any) -> None:
    opt = torch.optim.SGD(trained(model), lr=0.0, momentum=0.9)
    backward(model)
    opt.step()
    torch.save(opt.state_dict(), io.BytesIO())


def load_by_swapping(model: Any) -> None:
    full = make(False).state_dict()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(full)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def swap_data(model: Any) -> None:
    """The first assignment copies, so the second would copy it back."""
    twin = copy.deepcopy(model)
    model.scale.data, twin.scale.data = twin.scale.data, model.scale.data


def swap_tensors(model: Any) -> None:
    torch.utils.swap_tensors(model.lin.weight, copy.deepcopy(model.lin.weight))
    model(TOKENS)


REFUSED: dict[str, tuple[Case, str]] = {
    "Adafactor": (step_with("Adafactor"), r"along a dimension .* use p\.full_tensor\(\)"),
    "Muon": (step_with("Muon"), r"use p\.full_tensor\(\)"),
    "LBFGS": (step_with("LBFGS"), r"aten\.cat.* use p\.full_tensor\(\)"),
    "to_vector": (lambda m: nn.utils.parameters_to_vector(m.parameters()), r"aten\.cat.* use p\.full_tensor\(\)"),
    "from_vector": (lambda m: nn.utils.vector_to_parameters(torch.zeros(999), m.parameters()), r"use p\.copy_\(full\)"),
    "save_model_state": (lambda m: torch.save(m.state_dict(), io.BytesIO()), r"full_state_dict\(model\)"),
    "save_parameter": (lambda m: torch.save(m.scale, io.BytesIO()), r"save p\.full_tensor\(\)"),
    "save_module": (lambda m: torch.save(m, io.BytesIO()), r"save fsdp_passes\.full_state_dict\(model\)"),
    "save_optimizer": (save_optimizer, r"full_optimizer_state_dict\(model, optimizer\)"),
    "numpy": (lambda m: m.scale.detach().numpy(), r"use p\.full_tensor\(\)\.numpy\(\)"),
    "tolist": (lambda m: m.scale.tolist(), r"use p\.full_tensor\(\)\.tolist\(\)"),
    "share_parameter": (lambda m: m.scale.share_memory_(), r"use p\.full_tensor\(\)"),
    "share_module": (lambda m: m.share_memory(), r"use full_state_dict\(model\)"),
    "load_by_swapping": (load_by_swapping, r"switch it off, or use p\.copy_\(full\)"),
    "swap_data": (swap_data, r"read p\.data\.clone\(\)"),
    "swap_tensors": (swap_tensors, r"give forward p\.full_tensor\(\)"),
    "call_with_others": (
        lambda m: functional_call(m, dict(make(True).named_parameters()), (TOKENS,)),
        r"give forward p\.full_tensor\(\)",
    ),
    "call_with_others_compiled": (
        lambda m: torch.compile(functional_call, backend="eager")(m, {"scale": m.scale.detach() * 2}, (TOKENS,)),
        r"give forward p\.full_tensor\(\)",
    ),
    "prune": (lambda m: prune.l1_unstructured(m.lin, "weight", 0.5), r"prune them, before shard\(\)"),
    "add_plain": (lambda m: m.scale.detach() + torch.ones(1), r"torch\.empty_like\(p\.data\)\.copy_\(full\)"),
    "half": (lambda m: m.half(), r"call \.to\(\) before shard\(\)"),
    "half_of_a_part": (lambda m: m.lin.half(), r"call \.to\(\) before shard\(\)"),
    "meta": (lambda m: m.to("meta"), r"call \.to\(\) before shard\(\)"),
    "assigned": (lambda m: setattr(m.lin, "weight", nn.Parameter(torch.ones(3, 5))), r"p\.copy_\(full_tensor\)"),
    "tied_late": (lambda m: setattr(m.head, "weight", m.frozen.weight), r"cannot be replaced"),
    "load_assign": (
        lambda m: m.load_state_dict({k: whole(v) for k, v in make(False).state_dict().items()}, assign=True),
        r"p\.copy_\(full_tensor\)",
    ),
    "grad_of_list": (lambda m: torch.autograd.grad(m(TOKENS), trained(m)), r"read p\.grad"),
    "multi_grad_hook": (
        lambda m: torch.autograd.graph.register_multi_grad_hook(trained(m), print),
        r"register_post_accumulate_grad_hook",
    ),
    "penalty": (lambda m: (m(TOKENS) + m.scale.sum()).backward(), r"outside its module's forward"),
    "penalty_of_squares": (
        lambda m: (m(TOKENS) + m.lin.weight.square().sum()).backward(),
        r"outside its module's forward",
    ),
    "penalty_of_norm": (lambda m: (m(TOKENS) + m.lin.weight.norm()).backward(), r"outside its module's forward"),
    "weight_norm": (lambda m: nn.utils.parametrizations.weight_norm(m.lin), r"use p\.full_tensor\(\)"),
    "spectral_norm": (lambda m: nn.utils.parametrizations.spectral_norm(m.lin), r"use p\.full_tensor\(\)"),
    "stack_models": (lambda m: torch.func.stack_module_state([m]), r"use p\.full_tensor\(\)"),
}


def not_there(model: Any) -> None:
    del model.lin.bias
    model(TOKENS)


def hook_of_frozen(model: Any) -> None:
    model.frozen.weight.register_post_accumulate_grad_hook(print)


TORCHS_OWN: dict[str, tuple[Case, str]] = {
    "deleted": (not_there, "'Linear' object has no attribute 'bias'"),
    "hook_of_frozen": (hook_of_frozen, "cannot register a hook on a tensor that doesn't require gradient"),
}


def torchs_own_errors() -> list[list[str]]:
    said: list[list[str]] = []
    for case, _ in TORCHS_OWN.values():
        said.append([])
        for model in (make(False), make(True)):
            with pytest.raises((AttributeError, RuntimeError)) as error:
                case(model)
            said[-1].append(str(error.value))
    return said


def test_errors_of_torch_stay() -> None:
    for (plain, sharded), (_, sentence) in zip(pool.run(2, torchs_own_errors)[1], TORCHS_OWN.values(), strict=True):
        assert plain == sharded and sentence in plain


def refusals() -> dict[str, tuple[str, str | None]]:
    """By case what was said, and what changed all the same."""
    said: dict[str, tuple[str, str | None]] = {}
    for name, (case, _) in REFUSED.items():
        model = make(True)
        before = whole(dict(model.named_parameters()))
        try:
            case(model)
            sentence = "nothing was refused"
        except Exception as error:
            sentence = str(error)
        dist.barrier()  # no rank is in a collective that the others did not enter
        said[name] = sentence, difference(before, whole(dict(model.named_parameters())))
    return said


@pytest.mark.parametrize("world_size", WORLDS)
def test_refusals_say_what_to_call_and_change_nothing(world_size: int) -> None:
    said = pool.run(world_size, refusals, timeout=120)
    for name, (_, pattern) in REFUSED.items():
        sentence, changed = said[0][name]
        assert all(each[name] == said[0][name] for each in said), [each[name] for each in said]
        assert "fsdp_passes: " in sentence and re.search(pattern, sentence), (name, sentence)
        assert changed is None, (name, changed)
