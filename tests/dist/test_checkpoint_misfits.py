"""Checkpoints that do not fit, are broken, or differ between ranks: an error on every rank, and nothing changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner

import fsdp_passes as fsdp
from fsdp_passes.sharding.param import ShardedParam
from tests.dist import pool
from tests.dist.checkpointing import differences
from tests.dist.models import build

Make = Callable[[Any], torch.optim.Optimizer]


class _Eager(torch.optim.SGD):
    """Makes its state before the first step, which needs it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for param in self.param_groups[0]["params"]:
            self.state[param]["m"] = torch.zeros_like(param.data)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.state[param]["m"].add_(param.grad)


OPTIMIZERS: dict[str, Make] = {
    "eager": _Eager,
    "adam": lambda params: torch.optim.Adam(params, lr=0.5),
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.5),
}


def _model(device: str = "cpu") -> Any:
    with torch.device(device):
        return fsdp.shard(build(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))))


def _step(optimizer: torch.optim.Optimizer, count: int = 4) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params[:count]:
        param.grad = torch.ones_like(param.data)
    optimizer.step()
    optimizer.zero_grad()


def _trained(name: str, steps: int = 1, params: int = 4) -> tuple[Any, torch.optim.Optimizer]:
    model = _model()
    optimizer = OPTIMIZERS[name](list(model.parameters())[:params])
    for _ in range(steps):
        _step(optimizer)
    return model, optimizer


