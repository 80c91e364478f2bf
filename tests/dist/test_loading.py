"""A model, on the meta device or not, gets its values from a state dict of one rank, or from safetensors files."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_passes as fsdp
from tests.dist import pool
from tests.dist.models import Net, build, compiled, next_token_loss

TOKENS = torch.arange(12).view(2, 6) % 11


class Rotary(nn.Module):
    """A table that no state dict holds."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(8.0) / 8)


class Mixed(Net):
    """Net with what is unusual: a tied weight, another dtype, ragged and tiny parameters, a frozen one, buffers."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.rotary = Rotary()
        self.batch_norm = nn.BatchNorm1d(8)
        self.cube = nn.Parameter(torch.randn(3, 5, 7))
        self.scale = nn.Parameter(torch.randn(()))
        self.low = nn.Parameter(torch.randn(5, 3).bfloat16())
        self.frozen = nn.Parameter(torch.randn(9), requires_grad=False)
        self.register_buffer("count", torch.tensor(7))

    def reset_parameters(self) -> None:
        for param in (self.cube, self.scale, self.low, self.frozen):
            nn.init.normal_(param)
        self.count.fill_(7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + (self.rotary.table * self.scale).to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) + self.cube.sum() + self.low.sum() + self.frozen.sum()


def sharded_on_meta(make: Any = Mixed, *args: Any, **kwargs: Any) -> nn.Module:
    with torch.device("meta"):
        model = make(*args)
    return fsdp.shard(model, **kwargs)


def assert_state(model: nn.Module, expected: Mapping[str, Tensor]) -> None:
    """Bit for bit, dtypes too."""
    got = fsdp.full_state_dict(model)
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name


def _from_state_dict(from_rank: int) -> None:
    """Memory that nobody wrote is NaN."""
    expected, rank = build(Mixed), dist.get_rank()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    try:
        model = sharded_on_meta(precision=fsdp.Precision(param=torch.bfloat16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        given = expected.state_dict() if rank == from_rank else None
        fsdp.load_full_state_dict(model, given, from_rank)
        usual = fsdp.shard(build(Mixed), precision=fsdp.Precision(param=torch.bfloat16))
        assert_state(model, expected.state_dict())
        assert torch.equal(model.rotary.table, expected.rotary.table)
        for each in (model, usual):
            next_token_loss(each, TOKENS).backward()
        optimizer.step()
        torch.optim.SGD(usual.parameters(), lr=0.5).step()
        assert_state(model, fsdp.full_state_dict(usual))
        assert torch.equal(model(TOKENS), usual(TOKENS))  # with the 16-bit copies of after the step
        fsdp.load_full_state_dict(model, given, from_rank)
        assert_state(model, expected.state_dict())
        fsdp.load_full_state_dict(usual, given, from_rank)
        usual.rotary.table.copy_(model.rotary.table)
        assert torch.equal(model(TOKENS), usual(TOKENS))  # with those of after the second load
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_from_one_rank(world_size: int) -> None:
    pool.run(world_size, _from_state_dict, world_size - 1)


def _refusal(model: nn.Module, load: Callable[[nn.Module], None]) -> str:
    """The message of the ValueError that `load` raises, having changed nothing."""
    before = [p.local.clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]
    with pytest.raises(ValueError) as refused:
        load(model)
    after = [p.local for p in model.parameters()] + list(model.buffers())
    assert all((p.is_meta and q.is_meta) or torch.equal(p, q) for p, q in zip(before, after, strict=True))
    return str(refused.value)


def _misfit_state() -> dict[str, Any]:
    state = build(Mixed).state_dict()
    del state["cube"], state["count"], state["embed.weight"]  # whose other name is there
    return state | {"scale": torch.ones(1), "new": torch.ones(2), "batch_norm.running_mean": torch.ones(9)}


MISFITS = """: expected the entries of the model, got
  missing cube
  missing count
  unexpected new
  misshapen scale: expected [], got [1]
  misshapen batch_norm.running_mean: expected [8], got [9]"""


MISTYPED = "mistyped scale: expected torch.float32, got torch.complex64, which it cannot hold"


def _replace(module: nn.Module, state: dict[str, Any], *rest: Any) -> None:
    state["weight"] = state["weight"].clone()


def _drop(module: nn.Module, state: dict[str, Any], *rest: Any) -> None:
    del state["weight"]


class Extra(nn.Linear):
    """With state of its own; hooks of the state dict may replace what is in it."""

    def __init__(self, hook: str = "") -> None:
        super().__init__(3, 4)
        self.extra: Any = 7
        if hook:
            self.register_state_dict_post_hook(_replace if hook == "replaces" else _drop)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def _extra_state(folder: str) -> None:
    given = {**build(Extra).state_dict(), "_extra_state": {"a": torch.ones(2)}}
    model = sharded_on_meta(Extra)
    fsdp.load_full_state_dict(model, given)
    assert torch.equal(model.extra["a"], torch.ones(2))
    given["_extra_state"] = lambda: None  # cannot be pickled
    with pytest.raises((ValueError, AttributeError, pickle.PicklingError), match="pickle"):
        fsdp.load_full_state_dict(sharded_on_meta(Extra), given if dist.get_rank() == 0 else None)
    for hook in ("replaces", "drops"):
        model = fsdp.shard(build(Extra, hook))
        for load in (
            lambda model: fsdp.load_full_state_dict(model, given),
            lambda model: fsdp.load_safetensors(model, folder),
            lambda model: fsdp.load_state_dict(model, None, {"model": given}),
        ):
            assert "one whose hooks replace or drop weight" in _refusal(model, load)


def test_extra_state_and_hooks(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.ones(4, 3), "bias": torch.ones(4)}, tmp_path / "model.safetensors")
    pool.run(2, _extra_state, str(tmp_path))


class HasNaN(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("nan", torch.full((2,), float("nan")), persistent=False)


def _refusals() -> None:
    state = _misfit_state() | {"low": 3}
    for model in (sharded_on_meta(), fsdp.shard(build(Mixed))):
        given = state if dist.get_rank() == 0 else None
        refusal = _refusal(model, lambda model, given=given: fsdp.load_full_state_dict(model, given))
        assert set(refusal.split("\n")) == {
            *f"state_dict{MISFITS}".split("\n"),
            "  misshapen low: expected [5, 3], got a int",
        }
    with pytest.raises(ValueError, match=r"from_rank: expected one rank below 2, the same on all, got \[2, 2\]"):
        fsdp.load_full_state_dict(model, None, from_rank=2)
    for argument, from_rank, message in [
        (state, dist.get_rank(), r"from_rank: expected one rank below 2, the same on all, got \[0, 1\]"),
        (state if dist.get_rank() else None, 0, r"state_dict: expected one on rank 0, got one on \[1\]"),
        (list(state), 0, "state_dict: expected a dict of tensors, got list"),
        ({**build(Mixed).state_dict(), "scale": torch.ones((), dtype=torch.cfloat)}, 0, MISTYPED),
        ({**build(Mixed).state_dict(), "scale": torch.ones((), device="meta")}, 0, "got a tensor without values"),
        ({**build(Mixed).state_dict(), "cube": torch.ones(3, 5, 7).to_sparse()}, 0, "got a torch.sparse_coo tensor"),
    ]:
        refused = _refusal(
            sharded_on_meta(), lambda m, a=argument, r=from_rank: fsdp.load_full_state_dict(m, a, from_rank=r)
        )
        assert re.search(message, refused), refused
    with pytest.raises(ValueError, match="state_dict: expected one on rank 1 for a model that has values, got None"):
        fsdp.load_full_state_dict(model, None, from_rank=1)
    with pytest.raises(RuntimeError, match=r"got one on the meta device; call fsdp_passes\.load_full_state_dict"):
        sharded_on_meta()(TOKENS)
    model = sharded_on_meta()
    run = compiled(model)
    with pytest.raises(RuntimeError, match=r"got one on the meta device; call fsdp_passes\.load_full_state_dict"):
        run(TOKENS)
    fsdp.load_full_state_dict(model, build(Mixed).state_dict())  # though Dynamo holds weak references now
    next_token_loss(run, TOKENS).backward()
    assert all(param.grad is not None for param in model.parameters() if param.requires_grad)
    buffer = fsdp.shard(HasNaN())
    fsdp.load_full_state_dict(buffer, HasNaN().state_dict())  # a value like any other


def test_a_state_dict_that_does_not_fit() -> None:
    pool.run(2, _refusals)


class Wide(nn.Module):
    """36 MB in fp32, much more than a file's header."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1000, 1003) for _ in range(9))


