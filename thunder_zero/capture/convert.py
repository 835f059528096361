"""Converts PyTorch's joint graph into a trace: full parameters in, full gradients out.

::

    primals_2 (a parameter)             h_0_w
    mm = aten.mm(x, primals_2)    ->    y = torch.ops.aten.mm.default(x, h_0_w)
    tangents_1                          loss_grad = get_grad(loss)
    return (loss, mm_9)                 return loss, h_0_w_grad

Values have the user's names where dynamo knows them. Parameters and gradients are named after a parameter's path. The
conversion knows no plan: ``traces/insert.py`` puts gathers and reductions into the trace.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.types import py_sym_types

from thunder_zero.capture.joint import draws, readers_of_written_inputs, with_early_sums
from thunder_zero.capture.proxies import SAME, Proxies, append, fill, is_output, names_of, source_of
from thunder_zero.compat.aot.joint import Joint, input_of
from thunder_zero.compat.aot.nodes import is_backward, is_contiguous, users_value
from thunder_zero.compat.lines import set_signature
from thunder_zero.compat.private import OpOverload
from thunder_zero.traces.lift import proxies_in
from thunder_zero.traces.operators import is_view, line
from thunder_zero.traces.symbols import Facts, JointTrace, SymbolicShape, ZeroExecutor

from thunder.core import prims
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.trace import TraceCtx, get_tracectx, tracectx

# Operators that may copy replace views, because the strides of a kernel's result may differ from the strides in torch's
# trace. An example is batch norm of a transposed input.
COPYING: dict[Any, Any] = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}


@dataclass(frozen=True)
class Converted:
    """A joint graph after conversion: a joint trace, or a trace of forward alone."""

    trace: TraceCtx  # the trace of the plain module
    paths: Mapping[str, str]  # a mapping from inputs of the trace that are parameters to their paths
    values: Mapping[str, Any]  # fake values of the trace's values, keyed by name
    # (position of an output, name of its tangent) pairs, in the order of backward's inputs
    tangents: Sequence[tuple[int, str]]
    constants: Mapping[str, Tensor]  # the graph's constant tensors, keyed by the names of the trace's inputs for them
    outputs: int  # the number of outputs that AOTAutograd takes. The trace's forward returns these outputs first.
    # the number of gradients that AOTAutograd takes. The trace's backward returns these gradients first.
    gradients: int
    # the shapes of inputs that are no parameters. A symbolic size is the name of the input that is its number.
    sizes: Mapping[str, tuple[int | str, ...]]
    shapes: Mapping[str, SymbolicShape]  # the shapes of values that have symbolic sizes

    @property
    def parameters(self) -> dict[str, Any]:
        """The fake values of parameters, keyed by path."""
        return {path: self.values[name] for name, path in self.paths.items()}

    def traced(self, executor: ZeroExecutor, *, synced: bool) -> JointTrace:
        facts = Facts(executor, self.paths, synced, self.sizes, self.shapes, self.constants)
        return JointTrace(self.trace, facts)


def convert(joint: Joint, paths: Sequence[str | None], *, backward: bool) -> Converted:
    """Return the joint graph as a trace, or forward alone. Raise RuntimeError if it writes to or returns a parameter.

    ``paths`` has, for each input of dynamo's graph, the path of a parameter or None.
    """
    return _Conversion(joint, paths, backward).run()


@dataclass
class _Conversion:
    joint: Joint
    input_paths: Sequence[str | None]
    backward: bool
    proxies: Proxies = field(default_factory=Proxies)
    proxy_of: dict[fx.Node, Any] = field(default_factory=dict)
    inputs: dict[int, Any] = field(default_factory=dict)  # position of dynamo's input: proxy
    paths: dict[str, str] = field(default_factory=dict)  # name of an input that is a parameter: its path
    constants: dict[str, Tensor] = field(default_factory=dict)
    effects: list[Any] = field(default_factory=list)  # values that forward computes for no reader
    view_bases: dict[fx.Node, str] = field(default_factory=dict)  # base names of views without a variable

    def __post_init__(self) -> None:
        self.gradients = self.joint.gradients()
        self.overwritten = readers_of_written_inputs(self.joint, list(self.joint.graph.graph.nodes))
        self.names = names_of(self.joint)
        self.users_names = frozenset(self.names.values())
        self.names |= _names_of_gradients(self.gradients if self.backward else (), self.input_paths)

    def run(self) -> Converted:
        joint = self.joint
        _refuse_writes(joint, self.input_paths, backward=self.backward)
        nodes, tangents = with_early_sums(list(joint.graph.graph.nodes)), joint.tangents()
        outputs = joint.results[: joint.outputs]
        nodes = [node for node in nodes if self.backward or not is_backward(node)]
        computed = [node for node in nodes if node.op in ("call_function", "get_attr")]
        trace = TraceCtx()
        with tracectx(trace):
            args = [self._add_input(node) for node in joint.placeholders() if node not in tangents]
            args += [self._add_constant(node) for node in computed if node.op == "get_attr" and self._is_tensor(node)]
            for arg in args:
                prims.unpack_trivial(arg, name=arg.name)
            self._write_lines(computed, tangents, outputs)
            self._write_return(args, outputs)
        set_signature(trace, "computation", (arg.name for arg in args))
        trace.args = args
        read = tangents.items() if self.backward else ()
        numbers = self.proxies.numbers(args)
        tensors = [arg.name for arg in args if isinstance(arg, TensorProxy) and arg.name not in self.paths]
        return Converted(
            trace,
            self.paths,
            self.proxies.values,
            [(position, self.proxy_of[node].name) for node, position in read],
            self.constants,
            joint.outputs,
            len(self.gradients),
            self.proxies.sizes(tensors, numbers),
            self.proxies.symbolic_shapes(numbers),
        )

    def _write_lines(
        self, computed: Sequence[fx.Node], tangents: Mapping[fx.Node, int], outputs: Sequence[Any]
    ) -> None:
        late = self._read_by_backward_alone(computed, outputs)
        for node in computed:
            if node in late:
                continue
            for tangent in node.all_input_nodes:
                if tangent in tangents and tangent not in self.proxy_of:
                    self._add_tangent(tangent, outputs[tangents[tangent]])
            self._add_line(node)
        get_tracectx().set_current_source_location(None, None)
        for tangent in tangents if self.backward else ():
            if tangent not in self.proxy_of:  # it is a gradient itself, or nothing reads it
                self._add_tangent(tangent, outputs[tangents[tangent]])

    def _write_return(self, args: Sequence[Any], outputs: Sequence[Any]) -> None:
        results = tuple(self._output(node) for node in outputs)
        if not self.backward:
            prims.python_return({"flat_args": list(args), "output": results})
            return
        owners = [None if position is None else self.inputs.get(position) for _, position in self.gradients]
        other_args = [arg for arg in args if not any(arg is owner for owner in owners)]
        gradients = list(_Gradients(self).write())
        # Backward takes all numbers, since the zeros that it makes for missing tangents may have any size.
        gradients += [arg if isinstance(arg, NumberProxy) else None for arg in other_args]
        prims.python_return(
            {"flat_args": [*owners, *other_args], "output": tuple(gradients), "fw_flat_out": (*results, *self.effects)}
        )

    # Inputs

    def _add_input(self, node: fx.Node) -> Any:
        position = input_of(node)
        path = None if position is None else self.input_paths[position]
        name = node.name if position is None else self.joint.names[position]
        self.proxy_of[node] = proxy = self.proxies.make(path or name, node.meta["val"])
        if path is not None:
            self.paths[proxy.name] = path
        if position is not None:
            self.inputs[position] = proxy
        return proxy

    def _is_tensor(self, node: fx.Node) -> bool:
        return isinstance(getattr(self.joint.graph, str(node.target)), Tensor)

    def _add_constant(self, node: fx.Node) -> TensorProxy:
        value = getattr(self.joint.graph, str(node.target))
        self.proxy_of[node] = proxy = self.proxies.make(node.name, value)
        self.constants[proxy.name] = value
        return proxy

    def _add_tangent(self, node: fx.Node, output: fx.Node) -> None:
        result = self._output(output)
        self.proxy_of[node] = self.proxies.make(f"{result.name}_grad", node.meta["val"])
        append(prims.get_grad.bind(result, output=self.proxy_of[node]))

    # Lines

    def _read_by_backward_alone(self, computed: Sequence[fx.Node], outputs: Sequence[Any]) -> set[fx.Node]:
        """Return the lines of forward that only backward reads, except random lines and numbers.

        The caller writes them in backward, before their first readers, where they may read recomputed values. Random
        lines stay in forward to keep the order of draws, and numbers because they take little memory.
        """
        needed = set()
        pending = [node for node in outputs if isinstance(node, fx.Node)]
        while pending:
            if (node := pending.pop()) not in needed:
                needed.add(node)
                pending += node.all_input_nodes
        return {node for node in computed if node not in needed and not is_backward(node) and not self._stays(node)}

    def _stays(self, node: fx.Node) -> bool:
        """Return whether forward computes a node even if no line of forward reads it."""
        is_number = isinstance(node.meta.get("val"), py_sym_types)
        return not node.users or is_number or draws(node)

    def _add_line(self, node: fx.Node) -> None:
        """Write the line of a node, after the delayed lines that it reads."""
        for input_node in node.all_input_nodes:
            if input_node not in self.proxy_of:
                self._add_line(input_node)
        get_tracectx().set_current_source_location(*source_of(node))
        if node.op == "get_attr":
            self.proxy_of.setdefault(node, getattr(self.joint.graph, str(node.target)))
            return
        if node.target in SAME and not is_output(node):
            self.proxy_of[node] = self.proxy_of[node.all_input_nodes[0]]
            return
        args, kwargs = fill(node.args, self.proxy_of), fill(node.kwargs, self.proxy_of)
        if isinstance(args, tuple) and node.target is operator.getitem and isinstance(args[0], tuple | list):
            self.proxy_of[node] = args[0][args[1]]
            return
        name, value = self.names.get(node) or self._name_view(node) or node.name, node.meta.get("val")
        is_effect = not node.users and not is_backward(node) and node.is_impure()
        output = self._make_proxies(node, name, torch.empty(0) if is_effect and value is None else value)
        self.proxy_of[node] = output
        if is_effect or (isinstance(output, NumberProxy) and not is_backward(node)):
            self.effects += proxies_in(output)  # outputs of forward, or lifting would take them for backward's
        new_line = line(COPYING.get(node.target, node.target), args, kwargs, output)
        if node in self.overwritten:
            new_line.tags.add(prims.OpTags.IN_PLACE)  # backward would read what forward wrote
        append(new_line)

    def _name_view(self, node: fx.Node) -> str | None:
        """Return a name for a view without a variable, derived from its base. Return None for any other line."""
        if users_value(node) is None or not is_view(node.target):
            return None
        base, target = node.all_input_nodes[0], cast(OpOverload, node.target)
        self.view_bases[node] = self.view_bases.get(base) or self.proxy_of[base].name
        again = "_again" * (is_backward(node) and not is_backward(base))
        return f"{self.view_bases[node]}_{target.overloadpacket.__name__.removeprefix('_unsafe_')}{again}"

    def _make_proxies(self, node: fx.Node | None, name: str, value: Any) -> Any:
        """Return a proxy for the value of a node, or a tuple of proxies for several values.

        If the user's code sees only the first value, as for a layer norm, this value has the node's name. Otherwise
        each name ends with the position of its value.
        """
        if not isinstance(value, tuple | list):
            return self.proxies.make(name, value)
        getters = (user for user in (node.users if node else ()) if user.target is operator.getitem)
        takers: dict[Any, fx.Node] = {getter.args[1]: getter for getter in getters}
        others = [taker for position, taker in takers.items() if position and taker not in self.names]
        parts = [f"{name}_{position}" for position in range(len(value))]
        if not self.users_names.isdisjoint(parts):
            parts = [f"{name}__{position}" for position in range(len(value))]
        readers = (user for taker in others for user in taker.users)
        is_read_by_forward = any(not is_backward(user) and user.target not in SAME for user in readers)
        if not is_read_by_forward and None not in map(users_value, others):
            parts[:1] = [name]
        names = dict(enumerate(parts)) | {
            position: self.names[taker] for position, taker in takers.items() if taker in self.names
        }
        return tuple(
            self._make_proxies(takers.get(position), names[position], item) for position, item in enumerate(value)
        )

    def _output(self, node: Any) -> Any:
        """Return the proxy of an output of forward, or the output itself if it is not a node."""
        proxy = self.proxy_of[node] if isinstance(node, fx.Node) else node
        if isinstance(proxy, TensorProxy) and proxy.name in self.paths:
            raise RuntimeError(returned_message(self.paths[proxy.name]))
        return proxy


class _Gradients:
    """Writes the lines that backward's results need, once all other lines are written."""

    def __init__(self, conversion: _Conversion) -> None:
        self._of, self._owned = conversion, set[str]()  # names of the parameters' gradients so far

    def write(self) -> Iterator[Any]:
        yield from (self._gradient(node, owner) for node, owner in self._of.gradients)

    def _gradient(self, node: Any, owner: int | None) -> Any:
        if not isinstance(node, fx.Node):
            return None
        path = None if owner is None else self._of.input_paths[owner]
        return self._contiguous(node, owner) if path is None else self._own(node, path)

    def _own(self, node: fx.Node, path: str) -> TensorProxy:
        """Return a parameter's gradient, which is no other parameter's: then it is a clone."""
        if node.meta["val"].layout is not torch.strided:
            raise RuntimeError(
                f"backward makes a sparse gradient of parameter {path!r}, as an embedding with sparse=True does, and "
                f"gradients are reduced as dense tensors; use sparse=False"
            )
        grad: TensorProxy = self._of.proxy_of[node]
        if grad.name in self._owned:
            clone = self._of.proxies.make(f"{path}_grad", node.meta["val"])
            append(line(torch.ops.aten.clone.default, (grad,), {}, clone))
            return clone
        self._owned.add(grad.name)
        return grad

    def _contiguous(self, node: fx.Node, owner: int | None) -> Any:
        """Return the gradient of an input, contiguous if the input is contiguous.

        The backward of another graph may read the gradient, and may need contiguous memory. An example is the backward
        of ``all_gather`` with gloo.
        """
        value = None if owner is None else self._of.proxies.values.get(self._of.inputs[owner].name)
        if not isinstance(value, Tensor) or not is_contiguous(value) or is_contiguous(node.meta["val"]):
            return self._of.proxy_of[node]
        copy = self._of.proxies.make(f"{node.name}_contiguous", value)
        options = {"memory_format": torch.contiguous_format}
        append(line(torch.ops.aten.clone.default, (self._of.proxy_of[node],), options, copy))
        return copy


