"""Which submodules gather together, and the table of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_passes as fsdp
from fsdp_passes.sharding.units import find_units, plan_groups
from tests.dist.models import Block, Net


def _llama(**kwargs: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, **kwargs
    )
    return LlamaForCausalLM(config)


def _tied_llama() -> nn.Module:
    return _llama(tie_word_embeddings=True)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=4,
            patch_size=2,
            num_labels=3,
        )
    )


class BasicBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width))


class ResNet(nn.Module):
    """Stages of blocks, as torchvision names them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(BasicBlock(4), BasicBlock(4))
        self.layer2 = nn.Sequential(BasicBlock(4), BasicBlock(4))
        self.fc = nn.Linear(4, 2)


class Nested(nn.Module):
    """Experts inside blocks; a projection that is neither a block nor the head."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"gate": nn.Linear(2, 2), "experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(2))})
            for _ in range(2)
        )
        self.head = nn.Linear(2, 2)


def _deep() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 2), nn.Sequential(Block(2), nn.ReLU(), Block(2)), nn.Linear(2, 4))


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.LayerNorm(2))


_AUTO: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "Llama": (_llama, ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]),
    "Llama with a tied head": (_tied_llama, ["model.embed_tokens", "model.layers.0", "model.layers.1"]),
    "GPT-2, whose head is tied": (
        _gpt2,
        ["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1"],
    ),
    "T5, whose embeddings are all one": (
        _t5,
        ["shared", "encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    ),
    "ViT": (_vit, ["vit.encoder.layer.0", "vit.encoder.layer.1", "classifier"]),
    "ResNet": (ResNet, ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc"]),
    "nested": (Nested, ["blocks.0", "blocks.1", "head"]),
    "Sequential in Sequential": (_deep, ["0", "1.0", "1.2", "2"]),
    "Sequential": (_layers, ["0", "2", "3"]),
    "one linear layer": (lambda: nn.Linear(2, 2), []),
    "blocks and nothing else": (lambda: nn.Sequential(*(Block(2) for _ in range(3))), ["0", "1", "2"]),
    "no blocks": (lambda: nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(2, 2)), ["1"]),
}


def test_a_unit_called_root_is_not_the_rest() -> None:
    model = nn.Module()
    model.root, model.x = nn.Linear(2, 2), nn.Linear(2, 2)
    assert [plan.unit for plan in plan_groups(model, find_units(model, ["root"]))] == ["root", "(root)"]


@pytest.mark.parametrize("case", _AUTO)
def test_auto(case: str) -> None:
    make, expected = _AUTO[case]
    model = make()
    assert [unit for unit in _groups(model, "auto") if unit != "root"] == _named_as_now(model, expected)
    assert all(model.get_submodule(name) is module for name, module in find_units(model, "auto").items())


def _named_as_now(model: nn.Module, expected: list[str]) -> list[str]:
    """transformers moved ViT's layers once."""
    names = dict(model.named_modules())
    return [name if name in names else name.replace("vit.encoder.layer", "vit.layers") for name in expected]


def _groups(model: nn.Module, units: Any) -> dict[str, list[str]]:
    return {plan.unit: plan.names for plan in plan_groups(model, find_units(model, units))}


_CHOICES: dict[str, tuple[Any, list[str]]] = {
    "a name": ("blocks.1", ["blocks.1"]),
    "names, in any order": (["head", "blocks.0"], ["blocks.0", "head"]),
    "a class": (Block, ["blocks.0", "blocks.1"]),
    "classes": ([nn.Embedding, nn.LayerNorm], ["embed", "blocks.0.norm", "blocks.1.norm", "norm"]),
    "a name and a class": (("head", Block), ["blocks.0", "blocks.1", "head"]),
    "what two of them match": ([Block, "blocks.0"], ["blocks.0", "blocks.1"]),
    "a set": ({"head"}, ["head"]),
    "a base class": (nn.Linear, ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]),
    "a predicate of names": (lambda name, module: name.endswith("down"), ["blocks.0.down", "blocks.1.down"]),
    "a predicate of modules": (lambda name, module: isinstance(module, Block), ["blocks.0", "blocks.1"]),
}


@pytest.mark.parametrize("case", _CHOICES)
def test_choices(case: str) -> None:
    units, expected = _CHOICES[case]
    assert list(find_units(Net(), units)) == expected


def test_the_root_is_never_asked() -> None:
    asked: list[str] = []
    find_units(Net(), lambda name, module: asked.append(name) or True)
    assert "" not in asked
    assert asked == [name for name, _ in Net().named_modules() if name]


def test_the_innermost_unit_owns_a_parameter_and_the_rest_is_the_root() -> None:
    assert _groups(Net(blocks=1), ["blocks.0", "blocks.0.up"]) == {
        "root": ["embed.weight", "norm.weight", "norm.bias", "head.weight"],
        "blocks.0": ["blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.0.down.weight"],
        "blocks.0.up": ["blocks.0.up.weight", "blocks.0.up.bias"],
    }


