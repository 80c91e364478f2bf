"""The text of a graph: what it looks like, that it loads back, and what it refuses."""

import functools
import itertools
import logging
import math
import re
import warnings

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

from fsdp_passes.ir import text as language
from fsdp_passes.ir.ops import ShardInput
from fsdp_passes.ir.text import dump, load


@pytest.fixture(autouse=True)
def no_trace_log(monkeypatch):
    """pytest's log handler makes torch write its trace, for each guard: three times the run time."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)


def capture(function, *args, dynamic=False, **kwargs):
    """The graphs that AOTAutograd makes of `function`: forward, and backward if the result has a gradient."""
    graphs = []

    def keep(gm, example_inputs):
        graphs.append(gm)
        return gm

    def backend(gm, example_inputs):
        compilers = dict.fromkeys(("fw_compiler", "bw_compiler", "inference_compiler"), keep)
        return aot_autograd(partition_fn=min_cut_rematerialization_partition, **compilers)(gm, example_inputs)

    torch._dynamo.reset()
    with warnings.catch_warnings(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        warnings.simplefilter("ignore")  # compiled functions that take no boxed arguments
        out = torch.compile(function, backend=backend, dynamic=dynamic)(*args, **kwargs)
        loss = out.loss if hasattr(out, "loss") else out
        if loss.requires_grad:
            loss.sum().backward()
    return graphs


@functools.cache
def mlp(dynamic=False):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    return capture(model, torch.randn(4, 8), dynamic=dynamic)


def llama(dynamic=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    tokens = torch.randint(0, 64, (2, 16))
    return capture(LlamaForCausalLM(config), tokens, labels=tokens, use_cache=False, dynamic=dynamic)


def attention(dynamic=False):
    def function(x):
        return F.dropout(F.scaled_dot_product_attention(x, x, x, dropout_p=0.1, is_causal=True), 0.5)

    return capture(function, torch.randn(2, 3, 6, 8, requires_grad=True), dynamic=dynamic)


@functools.cache
def conv_net(dynamic=False):
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)]
    return capture(nn.Sequential(*layers), torch.randn(2, 3, 10, 12), dynamic=dynamic)


@functools.cache
def tensor_constant():
    values = [1.0, 2.0, 3.0]
    return capture(lambda x: x * torch.tensor(values) + math.inf, torch.randn(2, 3, requires_grad=True))


@functools.cache
def branches(dynamic=False):
    def function(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x,))

    return capture(function, torch.randn(4, 8, requires_grad=True), dynamic=dynamic)


def recomputed_dropout():
    def function(x):
        return checkpoint(lambda y: F.dropout(y.sin(), 0.5) @ y.t(), x, use_reentrant=False)

    return capture(function, torch.randn(4, 8, requires_grad=True))


def data_dependent():
    def function(x):
        rows = x.sum(1).nonzero()
        return x[rows[:, 0]].sum() + x.new_ones(rows.shape[0] * 2 + 1).sum()

    return capture(function, torch.randn(4, 8, requires_grad=True))


def size_arithmetic():
    def function(x):
        rows = x.reshape(-1, 2, x.shape[0] // 2, x.shape[1] // 2 * 2)
        return rows.mean() * (x.shape[0] + max(x.shape[0], 5))

    return capture(function, torch.randn(4, 8, requires_grad=True), dynamic=True)


CAPTURES = {
    "mlp": mlp,
    "mlp dynamic": lambda: mlp(dynamic=True),
    "llama": llama,
    "llama dynamic": lambda: llama(dynamic=True),
    "attention": attention,
    "attention dynamic": lambda: attention(dynamic=True),
    "conv net": conv_net,
    "conv net dynamic": lambda: conv_net(dynamic=True),
    "tensor constant": tensor_constant,
    "branches": branches,
    "branches dynamic": lambda: branches(dynamic=True),
    "recomputed dropout": recomputed_dropout,
    "data dependent": data_dependent,
    "size arithmetic": size_arithmetic,
}


SLOW = {"llama dynamic"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CAPTURES]
)
def test_captured_graphs_load_back(name):
    graphs = CAPTURES[name]()
    assert len(graphs) == 2
    for gm in graphs:
        text = dump(gm)
        loaded = load(text)
        assert dump(loaded) == text
        assert text.isascii()
        assert_same_nodes(loaded, gm)


def assert_same_nodes(loaded, gm):
    for new, old in zip(loaded.graph.nodes, gm.graph.nodes, strict=True):
        assert new.target == old.target or old.op in ("get_attr", "output")
        if old.op != "output":
            assert new.name == old.name
            assert ("val" in new.meta) == ("val" in old.meta or old.name.startswith("_assert")), old
        if isinstance(old.meta.get("val"), torch.Tensor):
            assert new.meta["val"].dtype == old.meta["val"].dtype
            assert new.meta["val"].dim() == old.meta["val"].dim()


def test_every_written_type_is_checked():
    """In a graph of one dtype, another dtype on any line that computes something is refused, on that line."""
    _, backward = mlp(dynamic=True)
    lines = dump(backward).splitlines()
    computed = [i for i, line in enumerate(lines) if " = " in line and "input()" not in line]
    assert len(computed) > 15
    for i in computed:
        wrong = [*lines[:i], lines[i].replace(": f32[", ": bf16[", 1), *lines[i + 1 :]]
        with pytest.raises(TypeError, match=rf"line {i + 1}: written bf16.*, inferred f32"):
            load("\n".join(wrong))


def test_every_written_size_is_checked():
    lines = dump(mlp(dynamic=True)[1]).splitlines()
    computed = [i for i, line in enumerate(lines) if "s0" in line and "input()" not in line]
    assert len(computed) > 5
    for i, size in itertools.product(computed, ("24", "s0 + 1", "s1")):
        wrong = [*lines[:i], lines[i].replace("s0", size, 1), *lines[i + 1 :]]
        with pytest.raises(TypeError, match=rf"line {i + 1}: written"):
            load("\n".join(wrong))


def test_symbols_are_numbered_by_appearance_and_no_guard_is_added():
    forward, _ = conv_net(dynamic=True)
    values = [node.meta.get("val") for node in forward.graph.nodes]
    symbols = [value for value in values if isinstance(value, torch.SymInt)]
    env = symbols[0].node.shape_env
    guards = len(env.guards)
    text = dump(forward)
    assert len(env.guards) == guards
    assert list(dict.fromkeys(re.findall(r"\bs\d+\b", text))) == ["s0", "s1", "s2"]
    assert {str(symbol) for symbol in symbols}.isdisjoint({"s0", "s1", "s2"})


def test_bodies_of_higher_order_operators_are_loaded():
    gm = load(dump(branches()[0]))
    assert isinstance(gm.true_graph_0, fx.GraphModule)
    assert [node.name for node in gm.true_graph_0.graph.nodes] == ["arg0_1", "sin", "mul", "output"]


def test_constants_load_as_empty_tensors_of_their_type():
    gm = load(dump(tensor_constant()[0]))
    assert (gm._tensor_constant0.dtype, tuple(gm._tensor_constant0.shape)) == (torch.float32, (3,))


def example_of_the_module():
    return "".join(f"{line[4:]}\n" for line in language.__doc__.splitlines() if re.match(r" {7}\d", line))


def test_the_example_in_the_documentation_is_the_language():
    gm = load(example_of_the_module())
    assert dump(gm) == example_of_the_module()
    (shard,) = gm.graph.find_nodes(op="placeholder")
    assert shard.meta["fsdp"] == ShardInput("layers.0")
    (release,) = gm.graph.find_nodes(op="call_function", target=torch.ops.fsdp_opt.release.default)
    assert release.meta["val"] is None


class TestSnapshot(expecttest.TestCase):
    maxDiff = None

    def test_forward_and_backward(self):
        def function(x, w):
            return F.relu(x @ w.t()).sum()

        inputs = torch.randn(4, 8), torch.randn(2, 8, requires_grad=True)
        forward, backward = capture(function, *inputs, dynamic=True)
        self.assertExpectedInline(
            dump(forward),
            """\
   0         primals_1: sym[s0] = input()
   1         primals_2: sym[s1] = input()
   2         primals_3: f32[s0,s1] = input()
   3         primals_4: sym[s2] = input()
   4         primals_5: f32[s2,s1] = input()
   5         t: f32[s1,s0]{1,s1} = aten.t(primals_3)
   6         mm: f32[s2,s0] = aten.mm(primals_5, t)
   7         relu: f32[s2,s0] = aten.relu(mm)
   8         detach: f32[s2,s0] = aten.detach(relu)
   9         sum_1: f32[] = aten.sum(relu)
  10         detach_1: f32[s2,s0] = aten.detach(detach)
  11         return (sum_1, primals_5, detach_1, primals_1, primals_4, primals_2)
