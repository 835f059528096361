"""needed while: AOTAutograd gives its joint graph under private names.

All that ``tz.compile`` asks of AOTAutograd: :func:`export` traces a graph of dynamo, forward and backward in one graph;
:func:`compiled` makes a function of two functions that compute the phases, with PyTorch's own handling of autograd, of
what forward writes to, and of outputs that are views of inputs. Their calling conventions::

    forward([inputs]) -> [outputs, saved tensors, saved numbers]
    backward([saved numbers, saved tensors, tangents]) -> [gradients of inputs]

A tangent is None where nothing differentiated the output. A tensor subclass, such as a DTensor, is the tensors that it
holds; opaque objects, such as meshes, are no business of the phases.
"""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node
from torch.types import py_sym_types
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from thunder_zero.compat.private import (
    GradAOTOutput,
    JointWithDescriptors,
    OutputType,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassCreationMeta,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
    TracingContext,
    aot_config,
    aot_export_joint_with_descriptors,
    aot_stage2_compile,
    cleanup_recompute_tags,
    detect_fake_mode,
    get_mkldnn_enabled,
    is_opaque_node,
    must_recompute,
    run_and_save_rng_state,
    run_with_rng_state,
    runtime_wrappers,
    set_grad_enabled,
    set_mkldnn_enabled,
    tensorify_python_scalars,
)

ALIASES = (OutputType.alias_of_input, OutputType.is_input)
RUN_AND_SAVE_STATE, RUN_WITH_STATE = run_and_save_rng_state, run_with_rng_state
ARGUMENT = re.compile(r"L\['(\w+)'\](?:\['(\w+)'\]|\[(\d+)\])?")  # of forward, by name or in *args and **kwargs
IN_PLACE = frozenset(
    ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "setitem")
)
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # functions of torch
Boxed = Callable[[list[Any]], list[Any]]


class Untraced(Exception):
    """A sentence that says what AOTAutograd does not take."""


class Phases(Protocol):
    """The two phases of a program, as functions; what forward saves, as values that look like it."""

    saved: Sequence[Any]

    def forward(self, args: list[Any]) -> list[Any]:
        """Compute outputs, and what backward reads."""

    def backward(self, args: list[Any]) -> list[Any]:
        """Compute the gradients of inputs."""


@dataclass(frozen=True)
class Joint:
    """A graph of dynamo, with its backward.

    Attributes:
        graph: its placeholders are inputs, then tangents; it returns forward's outputs, then gradients of inputs.
        differentiates: whether there is a backward.
        turns_on: whether forward turns gradients on itself, in a call that has them off.
        without_history: the positions of outputs that forward makes while it has turned gradients off, or of values
            that it makes then.
        names: of the inputs of dynamo's graph.
        outputs: how many outputs forward has, with values of inputs that it writes to. A tensor subclass counts as
            the tensors and objects that it holds.
        mutated: the positions of inputs that forward writes to.
        parts: the user's names of what functions return several of: by the graph and the name of the function's value,
            as :func:`users_value` has them, and the position.
    """

    graph: fx.GraphModule
    differentiates: bool
    turns_on: bool
    without_history: Collection[int]
    outputs: int
    mutated: Sequence[int]
    names: Sequence[str]
    parts: Mapping[tuple[int, str, int | None], str]
    exported: JointWithDescriptors

    @property
    def results(self) -> Sequence[Any]:
        """What the graph returns: nodes or None, as for opaque objects."""
        return [None if is_opaque(node) else node for node in self._output.args[0]]  # type: ignore[union-attr]

    @property
    def _output(self) -> fx.Node:
        return self.graph.graph.output_node()

    def tangents(self) -> Mapping[fx.Node, int]:
        """Return the tangents, with the positions of their outputs among forward's."""
        positions = {desc: at for at, desc in enumerate(self._output.meta["desc"][: self.outputs])}
        of = {node: _output_of(node.meta["desc"]) for node in self.placeholders()}
        return {node: positions[desc] for node, desc in of.items() if desc is not None}

    def placeholders(self) -> Sequence[fx.Node]:
        """Return the inputs and tangents that the phases get: no opaque objects."""
        return [node for node in self.graph.graph.nodes if node.op == "placeholder" and not is_opaque(node)]

    @property
    def returns_subclasses(self) -> bool:
        """Whether an output of forward is a part of a tensor subclass."""
        descs = self._output.meta["desc"][: self.outputs]
        return any(isinstance(desc, SubclassGetAttrAOTOutput) for desc in descs)

    def plain_outputs(self) -> Sequence[int]:
        """Return the positions of the outputs of dynamo's graph among forward's, in their order.

        Raises:
            RuntimeError: an output is a tensor subclass.
        """
        if self.returns_subclasses:
            raise RuntimeError(
                "forward returns a tensor subclass, such as a DTensor, which a trace of a model that does not run "
                "cannot show; train a step of tz.compile and read tz.traces_of(model)"
            )
        descs = self._output.meta["desc"][: self.outputs]
        found = {desc.idx: at for at, desc in enumerate(descs) if isinstance(desc, PlainAOTOutput)}
        return [found[number] for number in sorted(found)]

    def gradients(self) -> Sequence[tuple[Any, int | None]]:
        """Return each gradient, with the position of the input of dynamo's graph that it is of, if it is of one."""
        descs = self._output.meta["desc"][self.outputs :]
        return [(node, _position(desc)) for node, desc in zip(self.results[self.outputs :], descs, strict=True)]

    def subclass_gradients(self) -> Sequence[int]:
        """Return the positions of the inputs of dynamo's graph whose gradients are tensor subclasses."""
        descs = self._output.meta["desc"][self.outputs :]
        found = [_position(desc.base) for desc in descs if isinstance(desc, SubclassGetAttrAOTOutput)]
        return [position for position in found if position is not None]


