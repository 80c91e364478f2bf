"""Random models over random windows: every `grad_path` gives the gradients of `grad_path="cat"`, bit for bit."""

from __future__ import annotations

import contextlib
import traceback
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fsdp_passes as fsdp
from fsdp_passes.sharding.pending import PendingGrad
from tests.dist import pool
from tests.dist.models import build, whole

PLANS_PER_MODEL = 20  # compiling a model is dear, another plan is not
VOCAB, ROWS = 5, 3
PRECISIONS = {
    "none": None,
    "bf16, sums in fp32": fsdp.Precision(torch.bfloat16, torch.float32),
    "bf16, sums in bf16": fsdp.Precision(torch.bfloat16, torch.bfloat16),
    "the parameters', sums in fp32": fsdp.Precision(None, torch.float32),
}


@dataclass(frozen=True)
class LayerSpec:
    """tied: it shares the parameters of an earlier layer of the same shapes, if there is one."""

    kind: str = "linear"
    size: int = 1
    dtype: torch.dtype = torch.float32
    frozen: bool = False
    tied: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """units: the layers of each. in_root, aside, skipped: numbers of units, which may be none's.

    in_root: no unit of its own. aside: computes an output that the loss does not use. skipped: not used in branch 1.
    breaks: a graph ends after the first unit. dynamic: compiled for any number of rows.
    """

    width: int
    units: tuple[tuple[LayerSpec, ...], ...]
    in_root: int
    aside: int
    skipped: int
    precision: str
    reshard: bool
    breaks: bool
    dynamic: bool


@dataclass(frozen=True)
class Microbatch:
    """discard: which gradients are discarded before it. more_rows: only for a model that takes any number of them."""

    branch: int
    sync: bool
    discard: str
    more_rows: int


class Layer(nn.Module):
    """[rows, width] -> the same; computed in the dtype in which its parameters are gathered."""

    def __init__(self, spec: LayerSpec, width: int) -> None:
        super().__init__()
        self.spec = spec
        for name, shape in _shapes(spec.size, width)[spec.kind].items():
            value = torch.randn(shape).to(spec.dtype)
            self.register_parameter(name, nn.Parameter(value, requires_grad=not spec.frozen))

    def forward(self, x: Tensor) -> Tensor:
        return x + self._branch(x.to(self.a.dtype)).to(x.dtype)

    def _branch(self, x: Tensor) -> Tensor:
        match self.spec.kind:
            case "linear":
                return F.linear(F.linear(x, self.a, self.b).tanh(), self.a.t())
            case "products":
                return (x @ self.a).sin() @ self.b
            case "bias":
                return self.a
            case "gather":
                return x.cos() * F.embedding(torch.tensor([1, 3, 1]), self.a).sum(0)
            case "conv":
                return F.conv1d(x.unsqueeze(1), self.a, self.b, padding=1).sin().mean(1)
            case "norm":
                return F.layer_norm(x, x.shape[-1:], self.a, self.b)
            case "scalar":
                return x * self.a
            case "rows":
                return x * self.a[1] + self.a[2:].sum(0)
            case "detached":
                return x * self.a + self.b.detach().sum()
            case _:  # "half": nobody reads `b`
                return x * self.a


