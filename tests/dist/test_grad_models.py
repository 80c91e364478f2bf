"""Any captured model: gradients written into slices are, bit for bit, those that each microbatch concatenates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import fsdp_passes as fsdp
from fsdp_passes.ir.nodes import calls, is_fresh_zeros
from fsdp_passes.ir.ops import ACCUMULATE, REDUCE_GRAD
from fsdp_passes.ir.text import load
from tests.dist import pool
from tests.dist.models import VOCAB as NET_VOCAB
from tests.dist.models import Net, build, compiled, full_grads, next_token_loss, relative_error

BF16 = fsdp.Precision(param=torch.bfloat16, reduce=torch.float32, cast_inputs=True)
WIDTH, VOCAB = 8, 67


def _squares(model: Any, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def _sum(model: Any, x: Tensor) -> Tensor:
    """Its tangent has stride 0."""
    return model(x).sum()


def _rows(generator: torch.Generator) -> Tensor:
    return torch.randn(4, WIDTH, generator=generator)


def _row(generator: torch.Generator) -> Tensor:
    return torch.randn(WIDTH, generator=generator)


def _wide_rows(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 64, generator=generator)


def _any_rows(generator: torch.Generator) -> Tensor:
    """Another number of rows each time: symbolic sizes from the second on."""
    return torch.randn(int(torch.randint(2, 9, (), generator=generator)), WIDTH, generator=generator)


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(0, VOCAB - 7, (2, 10), generator=generator)


def _image(generator: torch.Generator) -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=generator)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    data: Callable[[torch.Generator], Any] = _rows
    loss: Callable[[Any, Any], Tensor] = _squares
    precision: fsdp.Precision | None = None
    units: Any = "auto"
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW


@dataclass(frozen=True)
class Trained:
    """`values`: gradients at the end of each window, and parameters after the last."""

    model: nn.Module
    values: dict[str, Tensor | None]


def _train(case: Case, windows: tuple[int, ...], plain: bool = False, **options: Any) -> Trained:
    """Windows of so many microbatches, a step after each; `plain`: unsharded, in eager."""
    torch._dynamo.reset()
    model: Any = build(case.make)
    if not plain:
        model = fsdp.shard(model, units=case.units, precision=case.precision)
    run = model if plain else compiled(model, **options)
    optimizer = case.optimizer(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    values: dict[str, Tensor | None] = {}
    for window, count in enumerate(windows):
        for number in range(count):
            with contextlib.nullcontext() if plain or number == count - 1 else run.no_sync():
                (case.loss(run, case.data(generator)) / count).backward()
        values |= {f"gradient {window} of {name}": grad for name, grad in _copies(full_grads(model))}
        optimizer.step()
        optimizer.zero_grad()
    after = model.state_dict() if plain else fsdp.full_state_dict(model)
    return Trained(model, values | {name: value for name, value in _copies(after)})


def _copies(tensors: dict[str, Any]) -> Iterator[tuple[str, Tensor | None]]:
    """Steps edit the parameters of a plain model in place."""
    return ((name, None if tensor is None else tensor.detach().clone()) for name, tensor in tensors.items())


def _train_each_way(case: Case, windows: tuple[int, ...], **options: Any) -> dict[str, Trained]:
    """By grad_path; `options` for "views". Elsewhere types are not inferred anew: it takes as long as the training."""
    trained = {path: _train(case, windows, grad_path=path, verify=1) for path in ("cat", "cat_last")}
    return trained | {"views": _train(case, windows, grad_path="views", **options)}


def _differences_between(trained: dict[str, Trained], expected: Trained) -> Iterator[str]:
    for path, got in trained.items():
        assert got.values.keys() == expected.values.keys()
        for name, value in got.values.items():
            if not _equal(value, expected.values[name]):
                yield f"{path}: {name} differs"


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)


# Real models -----------------------------------------------------------------------------------------------------


def _language_loss(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def _translation_loss(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, decoder_input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def _image_loss(model: Any, image: Tensor) -> Tensor:
    return model(pixel_values=image).logits.float().square().mean()


def _contrast_loss(model: Any, pair: tuple[Tensor, Tensor]) -> Tensor:
    output = model(input_ids=pair[0], pixel_values=pair[1])
    return F.cross_entropy(output.logits_per_image.float(), torch.arange(2))


_TRANSFORMER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
_DECODER = dict(**_TRANSFORMER, vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=32, use_cache=False)


def _llama(**kwargs: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**_DECODER, **kwargs}))


def _tied_llama() -> nn.Module:
    return _llama(tie_word_embeddings=True, num_hidden_layers=2)


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**_DECODER, num_local_experts=3, num_experts_per_tok=2))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = dict(attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)
    sizes = dict(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=1, n_head=4)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, use_cache=False))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = dict(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0, use_cache=False))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**_TRANSFORMER, image_size=16, patch_size=4, num_labels=5))


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5)
    )


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    ends = dict(eos_token_id=VOCAB - 1, bos_token_id=VOCAB - 2)
    text = dict(**_TRANSFORMER, **ends, vocab_size=VOCAB, max_position_embeddings=16)
    vision = dict(**_TRANSFORMER, image_size=16, patch_size=8)
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


class LoRA(nn.Module):
    """A frozen linear layer, and a trained product of low rank that is added to it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) / rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * (x @ self.down.t() @ self.up.t())