def write_safetensors(state: Mapping[str, Tensor], folder: Path, num_files: int, index: bool) -> None:
    names = [name for name in state if not name.endswith("embed.weight")]  # a tied weight is stored once
    weight_map = {}
    for number in range(num_files):
        file = f"part-{number}.safetensors"
        part = {name: state[name].contiguous() for name in names[number::num_files]}
        safetensors.torch.save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _bytes_read() -> int:
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def _from_files(folder: str) -> None:
    expected = build(Mixed).state_dict()
    for path in (
        "one/part-0.safetensors",
        "one",
        "compiled",
        "three",
        "indexed",
        "indexed/model.safetensors.index.json",
    ):
        model = sharded_on_meta()
        fsdp.load_safetensors(model, Path(folder, path))
        assert_state(model, expected)
        assert torch.equal(model.rotary.table, torch.arange(8.0) / 8)
    model = fsdp.shard(build(Mixed).bfloat16())
    fsdp.load_safetensors(model, f"{folder}/one")
    assert_state(model, {name: v.bfloat16() if v.is_floating_point() else v for name, v in expected.items()})

    model, before = sharded_on_meta(Wide), _bytes_read()
    fsdp.load_safetensors(model, f"{folder}/wide")
    read = _bytes_read() - before
    own = sum(param.local.nbytes for param in model.parameters())
    assert own <= read < own + 64 * 1024  # headers, and what ranks say to each other
    assert_state(model, build(Wide).state_dict())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_reads_its_ranges_of_files(world_size: int, tmp_path: Path) -> None:
    for name, make, num_files, index in [
        ("one", Mixed, 1, False),
        ("three", Mixed, 3, False),
        ("compiled", lambda: torch.compile(Mixed()), 1, False),
        ("indexed", Mixed, 2, True),
        ("wide", Wide, 2, True),
    ]:
        (tmp_path / name).mkdir()
        write_safetensors(build(make).state_dict(), tmp_path / name, num_files, index)
    pool.run(world_size, _from_files, str(tmp_path))


