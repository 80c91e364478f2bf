"""What a model's state dict consists of, and how what is given differs from it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_passes.sharding.model import ShardedModel
from fsdp_passes.sharding.param import ShardedParam
from fsdp_passes.sharding.shard import original_name, unwrap

_EXTRA_STATE = "_extra_state"  # how torch names what a module's get_extra_state() gives


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before it is loaded."""

    shape: torch.Size
    dtype: torch.dtype


Specs = Mapping[str, TensorSpec | str]  # by name; a string says what is no tensor


@dataclass
class Entries:
    """What a model's state dict consists of, by name."""

    params: dict[str, ShardedParam] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    extras: list[str] = field(default_factory=list)
    names: dict[int, list[str]] = field(default_factory=dict)  # of a parameter, by its id

    @classmethod
    def of(cls, model: nn.Module, state: ShardedModel) -> Entries:
        """ValueError: a hook replaces or drops entries, so that what is loaded into them would be lost."""
        entries = cls()
        for wrapped_name, value in model.state_dict(keep_vars=True).items():
            name = original_name(wrapped_name)
            if name.rpartition(".")[2] == _EXTRA_STATE:
                entries.extras.append(name)  # also if it is a tensor
            elif isinstance(value, ShardedParam):
                entries.params[name] = value
                entries.names.setdefault(id(value), []).append(name)
            elif isinstance(value, Tensor):
                entries.buffers[name] = value
        entries._check(model, state)
        return entries

    def _check(self, model: nn.Module, state: ShardedModel) -> None:
        params = {id(param): name for name, param in state.named_params()}
        buffers = {id(buffer) for buffer in model.buffers()}
        replaced = [name for key, name in params.items() if key not in self.names]
        replaced += [name for name, param in self.params.items() if id(param) not in params]
        replaced += [name for name, buffer in self.buffers.items() if id(buffer) not in buffers]
        if replaced:
            raise ValueError(
                "model: expected a state_dict() with the model's own parameters and buffers, got one whose hooks "
                f"replace or drop {', '.join(replaced)}"
            )

    @property
    def each_param(self) -> list[ShardedParam]:
        """Each parameter once, whatever its names."""
        return list({id(param): param for param in self.params.values()}.values())

    def given_name(self, param: ShardedParam, given: Container[str]) -> str:
        """The last of the parameter's names that `given` has: that is what stays where torch loads them in order."""
        return [name for name in self.names[id(param)] if name in given][-1]

    def misfits(self, given: Specs) -> list[str]:
        """How `given` differs from these entries."""
        tensors = self.params | self.buffers
        missing = [names[0] for names in self.names.values() if not any(name in given for name in names)]
        missing += [name for name in (*self.buffers, *self.extras) if name not in given]
        unexpected = [name for name in given if name not in tensors and name not in self.extras]
        found = [f"missing {name}" for name in missing] + [f"unexpected {name}" for name in unexpected]
        return found + [
            text for name, spec in given.items() if name in tensors for text in misfit(name, tensors[name], spec)
        ]


def misfit(name: str, own: Tensor, spec: TensorSpec | str) -> list[str]:
    """How `spec` differs from what goes into `own`: nothing, or one line."""
    if isinstance(spec, str):
        return [f"misshapen {name}: expected {list(own.shape)}, got a {spec}"]
    if spec.shape != own.shape:
        return [f"misshapen {name}: expected {list(own.shape)}, got {list(spec.shape)}"]
    if not torch.can_cast(spec.dtype, own.dtype):
        return [f"mistyped {name}: expected {own.dtype}, got {spec.dtype}, which it cannot hold"]
    return []


def refuse(argument: str, misfits: Iterable[str]) -> None:
    """ValueError that lists them all; none: nothing."""
    lines = list(misfits)
    if lines:
        raise ValueError(f"{argument}: expected the entries of the model, got\n  " + "\n  ".join(lines))


def specs_of(values: Mapping[str, Any], *kinds: type) -> dict[str, TensorSpec | str]:
    """Of dense tensors of these types that have values; of other things their type."""
    return {name: _spec(value, kinds) for name, value in values.items()}


def _spec(value: Any, kinds: tuple[type, ...]) -> TensorSpec | str:
    if type(value) not in kinds:
        return type(value).__name__
    if value.is_meta or value.layout is not torch.strided:
        return "tensor without values" if value.is_meta else f"{value.layout} tensor"
    return TensorSpec(value.shape, value.dtype)


def set_extra_state(model: nn.Module, name: str, value: Any) -> None:
    """`name` as Entries has it, without the names of torch.compile's wrappers."""
    path = name.removesuffix(_EXTRA_STATE).removesuffix(".")
    module = next(module for key, module in model.named_modules() if original_name(f"{key}.").removesuffix(".") == path)
    unwrap(module).set_extra_state(value)
