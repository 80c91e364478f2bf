"""Bad input is refused with a ValueError that says argument, expected and given, before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_passes as fsdp
from fsdp_passes.options import Options


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Rank 0 of 2 in this process; collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def tiny() -> Any:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


def _state(model: Any) -> list[tuple[Any, ...]]:
    if not isinstance(model, nn.Module):
        return []
    return [
        (name, id(module), type(module), set(vars(module)), {k: id(p) for k, p in module._parameters.items()})
        for name, module in model.named_modules()
    ]


def refused(model: Any, message: str, **arguments: Any) -> None:
    """shard() raises ValueError with exactly `message`, and leaves classes, attributes and parameters alone."""
    before = _state(model)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
        fsdp.shard(model, **arguments)
    assert _state(model) == before
    argument = str(caught.value).split(":")[0]
    assert argument in {"model", "mesh", "units", "precision", "reshard_after_forward"}
    assert "expected " in str(caught.value)
    assert ", got " in str(caught.value)


def test_no_process_group() -> None:
    assert not dist.is_initialized()
    refused(tiny(), "mesh: expected an initialised process group (init_process_group or torchrun), got none")


def test_every_state_change_would_be_seen(two_ranks: None) -> None:
    """What `refused` compares does change when sharding succeeds."""
    model = tiny()
    before = _state(model)
    fsdp.shard(model)
    assert all(old != new for old, new in zip(before, _state(model), strict=True) if old[4])


def _with_parameter(make: Callable[[], Any]) -> nn.Module:
    model = tiny()
    model[0].weight = make()
    return model


def _hooked() -> nn.Parameter:
    param = nn.Parameter(torch.ones(2, 2))
    param.register_hook(lambda grad: grad)
    return param


def _post_hooked() -> nn.Parameter:
    param = nn.Parameter(torch.ones(2, 2))
    param.register_post_accumulate_grad_hook(lambda param: None)
    return param


class Subclass(nn.Parameter):
    pass


class KeepsReference(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.kept = wrap(self.linear.weight)


def _with_aliasing_buffer() -> nn.Module:
    model = tiny()
    model[0].register_buffer("alias", model[0].weight.detach()[:1])
    return model


def _with_parameters_in_one_memory() -> nn.Module:
    model = tiny()
    model[2].weight = nn.Parameter(model[0].weight.data)
    return model


def _with_gradient() -> nn.Module:
    model = tiny()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    return model


def _mixed_devices() -> nn.Module:
    model = tiny()
    model[2].to("meta")
    return model


def _meta_buffer() -> nn.Module:
    model = tiny()
    model[1].running_mean = torch.empty(2, device="meta")
    return model


def _on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


_MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "no module": (lambda: [nn.Linear(2, 2)], "model: expected an nn.Module, got list"),
    "no parameter": (nn.ReLU, "model: expected at least one parameter, got none"),
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(2)),
        "model: expected initialised parameters, got lazy 0.weight; run one forward before shard()",
    ),
    "subclass": (
        lambda: _with_parameter(lambda: Subclass(torch.ones(2, 2))),
        "model: expected plain dense parameters, got 0.weight of type Subclass",
    ),
    "sparse layout": (
        lambda: _with_parameter(lambda: nn.Parameter(torch.ones(2, 2).to_sparse())),
        "model: expected plain dense parameters, got 0.weight of ",
    ),
    "hook": (
        lambda: _with_parameter(_hooked),
        "model: expected parameters without hooks, got 0.weight with one; register it after shard()",
    ),
    "post-accumulate hook": (
        lambda: _with_parameter(_post_hooked),
        "model: expected parameters without hooks, got 0.weight with one",
    ),
    "two devices": (_mixed_devices, "model: expected all parameters on cpu, as 0.weight is, got 2.weight on meta"),
    "buffer on another device": (_meta_buffer, "model: expected everything on cpu, got 1.running_mean on meta"),
    "TorchScript": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))),
        "model: expected Python modules, got the TorchScript module 0",
    ),
    "max_norm": (
        lambda: nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)),
        "model: expected max_norm=None, got 0 with 1.0: it edits its weight",
    ),
    "sparse embedding": (
        lambda: nn.Sequential(nn.EmbeddingBag(3, 2, sparse=True)),
        "model: expected dense gradients, got 0 with sparse=True",
    ),
    "list of parameters": (
        lambda: KeepsReference(lambda weight: [weight]),
        "model: expected parameters to be reached as attributes only, got KeepsReference.kept, which shares",
    ),
    "nested parameters": (
        lambda: nn.Sequential(KeepsReference(lambda weight: {"w": (1, weight)})),
        "model: expected parameters to be reached as attributes only, got 0.kept, which shares",
    ),
    "buffer in a parameter's memory": (
        _with_aliasing_buffer,
        "model: expected parameters to be reached as attributes only, got 0.alias, which shares memory with 0.weight",
    ),
    "view of a parameter": (
        lambda: KeepsReference(lambda weight: weight[1].detach()),
        "model: expected parameters to be reached as attributes only, got KeepsReference.kept, which shares",
    ),
    "two parameters in one memory": (
        lambda: _with_parameters_in_one_memory(),
        "model: expected parameters with memory of their own, got ",
    ),
    "two parameters in one memory on the meta device": (
        lambda: _on_meta(_with_parameters_in_one_memory),
        "model: expected parameters with memory of their own, got ",
    ),
    "view of a parameter on the meta device": (
        lambda: _on_meta(lambda: KeepsReference(lambda weight: weight[1].detach())),
        "model: expected parameters to be reached as attributes only, got KeepsReference.kept, which shares",
    ),
    "gradient": (
        lambda: _with_gradient(),
        "model: expected parameters without gradients, got 0.weight with one; zero_grad() before shard()",
    ),
}


@pytest.mark.parametrize("case", _MODELS)
def test_models(case: str, two_ranks: None) -> None:
    make, message = _MODELS[case]
    refused(make(), message)


def test_a_model_that_is_sharded(two_ranks: None) -> None:
    model: Any = fsdp.shard(tiny())
    message = "model: expected a model that is not sharded, got one that shard() has already sharded"
    refused(model, message)
    refused(model[0], message)
    refused(nn.Sequential(nn.Linear(2, 2), model), message)


def _sub_mesh() -> DeviceMesh:
    return DeviceMesh("cpu", [0])


def _square_mesh() -> DeviceMesh:
    return DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicate", "shard"))


_MESHES: dict[str, tuple[Callable[[], Any], str]] = {
    "no mesh": (lambda: 2, "mesh: expected a DeviceMesh or None, got int"),
    "process group": (lambda: dist.group.WORLD, "mesh: expected a DeviceMesh or None, got "),
    "two dimensions": (_square_mesh, "mesh: expected one dimension, got 2 of sizes (2, 1)"),
    "some of the ranks": (
        _sub_mesh,
        "mesh: expected a mesh over all 2 ranks, or a dimension of one, got a mesh over 1",
    ),
}


@pytest.mark.parametrize("case", _MESHES)
def test_meshes(case: str, two_ranks: None) -> None:
    make, message = _MESHES[case]
    refused(tiny(), message, mesh=make())


def test_parameters_on_another_device_than_the_mesh(two_ranks: None) -> None:
    message = "model: expected parameters on the mesh's device cuda, got cpu"
    refused(tiny(), message, mesh=DeviceMesh("cuda", [0, 1], _init_backend=False))


def test_a_dimension_of_a_larger_mesh_is_accepted(two_ranks: None) -> None:
    model = fsdp.shard(tiny(), mesh=_square_mesh()["replicate"])
    assert fsdp.summary(model).world_size == 2


_UNITS: dict[str, tuple[Any, str]] = {
    "name": ("2.bias", "units: expected a submodule's name or class, got '2.bias', which matches nothing"),
    "one of several": (["0", "9"], "units: expected a submodule's name or class, got '9', which matches nothing"),
    "class": (nn.Conv2d, "units: expected a submodule's name or class, got <class 'torch.nn.modules.conv.Conv2d'>"),
    "classes": ((nn.Linear, nn.GRU), "units: expected a submodule's name or class, got <class 'torch.nn.modules."),
    "number in a list": ([0], "units: expected a submodule's name or class, got 0, which matches nothing"),
    "empty": ([], 'units: expected "auto", module classes, names or a predicate, got an empty collection'),
    "predicate": (
        lambda name, module: False,
        "units: expected a predicate that accepts at least one submodule, got one that accepts none",
    ),
    "number": (3, 'units: expected "auto", module classes, names or a predicate, got 3'),
    "None": (None, 'units: expected "auto", module classes, names or a predicate, got None'),
}


@pytest.mark.parametrize("case", _UNITS)
def test_units(case: str, two_ranks: None) -> None:
    units, message = _UNITS[case]
    refused(tiny(), message, units=units)


_OTHER_ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "a dtype for a precision": lambda: {"precision": torch.bfloat16},
    "a string for a dtype": lambda: {"precision": fsdp.Precision(param="bf16")},  # type: ignore[arg-type]
    "an integer dtype": lambda: {"precision": fsdp.Precision(reduce=torch.int32)},
    "a string for a bool": lambda: {"reshard_after_forward": "no"},
}


@pytest.mark.parametrize("case", _OTHER_ARGUMENTS)
def test_other_arguments(case: str, two_ranks: None) -> None:
    model = tiny()
    before = _state(model)
    with pytest.raises(ValueError, match=r"^(precision|reshard_after_forward|param|reduce): expected .*, got "):
        fsdp.shard(model, **_OTHER_ARGUMENTS[case]())
    assert _state(model) == before


class Broken(Exception):
    pass


def _raise(*_: Any) -> Any:
    raise Broken


@pytest.mark.parametrize("argument", ["units", "reshard_after_forward"])
def test_a_predicate_that_raises_changes_nothing(argument: str, two_ranks: None) -> None:
    model = tiny()
    before = _state(model)
    with pytest.raises(Broken):
        arguments: dict[str, Any] = {argument: _raise}
        fsdp.shard(model, **arguments)
    assert _state(model) == before


@pytest.mark.parametrize("function", [fsdp.summary, fsdp.full_state_dict, lambda m: fsdp.clip_grad_norm_(m, 1.0)])
def test_functions_of_sharded_models_refuse_a_plain_one(function: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(ValueError, match=r"^model: expected a model that shard\(\) has sharded, got a plain Linear$"):
        function(nn.Linear(2, 2))


KNOWN = "grad_path, accumulate_bytes, in_flight, keep_gathered_bytes, wgrad, codegen, verify, dump_dir, poison"
_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"gradpath": "cat"}, f"options: expected names among {KNOWN}, got 'gradpath'"),
    "unknown among known": ({"verify": 2, "Verify": 2}, f"options: expected names among {KNOWN}, got 'Verify'"),
    "grad_path": (
        {"grad_path": "dog"},
        "options['grad_path']: expected one of ('views', 'cat_last', 'cat'), got 'dog'",
    ),
    "accumulate_bytes": (
        {"accumulate_bytes": -1},
        "options['accumulate_bytes']: expected None or a number of bytes, got -1",
    ),
    "a fraction of a byte": (
        {"accumulate_bytes": 0.5},
        "options['accumulate_bytes']: expected None or a number of bytes, got 0.5",
    ),
    "wgrad": ({"wgrad": "bf16"}, "options['wgrad']: expected one of ('round', 'fp32'), got 'bf16'"),
    "products without slices": (
        {"wgrad": "fp32", "grad_path": "cat"},
        "options['wgrad']: expected 'round' with grad_path='cat', which has no slices, got 'fp32'",
    ),
    "codegen": ({"codegen": "c"}, "options['codegen']: expected one of ('inductor', 'fx'), got 'c'"),
    "verify": ({"verify": 3}, "options['verify']: expected one of (0, 1, 2), got 3"),
    "bool for a number": ({"verify": True}, "options['verify']: expected one of (0, 1, 2), got True"),
    "string for a number": ({"verify": "1"}, "options['verify']: expected one of (0, 1, 2), got '1'"),
    "list": ({"codegen": ["fx"]}, "options['codegen']: expected one of ('inductor', 'fx'), got ['fx']"),
    "in_flight": ({"in_flight": 0}, "options['in_flight']: expected None or a number of units from 1 on, got 0"),
    "in_flight as a bool": (
        {"in_flight": True},
        "options['in_flight']: expected None or a number of units from 1 on, got True",
    ),
    "in_flight as a float": (
        {"in_flight": 2.0},
        "options['in_flight']: expected None or a number of units from 1 on, got 2.0",
    ),
    "keep_gathered_bytes": (
        {"keep_gathered_bytes": -1},
        "options['keep_gathered_bytes']: expected a number of bytes, got -1",
    ),
    "keep_gathered_bytes without a limit": (
        {"keep_gathered_bytes": None},
        "options['keep_gathered_bytes']: expected a number of bytes, got None",
    ),
    "poison": ({"poison": 1}, "options['poison']: expected one of (False, True), got 1"),
    "dump_dir": ({"dump_dir": 3}, "options['dump_dir']: expected a path or None, got 3"),
}


@pytest.mark.parametrize("case", _OPTIONS)
def test_options(case: str) -> None:
    options, message = _OPTIONS[case]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Options.parse(options)


def test_options_that_are_no_mapping() -> None:
    with pytest.raises(ValueError, match=r"^options: expected "):
        Options.parse("verify")  # type: ignore[arg-type]


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("FSDP_PASSES_DUMP", "FSDP_PASSES_POISON"):
        monkeypatch.delenv(variable, raising=False)
    assert Options.parse(None) == Options.parse({}) == Options()
    assert Options() == Options("views", None, 2, 0, "round", "inductor", 1, None, False)


@pytest.mark.parametrize(("value", "poisons"), [("1", True), ("0", False), ("", False)])
def test_poisoning_comes_from_the_environment_unless_given(
    monkeypatch: pytest.MonkeyPatch, value: str, poisons: bool
) -> None:
    monkeypatch.setenv("FSDP_PASSES_POISON", value)
    assert Options.parse({}).poison is poisons
    assert Options.parse({"poison": not poisons}).poison is not poisons


def test_the_dump_folder_comes_from_the_environment_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_PASSES_DUMP", "from_environment")
    assert str(Options.parse({}).dump_dir) == "from_environment"
    assert str(Options.parse({"dump_dir": "given"}).dump_dir) == "given"


def test_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^mode: expected None, got 'max-autotune'; this backend takes options$"):
        fsdp.fsdp_opt(torch.fx.GraphModule({}, torch.fx.Graph()), [], mode="max-autotune")


@pytest.mark.parametrize("arguments", [{"options": {"speed": 11}}, {"mode": "fast"}])
def test_torch_compile_shows_the_refusal(arguments: dict[str, Any]) -> None:
    run = torch.compile(nn.Linear(2, 2), backend="fsdp_opt", **arguments)
    with pytest.raises(Exception, match=f"expected names among {KNOWN}, got 'speed'|expected None, got 'fast'"):
        run(torch.ones(1, 2))


@pytest.mark.parametrize("factor", ["2", None, 0, -1.0, float("inf"), float("nan")])
def test_gradient_divide_factors(factor: Any, two_ranks: None) -> None:
    with pytest.raises(ValueError, match=r"^factor: expected a finite number above 0, got "):
        fsdp.shard(tiny()).set_gradient_divide_factor(factor)


def test_gradient_sync_is_a_bool(two_ranks: None) -> None:
    with pytest.raises(ValueError, match=r"^requires_gradient_sync: expected a bool, got 'no'"):
        fsdp.shard(tiny()).set_requires_gradient_sync("no")


@pytest.mark.parametrize("dump_dir", [0, False, []])
def test_dump_folders_that_are_no_path(dump_dir: Any) -> None:
    with pytest.raises(ValueError, match=r"^options\['dump_dir'\]: expected a path or None, got "):
        Options.parse({"dump_dir": dump_dir})
