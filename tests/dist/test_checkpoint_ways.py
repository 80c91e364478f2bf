"""Ways to save and load a checkpoint, and checkpoints that do not fit or were never finished."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.state_dict import get_state_dict

import fsdp_passes as fsdp
from fsdp_passes.sharding.param import ShardedParam
from tests.dist import pool
from tests.dist.checkpointing import Odd, Run, differences, ours, plain
from tests.dist.models import build, shard_net


def _assert_same(got: Any, expected: Any) -> None:
    assert differences(got, expected) == []


def _keys(value: Any) -> Any:
    """Nested dicts and lists with the shapes of tensors in place of values."""
    if isinstance(value, dict):
        return {key: _keys(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_keys(each) for each in value]
    return tuple(value.shape) if isinstance(value, Tensor) else value


def _structure() -> None:
    run, reference = ours(), plain()
    assert list(fsdp.state_dict(run.model)) == ["model"]
    for steps in (0, 1):  # torch gives a fresh optimizer its state, too, by a step of it
        run.train(steps)
        reference.train(steps)
        model, optim = get_state_dict(reference.model, reference.optimizer)
        assert _keys(run.state()) == _keys({"model": model, "optim": optim})
    state = run.state()
    values = [*state["model"].values(), state["optim"]["state"]["cube"]["exp_avg"]]
    sharded = [value for value in values if isinstance(value, ShardedParam)]
    assert len(sharded) == len(values) - 1  # the buffer is none
    assert not any(isinstance(value, nn.Parameter) or value.requires_grad for value in sharded)
    assert state["model"]["tiny"].local.data_ptr() == run.model.tiny.local.data_ptr()  # type: ignore[union-attr]
    assert type(state["optim"]["state"]["cube"]["step"]) is Tensor


def test_structure_is_that_of_torch() -> None:
    pool.run(2, _structure)


def _compiled_names() -> None:
    run = ours()
    compiled: Any = torch.compile(run.model, backend="eager")
    run.train(1)
    state = fsdp.state_dict(compiled, run.optimizer)
    _assert_same(_keys(state), _keys(run.state()))
    assert "_orig_mod" not in str(_keys(state))
    fsdp.load_state_dict(compiled, run.optimizer, state)


def test_names_of_a_compiled_model_are_the_original_ones() -> None:
    pool.run(2, _compiled_names)


def _fresh_optimizer(folder: str) -> None:
    """state_dict leaves it alone, and what dcp.load and load_state_dict make of it goes on like the one saved."""
    trained = ours()
    trained.train(2)
    dcp.save(trained.state(), checkpoint_id=folder)
    fresh = ours(lr=0.5)
    calls: list[Any] = []
    fresh.optimizer.register_step_pre_hook(lambda *args: calls.append(args))
    before = [p.full_tensor() for p in fresh.model.parameters()]  # type: ignore[operator]
    groups = _keys(fresh.optimizer.state_dict()["param_groups"])
    state = fresh.state()
    assert all(float(entries["step"]) == 0 for entries in state["optim"]["state"].values())
    assert not fresh.optimizer.state and not calls
    assert not getattr(fresh.optimizer, "_opt_called", False)
    assert _keys(fresh.optimizer.state_dict()["param_groups"]) == groups
    _assert_same([p.full_tensor() for p in fresh.model.parameters()], before)  # type: ignore[operator]
    assert all(p.grad is None for p in fresh.model.parameters())
    dcp.load(state, checkpoint_id=folder)
    fsdp.load_state_dict(fresh.model, fresh.optimizer, state)
    _assert_same(fresh.full(), trained.full())
    fresh.scheduler.load_state_dict(trained.scheduler.state_dict())
    assert fresh.train(2) == trained.train(2)
    _assert_same(fresh.full(), trained.full())


def test_the_usual_protocol_with_a_fresh_optimizer(tmp_path: Path) -> None:
    pool.run(2, _fresh_optimizer, str(tmp_path))


def _meta_model(folder: str) -> None:
    trained = ours()
    trained.train(2)
    dcp.save(trained.state(), checkpoint_id=folder)
    state = ours(meta=True).state()
    dcp.load(state, checkpoint_id=folder)
    for source in (folder, state):
        run = ours(meta=True)
        fsdp.load_state_dict(run.model, run.optimizer, source)
        _assert_same(run.full(), trained.full())
    model_only = ours(meta=True)
    fsdp.load_state_dict(model_only.model, None, folder)
    _assert_same(fsdp.full_state_dict(model_only.model), fsdp.full_state_dict(trained.model))
    assert not model_only.optimizer.state


def test_into_a_model_on_the_meta_device(tmp_path: Path) -> None:
    pool.run(2, _meta_model, str(tmp_path))


def _gathered_values(folder: str) -> None:
    """The bf16 copies of shards that forwards gather are made anew after a load."""
    model = shard_net(fsdp.Precision(param=torch.bfloat16))
    tokens = torch.arange(8).view(2, 4)
    expected = model(tokens)
    dcp.save(fsdp.state_dict(model), checkpoint_id=folder)
    for source in (folder, {"model": fsdp.full_state_dict(model)}):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        assert not torch.equal(model(tokens), expected)
        fsdp.load_state_dict(model, None, source)
        assert torch.equal(model(tokens), expected)


def test_the_next_forward_computes_with_what_was_loaded(tmp_path: Path) -> None:
    pool.run(2, _gathered_values, str(tmp_path))


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
    "named": lambda params: torch.optim.Adam(params, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "stateless": lambda params: torch.optim.SGD(params, lr=0.1),
    "plain 0-dim state": lambda params: torch.optim.NAdam(params),
    "state from the start": lambda params: torch.optim.Adagrad(params),
}


def _optimizer(name: str, folder: str) -> None:
    def make() -> Run:
        run = ours()
        params = run.model.named_parameters() if name == "named" else run.model.parameters()
        run.optimizer = _OPTIMIZERS[name](list(params))
        return run

    trained = make()
    trained.train(2)
    dcp.save(trained.state(), checkpoint_id=folder)
    loaded, copied = make(), make()
    loaded.load(folder)
    copied.load_full(trained.full())
    for run in (loaded, copied):
        _assert_same(run.full(), trained.full())
        run.scheduler.last_epoch = trained.scheduler.last_epoch
    losses = trained.train(2)
    for run in (loaded, copied):
        assert run.train(2) == losses
        _assert_same(run.full(), trained.full())


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_optimizers_go_on_as_if_never_stopped(name: str, tmp_path: Path) -> None:
    pool.run(2, _optimizer, name, str(tmp_path))


class _Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.rand(0, 3))
        self.row = nn.Parameter(torch.rand(1, 5))


def _empty_parameters(folder: str) -> None:
    model = fsdp.shard(build(_Empty))
    expected = fsdp.full_state_dict(model)
    dcp.save(fsdp.state_dict(model), checkpoint_id=folder)
    with torch.no_grad():
        model.row.fill_(0)  # type: ignore[operator]
    fsdp.load_state_dict(model, None, folder)
    _assert_same(fsdp.full_state_dict(model), expected)
    reference = build(_Empty)
    state = {"model": reference.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    _assert_same(state["model"], expected)


def test_parameters_without_elements(tmp_path: Path) -> None:
    pool.run(2, _empty_parameters, str(tmp_path))


class _Extra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(5))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def _extra_state(folder: str) -> None:
    for number, extra in enumerate((3, torch.ones(2), {"a": torch.ones(2), "b": {"c": [1]}}, [torch.ones(2), 4])):
        dcp.save(fsdp.state_dict(fsdp.shard(_Extra(extra))), checkpoint_id=f"{folder}/{number}")
        for source in (f"{folder}/{number}", {"model": {"weight": torch.ones(5), "_extra_state": extra}}):
            model = fsdp.shard(_Extra(None))
            fsdp.load_state_dict(model, None, source)
            _assert_same(model.extra, extra)


def test_extra_state_of_modules(tmp_path: Path) -> None:
    pool.run(2, _extra_state, str(tmp_path))


def _async_save(folder: str) -> None:
    run = ours()
    run.train(2)
    expected = run.full()
    saving: Any = dcp.async_save(run.state(), checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
    with torch.no_grad():
        for param in run.model.parameters():
            param.fill_(7)
        for entries in run.optimizer.state.values():
            for value in entries.values():
                value.fill_(3)
        run.model.count.fill_(5)  # type: ignore[operator]
    run.train(1)
    saving.result()
    run.load(folder)
    _assert_same(run.full(), expected)


def test_async_save_has_the_values_of_its_call(tmp_path: Path) -> None:
    pool.run(2, _async_save, str(tmp_path))


class _Other(Odd):
    """Has one parameter more than Odd, one less, and one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(3))
        self.cube = nn.Parameter(torch.zeros(3, 5, 6))
        del self.tiny