""",
        )
        self.assertExpectedInline(
            dump(backward),
            """\
   0         primals_1: sym[s0] = input()
   1         primals_4: sym[s1] = input()
   2         primals_2: sym[s2] = input()
   3         primals_5: f32[s1,s2] = input()
   4         detach_1: f32[s1,s0] = input()
   5         tangents_1: f32[] = input()
   6         expand: f32[s1,s0]{0,0} = aten.expand(tangents_1, [primals_4, primals_1])
   7         threshold_backward: f32[s1,s0] = aten.threshold_backward(expand, detach_1, 0)
   8         t_1: f32[s0,s1]{1,s0} = aten.t(threshold_backward)
   9         mm_1: f32[s0,s2] = aten.mm(t_1, primals_5)
  10         t_2: f32[s2,s0]{1,s2} = aten.t(mm_1)
  11         t_3: f32[s0,s2] = aten.t(t_2)
  12         return (None, None, t_3, None, None)
""",
        )

    def test_branches(self):
        self.assertExpectedInline(
            dump(branches()[0]),
            """\
   0         primals_1: f32[4,8] = input()
   1         sum_1: f32[] = aten.sum(primals_1)
   2         gt: b8[] = aten.gt.Scalar(sum_1, 0)
   3         true_graph_0: graph = get_attr("true_graph_0")
   4         false_graph_0: graph = get_attr("false_graph_0")
   5         cond: (f32[4,8],) = higher_order.cond(gt, true_graph_0, false_graph_0, (primals_1,))
   6         getitem: f32[4,8] = cond[0]
   7         return (getitem, primals_1, gt)