def is_opaque(node: Any) -> bool:
    """Return whether a node is an object that is no tensor, such as a mesh of a DTensor."""
    return bool(is_opaque_node(node))


def is_subclass(value: object) -> bool:
    """Return whether a value is a tensor that holds others, such as a DTensor."""
    return bool(is_traceable_wrapper_subclass(value))


def input_of(node: fx.Node) -> int | None:
    """Return the position of the input of dynamo's graph that a placeholder is; None if it is not a whole one."""
    desc = node.meta.get("desc")
    return desc.idx if isinstance(desc, PlainAOTInput) else None


def users_value(node: fx.Node) -> tuple[int, str] | None:
    """Return which graph of dynamo's a node comes from, such as that of a checkpoint, and the name that its value has
    there, after the user's variable or the function that made it; None for a line of backward."""
    sources = node.meta.get("from_node")
    return (sources[0].graph_id, sources[0].name) if sources else None


def variable_of(node: fx.Node) -> str | None:
    """Return the name of the user's variable that holds a node's value, with dynamo's number; None if the name is that
    of a function, or of a variable of torch's, as in ``nn.Sequential``."""
    value, callers = users_value(node), _modules_of(node)[:-1]
    is_torchs = bool(callers) and callers[-1][1].__module__.startswith("torch.nn.modules.")
    return None if value is None or is_torchs or value[1] == _function_of(node)[0] else value[1]


def module_of(node: fx.Node) -> str | None:
    """Return the path of the module of torch's whose forward has a node, from what the user's code calls ``self``."""
    is_torchs = isinstance(_function_of(node)[1], type)
    return _modules_of(node)[-1][0].partition("].")[2] or None if is_torchs else None


def _modules_of(node: fx.Node) -> list[tuple[str, type]]:
    """Return the paths and classes of the modules whose calls have a node, the innermost last."""
    return list((node.meta.get("nn_module_stack") or {}).values())


def _function_of(node: fx.Node) -> tuple[str, Any]:
    """Return the function that makes a node's value, or the class of the module of torch's that calls it, and the name
    that the value would have without a variable."""
    found: tuple[str, Any] = (node.meta.get("source_fn_stack") or (("", None),))[-1]
    return found


def sequence_number(node: fx.Node) -> int | None:
    """Return the number that autograd gives to a line of forward and to those of backward that compute its gradient."""
    number: int | None = node.meta.get("seq_nr")
    return number


