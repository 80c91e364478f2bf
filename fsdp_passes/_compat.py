"""Every private torch name that the package uses, each with the versions it was checked on."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

TESTED_VERSIONS = ("2.13", "2.14")
_MEMORY = "_fsdp_passes_memory"  # an attribute of storages

P = ParamSpec("P")
T = TypeVar("T")


def warn_if_untested(version: str) -> None:
    """A warning, never a failure, where the whole test suite did not run on that version of torch."""
    if ".".join(version.split(".")[:2]) not in TESTED_VERSIONS:
        warnings.warn(
            f"fsdp_passes: expected torch {' or '.join(TESTED_VERSIONS)}, which it is tested on, got {version}; "
            "it may work all the same",
            stacklevel=3,
        )


# How Dynamo writes `with torch.no_grad()` and `with torch.inference_mode()` into a graph: +1 enters, -1 leaves.
SET_GRAD_ENABLED = torch._C._set_grad_enabled  # torch 2.13
INFERENCE_MODE = {
    torch.autograd.grad_mode._enter_inference_mode: +1,  # torch 2.13
    torch.autograd.grad_mode._exit_inference_mode: -1,  # torch 2.13
}


def skip_frame(function: Callable[..., Any]) -> None:
    """Dynamo never compiles `function`'s frame on its own; traced callers still inline it."""
    from torch._dynamo.eval_frame import skip_code  # torch 2.13

    skip_code(function.__code__)


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward that runs now (the outermost one) is over."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # torch 2.13


def running_backward() -> int | None:
    """The number of the backward that runs in this thread; None outside of one."""
    number = torch._C._current_graph_task_id()  # torch 2.13
    return None if number == -1 else number


def backward_reaches(leaf: Tensor) -> bool:
    """Whether the backward that runs now accumulates into `leaf`: not when it is asked for other gradients only."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    return torch._C._will_engine_execute_node(node)  # torch 2.13


@torch.compiler.assume_constant_result
def traced_functions() -> list[tuple[str, str]]:
    """(file, name) of the functions that Dynamo traces now, the outermost first.

    Only for code that is traced, where it becomes a constant.
    """
    return [(frame.filename, frame.name) for frame in torch._guards.TracingContext.extract_stack()]  # torch 2.13


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` is a dimension of; `mesh` itself when it is none."""
    return mesh._get_root_mesh()  # torch 2.13


def known_groups() -> list[dist.ProcessGroup]:
    """The process groups that this rank is in."""
    return list(dist.distributed_c10d._world.pg_names)  # torch 2.13


def group_timeout(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """How long a collective of the group may take; None: its backend does not say."""
    backend = group._get_backend(group._device_types[0])  # torch 2.13
    return getattr(getattr(backend, "options", None), "_timeout", None)  # torch 2.13


def min_cut_partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
    from torch._functorch.partitioners import min_cut_rematerialization_partition  # torch 2.13

    return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)


def aot_compile(gm: Any, example_inputs: Any, **compilers: Any) -> Callable[..., Any]:
    """AOTAutograd over Dynamo's graph."""
    from torch._dynamo.backends.common import aot_autograd  # torch 2.13

    return aot_autograd(keep_inference_input_mutations=True, **compilers)(gm, example_inputs)


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """What a graph is decomposed into before Inductor; nothing while it emulates eager's roundings.

    aten.zeros stays whole: it tells a gradient that autograd made up from one that is zero. So does aten.cat, whose
    decomposition drops empty pieces.
    """
    import torch._inductor.lowering  # torch 2.13: registers decompositions of its own
    from torch._inductor import config  # torch 2.13
    from torch._inductor.decomposition import select_decomp_table  # torch 2.13

    if emulates_eager():
        return {}
    with config.patch(fallback_random=True):
        table = dict(select_decomp_table())
    for kept in (torch.ops.aten.zeros.default, torch.ops.aten.cat.default):
        table.pop(kept, None)
    return table


def _no_decompositions() -> dict[Any, Callable[..., Any]]:
    return {}


def compile_lock() -> Any:
    """Dynamo's, under which forwards compile; a backward compiles later, and other threads may then compile, too."""
    from torch._dynamo import convert_frame  # torch 2.13

    return convert_frame.compile_lock  # torch 2.13


def emulates_eager() -> bool:
    from torch._inductor import config  # torch 2.13

    return bool(config.emulate_precision_casts)