def _full(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": fsdp.full_state_dict(model), "optim": fsdp.full_optimizer_state_dict(model, optimizer)}


def _misshapen(optim: Any) -> None:
    optim["state"]["0.weight"]["exp_avg"] = torch.zeros(4, 3)
    optim["state"]["1.weight"]["exp_avg"] = "text"
    del optim["state"]["1.bias"]["exp_avg_sq"]
    optim["state"]["1.bias"]["more"] = torch.zeros(2)


def _no_dict(optim: Any) -> None:
    optim["state"]["0.weight"] = torch.zeros(3, 4)


def _more_names(optim: Any) -> None:
    optim["param_groups"][0]["params"] += ["other"]


def _no_groups(optim: Any) -> None:
    optim["param_groups"] = [3]


def _nothing(optim: Any) -> None:
    pass


def _lines(*parts: str) -> set[str]:
    """`{}` stands for each parameter."""
    names = ("0.weight", "0.bias", "1.weight", "1.bias")
    return {part.format(name) for part in parts for name in names}


# The optimizer that saved, what is done to its part, the one that loads, over how many parameters: the lines.
REFUSED: dict[str, tuple[str, Callable[[Any], None], str, int, set[str]]] = {
    "misshapen": (
        "adam",
        _misshapen,
        "adam",
        4,
        {
            "misshapen exp_avg of 0.weight: expected [3, 4], got [4, 3]",
            "misshapen exp_avg of 1.weight: expected [2, 3], got a str",
            "missing exp_avg_sq of 1.bias",
            "unexpected more of 1.bias",
        },
    ),
    "no dict": ("adam", _no_dict, "adam", 4, {"misshapen state of 0.weight: expected a dict, got a tensor"}),
    "more names": ("adam", _more_names, "adam", 4, {"unexpected other in param_groups"}),
    "no groups": (
        "sgd",
        _no_groups,
        "sgd",
        4,
        _lines("missing {} in param_groups")
        | {"misshapen param_groups: expected dicts with the names 'params', got a int"},
    ),
    "momentum into adam": (
        "momentum",
        _nothing,
        "adam",
        4,
        _lines("missing step of {}", "missing exp_avg of {}", "missing exp_avg_sq of {}")
        | _lines("unexpected momentum_buffer of {}"),
    ),
    "adam into momentum": (
        "adam",
        _nothing,
        "momentum",
        4,
        _lines("unexpected step of {}", "unexpected exp_avg of {}", "unexpected exp_avg_sq of {}")
        | _lines("missing momentum_buffer of {}"),
    ),
    "no state into eager": ("sgd", _nothing, "eager", 4, _lines("missing state of {}")),
    "over fewer": (
        "adam",
        _nothing,
        "adam",
        1,
        {f"unexpected {what}" for what in (*_lines("state of {}"), *_lines("{} in param_groups")) if "0.w" not in what},
    ),
}


def _refused(folder: str) -> dict[str, tuple[list[str], list[str]]]:
    """By case the lines of a load from memory, and from a folder; the model misses an entry, too."""
    lines = {}
    for case, (saver, change, loader, params, _) in REFUSED.items():
        given = _full(*_trained(saver))
        change(given["optim"])
        del given["model"]["1.bias"]
        dcp.save(given, checkpoint_id=f"{folder}/{case}")
        for steps in (0, 1):
            model, optimizer = _trained(loader, steps, params)
            before = copy.deepcopy(_full(model, optimizer))
            lines[case] = tuple(_refusal(model, optimizer, source) for source in (given, f"{folder}/{case}"))
            assert differences(_full(model, optimizer), before) == []
            assert bool(optimizer.state) == bool(steps and loader != "sgd") or loader == "eager"
    return lines  # type: ignore[return-value]


def _refusal(model: Any, optimizer: Any, state: Any) -> list[str]:
    with pytest.raises(ValueError) as error:
        fsdp.load_state_dict(model, optimizer, state)
    return str(error.value).split("\n  ")[1:]


def test_entries_of_the_optimizer_that_do_not_fit(tmp_path: Path) -> None:
    for lines in pool.run(2, _refused, str(tmp_path)):
        for case, both in lines.items():
            for of_source in both:
                assert sorted(of_source) == sorted({"missing 1.bias"} | REFUSED[case][-1]), case


def _accepted(folder: str) -> None:
    """Saved by one optimizer, loaded into another that has state of its own: it has just what was saved."""
    cases: dict[str, tuple[Any, str, int]] = {
        "partial": ("adam", "adam", 2),
        "hyperparameters": ("amsgrad", "adam", 4),
        "less": ("adam", "amsgrad", 4),
        "no momentum": ("sgd", "momentum", 4),
        "from the start": ("eager", "eager", 2),
    }
    for case, (saver, loader, stepped) in cases.items():
        model, optimizer = _trained(saver, steps=0)
        _step(optimizer, stepped)
        saved = _full(model, optimizer)
        for entries in saved["optim"]["state"].values():
            if "step" in entries and case == "partial":
                entries["step"] = 1  # as torch once kept it
        dcp.save(saved, checkpoint_id=f"{folder}/{case}")
        for source in (saved, f"{folder}/{case}"):
            for steps in (0, 3):
                loaded = _trained(loader, steps)
                fsdp.load_state_dict(*loaded, source)
                assert differences(_full(*loaded), _full(model, optimizer)) == [], (case, source, steps)
                _step(loaded[1])


def test_state_that_fits_with_its_hyperparameters(tmp_path: Path) -> None:
    pool.run(2, _accepted, str(tmp_path))


def _optional_state() -> None:
    """None is no misfit where an optimizer keeps nothing."""
    model, optimizer = _trained("sgd")
    given = _full(model, optimizer)
    given["optim"]["state"] = {"0.weight": {"momentum_buffer": None}}
    fsdp.load_state_dict(model, optimizer, given)
    _step(optimizer)


def _another_on_rank_1(root: str) -> list[str]:
    """What each rank raises where rank 1 alone fails, or calls otherwise."""
    other = dist.get_rank() == 1
    model, optimizer = _trained("adam")
    for name, saved in {"a": fsdp.state_dict(model, optimizer), "b": fsdp.state_dict(model)}.items():
        dcp.save(saved, checkpoint_id=f"{root}/{name}")
    given = _full(model, optimizer)
    groups = {"model": given["model"], "optim": given["optim"] | {"param_groups": [3]}}
    foreign = OPTIMIZERS["adam"]([nn.Parameter(torch.ones(1))])
    calls: list[tuple[Any, Any]] = [
        (foreign if other else optimizer, f"{root}/a"),
        (foreign if other else optimizer, given),
        (optimizer, f"{root}/b" if other else f"{root}/a"),
        (optimizer, f"{root}/none" if other else f"{root}/a"),
        (optimizer, f"{root}/a" if other else given),
        (None if other else optimizer, given),
        (optimizer, groups if other else given),
    ]
    messages = []
    for its_optimizer, state in calls:
        with pytest.raises(ValueError) as error:
            fsdp.load_state_dict(model, its_optimizer, state)
        messages.append(str(error.value).replace(root, "ROOT"))
    assert differences(_full(model, optimizer), given) == []
    return messages


def test_what_one_rank_fails_in_all_ranks_raise(tmp_path: Path) -> None:
    first, second = pool.run(2, _another_on_rank_1, str(tmp_path))
    assert first == second
    assert all("optimizer: expected parameters of the model, got Parameter containing" in each for each in first[:2])
    assert first[2] == "state: expected the same checkpoint on all ranks, got ['ROOT/a', 'ROOT/b']"
    assert "got ROOT/none" in first[3]
    assert all("expected a path, and an optimizer, on all ranks or on none" in each for each in first[4:6])
    assert "misshapen param_groups" in first[6]


def _broken(root: str) -> list[str]:
    model, optimizer = _trained("adam")
    dcp.save(fsdp.state_dict(model, optimizer), checkpoint_id=root)
    metadata = Path(root, ".metadata")
    data = metadata.read_bytes()
    messages = []
    for content in (data[:-200], b"", b"garbage", b"\x80\x04K\x03."):  # the last is the number 3
        dist.barrier()
        metadata.write_bytes(content) if dist.get_rank() == 0 else None
        dist.barrier()
        messages.append(_message(model, optimizer, root))
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"model": fsdp.full_state_dict(model)}, checkpoint_id=f"{root}/flat", planner=planner)
    return [*messages, _message(model, None, f"{root}/flat")]


