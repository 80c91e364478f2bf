"""Every private torch name that the package uses, each with the versions it was checked on."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

TESTED_VERSIONS = ("2.13", "2.14")


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


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` is a dimension of; `mesh` itself when it is none."""
    return mesh._get_root_mesh()  # torch 2.13


def min_cut_partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
    from torch._functorch.partitioners import min_cut_rematerialization_partition  # torch 2.13

    return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)


def aot_compile(gm: Any, example_inputs: Any, **compilers: Any) -> Callable[..., Any]:
    """AOTAutograd over Dynamo's graph."""
    from torch._dynamo.backends.common import aot_autograd  # torch 2.13

    return aot_autograd(keep_inference_input_mutations=True, **compilers)(gm, example_inputs)


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


def boxed(gm: Any) -> Callable[[list[Any]], Any]:
    """`gm` as a function of one list that it empties, so that an input dies after its last use."""
    from torch.fx.graph import _BoxedCodeGen  # torch 2.13

    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
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


def map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """`values` (nested lists, tuples, dicts, ...) with `function` applied to each tensor in it."""
    from torch.utils._pytree import tree_map_only  # torch 2.13

    return tree_map_only(Tensor, function, values)


def warn_once(log: logging.Logger, message: str) -> None:
    from torch._logging import warning_once  # torch 2.13

    warning_once(log, message)


def reads_data(node: Any) -> bool:
    """Whether a node of Dynamo's graph is `tensor.data`."""
    return "_get_data_attr" in str(node.target)  # torch 2.13: torch._C._autograd._get_data_attr