_BAD_FILES = {
    "missing": "path: expected files that can be read, got [Errno 2] No such file or directory: '{path}/missing'",
    "empty": "path: expected a folder with safetensors files and at most one index, got {path}/empty",
    "text": "path: expected a safetensors file, got {path}/text, which has no whole header",
    "short": "path: expected a safetensors file, got {path}/short, whose header cannot be read: "
    "12 bytes at [0, 12] are not in the file",
    "index.json": 'path: expected an index with a "weight_map", got {path}/index.json',
    "offsets": "path: expected a safetensors file, got {path}/offsets, whose header cannot be read: "
    "list index out of range",
    "twice": "path: expected each tensor in one file, got a in {path}/twice/1.safetensors and in "
    "{path}/twice/2.safetensors",
    "misfit": "path" + MISFITS,
}


def _bad_files(path: str) -> None:
    for model in (sharded_on_meta(), fsdp.shard(build(Mixed))):
        for name, message in _BAD_FILES.items():
            refusal = _refusal(model, lambda model, name=name: fsdp.load_safetensors(model, Path(path, name)))
            assert sorted(refusal.split("\n")) == sorted(message.format(path=path).split("\n"))
    here = Path(path, "misfit" if dist.get_rank() else "one")
    assert _refusal(model, lambda model: fsdp.load_safetensors(model, here)).startswith("path" + MISFITS[:50])


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    """Refused on every rank, though one alone sees it."""
    (tmp_path / "text").write_text("no header at all")
    (tmp_path / "index.json").write_text('{"weights": {}}')
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "short")
    (tmp_path / "short").write_bytes((tmp_path / "short").read_bytes()[:-1])
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": []}}).encode()
    (tmp_path / "offsets").write_bytes(len(header).to_bytes(8, "little") + header)
    for name in ("empty", "twice", "misfit", "one"):
        (tmp_path / name).mkdir()
    for file in ("1.safetensors", "2.safetensors"):
        safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "twice" / file)
    write_safetensors(_misfit_state(), tmp_path / "misfit", num_files=1, index=False)
    write_safetensors(build(Mixed).state_dict(), tmp_path / "one", num_files=1, index=False)
    pool.run(2, _bad_files, str(tmp_path))