def argument_of(node: fx.Node) -> str | None:
    """Return the user's name of an input of dynamo's graph, if it is an argument of forward."""
    source = node.meta.get("grapharg")
    found = ARGUMENT.fullmatch(str(source.source.name)) if source is not None else None
    if found is None:
        return None
    return found[2] or (f"{found[1]}_{found[3]}" if found[3] else found[1])


def buffer_of(node: fx.Node) -> str | None:
    """Return the path of the buffer that an input of dynamo's graph is, or of the parameter."""
    source = node.meta.get("grapharg")
    found = re.findall(r"\._(modules|buffers|parameters)\['([^']+)'\]", str(source.source.name)) if source else []
    return ".".join(name for _, name in found) if found and found[-1][0] != "modules" else None


def is_backward(node: fx.Node) -> bool:
    """Return whether autograd made a node for backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def is_checkpointed(node: fx.Node) -> bool:
    """Return whether a checkpoint says that backward computes a node again."""
    return bool(must_recompute(node))


def let_checkpoints_end(graph: fx.GraphModule) -> None:
    """Take the tag off what one checkpoint hands to the next."""
    cleanup_recompute_tags(graph, is_default_partition=False)


def generator_state(like: Tensor) -> Tensor:
    """Return what the state of the generator of a fake tensor's device looks like."""
    state = torch.get_rng_state() if like.device.type == "cpu" else torch.empty(16, dtype=torch.uint8)
    with like.fake_mode:  # type: ignore[attr-defined]  # it is a FakeTensor
        return torch.empty(state.shape, dtype=state.dtype)


def _output_of(desc: Any) -> Any:
    """Return the output that a tangent is of; None for an input."""
    if isinstance(desc, SubclassGetAttrAOTInput):
        of = _output_of(desc.base)
        return None if of is None else SubclassGetAttrAOTOutput(of, desc.attr)
    return desc.output if isinstance(desc, TangentAOTInput) else None


def _position(desc: Any) -> int | None:
    of = desc.grad_of if isinstance(desc, GradAOTOutput) else None
    return of.idx if isinstance(of, PlainAOTInput) else None


def _parts(graph: fx.GraphModule) -> Iterator[tuple[tuple[int, str, int | None], str]]:
    """Yield the user's names of parts of what a function of dynamo's graph returns."""
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=operator.getitem):
                of, position = node.args
                if isinstance(of, fx.Node) and isinstance(position, int) and node.name != _function_of(node)[0]:
                    yield (id(module.graph), of.name, position), node.name


def _choose_where_masks_write(graph: fx.GraphModule) -> None:
    """Rewrite ``x[mask] = value`` as a choice, if the value has no dimension for the mask's: its gradient would be one
    of unknown shape, which torch's trace refuses."""
    for node in graph.graph.find_nodes(op="call_function", target=operator.setitem):
        target, mask, value = node.args
        found = [each.meta.get("example_value") if isinstance(each, fx.Node) else each for each in node.args]
        x, index, filled = found
        if not (isinstance(x, Tensor) and isinstance(index, Tensor) and index.dtype is torch.bool and index.dim()):
            continue
        missing = x.dim() - index.dim()
        if not isinstance(filled, Tensor | float | int) or (isinstance(filled, Tensor) and filled.dim() > missing):
            continue
        with graph.graph.inserting_before(node):
            made = [mask]
            for _ in range(missing):
                made.append(graph.graph.call_method("unsqueeze", (made[-1], -1)))
            made.append(graph.graph.call_function(torch.where, (made[-1], value, target)))
            made.append(graph.graph.call_method("copy_", (target, made[-1])))
        for new in made[1:]:
            new.meta["stack_trace"] = node.meta.get("stack_trace")
        graph.graph.erase_node(node)
        graph.recompile()


