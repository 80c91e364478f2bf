"""A model on the meta device gets the values that its own modules start with, or says what has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import fsdp_passes as fsdp
from fsdp_passes.sharding.poison import has_unwritten, is_unwritten, poison
from tests.dist import pool
from tests.dist.models import build, next_token_loss
from tests.dist.test_loading import TOKENS, Mixed, assert_state, sharded_on_meta


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.complex64,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.bool,
    ],
)
def test_poison_is_told_from_values(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3).to(dtype)
    assert not has_unwritten(tensor) and not is_unwritten(tensor)
    poison(tensor)
    assert has_unwritten(tensor) and is_unwritten(tensor)
    tensor[1] = torch.ones(()).to(dtype)
    assert not is_unwritten(tensor)
    assert has_unwritten(tensor) == (dtype.is_floating_point or dtype.is_complex)
    poison(empty := torch.zeros(0).to(dtype))
    assert not has_unwritten(empty)


class NoInitialiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.ones(5))
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.register_buffer("mean", torch.ones(4))


class HalfAnInitialiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 5))

    def reset_parameters(self) -> None:
        self.weight[:3].fill_(1)


def _initialised_unsharded(model: nn.Module) -> dict[str, Tensor]:
    """The same functions, called on an unsharded model."""
    torch.manual_seed(3)
    with torch.no_grad():
        for module in _children_first(model):
            if isinstance(module, AsksForAnArgument):
                module._reset_parameters()
            elif hasattr(module, "reset_parameters"):
                module.reset_parameters()
            if isinstance(model, PreTrainedModel):
                model._init_weights(module)
    return model.state_dict()


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    module = getattr(module, "_orig_mod", module)
    for child in module.children():
        yield from _children_first(child)
    yield module


def _llama(tied: bool) -> nn.Module:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))


_MODELS = {"mixed": Mixed, "llama": lambda: _llama(tied=False), "tied llama": lambda: _llama(tied=True), "gpt2": _gpt2}


def _initial_values() -> None:
    for name, make in _MODELS.items():
        expected = build(make)
        values = _initialised_unsharded(expected)
        for buffer in expected.buffers():
            assert not buffer.isnan().any(), name
        model = sharded_on_meta(make)
        torch.manual_seed(3 + dist.get_rank())
        fsdp.load_full_state_dict(model, None)
        assert_state(model, values)
        for (path, got), buffer in zip(model.named_buffers(), expected.buffers(), strict=True):
            assert torch.equal(got, buffer), path
        drawn = torch.random.get_rng_state()
        torch.manual_seed(3 + dist.get_rank())
        if dist.get_rank():
            assert torch.equal(drawn, torch.random.get_rng_state()), (
                "the generator of a rank that drew rank 0's numbers"
            )
        else:
            assert not torch.equal(drawn, torch.random.get_rng_state())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_initial_values_are_those_of_the_unsharded_model(world_size: int) -> None:
    pool.run(world_size, _initial_values)


class Spellings(nn.Module):
    """Ways in which modules set values, and things to trip over."""

    def __init__(self) -> None:
        super().__init__()
        self.by_data = nn.Parameter(torch.empty(3, 5))
        self.replaced = nn.Parameter(torch.empty(7))
        self.integers = nn.Parameter(torch.empty(4, dtype=torch.int32), requires_grad=False)
        self.nothing = nn.Linear(0, 3)
        self.norm, self.same = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.same.running_mean = self.norm.running_mean
        self.child = nn.Module()
        self.child.bare = nn.Parameter(torch.empty(6))
        self.register_buffer("mask", torch.empty(3, dtype=torch.bool), persistent=False)
        self.register_buffer("nobody", torch.empty(0), persistent=False)
        self.register_buffer("index", torch.empty(5, dtype=torch.int64), persistent=False)
        self.inner = torch.compile(nn.Linear(2, 2), backend="eager")
        self.asks = AsksForAnArgument()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.by_data.data.normal_()
        self.replaced.data = torch.arange(7.0)
        self.integers.fill_(-3)
        nn.init.uniform_(self.child.bare)
        self.mask.data.copy_(torch.tensor([True, False, True]))
        self.index.data.copy_(torch.arange(5))


class AsksForAnArgument(nn.Module):
    """Whose reset_parameters is no `_init_weights(module)`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))
        self.reset_parameters(2.0)

    def reset_parameters(self, value: float) -> None:
        self.weight.data.fill_(value)

    def _reset_parameters(self) -> None:
        self.reset_parameters(2.0)


def _spellings() -> None:
    expected = build(Spellings)
    values = {name.replace("_orig_mod.", ""): value for name, value in _initialised_unsharded(expected).items()}
    for load in (
        lambda model: fsdp.load_full_state_dict(model, None),
        lambda model: fsdp.load_full_state_dict(model, values),
    ):
        model: Any = sharded_on_meta(Spellings)
        model.by_data.kept = "by the user"
        torch.manual_seed(3)
        load(model)
        assert_state(model, values)
        assert torch.equal(model.mask, expected.mask) and torch.equal(model.index, expected.index)
        assert model.same.running_mean is model.norm.running_mean
        assert model.by_data.kept == "by the user"


def test_ways_to_set_values() -> None:
    pool.run(2, _spellings)


def _in_inference_mode() -> None:
    """What is loaded there trains afterwards."""
    values = build(Mixed).state_dict()
    for state in (values, None):
        model = sharded_on_meta()
        with torch.inference_mode():
            fsdp.load_full_state_dict(model, state)
        next_token_loss(model, TOKENS).backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_loading_in_inference_mode() -> None:
    pool.run(2, _in_inference_mode)


def _holes() -> list[str]:
    refusals = []
    for make, load in [
        (NoInitialiser, lambda model: fsdp.load_full_state_dict(model, None)),
        (HalfAnInitialiser, lambda model: fsdp.load_full_state_dict(model, None)),
        (NoInitialiser, lambda model: fsdp.load_full_state_dict(model, NoInitialiser().state_dict())),
    ]:
        model = sharded_on_meta(make)
        for _ in range(2):  # a model that was refused is as it was
            with pytest.raises(ValueError) as refused:
                load(model)
            assert all(p.is_meta for p in (*model.parameters(), *model.buffers()))
        refusals.append(str(refused.value))
    return refusals


def test_what_has_no_value_is_named() -> None:
    """On both ranks, though only rank 1 holds the last rows; nothing is left as it was allocated."""
    for refusals in pool.run(2, _holes):
        names = [refusal.rsplit(" sets all of ", 1)[1] for refusal in refusals]
        assert names == ["weight, table, mean", "weight", "table"]
