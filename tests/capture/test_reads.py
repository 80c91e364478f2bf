"""Merging parameter reads, on the graphs that Dynamo captures of small sharded models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import fsdp_passes as fsdp
from fsdp_passes.capture.reads import merge_reads
from fsdp_passes.ir.ops import UNSHARD

WIDTH = 4
_X = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)
_READ = {"unshard", "split_with_sizes", "view"}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A group of one rank in this process: everything here happens at capture."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Model(nn.Module):
    """One linear layer, read by `read(self, x)`."""

    def __init__(self, read: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.read = read

    def forward(self, x: Tensor) -> Any:
        return self.read(self, x)


def captured(read: Callable[[Any, Tensor], Any]) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    """Dynamo's one graph of a model that reads its parameters as `read` does, and its arguments."""
    graphs: list[tuple[fx.GraphModule, tuple[Any, ...]]] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append((copy.deepcopy(gm), tuple(inputs)))
        return gm.forward

    torch.manual_seed(0)
    torch._dynamo.reset()
    torch.compile(fsdp.shard(Model(read)), backend=backend, fullgraph=True)(_X)
    (graph,) = graphs
    return graph


def words(graph: fx.Graph) -> list[str]:
    """The operations of a graph, in order, without its inputs and output."""
    nodes = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    return [str(getattr(node.target, "__name__", node.target)).removesuffix(".default") for node in nodes]


def merged(read: Callable[[Any, Tensor], Any]) -> fx.GraphModule:
    """The graph after merge_reads, which computes the same results and gradients as before."""
    gm, inputs = captured(read)
    before = _results_and_gradients(gm, inputs)
    merge_reads(gm)
    gm.graph.lint()
    for one, other in zip(_results_and_gradients(gm, inputs), before, strict=True):
        assert torch.equal(one, other)
    return gm