def export(graph: fx.GraphModule, inputs: Sequence[Any]) -> Joint:
    """Trace a graph of dynamo, while dynamo compiles it; with a backward if an output needs a gradient.

    Raises:
        Untraced: a recurrent layer has dropout; a checkpoint has contexts of another kind than
            ``create_selective_checkpoint_contexts`` makes; an input is a nested tensor.
    """
    inputs = list(map(_with_fixed_sizes, inputs))
    recurrent = [node for node in graph.graph.nodes if getattr(node.target, "__name__", "") in RECURRENT]
    if any(map(_drops, recurrent)):
        raise Untraced(
            "a recurrent layer has dropout, which torch's trace leaves out; make each of its layers a module, and put "
            "nn.Dropout between them"
        )
    _choose_where_masks_write(graph)
    has_none = not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    turns_on = has_none and _begin_without_gradients(graph)
    try:
        off = aot_config.patch(backward_pass_autocast="off")  # as in eager mode, whose backward runs outside of it
        with ExitStack() as stack, _undefined_tensors_avoided(recurrent), off:
            exported = aot_export_joint_with_descriptors(stack, graph, tuple(inputs))
        if _copy_views_of_parameters(graph, inputs, exported._aot_state.fw_metadata.output_info):
            return export(graph, inputs)
    except AssertionError as error:
        if "`context_fn`" not in str(error):
            raise
        raise Untraced(
            "a checkpoint has a context_fn whose contexts are no TorchDispatchModes, which torch.compile needs; "
            "use torch's create_selective_checkpoint_contexts, or Policy.recompute in place of the checkpoint"
        ) from error
    state, captured = exported._aot_state, exported._aot_graph_capture
    _compute_with_tensors(captured.graph_module)
    _mark_backward(captured.graph_module)
    meta = state.fw_metadata
    if not all(map(_has_known_sizes, captured.graph_module.graph.find_nodes(op="placeholder"))):
        raise Untraced(
            "an input is a nested tensor, whose rows have a length each; give forward padded tensors, and make nested "
            "ones inside of it"
        )
    results: Any = captured.graph_module.graph.output_node().args[0]
    inner = captured.maybe_subclass_meta.fw_metadata if captured.maybe_subclass_meta else meta
    outputs = len(meta.tokens) + inner.num_forward_returns if state.needs_autograd else len(results)
    mutated = [at for at, info in enumerate(meta.input_info) if info.mutates_data or info.mutates_metadata]
    names = [
        argument_of(node) or buffer_of(node) or node.name for node in graph.graph.nodes if node.op == "placeholder"
    ]
    return Joint(
        graph=captured.graph_module,
        differentiates=state.needs_autograd,
        turns_on=turns_on,
        without_history=_made_without_gradients(graph),
        outputs=outputs,
        mutated=mutated,
        names=names,
        parts=dict(_parts(graph)),
        exported=exported,
    )


def _with_fixed_sizes(value: Any) -> Any:
    """Return a parameter that dynamo has not seen, a slice of one that it has, as a fake one: AOTAutograd would make
    symbols of its sizes. Any other value stays."""
    context = TracingContext.try_get()
    is_new = isinstance(value, nn.Parameter) and context is not None and value not in context.tensor_to_context
    return context.fake_mode.from_tensor(value, static_shapes=True) if is_new else value


def _compute_with_tensors(graph: fx.GraphModule) -> None:
    """Let a graph compute with tensors where it does with floats, which change from call to call."""
    fakes = detect_fake_mode()
    if fakes is not None and fakes.shape_env is not None:
        tensorify_python_scalars(graph, fakes.shape_env, fakes)


def _has_known_sizes(node: fx.Node) -> bool:
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    return all(hint(size) is not None for size in sizes if isinstance(size, py_sym_types))


def hint(number: Any) -> int | float | bool | None:
    """Return what a symbolic number was in the call that dynamo captured; None if nobody knows."""
    known: int | float | bool | None = number
    if isinstance(number, py_sym_types):
        known = None if number.node.is_nested_int() else number.node.hint
    return known


def is_contiguous(value: Tensor) -> bool:
    """Return whether a tensor of the graph was contiguous in the call that dynamo captured."""
    if value.layout is not torch.strided:
        return False
    shape, strides = (tuple(map(hint, each)) for each in (value.shape, value.stride()))
    return torch.empty_strided(shape, strides, device="meta").is_contiguous()  # type: ignore[arg-type]