@pytest.mark.parametrize("make", [_llama, _tied_llama, _gpt2, _t5, _vit, ResNet, Nested, _deep, _layers])
def test_every_parameter_is_placed_once_where_its_first_name_says(make: Callable[[], nn.Module]) -> None:
    model = make()
    names = [name for names in _groups(model, "auto").values() for name in names]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_a_tied_parameter_belongs_to_its_first_owner_and_keeps_its_places() -> None:
    model = Net(tied=True)
    plans = {plan.unit: plan for plan in plan_groups(model, find_units(model, "auto"))}
    assert "head" not in plans
    assert plans["embed"].names == ["embed.weight"]
    assert plans["embed"].places == [[(model.embed, "weight"), (model.head, "weight")]]


def test_groups_share_dtype_and_requires_grad() -> None:
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    model.c, model.d = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    assert [plan.names for plan in plan_groups(model, {})] == [["a", "d"], ["b"], ["c"]]


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Rank 0 of 2 in this process; collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class TestSummary(expecttest.TestCase):
    @pytest.fixture(autouse=True)
    def _ranks(self, two_ranks: None) -> None:
        pass

    def test_text(self) -> None:
        model = Net()
        model.norm.bias.requires_grad_(False)
        precision = fsdp.Precision(param=torch.bfloat16)
        fsdp.shard(model, precision=precision, reshard_after_forward=lambda unit: unit != "root")
        self.assertExpectedInline(
            str(fsdp.summary(model)),
            """\
unit      group               parameters  elements  padding  gathered    shard  after forward  accumulated
embed     f32 as bf16                  1        88       40     256 B    256 B        reshard        512 B
blocks.0  f32 as bf16                  5       220      292   1,024 B  1,024 B        reshard      2,048 B
blocks.1  f32 as bf16                  5       220      292   1,024 B  1,024 B        reshard      2,048 B
root      f32 as bf16                  1         8      120     256 B    256 B           keep        512 B
root      f32 as bf16 frozen           1         8      120     256 B    256 B           keep          0 B
head      f32 as bf16                  1        88       40     256 B    256 B        reshard        512 B
5 units, 6 flat groups, 2 ranks
5,632 B of unreduced gradients between microbatches""",
        )

    def test_text_of_a_dominant_unit(self) -> None:
        model = fsdp.shard(nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 2)))
        self.assertExpectedInline(
            str(fsdp.summary(model)),
            """\
unit  group  parameters  elements  padding  gathered    shard  after forward  accumulated
0     f32             1       800       32   3,328 B  1,664 B        reshard      3,328 B
1     f32             2        18       46     256 B    128 B        reshard        256 B
2 units, 2 flat groups, 2 ranks
3,584 B of unreduced gradients between microbatches
unit '0' holds most of the model: its gather has no computation to overlap with; name smaller units (units=...)""",
        )


def test_numbers_of_the_summary(two_ranks: None) -> None:
    rows = fsdp.summary(fsdp.shard(Net(), precision=fsdp.Precision(param=torch.bfloat16))).groups
    assert sum(row.num_elems for row in rows) == sum(p.numel() for p in Net().parameters())
    assert sum(row.num_params for row in rows) == len(list(Net().parameters()))
    for row in rows:
        full_elems = row.num_elems + row.padding_elems
        assert full_elems % (2 * 64) == 0  # 128 bytes of bfloat16 on each of two ranks
        assert row.gathered_bytes == 2 * full_elems
        assert row.shard_bytes == 4 * full_elems // 2


def _dominant(model: nn.Module, units: Any = "auto") -> str | None:
    return fsdp.summary(fsdp.shard(model, units=units)).dominant_unit


def test_the_dominant_unit_holds_more_than_half(two_ranks: None) -> None:
    assert _dominant(nn.Linear(8, 8)) == "root"
    assert _dominant(nn.Sequential(nn.Linear(64, 64), nn.Linear(8, 8))) == "0"
    assert _dominant(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) is None
    assert _dominant(Net(blocks=4)) is None
    assert _dominant(Net(blocks=4), units="blocks") == "blocks"


class _Half(nn.Module):
    """A unit of two groups, a frozen and a trainable one, that dominates only with both."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.ParameterDict({"frozen": torch.ones(64), "trained": torch.ones(64)})
        self.pair["frozen"].requires_grad_(False)
        self.rest = nn.Parameter(torch.ones(64))

    def forward(self) -> Tensor:
        return self.rest.sum()


def test_a_units_groups_count_together(two_ranks: None) -> None:
    model = fsdp.shard(_Half(), units=["pair"])
    assert len(fsdp.summary(model).groups) == 3
    assert fsdp.summary(model).dominant_unit == "pair"