def _names_of_gradients(gradients: Iterable[tuple[Any, int | None]], paths: Sequence[str | None]) -> dict[fx.Node, str]:
    """Return names for the nodes that compute gradients of parameters, by the first parameter's path."""
    names: dict[fx.Node, str] = {}
    for node, owner in gradients:
        if isinstance(node, fx.Node) and owner is not None and (path := paths[owner]) is not None:
            names.setdefault(node, f"{path}_grad")
    return names


def _refuse_writes(joint: Joint, paths: Sequence[str | None], *, backward: bool) -> None:
    for position in joint.mutated:
        if position < len(paths) and (path := paths[position]) is not None:
            raise RuntimeError(written_message(path))
    for position in joint.subclass_gradients() if backward else ():
        if (path := paths[position]) is not None:
            raise RuntimeError(
                f"backward makes a gradient of parameter {path!r} that is a tensor subclass, as forward computes "
                f"with an input that is one, and gradients are reduced as plain tensors; give forward a plain "
                f"tensor, as DTensor.to_local makes one"
            )


def written_message(path: str) -> str:
    return (
        f"forward writes to parameter {path!r}, of which each rank holds its own rows; write to a buffer, or put the "
        f"parameter's module into Policy.ignored"
    )


def returned_message(path: str) -> str:
    return (
        f"forward returns the parameter {path!r} itself, which is sharded; return a value computed from it, such as "
        f"param * 1, or read it with thunder_zero.full_state_dict"
    )