def _drops(node: fx.Node) -> bool:
    """Return whether a recurrent layer has dropout between its layers; number of layers, dropout and whether it trains
    follow one another among its arguments."""
    found = zip(node.args, node.args[1:], node.args[2:], strict=False)
    return any(
        type(layers) is int and layers > 1 and trains is True and (isinstance(dropout, fx.Node) or bool(dropout))
        for layers, dropout, trains in found
        if type(dropout) in (int, float, fx.Node)
    )


def _begin_without_gradients(graph: fx.GraphModule) -> bool:
    """Let a graph that turns gradients on begin without: AOTAutograd traces it with gradients on."""
    switches = graph.graph.find_nodes(op="call_function", target=set_grad_enabled)
    turns_on = any(node.args[0] for node in switches)
    if turns_on:
        first = next(node for node in graph.graph.nodes if node.op != "placeholder")
        with graph.graph.inserting_before(first):
            graph.graph.call_function(set_grad_enabled, (False,))
        graph.recompile()
    return turns_on


def _made_without_gradients(graph: fx.GraphModule) -> frozenset[int]:
    """Return the positions of the outputs that a graph makes while it has turned gradients off, or of such values. What
    writes in place returns what was there before, with its history."""
    enabled, made = True, set[fx.Node]()
    for node in graph.graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.target is set_grad_enabled:
            enabled = bool(node.args[0])
        elif name.endswith("_") or name in IN_PLACE:
            continue
        elif not enabled or (node.all_input_nodes and made.issuperset(node.all_input_nodes)):
            made.add(node)
    outputs: Any = graph.graph.output_node().args[0]
    return frozenset(position for position, node in enumerate(outputs) if node in made)


def _copy_views_of_parameters(graph: fx.GraphModule, inputs: Sequence[Any], infos: Sequence[Any]) -> bool:
    """Let a graph return copies in place of views of parameters: AOTAutograd would make the views anew, of rows."""
    output: Any = graph.graph.output_node()
    results, copied = list(output.args[0]), False
    for position, info in enumerate(infos):
        is_alias = info.output_type in ALIASES and info.base_idx is not None
        if is_alias and isinstance(inputs[info.base_idx], nn.Parameter):
            with graph.graph.inserting_before(output):
                results[position] = graph.graph.call_method("clone", (results[position],))
            copied = True
    if copied:
        output.args = (tuple(results),)
        graph.recompile()
    return copied


def _mark_backward(graph: fx.GraphModule) -> None:
    """Mark what depends on a tangent: torch leaves out the backward of autograd functions that a user wrote."""
    made: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder" and _output_of(node.meta.get("desc")) is not None:
            made.add(node)
        elif node.op == "call_function" and (is_backward(node) or not made.isdisjoint(node.all_input_nodes)):
            node.meta["partitioner_tag"] = "is_backward"
            made.add(node)


@contextmanager
def _undefined_tensors_avoided(recurrent: Sequence[fx.Node]) -> Iterator[None]:
    """Trace an LSTM of the CPU without mkldnn: its operator saves an undefined tensor, which torch's trace cannot."""
    before = get_mkldnn_enabled()
    set_mkldnn_enabled(before and not recurrent)
    try:
        yield
    finally:
        set_mkldnn_enabled(before)