def _misfits(folder: str) -> list[str]:
    """The messages of loads that change nothing."""
    trained = ours()
    trained.train(1)
    dcp.save(trained.state(), checkpoint_id=folder)
    dcp.save(fsdp.state_dict(trained.model), checkpoint_id=f"{folder}-model")
    model = fsdp.shard(build(_Other))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    before = fsdp.full_state_dict(model)
    messages = []
    loads: list[tuple[Any, Any, Any]] = [
        (model, None, folder),
        (model, None, trained.state() if dist.get_rank() else {"model": {}}),
        (trained.model, torch.optim.AdamW([trained.model.tiny]), folder),  # type: ignore[list-item]
        (trained.model, trained.optimizer, f"{folder}-model"),
        (model, optimizer, {"model": before}),
        (model, optimizer, 3),
        (model, None, {"model": fsdp.state_dict(fsdp.shard(build(_Other), units=[nn.Linear]))["model"]}),
    ]
    for target, its_optimizer, state in loads:
        with pytest.raises(ValueError) as error:
            fsdp.load_state_dict(target, its_optimizer, state)
        messages.append(str(error.value).replace(folder, "FOLDER"))
    _assert_same(fsdp.full_state_dict(model), before)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5
    return messages


def test_what_does_not_fit_is_listed_before_anything_changes(tmp_path: Path) -> None:
    first, second = pool.run(2, _misfits, str(tmp_path))
    of_model = "expected the entries of the model, got\n  "
    misshapen = "misshapen cube: expected [3, 5, 6], got [3, 5, 7]"
    assert first[0] == f"state: FOLDER: {of_model}missing extra\n  unexpected tiny\n  {misshapen}"
    assert first[1].startswith(f"state: {of_model}missing scale\n  missing cube\n  missing extra\n")
    assert second[1] == f"state: {of_model}missing extra\n  unexpected tiny\n  {misshapen}"  # of its own dict
    assert "unexpected state of cube" in first[2] and "missing" not in first[2]
    assert "missing cube in param_groups" in first[3] and "missing tiny in param_groups" in first[3]
    assert first[4] == "state: expected a path, or a dict of dicts 'model' and 'optim', got ['model']"
    assert first[5] == "state: expected a path, or a dict of dicts 'model' and 'optim', got int"
    assert "\n  misshapen cube: expected [3, 5, 6], got a tensor that is sharded otherwise" in first[6]
    assert first[2:] == second[2:]