def _message(model: Any, optimizer: Any, state: Any) -> str:
    with pytest.raises(ValueError) as error:
        fsdp.load_state_dict(model, optimizer, state)
    return str(error.value)


def test_metadata_that_cannot_be_read(tmp_path: Path) -> None:
    for *messages, flat in pool.run(2, _broken, str(tmp_path)):
        for message in messages:
            assert message.startswith(f"state: expected the folder of a complete checkpoint, got {tmp_path}, whose .me")
        assert flat.endswith("flat, which was saved with flatten_state_dict=False, or by another planner")


def _half_loaded(root: str) -> None:
    """Loads that fail in the middle leave a model on the meta device there: the model's values, then the optimizer."""
    trained = _trained("adam")
    expected = _full(*trained)
    dcp.save(fsdp.state_dict(*trained), checkpoint_id=root)
    model = _model("meta")
    optimizer = OPTIMIZERS["adam"](model.parameters())
    stored = {path: path.read_bytes() for path in Path(root).glob("*.distcp")}
    dist.barrier()
    if dist.get_rank() == 0:
        for path, data in stored.items():
            path.write_bytes(data[: len(data) // 2])
    dist.barrier()
    _assert_fails(model, optimizer, root)
    if dist.get_rank() == 0:
        for path, data in stored.items():
            path.write_bytes(data)
    dist.barrier()

    def fail(*args: Any) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("a hook")

    hook = optimizer.register_load_state_dict_pre_hook(fail)
    for source in (root, expected):
        _assert_fails(model, optimizer, source)
    hook.remove()
    fsdp.load_state_dict(model, optimizer, root)
    assert differences(_full(model, optimizer), expected) == []
    model(torch.ones(1, 4))


def _assert_fails(model: Any, optimizer: Any, source: Any) -> None:
    with pytest.raises(BaseException, match=r"hook|CheckpointException"):  # torch's is no Exception
        fsdp.load_state_dict(model, optimizer, source)
    assert all(param.is_meta for param in model.parameters())
    with pytest.raises(Exception, match="meta"):
        model(torch.ones(1, 4))


def test_a_failed_load_leaves_a_model_on_the_meta_device(tmp_path: Path) -> None:
    pool.run(2, _half_loaded, str(tmp_path))


def _own_memory() -> None:
    """A copy's optimizer gets memory of its own; what is the optimizer's own already stays where it is."""
    first, second = _trained("adam"), _trained("adam", steps=0)
    fsdp.load_state_dict(*second, fsdp.state_dict(*first))
    expected = _full(*first)
    _step(second[1])
    assert differences(_full(*first), expected) == []
    kept = [entries["exp_avg"].local.data_ptr() for entries in first[1].state.values()]
    fsdp.load_state_dict(*first, fsdp.state_dict(*first))
    assert [entries["exp_avg"].local.data_ptr() for entries in first[1].state.values()] == kept


class _Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if tied:
            self.two.weight = self.one.weight


def _untied_into_tied(folder: str) -> None:
    """Weight, state and hyperparameters are those of the last name."""
    untied, tied = (fsdp.shard(build(_Tied, is_tied)) for is_tied in (False, True))
    first, second = untied.parameters()
    optimizer = torch.optim.Adam([{"params": [first]}, {"params": [second], "lr": 7.0}])
    for number, param in enumerate((first, second)):
        param.grad = torch.full_like(param.data, number + 1.0)
    optimizer.step()
    full = _full(untied, optimizer)
    dcp.save(fsdp.state_dict(untied, optimizer), checkpoint_id=folder)
    for source in (folder, full):
        for steps in (0, 1):
            loaded = torch.optim.Adam(tied.parameters())
            for _ in range(steps):
                _step(loaded)
            fsdp.load_state_dict(tied, loaded, source)
            got = _full(tied, loaded)
            assert differences(got["model"]["one.weight"], full["model"]["two.weight"]) == []
            assert differences(got["optim"]["state"]["one.weight"], full["optim"]["state"]["two.weight"]) == []
            assert loaded.param_groups[0]["lr"] == 7.0


def test_an_untied_checkpoint_in_a_tied_model(tmp_path: Path) -> None:
    pool.run(2, _untied_into_tied, str(tmp_path))


class _Nested(torch.optim.SGD):
    """Keeps its momentum two dicts deep."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                state = self.state[param]
                sub = state.setdefault("sub", {"m": torch.zeros_like(param.data), "count": torch.zeros(2)})
                sub["m"].add_(param.grad)
                param.add_(sub["m"], alpha=-0.1)


def _nested(folder: str) -> None:
    model = _model()
    optimizer = _Nested(model.parameters())
    _step(optimizer)
    full = _full(model, optimizer)
    dcp.save(fsdp.state_dict(model, optimizer), checkpoint_id=folder)
    for source in (folder, full):
        for steps in (0, 1):
            target = _model()
            loaded = _Nested(target.parameters())
            for _ in range(steps):
                _step(loaded)
            fsdp.load_state_dict(target, loaded, source)
            assert all(type(entries["sub"]["m"]) is ShardedParam for entries in loaded.state.values())
            assert differences(_full(target, loaded), full) == []
            _step(loaded)
    full["optim"]["state"]["0.bias"]["sub"]["m"] = torch.zeros(5)
    assert _refusal(model, optimizer, full) == ["misshapen sub.m of 0.bias: expected [3], got [5]"]


def test_nested_state_of_an_optimizer(tmp_path: Path) -> None:
    pool.run(2, _nested, str(tmp_path))


def _without_a_first_step() -> None:
    model = _model()
    with pytest.raises(ValueError, match=r"optimizer: expected .* got LBFGS, whose step\(\) raises TypeError"):
        fsdp.state_dict(model, torch.optim.LBFGS(model.parameters()))


def _several() -> None:
    _optional_state()
    _own_memory()
    _without_a_first_step()


def test_none_own_memory_and_lbfgs() -> None:
    pool.run(2, _several)


class _Views(nn.Module):
    """Parameters that a file holds otherwise than their values are, larger than what is read whole."""

    def __init__(self, views: bool = True) -> None:
        super().__init__()
        real, imaginary = torch.randn(2, 300, 300)
        values: list[Tensor] = [torch.complex(real, imaginary).conj(), torch._neg_view(real), real.t()]
        for number, value in enumerate(values):
            setattr(self, f"p{number}", nn.Parameter(value if views else torch.zeros_like(value).contiguous()))


def _save_views(folder: str) -> None:
    dcp.save({"model": build(_Views).state_dict()}, checkpoint_id=folder)


def _load_views(folder: str) -> None:
    model = fsdp.shard(build(_Views, views=False))
    fsdp.load_state_dict(model, None, folder)
    expected = {name: value.resolve_conj().resolve_neg() for name, value in build(_Views).state_dict().items()}
    assert differences(fsdp.full_state_dict(model), expected) == []


def test_conjugated_negated_and_transposed_values(tmp_path: Path) -> None:
    pool.run(1, _save_views, str(tmp_path))
    pool.run(2, _load_views, str(tmp_path))