def compiled(joint: Joint, phases: Phases, look: Callable[[Node], None]) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a function of a list of inputs that runs the phases. ``look`` gets the node of each backward before it
    runs, and may raise."""
    state, capture = _for_one_program(joint.exported)
    runs = phases if capture.maybe_subclass_meta is None and not _objects(joint) else _WithObjects(joint, phases)

    def partition(graph: fx.GraphModule, given: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        return _stubs(joint, runs.saved)

    def forward(graph: fx.GraphModule, given: Any) -> Boxed:
        return _boxed(runs.forward)

    def backward(graph: fx.GraphModule, given: Any) -> Boxed:
        return _boxed(runs.backward)

    with torch.no_grad(), aot_config.patch(donated_buffer=False), _watched(look):
        function: Callable[[list[Any]], Sequence[Any]]
        function, _ = aot_stage2_compile(state, capture, partition, forward, backward)
    return function


def _for_one_program(exported: JointWithDescriptors) -> tuple[Any, Any]:
    """Return copies of what AOTAutograd changes when it compiles."""
    state, capture = exported._aot_state, exported._aot_graph_capture
    meta = _copied_metadata(state.fw_metadata)
    meta.bw_donated_idxs = []  # None would refuse retain_graph
    if capture.maybe_subclass_meta is not None:
        subclasses = copy.copy(capture.maybe_subclass_meta)
        subclasses.fw_metadata = _copied_metadata(subclasses.fw_metadata)
        subclasses.grad_input_metas = list(map(_copied_creation, subclasses.grad_input_metas or ()))
        capture = replace(capture, maybe_subclass_meta=subclasses)
    quiet = replace(state.aot_config, enable_log=False)  # it would print the whole graph for a log
    return replace(state, fw_metadata=meta, aot_config=quiet), capture


def _copied_metadata(meta: Any) -> Any:
    meta = copy.copy(meta)
    meta.dynamic_saved_tensors_idxs = {}  # torch adds to it, by positions among the tensors that one program saves
    for name in ("subclass_inp_meta", "subclass_fw_graph_out_meta", "subclass_tangent_meta"):
        setattr(meta, name, list(map(_copied_creation, getattr(meta, name))))
    return meta


def _copied_creation(meta: Any) -> Any:
    """Return a copy of how a tensor subclass is made; another description stays."""
    if not isinstance(meta, SubclassCreationMeta):
        return meta
    copied = copy.copy(meta)
    copied.attrs = {name: _copied_creation(each) for name, each in meta.attrs.items()}
    return copied


def _objects(joint: Joint) -> list[fx.Node]:
    """Return the opaque objects among the inputs."""
    nodes = joint.graph.graph.nodes
    found = [node for node in nodes if node.op == "placeholder" and is_opaque(node)]
    return [node for node in found if _output_of(node.meta["desc"]) is None]


class _WithObjects:
    """Phases of a graph with tensor subclasses or opaque objects, which AOTAutograd takes apart and puts together."""

    def __init__(self, joint: Joint, phases: Phases) -> None:
        self._phases, self._objects, self.saved = phases, _objects(joint), phases.saved
        placeholders = [node for node in joint.graph.graph.nodes if node.op == "placeholder"]
        inputs = [node for node in placeholders if _output_of(node.meta["desc"]) is None]
        self._inputs = [inputs.index(node) for node in self._objects]
        self._given: dict[int, Any] = {}  # objects that forward was given last, by those that torch traced
        results: Any = joint._output.args[0]
        self._outputs, self._gradients = results[: joint.outputs], results[joint.outputs :]
        descs = joint._output.meta["desc"][joint.outputs :]
        self._parts = [at for at, desc in enumerate(descs) if isinstance(desc, SubclassGetAttrAOTOutput)]
        self._tangents = [(node, node.meta["desc"]) for node in placeholders if node not in inputs]

    def forward(self, args: list[Any]) -> list[Any]:
        """Compute outputs, and what backward reads; objects pass."""
        for node, position in zip(self._objects, self._inputs, strict=True):
            self._given[id(node.meta["val"])] = args[position]
        plain = [arg for position, arg in enumerate(args) if position not in self._inputs]
        args.clear()
        return self._filled(self._phases.forward(plain), self._outputs)

    def backward(self, args: list[Any]) -> list[Any]:
        """Compute the gradients of the inputs; objects pass, and a subclass that has no gradient gets zeros."""
        count = len(self.saved)
        plain = [*args[:count], *self._flat(args[count:])]
        args.clear()
        gradients = self._filled(self._phases.backward(plain), self._gradients)
        for position in self._parts:
            if gradients[position] is None:
                gradients[position] = _zeros(self._gradients[position].meta["val"])
        return gradients

    def _flat(self, tangents: Sequence[Any]) -> Iterator[Any]:
        """Yield each tensor of the tangents; None for each of one that nobody made, of which torch gives one None."""
        given, before, missing = iter(tangents), None, False
        for node, desc in self._tangents:
            of = _whole(desc)
            value = None if of == before and missing else next(given)
            if of != before:
                before, missing = of, value is None
            if not is_opaque(node):
                yield value

    def _filled(self, results: list[Any], nodes: Sequence[Any]) -> list[Any]:
        """Put objects into results: that of an input, or else the one that torch traced. A node may be of a tangent, as
        torch traces an object that is there twice as one."""
        for position, node in enumerate(nodes):
            if is_opaque(node):
                traced = node.meta["val"]
                results[position] = self._given.get(id(traced), traced.real_obj)
        return results


def _whole(desc: Any) -> Any:
    """Return the tangent that a part of one belongs to."""
    return _whole(desc.base) if isinstance(desc, SubclassGetAttrAOTInput) else desc


def _zeros(like: Tensor) -> Tensor:
    """Return zeros that look like a fake tensor."""
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def _boxed(function: Boxed) -> Boxed:
    """Mark a function as one that empties the list that it is given."""

    def boxed(args: list[Any]) -> list[Any]:
        return function(args)

    vars(boxed)["_boxed_call"] = True
    return boxed


@contextmanager
def _watched(look: Callable[[Node], None]) -> Iterator[None]:
    """Let the autograd function that is made inside give None for a tangent that nobody made, where torch would make
    zeros, and call ``look`` before each backward."""
    factory: Any = runtime_wrappers._AOTDispatchAutogradFunctionFactory
    build = factory.build

    def build_watched(self: Any) -> Any:
        function = build(self)
        forward, backward = function.forward, function.backward

        def forward_watched(ctx: Any, *args: Any) -> Any:
            ctx.set_materialize_grads(False)
            return forward(ctx, *args)

        def backward_watched(ctx: Any, *grads: Any) -> Any:
            look(ctx)
            return backward(ctx, *grads)

        function.forward, function.backward = staticmethod(forward_watched), staticmethod(backward_watched)
        return function

    factory.build = build_watched
    try:
        yield
    finally:
        factory.build = build


def _stubs(joint: Joint, saved: Sequence[Any]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return graphs of the calling conventions alone, of which AOTAutograd reads what is saved; nothing runs them."""
    forward, backward = fx.Graph(), fx.Graph()
    placeholders = [node for node in joint.graph.graph.nodes if node.op == "placeholder"]
    inputs = [_copied(forward, node) for node in placeholders if _output_of(node.meta["desc"]) is None]
    made = forward.call_function(_stub, tuple(inputs))
    results: Any = joint._output.args[0]
    outputs = [_item(forward, made, node) for node in results[: joint.outputs]]
    kept = [_item(forward, made, value) for value in saved]
    forward.output((*outputs, *kept)).meta["desc"] = [*joint._output.meta["desc"][: joint.outputs], *[None] * len(kept)]
    for number, value in enumerate(sorted(saved, key=lambda value: isinstance(value, Tensor))):
        backward.placeholder(f"saved_{number}").meta["val"] = value
    given = [_copied(backward, node) for node in placeholders if _output_of(node.meta["desc"]) is not None]
    made = backward.call_function(_stub, tuple(given))
    grads = tuple(_item(backward, made, node) for node in results[joint.outputs :])
    backward.output(grads).meta["desc"] = list(joint._output.meta["desc"][joint.outputs :])
    return fx.GraphModule(nn.Module(), forward), fx.GraphModule(nn.Module(), backward)


def _stub(*args: Any) -> Any:
    raise AssertionError("a stub does not run")


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    new = graph.placeholder(node.name)
    new.meta.update(node.meta)
    return new


def _item(graph: fx.Graph, made: fx.Node, of: Any) -> Any:
    """Return a node that looks like another node, or like a value; None, and numbers, stay."""
    if of is None or isinstance(of, int | float):
        return of
    new = graph.call_function(_stub, (made,))
    new.meta.update(of.meta if isinstance(of, fx.Node) else {"val": of})
    return new