def _lora_llama() -> nn.Module:
    model = _llama().requires_grad_(False)
    attentions: list[Any] = [module for module in model.modules() if hasattr(module, "q_proj")]
    for attention in attentions:
        attention.q_proj, attention.v_proj = LoRA(attention.q_proj), LoRA(attention.v_proj)
    return model


class _RMSNorm(torch.autograd.Function):
    """In fp32, with the derivative written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = x.float().square().mean(-1, keepdim=True).add(1e-5).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        normed, scaled = x * scale, (grad * weight).float()
        inner = scale * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        return inner.to(x.dtype), (grad * normed).sum((0, 1)).to(weight.dtype)


class RMSNorm(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight)


def _net_with_own_norms() -> nn.Module:
    model = Net()
    for module in (model, *model.blocks):
        assert isinstance(module.norm, nn.LayerNorm)
        module.norm = RMSNorm(module.norm.weight)
    return model


def _few_tokens(generator: torch.Generator) -> Tensor:
    return _tokens(generator) % NET_VOCAB


def _pair(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return _tokens(generator), _image(generator)


_MODELS = {
    "llama": Case(_llama, _tokens, _language_loss, BF16),
    "tied llama": Case(_tied_llama, _tokens, _language_loss, BF16),
    "mixtral": Case(_mixtral, _tokens, _language_loss, BF16),
    "gpt2": Case(_gpt2, _tokens, _language_loss, BF16),
    "t5": Case(_t5, _tokens, _translation_loss, BF16),
    "vit": Case(_vit, _image, _image_loss, BF16),
    "resnet": Case(_resnet, _image, _image_loss),  # on the CPU BatchNorm in bf16 needs buffers in fp32
    "clip": Case(_clip, _pair, _contrast_loss, BF16),
    "llama with LoRA": Case(_lora_llama, _tokens, _language_loss, BF16),
    "an autograd.Function": Case(_net_with_own_norms, _few_tokens, next_token_loss, BF16),
}


def _wrong_with_model(name: str, folder: Path) -> list[str]:
    trained = _train_each_way(_MODELS[name], (2, 1), dump_dir=folder, verify=1)
    expected = trained.pop("cat")
    wrong = list(_differences_between(trained, expected))
    for path, each in trained.items():
        wrong += [f"{path}: {text}" for text in (*_not_rewritten(each), *_not_written(each))]
    files = sorted((folder / f"rank{dist.get_rank()}").glob("graph*.bwd.*.gather_on_demand.txt"))
    groups = {row.num_elems + row.padding_elems for row in fsdp.summary(trained["views"].model).groups}
    wrong += [f"{file.name}: {text}" for file in files for text in _left_in_graph(load(file.read_text()).graph, groups)]
    return wrong if files else ["no backward graph"]


def _not_rewritten(trained: Trained) -> Iterator[str]:
    explanation = fsdp.explain(trained.model)
    gradients = [each for graph in explanation.graphs for each in graph.gradients]
    yield from (f"declined {left}" for left in explanation.declined)
    yield from (f"{each.unit} is added up as a whole" for each in gradients if each.whole)
    if not any(each.num_written for each in gradients):
        yield "nothing is written"


def _not_written(trained: Trained) -> Iterator[str]:
    """A model that is one graph writes each parameter that has a gradient once."""
    num_grads = sum(value is not None for name, value in trained.values.items() if name.startswith("gradient 0"))
    num_written = sum(each.num_written for graph in fsdp.explain(trained.model).graphs for each in graph.gradients)
    if num_written != num_grads:
        yield f"{num_grads} parameters have a gradient, {num_written} are written"


def _left_in_graph(graph: fx.Graph, groups: set[int]) -> Iterator[str]:
    for node in graph.nodes:
        if node.target in (ACCUMULATE, REDUCE_GRAD):
            yield f"{node} is left"
        if is_fresh_zeros(node) and not node.users:
            yield f"nobody reads {node}"
    for cat in calls(graph, torch.ops.aten.cat.default):
        if cat.meta["val"].ndim == 1 and cat.meta["val"].numel() in groups:
            yield f"{cat} is as large as a flat group"


_TWO_RANKS = ("tied llama", "mixtral")
_SLOW = ("llama", "gpt2", "t5", "clip")  # the others have their kinds of gradients, too


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW)) for n in _MODELS])
def test_a_real_model_writes_every_gradient_and_trains_as_with_cat(name: str, tmp_path: Path) -> None:
    for wrong in pool.run(2 if name in _TWO_RANKS else 1, _wrong_with_model, name, tmp_path):
        assert wrong == []


# Rare producers of gradients ---------------------------------------------------------------------------------------


class Formula(nn.Module):
    """`formula` of the module, which has parameters of these `shapes`, and the input."""

    def __init__(self, formula: Callable[[Any, Any], Tensor], **shapes: tuple[int, ...] | Tensor) -> None:
        super().__init__()
        self.formula = formula
        for name, shape in shapes.items():
            values = shape if isinstance(shape, Tensor) else torch.randn(shape)
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, x: Any) -> Tensor:
        return self.formula(self, x)


def _formula(formula: Callable[[Any, Any], Tensor], **shapes: Any) -> Callable[[], nn.Module]:
    return lambda: Formula(formula, **shapes)


def _of(formula: Callable[[Any, Any], Tensor], *, case: Case | None = None, **shapes: Any) -> Case:
    return replace(case or _ROWS, make=_formula(formula, **shapes))


_ROWS = Case(nn.Identity)
_ROW = Case(nn.Identity, _row)
_WIDE = Case(nn.Identity, _wide_rows)


class _Returns(torch.autograd.Function):
    """x * a; the gradient of `a` is said to be `given`, whatever it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, given: Tensor) -> Tensor:
        ctx.save_for_backward(a, given)
        return x * a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        a, given = ctx.saved_tensors
        return grad * a, given, None