def _die_in_the_second_save(root: str) -> None:
    run = ours()
    run.train(1)
    dcp.save(run.state(), checkpoint_id=f"{root}/1")
    run.train(1)
    if dist.get_rank() == 1:
        _die_after(4)
    dcp.save(run.state(), checkpoint_id=f"{root}/2")


def _die_after(items: int) -> None:
    write, written = filesystem._write_item, []

    def write_or_die(*args: Any) -> Any:
        written.append(args)
        return write(*args) if len(written) <= items else os._exit(9)

    filesystem._write_item = write_or_die


def _after_the_crash(root: str) -> str:
    trained, run = ours(), ours(lr=0.5)
    trained.train(1)
    run.load(f"{root}/1")
    _assert_same(run.full(), trained.full())
    with pytest.raises(ValueError) as error:
        run.load(f"{root}/2")
    _assert_same(run.full(), trained.full())
    return str(error.value)


def test_killed_in_the_middle_of_a_save(tmp_path: Path) -> None:
    with pytest.raises(pool.RankError, match=re.escape("rank 1 died with exit code 9")):
        pool.run(2, _die_in_the_second_save, str(tmp_path))
    assert (tmp_path / "2").exists() and not (tmp_path / "2" / ".metadata").exists()
    for message in pool.run(2, _after_the_crash, str(tmp_path)):
        assert message == (
            f"state: expected the folder of a complete checkpoint, got {tmp_path}/2, whose .metadata, which dcp.save "
            "writes last, cannot be read (No such file or directory)"
        )


_MIB = 1 << 20


def _wide() -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """A model, its optimizer after a step, and the bytes of this rank's pieces of both."""
    model = fsdp.shard(build(nn.Sequential, *(nn.Linear(511, 511) for _ in range(4))))
    optimizer = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return model, optimizer, 3 * sum(param.local.nbytes for param in model.parameters())  # type: ignore[operator]


def _bytes_written(folder: str) -> tuple[int, int]:
    model, optimizer, shard_bytes = _wide()
    dcp.save(fsdp.state_dict(model, optimizer), checkpoint_id=folder)
    files = Path(folder).glob(f"__{dist.get_rank()}_*")
    return sum(file.stat().st_size for file in files), shard_bytes


def _bytes_read(folder: str) -> tuple[int, int]:
    model, optimizer, shard_bytes = _wide()
    before = _read_so_far()
    fsdp.load_state_dict(model, optimizer, folder)
    return _read_so_far() - before, shard_bytes


def _read_so_far() -> int:
    return int(Path("/proc/self/io").read_text().partition("rchar: ")[2].split()[0])


def test_a_rank_writes_and_reads_its_own_pieces(tmp_path: Path) -> None:
    """torch's reader reads whole saved chunks: 3 to 6 times this for three ranks."""
    for written, shard_bytes in pool.run(2, _bytes_written, str(tmp_path)):
        assert shard_bytes <= written <= shard_bytes + _MIB // 8
    for world_size in (1, 2, 3):
        for read, shard_bytes in pool.run(world_size, _bytes_read, str(tmp_path)):
            assert shard_bytes <= read <= shard_bytes + _MIB
