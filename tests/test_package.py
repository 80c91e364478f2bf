"""What holds for the whole package: who imports what, how torch finds the backend, what the README says."""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fsdp_passes
from fsdp_passes.options import Options

ROOT = Path(fsdp_passes.__file__).parent
_FILES = sorted(ROOT.rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in _FILES}

# Area -> what it may import of the package: an area, or one module. backend.py, __init__.py and inspect/,
# which tie all areas together, are free.
MAY_IMPORT = {
    "ir": {"_compat", "ir"},
    "capture": {"_compat", "ir", "capture"},
    "passes": {"_compat", "ir", "passes"},
    "passes.pipeline": {"ir", "options", "passes", "schedule.intervals"},
    "schedule": {"_compat", "ir", "schedule"},
    "codegen": {"_compat", "ir", "codegen", "schedule.plan"},
    "runtime": {"_compat", "ir.ops", "runtime", "schedule.plan", "sharding"},
    "runtime.collectives": {"_compat", "runtime.streams"},
    "runtime.streams": set(),
    "runtime.agreement": {"runtime.collectives"},
    "sharding": {"_compat", "ir.ops", "sharding", "runtime.agreement", "runtime.collectives", "runtime.streams"},
    "sharding.param": {"_compat", "sharding.param_ops", "sharding.chunks", "sharding.place"},
    "sharding.chunks": {"sharding.boxes", "sharding.place"},
    "options": set(),
    "_compat": set(),
}


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imported(module: str) -> Iterator[str]:
    """Dotted names that `module` imports, those inside of functions and TYPE_CHECKING, too."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_modules(module: str) -> set[str]:
    """Modules of the package that `module` imports, without the package's name."""
    ours = [name.removeprefix("fsdp_passes.") for name in imported(module) if name.startswith("fsdp_passes.")]
    return {name if name in MODULES else name.rpartition(".")[0] for name in ours}


def allowed(module: str) -> set[str] | None:
    """The entry for `module` itself or for its area; None where everything is allowed."""
    return MAY_IMPORT.get(module, MAY_IMPORT.get(module.partition(".")[0]))


@pytest.mark.parametrize("module", [module for module in MODULES if allowed(module) is not None])
def test_import_rule(module: str) -> None:
    may = allowed(module)
    assert may is not None
    wrong = [name for name in imported_modules(module) if not {name, name.partition(".")[0]} & may]
    assert wrong == [], f"{module} may import {sorted(may)}"


def test_the_import_rule_sees_the_imports() -> None:
    """Imports of a module, of a name in it, inside a function, and under TYPE_CHECKING."""
    assert "_compat" in imported_modules("ir.types")
    assert "ir.sizes" in imported_modules("ir.types")
    assert "sharding.param_ops" in imported_modules("sharding.param")
    assert "sharding.group" in imported_modules("sharding.model")
    assert {"capture.joint", "runtime.executor"} <= imported_modules("backend")


def private_torch_names(module: str) -> set[str]:
    """`torch` names with a part that starts with an underscore, imported or reached through attributes.

    Operators (`torch.ops.aten._unsafe_view`, `torch._foreach_norm`) and `torch._check` are documented.
    """
    of_torch = {"torch"} | {name.rpartition(".")[2] for name in imported(module) if name.startswith("torch.")}
    aliases = {"dist"} if "torch.distributed" in set(imported(module)) else set()
    chains = {ast.unparse(node) for node in ast.walk(tree_of(module)) if isinstance(node, ast.Attribute)}
    names = {name for name in imported(module) if name.startswith("torch.")}
    names |= {chain for chain in chains if chain.partition(".")[0] in of_torch | aliases}
    return {name for name in names if re.search(r"\._(?!_|foreach_|check\b)", name) and ".ops." not in name}


@pytest.mark.parametrize(
    "module",
    [module for module in MODULES if module != "_compat"],
)
def test_private_names_of_torch_are_used_in_compat_only(module: str) -> None:
    assert private_torch_names(module) == set()


def test_private_names_of_torch_are_seen() -> None:
    found = private_torch_names("_compat")
    assert "torch._functorch.partitioners.min_cut_rematerialization_partition" in found
    assert "torch.autograd.Variable._execution_engine" in found
    assert "torch._ops.OpOverload" in found