graph true_graph_0:
   0         arg0_1: f32[4,8] = input()
   1         sin: f32[4,8] = aten.sin(arg0_1)
   2         mul: f32[4,8] = aten.mul.Tensor(sin, 2)
   3         return (mul,)

graph false_graph_0:
   0         arg0_1: f32[4,8] = input()
   1         cos: f32[4,8] = aten.cos(arg0_1)
   2         return (cos,)
""",
        )


TYPES = [
    "f32[]",
    "f32[0,3]",
    "f32[0,3]{1,1}",
    "bf16[2,64]{1,2}",
    "f32[1,2]{7,1}",
    "f32[4]{0}",
    "c64[2]",
    "b8[2]",
    "f8e4m3fn[2]",
    "f32[2]@cuda",
    "f32[2]@meta",
    "i64[s0,s1 + 1]{1,s0}",
    "f32[s0*s1,2]",
    "f32[u0,4]",
    "f32[Max(1, s0 - 2),(s0//2),Mod(s0, 8)]",
    "sym[s0 + 1]",
    "sym[u0]",
    "symfloat[ToFloat(s0)]",
    "symfloat[zf0]",
    "symbool[s0 >= 4]",
    "symbool[Eq(s0, 4)]",
    "int[-5]",
    "float[inf]",
    "bool[True]",
    "none",
    "(f32[2], none, i64[])",
    "(f32[2,3]{1,2},)",
    "()",
    "?",
]


@pytest.mark.parametrize("written", TYPES)
def test_types_load_back(written):
    text = f"   0         x: {written} = input()\n   1         return (x,)\n"
    assert dump(load(text)) == text


ARGUMENTS = [
    "None, True, 3, -3, 9223372036854775807",
    "0.1, -0.0, inf, -inf, nan, 1e-05",
    "complex(0.0, -1.0), complex(inf, 0.0)",
    r'"a", "it\'s \"\\ \n \xe9 \u20ac", ""',
    "[1, [x, None]], (x,), (), []",
    '{"a": 1, "b": x}',
    'torch.bfloat16, torch.strided, torch.channels_last, device("cuda")',
    'slice(None, x, 2), op("aten.native_dropout")',
    "dim=1, names=[x]",
]


@pytest.mark.parametrize("written", ARGUMENTS)
def test_arguments_load_back(written):
    # A line of unknown type is not run, so that it may hold any arguments.
    arguments = written.replace(r"\'", "'")
    lines = ["x: f32[] = input()", f"y: ? = aten.add.Tensor({arguments})", "return y"]
    text = "".join(f"{i:4}         {line}\n" for i, line in enumerate(lines))
    assert dump(load(text)) == text


def test_what_depends_on_the_rank_is_left_out():
    gm = load("0 x: f32[2]@cuda = input()\n1 return x\n")
    (x,) = gm.graph.find_nodes(op="placeholder")
    device = {"device": torch.device("cuda", 3)}
    with gm.graph.inserting_after(x):
        gm.graph.call_function(torch.ops.aten.empty.memory_format, ([2],), device)
    assert x.meta["val"].device.index is not None
    assert not re.search(r"cuda.?\d|cuda:", dump(gm))
    assert 'device("cuda")' in dump(gm)


ACCEPTED = {
    "sizes that must divide by five": """
        0 x: f32[s0] = input()
        1 y: f32[(s0//5),5] = aten.view(x, [-1, 5])
        2 return y
        """,
    "another way to write the inferred size": """
        0 x: f32[s0] = input()
        1 y: f32[Max(1, s0 - 2)] = aten.slice.Tensor(x, 0, 2)
        2 return y
        """,
    "the readers of a line of unknown type": """
        0 x: f32[2] = input()
        1 y: ? = aten.neg(x)
        2 z: bf16[7] = aten.neg(y)
        3 return z
        """,
    "sizes and functions of sizes": """
        0 n: sym[s0] = input()
        1 half: symfloat[IntTrueDiv(s0, 2)] = operator.truediv(n, 2)
        2 up: sym[CeilToInt(IntTrueDiv(s0, 2))] = math.ceil(half)
        3 big: sym[Max(s0, CeilToInt(IntTrueDiv(s0, 2)))] = torch.sym_max(n, up)
        4 return big
        """,
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name):
    text = dump(load(ACCEPTED[name]))
    assert dump(load(text)) == text
    written = [re.sub(r"^ *\d+ +", "", line) for line in ACCEPTED[name].splitlines() if line.strip()]
    assert [re.sub(r"^ *\d+ +", "", line) for line in text.splitlines()] == written


HEAD = "# comment\n\n   0         x: f32[2,3] = input()\n"
REFUSED = [
    ("1 y: f32[2,3] = aten.t(x)", TypeError, "line 4: written f32[2,3], inferred f32[3,2]{1,3}: "),
    ("1 y: f32[3,2] = aten.t(x)", TypeError, "line 4: written f32[3,2], inferred f32[3,2]{1,3}: "),
    ("1 y: f16[2,3] = aten.neg(x)", TypeError, "line 4: written f16[2,3], inferred f32[2,3]: "),
    ("1 y: f32[2,3]@cuda = aten.neg(x)", TypeError, "line 4: written f32[2,3]@cuda, inferred f32[2,3]: "),
    ("1 y: none = aten.neg(x)", TypeError, "line 4: written none, inferred f32[2,3]: "),
    ("1 y: (f32[2,3],) = aten.unbind.int(x)", TypeError, "line 4: written (f32[2,3],), inferred (f32[3], f3"),
    ("1 y: f32[2,3] = aten.mm(x, x)", TypeError, "line 4: the operator does not take these arguments ("),
    ("1 y: int[3] = aten.sym_size.int(x, 0)", TypeError, "line 4: written int[3], inferred int[2]: "),
    ("1 y: f32[2,3] == aten.neg(x)", SyntaxError, "line 4: not a line of a graph: 1 y: f32[2,3] =="),
    ("y: f32[2,3] = aten.neg(x)", SyntaxError, "line 4: not a line of a graph"),
    ("1 y: f32[2,3] = aten.neg(z)", SyntaxError, "line 4: unknown name 'z'"),
    ("1 y: f32[2,3] = z[0]", SyntaxError, "line 4: unknown name 'z'"),
    ("1 return (x, z)", SyntaxError, "line 4: unknown name 'z'"),
    ("1 y: f32[2,3] = aten.negg(x)", SyntaxError, "line 4: unknown operator 'aten.negg'"),
    ("1 y: f32[2,3] = aten.neg.Tensor(x)", SyntaxError, "line 4: unknown operator 'aten.neg.Tensor'"),
    ("1 y: f32[2,3] = higher_order.nothing(x)", SyntaxError, "line 4: unknown operator 'higher"),
    ("1 y: f32[2,3] = builtins.eval(x)", SyntaxError, "line 4: unknown operator 'builtins.eval'"),
    ("1 y: f32[2,3] = torch.load(x)", SyntaxError, "line 4: unknown operator 'torch.load'"),
    ("1 x: f32[2,3] = input()", SyntaxError, "line 4: 'x' is defined twice"),
    ("1 def: f32[2,3] = input()", SyntaxError, "line 4: 'def' cannot be the name of a node"),
    ("1 issue y: f32[2,3] = aten.neg(x)", SyntaxError, "line 4: expected lane '', got 'issue'"),
    ("1 release = fsdp_opt.release(x)", SyntaxError, "line 4: expected lane 'release', got ''"),
    ("1 release r: f32[2] = fsdp_opt.release(x)", SyntaxError, "line 4: expected no type for this operator"),
    ("1 y = aten.neg(x)", SyntaxError, "line 4: expected a type for this operator"),
    ("1 y: f99[2] = input()", SyntaxError, "line 4: unknown dtype 'f99'"),
    ("1 y: f32[k0] = input()", SyntaxError, "line 4: not a size: 'k0'"),
    ("1 y: f32[s0 +] = input()", SyntaxError, "line 4: not a size: 's0 +'"),
    ("1 y: f32[open(s0)] = input()", SyntaxError, "line 4: not a size: 'open(s0)'"),
    ("1 y: f32[2]{1,1} = input()", SyntaxError, "line 4: no tensor has this type"),
    ("1 y: f32 = input()", SyntaxError, "line 4: not a type: 'f32'"),
    ("1 y: bool[2] = input()", SyntaxError, "line 4: not a value of type bool: '2'"),
    ('1 y: f32[2] = input(unit="a")', SyntaxError, 'line 4: expected "name: type = input()"'),
    ("1 y: f32[2] = get_attr()", SyntaxError, 'line 4: expected "name: type = get_attr("path")"'),
    ('1 y: graph = get_attr("body")', SyntaxError, "line 4: there is no line 'graph body:'"),
    ("1 y: f32[2,3] = aten.neg(x))", SyntaxError, "line 4: not an argument"),
    ("1 y: f32[2,3] = aten.neg(x + 1)", SyntaxError, "line 4: not an argument: 'x + 1'"),
    ("1 y: f32[2,3] = aten.neg(torch.load)", SyntaxError, "line 4: unknown constant 'torch.load'"),
    ("1 y: f32[2,3] = aten.neg(device(3.5))", SyntaxError, "line 4: not an argument: device(3.5,)"),
    (
        "1 y: i64[2*u0,2] = aten.nonzero(x)",
        TypeError,
        "line 4: written i64[2*u0,2], inferred i64[u0,2]{1,u0}: ",
    ),
    (
        '1 issue b: graph = get_attr("body")\n2 return x\ngraph body:\n0 return 1',
        SyntaxError,
        "line 4: expected lane '', got 'issue'",
    ),
    ("1 y: f32[2,3] = aten.neg", SyntaxError, "line 4: not an operation: 'aten.neg'"),
    ("1 return x\n2 return x", SyntaxError, "line 5: a line after return"),
    ("", SyntaxError, "line 3: the graph ends without return"),
    ("1 return x\ngraph a:\ngraph a:", SyntaxError, "line 6: graph a is defined twice"),
    (
        "1 y: f32[s0] = input()\n2 z: f32[2,24] = input()\n3 a: f32[2,24] = aten.add.Tensor(y, z)",
        TypeError,
        "line 6: the operator fixes s0 to 24: 3 a: f32[2,24] =",
    ),
]


@pytest.mark.parametrize(("lines", "error", "message"), REFUSED)
def test_refused(lines, error, message):
    with pytest.raises(error, match=re.escape(message)) as caught:
        load(f"{HEAD}{lines}\n")
    assert type(caught.value) is error
    line = int(re.match(r"line (\d+)", str(caught.value))[1])
    assert str(caught.value).endswith(f"{HEAD}{lines}".splitlines()[line - 1].strip())


def test_an_error_inside_a_body_names_its_line():
    text = dump(branches()[0])
    wrong = text.replace("sin: f32[4,8]", "sin: f32[4,9]")
    line = wrong.splitlines().index(next(line for line in wrong.splitlines() if "f32[4,9]" in line)) + 1
    with pytest.raises(TypeError, match=rf"line {line}: written f32\[4,9\], inferred f32\[4,8\]: 1 +sin: "):
        load(wrong)


@pytest.mark.parametrize(
    ("op", "target", "args", "message"),
    [
        ("call_function", print, (), "node print_1: expected a torch operator or a function of sizes, got"),
        ("call_function", torch.ops.aten.neg.default, (range(3),), "node neg: expected a torch operator"),
        ("call_method", "sin", (), "node sin: expected call_function, got call_method"),
        ("get_attr", "block", (), "node block: expected get_attr of a tensor or a graph, got Linear"),
    ],
)
def test_nodes_without_words_are_refused(op, target, args, message):
    graph = fx.Graph()
    x = graph.placeholder("x")
    name = "neg" if target is torch.ops.aten.neg.default else None
    graph.output(graph.create_node(op, target, args or (x,), name=name))
    with pytest.raises(ValueError, match=message):
        dump(fx.GraphModule({"block": nn.Linear(1, 1)}, graph))