def with_settings_of_now(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, with Inductor's settings of here and now, whenever and in whichever thread it is called.

    torch 2.13 keeps them in context variables, and autograd has a thread of its own for each GPU. In 2.11 they are the
    whole process's: there it is called with those of its call.
    """
    context = copy_context()

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return context.copy().run(function, *args, **kwargs)  # a copy: several threads may call it at a time

    return call


def is_elementwise(target: Any) -> bool:
    return is_operator(target) and torch.Tag.pointwise in target.tags


def leave_to_aten(node: Any) -> None:
    """Have Inductor call this operator's own kernel."""
    node.meta["should_fallback"] = True  # torch 2.13


def inductor_state() -> str:
    """What the code that Inductor makes depends on, besides the graph."""
    from torch._inductor import config  # torch 2.13

    modes = (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    )
    return f"{config.get_hash()!r} {modes}"


def inductor_compile(gm: Any) -> tuple[Callable[[list[Any]], Any], Callable[[], None]]:
    """`gm`, whose placeholders have fake values, compiled by Inductor; it edits `gm`.

    The first result is a function of one list that it empties. On the CPU its kernels are being compiled by
    Inductor's threads, which the second result waits for; it must be called before the first.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing  # torch 2.13
    from torch._inductor import compile_fx, config  # torch 2.13
    from torch._inductor.utils import BoxedBool  # torch 2.13

    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    values = [node.meta.get("val") for node in gm.graph.nodes]
    kwargs: dict[str, Any] = {"cudagraphs": BoxedBool(False)}
    if emulates_eager():
        kwargs["get_decomp_fn"] = _no_decompositions
    # Regions are compiled against each other's strides.
    output = gm.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # torch 2.13
    mode = detect_fake_mode(values)
    # Without a context of its own a second compilation within one of Dynamo's fails on the strides of its outputs.
    # fallback_random: what draws its random numbers itself is prepared by a pass over joint graphs that is not run.
    with tracing(TracingContext(mode)), config.patch(fallback_random=True), _late_loads(values) as loads:
        compiled = compile_fx.compile_fx_inner(gm, inputs, **kwargs)  # torch 2.13

    def load() -> None:
        for each in loads:
            each()

    return compiled, load


@contextlib.contextmanager
def _late_loads(values: list[Any]) -> Iterator[list[Callable[[], None]]]:
    """Modules that Inductor makes here, in this thread, do not wait for their kernels; the list's functions do.

    On the CPU only: elsewhere the kernels are part of what Inductor's cache on disk stores at once. Not reentrant.
    """
    from torch._inductor.async_compile import AsyncCompile  # torch 2.13

    wait, thread, loads = AsyncCompile.wait, threading.get_ident(), list[Callable[[], None]]()
    if any(isinstance(value, Tensor) and value.device.type != "cpu" for value in values):
        yield loads
        return

    def wait_later(self: Any, scope: Any) -> None:
        if threading.get_ident() == thread:
            loads.append(lambda: wait(self, scope))
        else:
            wait(self, scope)

    AsyncCompile.wait = wait_later  # type: ignore[method-assign]
    try:
        yield loads
    except BaseException:
        for load in loads:  # torch keeps the modules, and would use them as they are
            with contextlib.suppress(Exception):
                load()
        raise
    finally:
        AsyncCompile.wait = wait  # type: ignore[method-assign]


def size_facts(values: list[Any]) -> str | None:
    """What the code compiled so far takes for granted about the symbols among `values`, a region's inputs."""
    symbols = _backed_symbols(values)
    if not symbols:
        return None
    env = symbols[0].node.shape_env
    return env.produce_guards_expression(symbols, guards=env.get_pruned_guards(symbols))  # torch 2.13


def size_facts_hold(facts: str | None, values: list[Any]) -> bool:
    """Whether `facts` hold for other inputs; if so they become guards on their symbols."""
    symbols = _backed_symbols(values)
    if facts is None or not symbols:
        return facts is None
    env = symbols[0].node.shape_env
    if not env.evaluate_guards_expression(facts, [symbol.node.hint for symbol in symbols]):  # torch 2.13
        return False
    return bool(env.evaluate_guards_expression(facts, symbols))  # torch 2.13


def _backed_symbols(values: list[Any]) -> list[Any]:
    """In the order of `values`; no guard can be about an unbacked one, which has no example value."""
    return [value for value in values if isinstance(value, torch.SymInt) and value.node.has_hint()]


def example_size(size: int | torch.SymInt) -> int:
    """`size` as it was in the example, without a guard; 0 where it depends on data."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 0  # torch 2.13
    return size


def donate_no_saved_tensors() -> None:
    """Called while a forward is compiled: its backward may run again (retain_graph=True).

    Switching `donated_buffer` off for the compilation does not do: the check at run time reads the global switch,
    and takes a list that was never made for one that is not empty.
    """
    from torch._guards import TracingContext  # torch 2.13

    metadata = TracingContext.get().fw_metadata  # torch 2.13
    if metadata is not None:
        metadata.bw_donated_idxs = []  # torch 2.13


def compiled_autograd_is_on() -> bool:
    from torch._dynamo import compiled_autograd, config  # torch 2.13

    return bool(config.compiled_autograd or compiled_autograd.compiled_autograd_enabled)


def graph_module(root: Any, graph: Any, name: str) -> Any:
    """A GraphModule whose code is made when it is first called: most regions never are."""
    from torch.fx._lazy_graph_module import _LazyGraphModule  # torch 2.13

    return _LazyGraphModule(root, graph, class_name=name)


def boxed(gm: Any) -> Callable[[list[Any]], Any]:
    """`gm` as a function of one list that it empties, so that an input dies after its last use."""
    from torch.fx._lazy_graph_module import _LazyGraphModule  # torch 2.13
    from torch.fx.graph import _BoxedCodeGen  # torch 2.13

    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    _LazyGraphModule.force_recompile(gm)  # torch 2.13
    return gm.forward


def profiler_span(name: str) -> Any:
    """A named range in torch.profiler's trace; nothing to speak of when no profiler runs."""
    from torch._C._profiler import _RecordFunctionFast  # torch 2.13

    return _RecordFunctionFast(name)


def wrapper_tensor(cls: type[Tensor], like: Tensor, shape: torch.Size, requires_grad: bool = False) -> Any:
    """A contiguous tensor of class `cls` without storage, with dtype and device of `like`."""
    return Tensor._make_wrapper_subclass(  # torch 2.13
        cls, shape, dtype=like.dtype, device=like.device, requires_grad=requires_grad
    )


def mark_as_parameter(tensor: Tensor) -> None:
    """Make isinstance(tensor, nn.Parameter) hold."""
    tensor._is_param = True  # torch 2.13


def call_past_torch_function(func: Any, types: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
    """Run `func` with __torch_function__ of subclasses switched off; results are left as they are."""
    return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})  # torch 2.13