def test_each_private_name_in_compat_says_its_versions() -> None:
    lines = MODULES["_compat"].read_text(encoding="utf-8").splitlines()
    private = [line for line in lines if re.search(r"\btorch\._|(\w|\))\._[a-z]|import _[a-z]", line)]
    assert len(private) > 15
    assert [line for line in private if "# torch 2.13" not in line] == []


@pytest.mark.parametrize("module", [module for module in MODULES if module != "options"])
def test_the_environment_is_read_in_options_only(module: str) -> None:
    names = {node.attr for node in ast.walk(tree_of(module)) if isinstance(node, ast.Attribute)}
    names |= {name.rpartition(".")[2] for name in imported(module)}
    assert not names & {"environ", "getenv", "environb"}


def test_options_reads_the_environment() -> None:
    names = {node.attr for node in ast.walk(tree_of("options")) if isinstance(node, ast.Attribute)}
    assert "environ" in names


_STRING_ALONE = """
import sys
import torch
from torch import nn

def fsdp_modules():
    return [name for name in sys.modules if name.startswith("fsdp_passes")]

torch.manual_seed(0)
layer, x = nn.Linear(2, 2), torch.randn(3, 2)
assert not fsdp_modules()
compiled = torch.compile(layer, backend="fsdp_opt")
got = compiled(x)
assert "fsdp_passes.backend" in fsdp_modules()
assert torch.equal(got, layer(x))
got.sum().backward()
assert layer.weight.grad is not None and torch.equal(layer.weight.grad, x.sum(0).expand(2, 2))

import fsdp_passes
assert torch.equal(torch.compile(nn.Sequential(layer), backend=fsdp_passes.fsdp_opt)(x), layer(x))
try:
    torch.compile(nn.Linear(2, 2), backend="fsdp_opt", options={"gard_path": "cat"})(x)
except Exception as error:
    print(error)
"""


@pytest.fixture(scope="module")
def process() -> subprocess.CompletedProcess[str]:
    """A process that imports torch alone; started elsewhere, so that only what is installed is found."""
    command = [sys.executable, "-c", _STRING_ALONE]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=300, check=False)


def test_the_string_needs_no_import_and_the_callable_works(process: subprocess.CompletedProcess[str]) -> None:
    assert process.returncode == 0, process.stderr


def test_a_plain_model_is_announced_once(process: subprocess.CompletedProcess[str]) -> None:
    assert process.stderr.count("a graph reads no sharded parameter; it is compiled as it is") == 1


def test_an_unknown_option_lists_the_known_ones(process: subprocess.CompletedProcess[str]) -> None:
    names = ", ".join(field.name for field in dataclasses.fields(Options))
    assert f"expected names among {names}, got 'gard_path'" in process.stdout


def test_fsdp_opt_is_found_by_name_once() -> None:
    assert torch._dynamo.list_backends().count("fsdp_opt") == 1


def test_the_readmes_table_of_options() -> None:
    readme = (ROOT.parent / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", readme, re.MULTILINE)
    assert [name for name, _ in rows] == [field.name for field in dataclasses.fields(Options)]
    assert {name: ast.literal_eval(default) for name, default in rows} == dataclasses.asdict(Options())


def test_pytest_leaves_no_folder_of_tests_out(pytestconfig: pytest.Config) -> None:
    """Its default leaves out folders that are called dist."""
    tests = Path(__file__).parent
    folders = {folder for path in tests.rglob("test_*.py") for folder in path.relative_to(tests).parts[:-1]}
    left_out = pytestconfig.getini("norecursedirs")
    assert "dist" in folders
    assert [folder for folder in folders if any(fnmatch.fnmatch(folder, pattern) for pattern in left_out)] == []


def test_public_names() -> None:
    assert fsdp_passes.__all__ == sorted(fsdp_passes.__all__)
    assert all(hasattr(fsdp_passes, name) for name in fsdp_passes.__all__)


@pytest.mark.parametrize(
    "version, warns", [("2.13.0+cpu", False), ("2.14.1", False), ("2.11.0", True), ("3.0.0a0", True)]
)
def test_an_untested_torch_is_warned_about(version: str, warns: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fsdp_passes._compat.warn_if_untested(version)
    assert [f"got {version}" in str(warning.message) for warning in caught] == [True] * warns