class _ReturnsOneForTwo(torch.autograd.Function):
    """Two sums; the gradients of `a` and `b` are one value, in two shapes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return a.sum() + b.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        product = grad * x.t() @ x
        return None, product, product.reshape(4, 16)


class _ReturnsBuffer(torch.autograd.Function):
    """x * a; the gradient of `a` is what `buffer` held before backward changes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        ctx.save_for_backward(a)
        return x * a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        before = ctx.buffer.clone()
        ctx.buffer.add_(1)
        return grad * ctx.saved_tensors[0], before, None


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("buffer", torch.arange(float(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return _ReturnsBuffer.apply(x, self.a, self.buffer)


class _ReturnsZeros(torch.autograd.Function):
    """x * a; the gradient of `a` is zeros of the user's, of which one is written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return x * a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (a,) = ctx.saved_tensors
        zeros = torch.zeros_like(a)
        zeros[3:] = grad.sum(0)[3:]
        return grad * a, zeros


def _two_graphs(m: Any, x: Tensor) -> Tensor:
    y = (x @ m.a).relu()
    torch._dynamo.graph_break()
    return y @ m.a + m.b * m.a.sum()


def _half_checkpointed(m: Any, x: Tensor) -> Tensor:
    y = checkpoint(lambda x: F.gelu(x @ m.a) @ m.b, x, use_reentrant=False)
    return F.gelu(y @ m.c) @ m.b


def _qkv(m: Any, x: Tensor) -> Tensor:
    q, k, v = F.linear(x, torch.cat([m.q, m.k, m.v])).chunk(3, -1)
    return (q @ k.t()).softmax(-1) @ v


def _fused_qkv(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.a.chunk(3)
    return (x @ q.t()) * (x @ k.t()).sigmoid() + x @ v.t()


class Tied(nn.Module):
    """One weight in three units, and twice in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers[1].weight = self.layers[2].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[2]):
            x = x + F.gelu(layer(x))
        return x


class Recurrent(nn.Module):
    """Cells, as torch does not capture nn.LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.gated = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.cell(x)
        h, c = self.cell(x, (h, c))
        return self.gated(h, c)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, add_bias_kv=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def _frozen() -> nn.Module:
    model = Formula(lambda m, x: (x @ m.a + m.b) @ m.c, a=(8, 8), b=(8,), c=(8, 8))
    model.a.requires_grad_(False)
    return model


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2),
        nn.GroupNorm(2, 6),
        nn.ConvTranspose2d(6, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, groups=4, bias=False),
    )


def _channels_last(generator: torch.Generator) -> Tensor:
    return _image(generator).to(memory_format=torch.channels_last)


def _channels_last_convolutions() -> nn.Module:
    return _convolutions().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _weight_normed() -> nn.Module:
    norm = parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(WIDTH, 12)), nn.GELU(), norm(nn.Linear(12, WIDTH), dim=1))


def _padded_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH, padding_idx=3), nn.Linear(WIDTH, VOCAB))


def _positions(generator: torch.Generator) -> Tensor:
    return torch.randint(0, WIDTH, (7,), generator=generator)


def _nested(generator: torch.Generator) -> Tensor:
    """Of 3 and 5 rows."""
    rows = [torch.randn(count, WIDTH, generator=generator) for count in (3, 5)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))


def _edits_a_copy(module: nn.Module, x: Tensor) -> Tensor:
    weight = module.a.clone()
    weight[0] = 0
    weight.mul_(module.b)
    return x @ weight.tril() + (x @ module.a.t()).cumsum(0)


def _parametrized() -> nn.Module:
    """The first writes buffers in forward, the second is a matrix exponential."""
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(parametrizations.spectral_norm(first), nn.Tanh(), parametrizations.orthogonal(second))


_COMPLEX = torch.complex(torch.arange(8.0), torch.ones(8))

_CASES = {
    "one value is the gradient of two parameters": _of(lambda m, x: (m.a + m.b) * x, a=(8,), b=(8,)),
    "the gradient is the tangent": _of(lambda m, x: m.a + x, a=(8,), case=_ROW),
    "the gradient is the tangent, which has stride 0": _of(
        lambda m, x: m.a + m.b + x, a=(8,), b=(8,), case=replace(_ROW, loss=_sum)
    ),
    "the gradient is an input of forward": _of(lambda m, x: _Returns.apply(x, m.a, x), a=(8,), case=_ROW),
    "the gradient is a view of an input": _of(lambda m, x: _Returns.apply(x[2], m.a, x[1]), a=(8,)),
    "the gradient is another parameter": _of(lambda m, x: _Returns.apply(x, m.a, m.b), a=(8,), b=(8,)),
    "the gradient is the user's zeros": _of(lambda m, x: _ReturnsZeros.apply(x, m.a) + m.b, a=(8,), b=(8,)),
    "one value in two shapes": _of(lambda m, x: x.sum() + _ReturnsOneForTwo.apply(x, m.a, m.b), a=(8, 8), b=(4, 16)),
    "the gradient is a buffer that backward changes": Case(Buffered),
    "stride 0": _of(lambda m, x: m.a.sum() * 2 + m.b.sum(0) + x, a=(8, 8), b=(3, 8)),
    "used both ways": _of(lambda m, x: x @ m.a.t() + x @ m.a, a=(8, 8)),
    "transposed": _of(
        lambda m, x: x @ m.a.t().contiguous() + (x @ m.b.permute(2, 0, 1).reshape(8, 6).sin()).sum(1, True),
        a=(8, 8),
        b=(2, 3, 8),
    ),
    "transposes that do and do not undo each other": _of(
        lambda m, x: (
            x * m.a.transpose(0, 1).mT.t().sum(0) + (x @ m.b.permute(2, 0, 1).transpose(0, 2).flatten(1)).sum()
        ),
        a=(8, 3),
        b=(2, 8, 3),
    ),
    "a product split into gradients": _of(_qkv, q=(8, 8), k=(8, 8), v=(8, 8)),
    "gradients put together": _of(_fused_qkv, a=(24, 8)),
    "stacked": _of(lambda m, x: torch.einsum("bi,nio->bo", x, torch.stack([m.a, m.b, m.a])), a=(8, 8), b=(8, 8)),
    "used three times": _of(lambda m, x: ((x @ m.a).sin() @ m.a).cos() @ m.a + m.b, a=(8, 8), b=(8,)),
    "used in several units": Case(Tied),
    "used in two graphs": _of(_two_graphs, a=(8, 8), b=(8,)),
    "select": _of(lambda m, x: x * m.a[3] + m.a[:, 2:5].sum() + m.a[1:7:2].mean(), a=(8, 8)),
    "gather": _of(
        lambda m, x: m.a.index_select(0, x) * m.a[x] + m.b[x].sum() + m.a[x, x].sum() + m.a.gather(1, x[:, None]),
        a=(8, 8),
        b=(8,),
        case=Case(nn.Identity, _positions),
    ),
    "put": _of(lambda m, x: (m.a.index_put((torch.tensor([1, 2]),), m.b) * x).cumsum(0), a=(4, 8), b=(8,)),
    "an embedding with padding_idx": Case(_padded_embedding, _tokens),
    "weight_norm": Case(_weight_normed),
    "parametrizations": Case(_parametrized),
    "a copy that is edited in place": _of(_edits_a_copy, a=(8, 8), b=(8,)),
    "experts": _of(lambda m, x: torch.einsum("bi,bkij->bj", x, m.a[(x @ m.b).topk(2).indices]), a=(4, 8, 8), b=(8, 4)),
    "convolutions": Case(_convolutions, _image),
    "convolutions in channels_last": Case(_channels_last_convolutions, _channels_last),
    "nested tensors": Case(_two_layers, _nested, lambda model, x: model(x).values().square().mean()),
    "recurrent cells": Case(Recurrent),
    "attention": Case(Attention),
    "batched products": _of(
        lambda m, x: torch.bmm(x.expand(3, 4, 8), m.a).sum(0) + torch.einsum("bi,oi,j->bo", x, m.b, m.c),
        a=(3, 8, 8),
        b=(8, 8),
        c=(5,),
    ),
    "a sum in fp32": _of(lambda m, x: (x.float() * m.a.float()).to(x.dtype) + m.b, a=(8,), b=(8,)),
    "odd sizes": _of(lambda m, x: x @ m.c @ m.d + m.b + m.a.sum() + m.e, a=(0,), b=(), c=(8, 13), d=(13, 7), e=(7,)),
    "complex": _of(
        lambda m, x: torch.view_as_real(x * m.a * m.b.conj() + m.c),
        a=_COMPLEX,
        b=-_COMPLEX,
        c=(8,),
        case=replace(_ROWS, optimizer=torch.optim.SGD),
    ),
    "several dtypes": _of(
        lambda m, x: x @ m.a * m.b + (m.c * x.half()).sum(), a=(8, 8), b=torch.ones(8).double(), c=torch.ones(8).half()
    ),
    "a frozen parameter": Case(_frozen),
    "a parameter that is read for nothing": _of(
        lambda m, x: x * m.a + m.b.detach() + 0 * m.c.sum() + (m.d * 2)[:0].sum(), a=(8,), b=(8,), c=(8,), d=(8,)
    ),
    "masked": _of(lambda m, x: torch.where(x > 0, m.a, m.b) + m.c.masked_fill(m.c > 0, 1) * x, a=(8,), b=(), c=(8,)),
    "expanded over the batch": _of(
        lambda m, x: (m.a.expand(4, 8, 8) @ x[:, :, None])[..., 0] + m.b.repeat(4, 1) + m.c[None].expand(4, -1),
        a=(8, 8),
        b=(8,),
        c=(8,),
    ),
    "a scalar for everything": _of(lambda m, x: m.s * (m.s + x @ m.a) * m.s, s=(), a=(8, 8)),
    "vmap": _of(lambda m, x: torch.vmap(lambda row: row @ m.a * m.b)(x), a=(8, 8), b=(8,)),
    "checkpoint": _of(_half_checkpointed, a=(8, 8), b=(8, 8), c=(8, 8)),
    "symbolic sizes": _of(
        lambda m, x: F.gelu(x @ m.a) * m.b + m.c.expand(x.shape[0], 8) * x.shape[0],
        a=(8, 8),
        b=(8,),
        c=(8,),
        case=Case(nn.Identity, _any_rows),
    ),
    "the input has a gradient, too": _of(
        lambda m, x: m.a + x, a=(8,), case=Case(nn.Identity, lambda generator: _row(generator).requires_grad_())
    ),
    "no padding": Case(lambda: nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))), _wide_rows),
    "one row, no padding, in chunks": _of(
        lambda m, x: x[:, :32] * m.a.chunk(2)[0] + m.a.chunk(2)[1], a=(64,), case=_WIDE
    ),
    "one row, no padding, in chunks of two sizes": _of(
        lambda m, x: x[:, :40] * m.a.split([40, 24])[0] + m.a.split([40, 24])[1].sum(),
        a=(64,),
        case=_WIDE,
    ),
}
# Where a sum's order or its rounding shows. Without a policy the numbers are also compared with an unsharded model's.
_IN_BF16 = (
    "gradients put together",
    "stacked",
    "used in several units",
    "used in two graphs",
    "an embedding with padding_idx",
    "a sum in fp32",
    "odd sizes",
    "one value in two shapes",
)
_RUNS = [
    *((name, None, 1) for name in _CASES),
    *((name, BF16, 1) for name in _IN_BF16),
    *((name, BF16, 2) for name in ("used in several units", "odd sizes", "no padding")),
]


def _wrong_with_case(name: str, precision: fsdp.Precision | None) -> list[str]:
    case = replace(_CASES[name], precision=precision)
    trained = _train_each_way(case, (3, 1))
    expected = trained.pop("cat")
    wrong = list(_differences_between(trained, expected))
    wrong += [f"{path}: {text}" for path in trained for text in _not_rewritten(trained[path])]
    if precision is None:
        wrong += _far_from(_train(case, (3, 1), plain=True), expected)
    return wrong


def _far_from(plain: Trained, trained: Trained) -> Iterator[str]:
    """What differs from `plain` by more than rounding. A parameter that is read for nothing may have zeros or None."""
    for name, value in plain.values.items():
        got = trained.values[name]
        if got is None or value is None:
            if any(each is not None and each.any() for each in (got, value)):
                yield f"{name} is {got}, expected {value}"
        elif relative_error(_real(got), _real(value)) > 2e-6:
            yield f"{name} is not the unsharded one's: {got}, expected {value}"


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@pytest.mark.parametrize(
    "name, precision, world_size", _RUNS, ids=[f"{n}-{'bf16' if p else 'as it is'}-{w}" for n, p, w in _RUNS]
)
def test_a_rare_gradient_is_written_as_with_cat(name: str, precision: fsdp.Precision | None, world_size: int) -> None:
    for wrong in pool.run(world_size, _wrong_with_case, name, precision):
        assert wrong == []


def _left_in_a_branch() -> tuple[list[str], tuple[Any, ...]]:
    case = _of(lambda m, x: torch.cond(x.sum() > 0, lambda x: x @ m.a, lambda x: x @ m.b, (x,)), a=(8, 8), b=(8, 8))
    trained = _train_each_way(case, (3, 1))
    expected = trained.pop("cat")
    wrong = [*_differences_between(trained, expected), *_far_from(_train(case, (3, 1), plain=True), expected)]
    return wrong, fsdp.explain(trained["views"].model).declined


def test_a_gradient_that_stays_in_a_branch_is_right_and_named() -> None:
    [(wrong, declined)] = pool.run(1, _left_in_a_branch)
    assert wrong == []
    assert declined


def _error_of_parts() -> str:
    model: Any = compiled(fsdp.shard(build(_two_layers)))
    output = model(TwoTensor(torch.ones(4, WIDTH), torch.zeros(4, WIDTH)))
    with pytest.raises(NotImplementedError) as raised:
        output.sum().backward()
    return str(raised.value)


def test_a_gradient_of_several_parts_is_refused() -> None:
    """AOTAutograd takes it apart: its shard would keep one of them."""
    assert pool.run(1, _error_of_parts) == [
        "gradients of unit '2': expected plain tensors, got 2 parts of each, as of a tensor subclass; "
        "give the model plain tensors"
    ]