def _results_and_gradients(gm: fx.GraphModule, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Results, and the gradient of their sum, which the eager kernel of unshard hands to the flat group."""
    (shard,) = {id(x): x for x in inputs if isinstance(x, nn.Parameter)}.values()
    shard.grad = None
    results = [result for result in gm(*inputs) if isinstance(result, Tensor)]
    total = sum(result.sum() for result in results)
    if not torch.is_grad_enabled():
        return results
    total.backward()
    assert shard.grad is not None
    return [*results, shard.grad.clone()]


def body_of(gm: fx.GraphModule) -> fx.GraphModule:
    (body,) = [child for _, child in gm.named_children() if isinstance(child, fx.GraphModule)]
    return body


def num_unshards(graph: fx.Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=UNSHARD)) + len(
        graph.find_nodes(op="call_function", target=UNSHARD.overloadpacket)
    )


def test_each_read_captures_its_own_unshard() -> None:
    gm, _ = captured(lambda model, x: model.linear(model.linear(x)))
    assert num_unshards(gm.graph) == 4


def test_two_uses_share_one_chain() -> None:
    gm = merged(lambda model, x: model.linear(model.linear(x)))
    assert words(gm.graph) == ["unshard", "split_with_sizes", *["getitem", "view"] * 2, "linear", "linear"]


def test_twice_is_once() -> None:
    gm = merged(lambda model, x: model.linear(model.linear(x)))
    before = str(gm.graph)
    merge_reads(gm)
    assert str(gm.graph) == before


def test_nothing_to_do() -> None:
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    before = str(gm.graph)
    merge_reads(gm)
    assert str(gm.graph) == before


def test_reads_for_dtype_and_shape_are_dropped() -> None:
    def read(model: Any, x: Tensor) -> Tensor:
        return x.to(model.linear.weight.dtype) * model.linear.bias.shape[0] + model.linear.bias

    gm = merged(read)
    assert words(gm.graph).count("unshard") == 1
    assert words(gm.graph).count("view") == 1


def _without_grad_first(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = model.linear(x)
    return model.linear(model.linear(x)) - target


def _told(function: Callable[[Any, Tensor], Tensor]) -> list[str]:
    gm = merged(function)
    kept = ("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode", "unshard", "linear")
    return [word for word in words(gm.graph) if word in kept]


def test_reads_without_grad_are_moved_in_front_and_merged() -> None:
    no_grad = ["_set_grad_enabled", "linear", "_set_grad_enabled"]
    assert _told(_without_grad_first) == ["unshard", *no_grad, "linear", "linear"]


def _inference_in_no_grad(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = x + 1
        with torch.inference_mode():
            target = model.linear(x).sum().item()
    return model.linear(x) - target


def test_reads_in_nested_modes_are_moved_in_front_of_the_outermost() -> None:
    inference = ["_enter_inference_mode", "linear", "_exit_inference_mode"]
    modes = ["_set_grad_enabled", *inference, "_set_grad_enabled"]
    assert _told(_inference_in_no_grad) == ["unshard", *modes, "linear"]


def _enabled_in_no_grad(model: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return model.linear(x) + x


def test_reads_with_grad_stay_apart_from_those_of_a_caller_without() -> None:
    """Where the caller has gradients switched off, only what enable_grad encloses has them."""

    def twice(model: Any, x: Tensor) -> Tensor:
        return _enabled_in_no_grad(model, model.linear(x))

    with torch.no_grad():
        assert _told(twice).count("unshard") == 2
    assert _told(twice).count("unshard") == 1


def _in_checkpoint(model: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda y: model.linear(model.linear(y)), x, use_reentrant=False)


def _in_and_outside_of_checkpoint(model: Any, x: Tensor) -> Tensor:
    return model.linear(_in_checkpoint(model, x))


def _in_nested_checkpoints(model: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda y: _in_checkpoint(model, y) * model.linear.bias, x, use_reentrant=False)


def _in_two_checkpoints(model: Any, x: Tensor) -> Tensor:
    return _in_checkpoint(model, _in_checkpoint(model, x))


def _without_grad_in_checkpoint(model: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda y: _without_grad_first(model, y), x, use_reentrant=False)


@pytest.mark.parametrize(
    "read",
    [
        _in_checkpoint,
        _in_and_outside_of_checkpoint,
        _in_nested_checkpoints,
        _in_two_checkpoints,
        _without_grad_in_checkpoint,
    ],
)
def test_reads_inside_checkpoints_are_hoisted(read: Callable[[Any, Tensor], Tensor]) -> None:
    gm = merged(read)
    assert num_unshards(gm.graph) == 1
    assert words(gm.graph).count("split_with_sizes") == 1
    assert words(gm.graph).count("view") == 2
    bodies = [module for module in gm.modules() if isinstance(module, fx.GraphModule) and module is not gm]
    assert bodies
    assert not [word for body in bodies for word in words(body.graph) if word in _READ]


def test_a_hoisted_read_is_an_argument_of_its_checkpoint() -> None:
    gm = merged(_in_checkpoint)
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint)
    views = gm.graph.find_nodes(op="call_method", target="view")
    assert set(views) < set(call.args)
    assert len(body_of(gm).graph.find_nodes(op="placeholder")) == len(call.args) - 1


@torch.no_grad()
def _mul_(model: Any, x: Tensor) -> Tensor:
    model.linear.weight.mul_(2)
    return x


@torch.no_grad()
def _setitem(model: Any, x: Tensor) -> Tensor:
    model.linear.weight[0] = 1
    return x


@torch.no_grad()
def _copy_(model: Any, x: Tensor) -> Tensor:
    model.linear.weight.copy_(x.t() @ x)
    return x


@torch.no_grad()
def _through_a_view(model: Any, x: Tensor) -> Tensor:
    model.linear.weight.t().mul_(2)
    return x


@torch.no_grad()
def _through_a_row(model: Any, x: Tensor) -> Tensor:
    model.linear.weight[0].mul_(2)
    return x


@torch.no_grad()
def _through_data(model: Any, x: Tensor) -> Tensor:
    model.linear.weight.data.mul_(2)
    return x


@torch.no_grad()
def _by_a_function(model: Any, x: Tensor) -> Tensor:
    torch.relu_(model.linear.weight)
    return x


@torch.no_grad()
def _as_out(model: Any, x: Tensor) -> Tensor:
    torch.mul(x.t() @ x, 2, out=model.linear.weight)
    return x


@torch.no_grad()
def _by_init(model: Any, x: Tensor) -> Tensor:
    nn.init.zeros_(model.linear.weight)
    return x


@torch.no_grad()
def _in_place_function(model: Any, x: Tensor) -> Tensor:
    return nn.functional.relu(model.linear.weight, inplace=True) @ x.t()


def _edit_in_checkpoint(model: Any, x: Tensor) -> Tensor:
    def body(y: Tensor) -> Tensor:
        with torch.no_grad():
            model.linear.weight.mul_(2)
        return model.linear(y)

    return checkpoint(body, x, use_reentrant=False)


REFUSED = [_mul_, _setitem, _copy_, _by_init]
REFUSED += [_through_a_view, _through_a_row, _through_data, _by_a_function, _as_out, _in_place_function]
REFUSED += [_edit_in_checkpoint]


@pytest.mark.parametrize(
    "edit",
    REFUSED,
    ids=lambda edit: edit.__name__,
)
def test_edits_of_parameters_are_refused(edit: Callable[[Any, Tensor], Tensor]) -> None:
    gm, _ = captured(edit)
    with pytest.raises(RuntimeError, match="expected forward to leave its parameters alone, got "):
        merge_reads(gm)


def _requires_grad_(model: Any, x: Tensor) -> Tensor:
    return x @ model.linear.weight.requires_grad_()


@pytest.mark.parametrize("read", [_in_checkpoint, _without_grad_first, _requires_grad_])
def test_reads_are_no_edits(read: Callable[[Any, Tensor], Tensor]) -> None:
    merge_reads(captured(read)[0])
