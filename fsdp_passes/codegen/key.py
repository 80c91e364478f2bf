"""When two regions are the same to a compiler: equal but for the names of nodes, attributes and symbols."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fsdp_passes._compat import graph_module, storage_id, tensor_bytes
from fsdp_passes.ir.nodes import attribute
from fsdp_passes.ir.text import dump
from fsdp_passes.ir.types import UNKNOWN


def canonical(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of `gm` whose nodes and attributes, those of the graphs that it calls too, are named by position."""
    attributes: dict[str, Any] = {}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        name, target = f"v{len(copies)}", node.target
        if node.op == "get_attr":
            target = f"c{len(attributes)}"
            value = attribute(gm, node)
            attributes[target] = canonical(value) if isinstance(value, fx.GraphModule) else value
        elif node.op == "placeholder":
            target = name
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.create_node(node.op, target, args, kwargs, name)
        copies[node].meta = {key: value for key, value in node.meta.items() if key != "fsdp"}
    return graph_module(attributes, graph, "region")


def region_key(gm: fx.GraphModule) -> str | None:
    """A digest of `gm`, a canonical graph: operators, types, devices, aliases among inputs, values of constants.

    None: it cannot be compared. The graph language has no words for one of its nodes, a tensor has no values or no
    strides, a size depends on data, of which code may take for granted what the graph does not show, or it calls a
    kernel of the user's, of which the graph has only a number.
    """
    values = [node.meta.get("val") for node in gm.graph.nodes]
    try:
        text, constants = dump(gm), _constants(gm)
    except (ValueError, NotImplementedError):
        return None
    if f": {UNKNOWN} = " in text or "triton_kernel_wrapper" in text or any(map(free_unbacked_symbols, values)):
        return None
    devices = [str(value.device) for value in values if isinstance(value, Tensor)]
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    storages = [storage_id(value) for value in tensors]
    places = [
        (storages.index(storage), str(value.storage_offset())) for storage, value in zip(storages, tensors, strict=True)
    ]
    return hashlib.sha256(repr((text, devices, places, constants)).encode()).hexdigest()


def _constants(gm: fx.GraphModule) -> list[str]:
    """Digests of the tensors that `gm`, or a graph that it calls, reads as attributes, in the order of the graph."""
    found: list[str] = []
    for node in gm.graph.find_nodes(op="get_attr"):
        value = attribute(gm, node)
        found += _constants(value) if isinstance(value, fx.GraphModule) else [_digest(value)]
    return found


def _digest(tensor: Tensor) -> str:
    return f"{tensor.device} {hashlib.sha256(tensor_bytes(tensor)).hexdigest()}"
