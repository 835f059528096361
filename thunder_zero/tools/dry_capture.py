"""Captures the graph of a module that never runs, from tensors without memory.

In: a module whose parameters are placeholders, and its inputs. Out: the joint graph that a sharded model would train,
and a function that builds forward's result from the graph's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.types import py_sym_types

from thunder_zero.capture.convert import returned_message, written_message
from thunder_zero.capture.graphs import paths_of, replaced_parameter
from thunder_zero.capture.joint import joint_of, with_slices
from thunder_zero.capture.programs import restoring
from thunder_zero.capture.proxies import source_of
from thunder_zero.compat import aot, dynamo
from thunder_zero.compat.private import dynamo_config
from thunder_zero.plan.params import Plan
from thunder_zero.sharded.placeholders import Placeholder, path_of, require_unhooked, without_memory
from thunder_zero.sharded.reduce import tensors_in

FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default
HALF, WIDEST = (torch.float16, torch.bfloat16), 256


# A module's graph with its backward; for each input, the path of a parameter or None; paths of buffers and unplanned
# parameters, by the position of the input; and what builds the result of forward from the outputs of the forward trace
Exported = tuple[aot.Joint, Sequence[str | None], Mapping[int, str], Callable[[Sequence[Any]], Any]]


def export(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    plan: Plan,
    *,
    for_gpu: bool = False,
    dynamic: bool = False,
) -> Exported:
    """Capture a module's forward. Raise RuntimeError if it is not one graph, or reads a number from a tensor.

    With ``for_gpu``, the GPU's attention kernels are used even if tensors are on the CPU. With ``dynamic``, the
    arguments' sizes are symbols.
    """
    name = type(module).__name__
    captures: list[tuple[aot.Joint, Sequence[Any], Sequence[str | None], Sequence[Any]]] = []

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # Here dynamo captures a number that is read from a tensor. In training dynamo breaks the graph there.
        values = ((node, node.meta.get("example_value")) for node in graph.graph.nodes)
        numbers = [node for node, value in values if isinstance(value, py_sym_types) and aot.hint(value) is None]
        if numbers:
            return partial(_refuse, _number_message(name, numbers[0]))
        if (path := replaced_parameter(graph, inputs)) is not None:
            return partial(_refuse, written_message(path))
        if for_gpu:
            _attend_as_on_gpu(graph)
        paths, inputs = paths_of(inputs), with_slices(graph, inputs)
        joint = joint_of(graph, inputs, paths, plan)

        def run(*args: Any) -> Sequence[Any]:
            markers = tuple(_marker(joint.results[position]) for position in joint.plain_outputs())
            captures.append((joint, inputs, paths, markers))
            return markers

        return run

    capturing = partial(dynamo.capturing, [], (Placeholder, Memoryless))
    captured = dynamo.capture(module, backend, capturing, dynamic=dynamic, whole=True)
    with dynamo_config.patch(specialize_float=True):  # such as the epsilon of a norm
        returned = captured(*args, **kwargs)
    if not captures:
        raise RuntimeError(f"forward of {name} computes nothing with tensors, so there is no trace of it")
    require_unhooked(module.parameters())
    for tensor in tensors_in(returned):
        if (path := path_of(tensor)) is not None:
            raise RuntimeError(returned_message(path))
    joint, inputs, paths, markers = captures[-1]
    names = {id(tensor): name for name, tensor in (*module.named_buffers(), *module.named_parameters())}
    buffers = {
        position: names[id(value)]
        for position, value in enumerate(inputs)
        if not paths[position] and id(value) in names
    }
    return joint, paths, buffers, restoring(returned, markers, joint.plain_outputs())


class Memoryless(Tensor):
    """A contiguous tensor without memory, for code that is captured but not run. No operator accepts it."""


def shape_of(tensor: Tensor) -> Tensor:
    """Return a CPU tensor or parameter without memory, with the shape and dtype of ``tensor``."""
    kind = nn.Parameter if isinstance(tensor, nn.Parameter) else Memoryless
    return without_memory(kind, tensor, tensor.dtype, torch.device("cpu"))


def _refuse(message: str, *inputs: Any) -> NoReturn:
    raise RuntimeError(message)


def _number_message(name: str, number: fx.Node) -> str:
    file, positions = source_of(number)
    where = f" at {file}:{positions.lineno}" if positions else ""
    return (
        f"forward of {name} reads a number from a tensor{where}, where dynamo ends a graph, and a trace shows one "
        f"graph; keep it a tensor, or train a step of tz.compile and read tz.traces_of(model, graph=0)"
    )


def _marker(node: Any) -> Any:
    value = node.meta["val"] if isinstance(node, fx.Node) else node
    return shape_of(value) if isinstance(value, Tensor) else value


def _attend_as_on_gpu(graph: fx.GraphModule) -> None:
    """Change a graph of CPU tensors so that it calls the attention kernels that torch chooses on a GPU.

    On a machine without a GPU torch would trace the CPU's kernel. For attention with dropout it would trace the
    decomposed formula, whose saved values grow with the square of the sequence length.
    """
    for node in graph.graph.find_nodes(op="call_function", target=scaled_dot_product_attention):
        node.target = _attention
    graph.recompile()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention as torch does on a GPU.

    Calls in half precision without a mask use the flash kernel. Other calls use the efficient kernel. Torch chooses
    likewise (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``).
    """
    if attn_mask is None and query.dtype in HALF and query.shape[-1] <= WIDEST:
        output: Tensor = FLASH(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return output
    if enable_gqa:
        key, value = (heads.repeat_interleave(query.shape[-3] // heads.shape[-3], -3) for heads in (key, value))
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    output = EFFICIENT(query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale)[0]
    return output