def register_foreach_type(cls: type[Tensor]) -> None:
    """Let optimizers and gradient clipping pass lists of `cls` to foreach operators. Idempotent.

    Without it clipping takes one norm, so one collective, a parameter.
    """
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers  # torch 2.13
    from torch.utils._foreach_utils import _foreach_supported_types as of_utils  # torch 2.13

    for supported in (of_optimizers, of_utils):
        if cls not in supported:
            supported.append(cls)


def skip_optimizer_helpers() -> None:
    """For an optimizer that is compiled, and runs eagerly where it meets wrapper tensors. Idempotent.

    Dynamo would compile these helpers on their own, once for each scalar, and give up on some after eight: then one
    takes tensors for what another has made numbers. Inlined in what is traced they stay what they are.
    """
    from torch.optim.optimizer import _get_value, _stack_if_compiling  # torch 2.13

    for helper in (_get_value, _stack_if_compiling):
        skip_frame(helper)


def named_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an operator by their declared names, defaults filled in."""
    declared = func._schema.arguments  # torch 2.13
    given = {argument.name: value for argument, value in zip(declared, args, strict=False)}
    return {argument.name: argument.default_value for argument in declared} | given | kwargs


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a call that the operator declares to write into."""
    declared = func._schema.arguments  # torch 2.13
    names = [argument.name for argument in declared if argument.alias_info and argument.alias_info.is_write]
    call = named_arguments(func, args, kwargs)
    return [call[name] for name in names if call[name] is not None]


def dtype_names() -> dict[torch.dtype, str]:
    """torch.bfloat16 -> "bf16", for every dtype."""
    from torch.utils._dtype_abbrs import dtype_abbrs  # torch 2.13

    return dtype_abbrs


def sympy_functions() -> Any:
    """The module of torch's own sympy functions: FloorDiv, Mod, Max, ..."""
    from torch.utils._sympy import functions  # torch 2.13

    return functions


def fake_mode(env: ShapeEnv) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode  # torch 2.13

    return FakeTensorMode(shape_env=env)


@contextlib.contextmanager
def type_inference(mode: Any) -> Iterator[None]:
    """Operators that run here on `mode`'s tensors compute types only, and keep symbolic sizes symbolic.

    Without Python kernels in the dispatcher some operators (constant_pad_nd) fix every size to its example.
    """
    from torch._dispatch.python import enable_python_dispatcher  # torch 2.13

    with torch.no_grad(), enable_python_dispatcher(), mode:
        yield


def named_symbol(env: ShapeEnv, name: str, value: int | float) -> Any:
    """A new backed symbol (a sympy.Symbol) of that name, s and digits, with that example value.

    torch numbers symbols by a hash of where they come from; the numbers decide how sympy orders a sum.
    """
    from torch._dynamo.source import ConstantSource  # torch 2.13

    env._generate_unique_id = lambda source_name: int(name.lstrip("szf"))  # type: ignore[method-assign]  # torch 2.13
    return env.create_symbol(value, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC)