def _shapes(size: int, width: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Of the parameters of each kind of layer, by name."""
    return {
        "linear": {"a": (size, width), "b": (size,)},
        "products": {"a": (width, size), "b": (size, width)},
        "bias": {"a": (width,)},
        "gather": {"a": (VOCAB, width)},
        "conv": {"a": (size, 1, 3), "b": (size,)},
        "norm": {"a": (width,), "b": (width,)},
        "scalar": {"a": ()},
        "rows": {"a": (size + 3, width)},
        "detached": {"a": (width,), "b": (size,)},
        "half": {"a": (width,), "b": (size,)},
    }


class Random(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.units = nn.ModuleList(nn.ModuleList(Layer(layer, spec.width) for layer in unit) for unit in spec.units)
        layers = [layer for layer in self.modules() if isinstance(layer, Layer)]
        for number, layer in enumerate(layers):
            if layer.spec.tied:
                _tie(layer, layers[:number])

    def forward(self, x: Tensor, branch: int) -> tuple[Tensor, Tensor | None]:
        """A loss, and an output that the loss does not use."""
        spec, aside = self.spec, None
        for number, unit in enumerate(self.units):
            if branch and number == spec.skipped:
                continue
            y = x
            for layer in unit:
                y = layer(y)
            if number == spec.aside:
                aside = y
            else:
                x = y
            if spec.breaks and number == 0:
                torch._dynamo.graph_break()
        return x.square().mean(), aside


def _tie(layer: Layer, before: list[Layer]) -> None:
    def alike(each: Layer) -> list[Any]:
        return [each.spec.kind, *((p.shape, p.dtype, p.requires_grad) for p in each.parameters())]

    for each in before:
        if alike(each) == alike(layer):
            for name, param in each.named_parameters():
                setattr(layer, name, param)
            return


def _gradients(spec: ModelSpec, plans: list[list[Microbatch]], grad_path: str) -> list[dict[str, Any]]:
    """After each microbatch of each plan the gradient of each parameter: None, "pending" or the whole."""
    model: Any = build(Random, spec)
    names = [f"units.{number}" for number in range(len(spec.units)) if number != spec.in_root]
    fsdp.shard(model, units=names, precision=PRECISIONS[spec.precision], reshard_after_forward=spec.reshard)
    torch._dynamo.reset()
    options = {"codegen": "fx", "verify": 1, "grad_path": grad_path}
    run = torch.compile(model, backend="fsdp_opt", dynamic=spec.dynamic, options=options)
    seen = []
    for number, plan in enumerate(plans):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        for microbatch in plan:
            _discard(model, microbatch.discard)
            rows = ROWS + microbatch.more_rows * spec.dynamic
            x = torch.randn(rows, spec.width, generator=generator).requires_grad_()
            with contextlib.nullcontext() if microbatch.sync else run.no_sync():
                run(x, microbatch.branch)[0].backward()
            seen.append({name: _grad(param) for name, param in model.named_parameters()})
        model.zero_grad()
    return seen


def _discard(model: nn.Module, which: str) -> None:
    if which == "the first":
        next(model.parameters()).grad = None
    elif which != "none":
        model.zero_grad(set_to_none=which == "all")


def _grad(param: Any) -> Tensor | str | None:
    if isinstance(param.grad, PendingGrad):
        return "pending"
    return None if param.grad is None else whole(param.grad).clone()


def _same(a: Tensor | str | None, b: Tensor | str | None) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())
    return type(a) is type(b)


def _differences(spec: ModelSpec, plans: list[list[Microbatch]]) -> list[str]:
    """Where another path's gradients differ from those of "cat", and what raised."""
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        try:
            expected = _gradients(spec, plans, "cat")
            places = [(p, m) for p, plan in enumerate(plans) for m in range(len(plan))]
            return [
                f"{path}: {name} after microbatch {m} of {plans[p]}: {grads[name]}, not {wanted[name]}"
                for path in ("views", "cat_last")
                for (p, m), wanted, grads in zip(places, expected, _gradients(spec, plans, path), strict=True)
                for name in wanted
                if not _same(grads[name], wanted[name])
            ]
        except Exception:  # a rank that raises would end the pool, and with it the search for a smaller example
            return [traceback.format_exc()]


def _mostly(value: Any, *others: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([value] * (2 * len(others)) + list(others))


LAYERS = st.builds(
    LayerSpec,
    kind=st.sampled_from(list(_shapes(1, 1))),
    size=st.sampled_from([1, 7, 33]),
    dtype=_mostly(torch.float32, torch.bfloat16, torch.float64),
    frozen=_mostly(False, True),
    tied=st.booleans(),
)
UNITS = st.lists(st.lists(LAYERS, min_size=1, max_size=2).map(tuple), min_size=2, max_size=5).map(tuple)
MODELS = st.builds(
    ModelSpec,
    width=st.sampled_from([1, 3, 8]),
    units=UNITS,
    in_root=st.integers(0, 5),
    aside=st.integers(0, 5),
    skipped=st.integers(0, 4),
    precision=st.sampled_from(list(PRECISIONS)),
    reshard=st.booleans(),
    breaks=_mostly(False, True),
    dynamic=_mostly(False, True),
)
MICROBATCHES = st.builds(
    Microbatch,
    branch=st.integers(0, 1),
    sync=st.booleans(),
    discard=_mostly("none", "all", "in place", "the first"),
    more_rows=st.integers(0, 2),
)
PLANS = st.lists(st.lists(MICROBATCHES, min_size=1, max_size=4), min_size=PLANS_PER_MODEL, max_size=PLANS_PER_MODEL)


@pytest.mark.parametrize("num_models", [6, pytest.param(16, marks=pytest.mark.slow)])
def test_every_grad_path_gives_the_gradients_of_cat(num_models: int) -> None:
    """A case is a model with a plan of microbatches; its gradients are compared after each of them."""
    cases = 0

    @settings(
        max_examples=num_models,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(spec=MODELS, plans=PLANS, world_size=st.sampled_from([1, 1, 1, 2]))
    def check(spec: ModelSpec, plans: list[list[Microbatch]], world_size: int) -> None:
        nonlocal cases
        for differences in pool.run(world_size, _differences, spec, plans, timeout=600):
            assert not differences, differences[0]
        cases += len(plans)

    check()
    assert cases >= 0.9 * num_models * PLANS_PER_MODEL
