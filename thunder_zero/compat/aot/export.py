"""needed while: torch has no public API for AOTAutograd's joint graph.

In: a graph of dynamo, while dynamo compiles it, and its inputs. Out: a :class:`Joint`, or the reason why
AOTAutograd cannot trace the graph (:class:`Untraced`)::

    def forward(x, w): return x @ w          joint(x, w, tangent): return x @ w, tangent @ w.t(), x.t() @ tangent
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import PythonKeyTracer
from torch.types import py_sym_types

from thunder_zero.compat.aot import rewrites
from thunder_zero.compat.aot.joint import Joint
from thunder_zero.compat.aot.nodes import argument_of, buffer_of, hint, names_of_parts
from thunder_zero.compat.private import (
    JointWithDescriptors,
    TracingContext,
    aot_config,
    aot_export_joint_with_descriptors,
    get_mkldnn_enabled,
    replaced,
    set_mkldnn_enabled,
)

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # functions of torch


class Untraced(Exception):
    """Raised if AOTAutograd cannot trace a graph of dynamo. The message says why, and what to do."""


def export(graph: fx.GraphModule, inputs: Sequence[Any]) -> Joint:
    """Trace a graph that dynamo is compiling. Also trace a backward if an output needs a gradient."""
    inputs = list(map(_with_fixed_sizes, inputs))
    recurrent = [node for node in graph.graph.nodes if getattr(node.target, "__name__", "") in RECURRENT]
    if any(map(_drops, recurrent)):
        raise Untraced(
            "a recurrent layer has dropout, which torch's trace leaves out; make each of its layers a module, and put "
            "nn.Dropout between them"
        )
    rewrites.choose_where_masks_write(graph)
    is_off = not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    turns_on = is_off and rewrites.begin_without_gradients(graph)
    exported = _exported(graph, inputs, recurrent)
    if rewrites.copy_views_of_parameters(graph, inputs, exported._aot_state.fw_metadata.output_info):
        return export(graph, inputs)
    joint = exported._aot_graph_capture.graph_module
    rewrites.compute_with_tensors(joint)
    rewrites.mark_backward(joint)
    if not all(map(_has_known_sizes, joint.graph.find_nodes(op="placeholder"))):
        raise Untraced(
            "an input is a nested tensor, whose rows have a length each; give forward padded tensors, and make nested "
            "ones inside of it"
        )
    infos = exported._aot_state.fw_metadata.input_info
    placeholders = graph.graph.find_nodes(op="placeholder")
    return Joint(
        graph=joint,
        differentiates=exported._aot_state.needs_autograd,
        turns_on=turns_on,
        without_history=rewrites.outputs_without_history(graph),
        outputs=_number_of_outputs(exported),
        mutated=[position for position, info in enumerate(infos) if info.mutates_data or info.mutates_metadata],
        names=[argument_of(node) or buffer_of(node) or node.name for node in placeholders],
        parts=dict(names_of_parts(graph)),
        exported=exported,
    )


def _exported(graph: fx.GraphModule, inputs: Sequence[Any], recurrent: Sequence[fx.Node]) -> JointWithDescriptors:
    settings = aot_config.patch(backward_pass_autocast="off")  # as in eager mode, where backward runs without autocast
    try:
        with ExitStack() as stack, _undefined_tensors_avoided(recurrent), _sources_kept(), settings:
            exported: JointWithDescriptors = aot_export_joint_with_descriptors(stack, graph, tuple(inputs))
            return exported
    except AssertionError as error:
        if "`context_fn`" not in str(error):
            raise
        raise Untraced(
            "a checkpoint has a context_fn whose contexts are no TorchDispatchModes, which torch.compile needs; "
            "use torch's create_selective_checkpoint_contexts, or Policy.recompute in place of the checkpoint"
        ) from error


def _number_of_outputs(exported: JointWithDescriptors) -> int:
    """Return how many results of a joint graph are outputs of forward. The remaining results are gradients."""
    state, capture = exported._aot_state, exported._aot_graph_capture
    if not state.needs_autograd:
        results: Any = capture.graph_module.graph.output_node().args[0]
        return len(results)
    subclasses = capture.maybe_subclass_meta
    inner = subclasses.fw_metadata if subclasses else state.fw_metadata
    return len(state.fw_metadata.tokens) + int(inner.num_forward_returns)


def _with_fixed_sizes(value: Any) -> Any:
    """Return a fake with fixed sizes for a parameter that is new to dynamo, and any other value unchanged.

    Dynamo does not know slices of parameters, and AOTAutograd would make their sizes symbolic.
    """
    context = TracingContext.try_get()
    is_new = isinstance(value, nn.Parameter) and context is not None and value not in context.tensor_to_context
    return context.fake_mode.from_tensor(value, static_shapes=True) if is_new else value


def _has_known_sizes(node: fx.Node) -> bool:
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    return all(hint(size) is not None for size in sizes if isinstance(size, py_sym_types))


def _drops(node: fx.Node) -> bool:
    # Three consecutive arguments are the number of layers, the dropout between them, and the training flag.
    triples = zip(node.args, node.args[1:], node.args[2:], strict=False)
    return any(
        type(layers) is int and layers > 1 and is_training is True and (isinstance(dropout, fx.Node) or bool(dropout))
        for layers, dropout, is_training in triples
        if type(dropout) in (int, float, fx.Node)
    )


@contextmanager
def _undefined_tensors_avoided(recurrent: Sequence[fx.Node]) -> Iterator[None]:
    """Trace an LSTM on the CPU without mkldnn's operator, since torch cannot trace its undefined saved tensor."""
    was_enabled = get_mkldnn_enabled()
    set_mkldnn_enabled(was_enabled and not recurrent)
    try:
        yield
    finally:
        set_mkldnn_enabled(was_enabled)


class _FirstSources(dict[Any, Any]):
    def __setitem__(self, symbol: Any, source: Any) -> None:
        self.setdefault(symbol, source)


def _sources_kept() -> AbstractContextManager[None]:
    """Let a trace keep the first source of each symbol, which is an input.

    DTensors have sizes that torch computes outside of the trace, which finds their sources by symbol. A size that
    simplifies to a symbol, such as ``max(s0, 1)``, would become the symbol's source: torch would recurse without end.
    """
    init = PythonKeyTracer.__init__

    def init_with_first_sources(tracer: PythonKeyTracer) -> None:
        init(tracer)
        tracer.sympy_expr_tracker = _FirstSources()

    return replaced(PythonKeyTracer, "__init__", init_with_first_sources)