def is_operator(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload)  # torch 2.13


def is_higher_order(target: object) -> bool:
    return isinstance(target, torch._ops.HigherOrderOperator)  # torch 2.13


def returns_view(target: object) -> bool:
    """Whether `target` is an operator whose (first) result is declared to alias an argument, unwritten."""
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()  # torch 2.13
    alias = returns[0].alias_info if returns else None
    return alias is not None and not alias.is_write


def returns_nothing(target: object) -> bool:
    """Whether `target` is an operator whose schema has no outputs."""
    return isinstance(target, torch._ops.OpOverload) and not target._schema.returns  # torch 2.13


def argument_index(placeholder: Any) -> int | None:
    """Which argument of the captured function a placeholder of AOTAutograd is; None: none of them."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput  # torch 2.13

    description = placeholder.meta.get("desc")
    return description.idx if isinstance(description, PlainAOTInput) else None


def gradient_indices(graph: Any) -> list[int]:
    """Of which arguments of the captured function the results of a backward graph are gradients, or parts of them."""
    from torch._functorch._aot_autograd.descriptors import (  # torch 2.13
        GradAOTOutput,
        PlainAOTInput,
        SubclassGetAttrAOTOutput,
    )

    indices = []
    for description in graph.output_node().meta.get("desc", ()):
        while isinstance(description, SubclassGetAttrAOTOutput):
            description = description.base
        if isinstance(description, GradAOTOutput) and isinstance(description.grad_of, PlainAOTInput):
            indices.append(description.grad_of.idx)
    return indices


def map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """`values` (nested lists, tuples, dicts, ...) with `function` applied to each tensor in it."""
    from torch.utils._pytree import tree_map_only  # torch 2.13

    return tree_map_only(Tensor, function, values)


def saved_tensor(stream: Any) -> tuple[Tensor, int]:
    """Of what torch.save wrote: a fake of the tensor, and at which byte of `stream` its storage begins."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # torch 2.13

    with FakeTensorMode():
        fake = torch.load(stream, weights_only=True)
    return fake, fake.untyped_storage()._checkpoint_offset  # torch 2.13


def set_along_path(nested: dict[str, Any], path: Any, value: Any) -> None:
    """nested[path[0]][path[1]]... = value; strings are keys of dicts, integers indices of lists, made where missing."""
    from torch.distributed.checkpoint._traverse import set_element  # torch 2.13

    set_element(nested, path, value)


def non_persistent_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """The buffers that no state dict holds, by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()  # torch 2.13
        if buffer is not None and name in module._non_persistent_buffers_set  # torch 2.13
    }


def swap_contents(one: Tensor, other: Tensor) -> None:
    """torch.utils.swap_tensors of two of one class, also where somebody has weak references to them, as Dynamo has."""
    torch._C._swap_tensor_impl(one, other)  # torch 2.13
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__


def storage_id(tensor: Tensor) -> int:
    """Equal for tensors that share memory; for fake ones, too."""
    return tensor.untyped_storage()._cdata  # torch 2.13


def storage_over(memory: Tensor, offset: int, elems: int, dtype: torch.dtype) -> Tensor:
    """A 1-D tensor with a storage of its own, over `memory` from byte `offset` on, which it keeps alive."""
    if memory.is_meta:  # has no addresses
        return torch.empty(elems, dtype=dtype, device="meta")
    nbytes = elems * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(  # torch 2.13
        memory.data_ptr() + offset, memory.device, nbytes
    )
    setattr(storage, _MEMORY, memory)
    return torch.empty(0, dtype=dtype, device=memory.device).set_(storage, 0, (elems,), (1,))


def tensor_bytes(tensor: Tensor) -> bytes:
    """The values of a tensor, in the order of its indices, also while graphs are traced.

    NotImplementedError: it has none (fake, meta), or they are not strided.
    """
    from torch.utils._python_dispatch import _disable_current_modes  # torch 2.13

    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        raise NotImplementedError(f"expected a strided tensor with values, got {type(tensor).__name__}")
    with _disable_current_modes():  # torch 2.13
        values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return ctypes.string_at(values.data_ptr(), values.nbytes) if values.nbytes else b""


def count(name: str) -> None:
    """Add one to what torch counts of this package: counters["fsdp_opt"][name]."""
    from torch._dynamo.utils import counters  # torch 2.13

    counters["fsdp_opt"][name] += 1


def warn_once(log: logging.Logger, message: str) -> None:
    from torch._logging import warning_once  # torch 2.13

    warning_once(log, message)


def reads_data(node: Any) -> bool:
    """Whether a node of Dynamo's graph is `tensor.data`."""
    return "_get_data_attr" in str(node.target)  # torch 2.13: torch._C._autograd._get_data_attr
