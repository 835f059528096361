"""Converts PyTorch's joint graph into a joint trace with our gathers and reductions.

::

    primals_2 (a parameter, full)    t_h_0_w (its rows); p0 = zero_all_gather(t_h_0_w, 'h.0.w'); h_0_w = zero_wait(p0)
    mm = aten.mm(x, primals_2)   ->  y = torch.ops.aten.mm.default(x, h_0_w)
    tangents_1                       loss_grad = get_grad(loss)
    return (loss, mm_9)              p9 = zero_reduce_scatter(h_0_w_grad, 'h.0.w'); t_h_0_w_grad = zero_wait(p9); return

A parameter is gathered before the first line that reads it; its gradient is reduced right after the line that makes it.
Values have the user's names where dynamo has them, and parameters, their rows and gradients the parameter's path.
The trace is what Thunder would have after autodiff and lowering, so all that follows is the same for both front ends.
"""

from __future__ import annotations

import dis
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch import SymFloat, Tensor, fx
from torch.types import py_sym_types

from thunder_zero.compat.aot import Joint, hint, input_of, is_backward, is_contiguous, users_value
from thunder_zero.compat.dynamo import users_line
from thunder_zero.compat.lines import set_signature
from thunder_zero.compat.private import OpOverload
from thunder_zero.frontends.dynamo.early_sums import with_early_sums
from thunder_zero.frontends.dynamo.names import SAME, first_free, is_output, names_of
from thunder_zero.traces.lift import proxies_in
from thunder_zero.traces.operators import draws_random_numbers, is_view, line, read_for_shape
from thunder_zero.traces.pipeline import JointTrace
from thunder_zero.traces.symbols import Facts, SymbolicShape, ZeroExecutor

from thunder.core import prims
from thunder.core.devices import to_device
from thunder.core.dtypes import to_dtype
from thunder.core.proxies import CONSTRAINT, FloatProxy, IntegerProxy, NumberProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, get_tracectx, tracectx

# A kernel may lay out its result in another way than torch's trace says, as batch norm does of a transposed input.
COPIES_IF_IT_MUST: dict[Any, Any] = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}
device_of = cache(to_device)  # which reads a device's name, of each value


@dataclass(frozen=True)
class Converted:
    """A graph as a joint trace, or as that of forward alone.

    Attributes:
        joint: the trace; its inputs that are parameters are rows.
        values: what each value of the trace looks like, by name.
        parameters: what each gathered parameter looks like, by path.
        tangents: for each tangent, in the order of backward's inputs, the position of its output, and its name.
        constants: inputs that are tensors of the graph's own, by name.
        outputs: how many outputs of forward AOTAutograd takes, the first that the trace returns.
        gradients: how many gradients, likewise.
    """

    joint: JointTrace
    values: Mapping[str, Any]
    parameters: Mapping[str, Any]
    tangents: Sequence[tuple[int, str]]
    constants: Mapping[str, Tensor]
    outputs: int
    gradients: int


def convert(
    joint: Joint, paths: Sequence[str | None], executor: ZeroExecutor, *, backward: bool, synced: bool = True
) -> Converted:
    """Return the joint graph as a trace. ``paths`` are those of the inputs of dynamo's graph that are parameters;
    without ``backward``, forward alone; ``synced``: the program reduces gradients.

    Raises:
        RuntimeError: forward writes to a parameter, or returns one.
    """
    return _Conversion(joint, paths, executor, backward, synced).run()


@dataclass
class _Conversion:
    joint: Joint
    path_of: Sequence[str | None]
    executor: ZeroExecutor
    backward: bool
    synced: bool
    made: dict[fx.Node, Any] = field(default_factory=dict)  # values of the trace, by the nodes that they stand for
    inputs: dict[int, Any] = field(default_factory=dict)  # of dynamo's graph, by their positions
    rows: dict[fx.Node, TensorProxy] = field(default_factory=dict)  # of parameters
    full: dict[str, TensorProxy] = field(default_factory=dict)  # gathered parameters, by path
    paths: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    effects: list[Any] = field(default_factory=list)  # what forward computes, whoever reads it
    viewed: dict[fx.Node, str] = field(default_factory=dict)  # names of what views without a name are views of
    sent: set[str] = field(default_factory=set)  # values that a reduction reads

    def __post_init__(self) -> None:
        self.gradients = self.joint.gradients()
        self.names = names_of(self.joint)
        self.users = frozenset(self.names.values())
        for node, (first, *_) in self._ready().items():
            self.names[node] = f"{self._path_of_gradient(first)}_grad"

    def run(self) -> Converted:
        joint = self.joint
        self._refuse_writes()
        nodes, tangents = with_early_sums(list(joint.graph.graph.nodes)), joint.tangents()
        outputs = joint.results[: joint.outputs]
        computed = [node for node in nodes if node.op in ("call_function", "get_attr") and self._is_part(node)]
        trace = TraceCtx()
        with tracectx(trace):
            args = [self._input(node) for node in joint.placeholders() if node not in tangents]
            args += [self._constant(node) for node in computed if node.op == "get_attr" and self._is_tensor(node)]
            for arg in args:
                prims.unpack_trivial(arg, name=arg.name)
            reduced: dict[int, TensorProxy] = {}  # gradients by their positions
            ready = self._ready()
            late = self._late(computed, outputs)
            for node in computed:
                if node in late:
                    continue
                for tangent in (read for read in node.all_input_nodes if read in tangents and read not in self.made):
                    self._tangent(tangent, outputs[tangents[tangent]])
                self._line(node)
                for position in ready.get(node, ()):
                    reduced[position] = self._reduced(node, position)
            trace.set_current_source_location(None, None)
            for tangent in tangents if self.backward else ():
                if tangent not in self.made:  # it is a gradient itself, or nothing reads it
                    self._tangent(tangent, outputs[tangents[tangent]])
                for position in ready.get(tangent, ()):
                    reduced[position] = self._reduced(tangent, position)
            flat = tuple(self._result(node) for node in outputs)
            result: dict[str, Any] = {"flat_args": args, "output": flat}
            if self.backward:
                of = [None if of is None else self.inputs.get(of) for _, of in self.gradients]
                rest = [arg for arg in args if not any(arg is each for each in of)]
                gradients = [self._gradient(node, number, reduced) for number, (node, _) in enumerate(self.gradients)]
                # Backward has all numbers: what it makes of missing tangents may have any size.
                gradients += [arg if isinstance(arg, NumberProxy) else None for arg in rest]
                result = {"flat_args": [*of, *rest], "output": tuple(gradients), "fw_flat_out": (*flat, *self.effects)}
            prims.python_return(result)
        set_signature(trace, "computation", (arg.name for arg in args))
        trace.args = args
        named = [(position, self.made[node].name) for node, position in tangents.items()] if self.backward else []
        numbers = {str(self.values[arg.name]): arg for arg in args if isinstance(arg, NumberProxy)}  # by their symbols
        facts = Facts(
            self.executor,
            self.executor.plan,
            self.paths,
            synced=self.synced,
            sizes=self._sizes(args, numbers),
            shapes=self._shapes(numbers),
        )
        made = JointTrace(trace, facts)
        full = {path: self.values[proxy.name] for path, proxy in self.full.items()}
        return Converted(made, self.values, full, named, self.constants, joint.outputs, len(self.gradients))

    def _refuse_writes(self) -> None:
        for position in self.joint.mutated:
            if position < len(self.path_of) and (path := self.path_of[position]) is not None:
                raise RuntimeError(written(path))
        for position in self.joint.subclass_gradients() if self.backward else ():
            if (path := self.path_of[position]) is not None:
                raise RuntimeError(
                    f"backward makes a gradient of parameter {path!r} that is a tensor subclass, as forward computes "
                    f"with an input that is one, and gradients are reduced as plain tensors; give forward a plain "
                    f"tensor, as DTensor.to_local makes one"
                )

    def _is_part(self, node: fx.Node) -> bool:
        return self.backward or not is_backward(node)

    # Inputs

    def _input(self, node: fx.Node) -> Any:
        """Return the proxy of an input: of the rows, if it is a parameter."""
        position = input_of(node)
        path = None if position is None else self.path_of[position]
        name = node.name if position is None else self.joint.names[position]
        proxy = self._proxy(name if path is None else f"t_{path}", node.meta["val"])
        if path is None:
            self.made[node] = proxy
            if position is not None:
                self.inputs[position] = proxy
            return proxy
        param, plan = self.executor.plan.by_name[path], self.executor.plan
        get_tracectx().names.discard(proxy.name)
        rows = TensorProxy(
            proxy.name,
            shape=plan.shard_shape(param),
            device=self.executor.device_at_rest(param) or proxy.device,
            dtype=to_dtype(param.rest_dtype),
            requires_grad=param.requires_grad,
        )
        self.paths[rows.name], self.rows[node] = path, rows
        assert position is not None, "it has a path"
        self.inputs[position] = rows
        return rows

    def _is_tensor(self, node: fx.Node) -> bool:
        return isinstance(getattr(self.joint.graph, str(node.target)), Tensor)

    def _constant(self, node: fx.Node) -> TensorProxy:
        value = getattr(self.joint.graph, str(node.target))
        self.made[node] = proxy = self._proxy(node.name, value)
        self.constants[proxy.name] = value
        return proxy

    def _proxy(self, name: str, value: Any) -> Any:
        """Return a proxy that looks like a tensor, or a number that differs from call to call, as in the call that
        dynamo captured; any other value stays as it is."""
        if not isinstance(value, (Tensor, *py_sym_types)):
            return value
        proxy: Proxy
        if isinstance(value, Tensor):
            proxy = TensorProxy(
                _free(name),
                shape=tuple(map(hint, value.shape)),
                device=device_of(value.device),
                dtype=to_dtype(value.dtype),
                requires_grad=False,
            )
        else:
            kind = FloatProxy if isinstance(value, SymFloat) else IntegerProxy
            proxy = kind(_free(name), value=hint(value), constraint=CONSTRAINT.DYNAMIC)
        self.values[proxy.name] = value
        return proxy

    def _tangent(self, node: fx.Node, of: fx.Node) -> None:
        result = self._result(of)
        self.made[node] = self._proxy(f"{result.name}_grad", node.meta["val"])
        _append(prims.get_grad.bind(result, output=self.made[node]))

    def _sizes(self, args: Sequence[Any], numbers: Mapping[str, NumberProxy]) -> dict[str, tuple[int | str, ...]]:
        """Return the shapes of the inputs that are no rows, with the names of numbers for sizes that are symbols."""
        names = {symbol: number.name for symbol, number in numbers.items()}
        tensors = (arg.name for arg in args if isinstance(arg, TensorProxy) and arg.name not in self.paths)
        shapes = {tensor: self.values[tensor].shape for tensor in tensors}
        return {
            tensor: tuple(size if type(size) is int else names.get(str(size), str(size)) for size in shape)
            for tensor, shape in shapes.items()
        }

    def _shapes(self, numbers: Mapping[str, NumberProxy]) -> dict[str, SymbolicShape]:
        """Return the shapes of values with sizes that are symbols, as expressions of the symbols of input numbers."""
        return {
            name: SymbolicShape(tuple(map(str, value.shape)), numbers)
            for name, value in self.values.items()
            if isinstance(value, Tensor) and any(isinstance(size, py_sym_types) for size in value.shape)
        }

    # Lines

    def _late(self, computed: Sequence[fx.Node], outputs: Sequence[Any]) -> set[fx.Node]:
        """Return the lines of forward that backward alone reads: each comes before its first reader, since there it
        may read what backward computes again. Random lines stay, as they draw in order; so do numbers, which are
        smaller than the tensors whose sizes they are."""
        needed = set()
        todo = [node for node in outputs if isinstance(node, fx.Node)]
        while todo:
            if (node := todo.pop()) not in needed:
                needed.add(node)
                todo += node.all_input_nodes
        return {node for node in computed if node not in needed and not is_backward(node) and not self._stays(node)}

    def _stays(self, node: fx.Node) -> bool:
        """Return whether forward computes a node where the graph does, whoever reads it."""
        is_number = isinstance(node.meta.get("val"), py_sym_types)
        return not node.users or is_number or draws_random_numbers(node.target, node.args, node.kwargs)

    def _line(self, node: fx.Node) -> None:
        for read in node.all_input_nodes:
            if read not in self.made:
                if read in self.rows:
                    self.made[read] = self._gathered(read)
                else:
                    self._line(read)
        get_tracectx().set_current_source_location(*source_of(node))
        if node.op == "get_attr":
            self.made.setdefault(node, getattr(self.joint.graph, str(node.target)))
            return
        if node.target in SAME and not is_output(node):
            self.made[node] = self.made[node.all_input_nodes[0]]
            return
        args, kwargs = _filled(node.args, self.made | self._stand_ins(node)), _filled(node.kwargs, self.made)
        if isinstance(args, tuple) and node.target is operator.getitem and isinstance(args[0], tuple | list):
            self.made[node] = args[0][args[1]]
            return
        name, value = self.names.get(node) or self._name_of_view(node) or node.name, node.meta.get("val")
        is_effect = not node.users and not is_backward(node) and node.is_impure()
        self.made[node] = output = self._proxies(node, name, torch.empty(0) if is_effect and value is None else value)
        if is_effect or (isinstance(output, NumberProxy) and not is_backward(node)):
            self.effects += proxies_in(output)  # outputs of forward, or the split would take them for backward's
        _append(line(COPIES_IF_IT_MUST.get(node.target, node.target), args, kwargs, output))

    def _name_of_view(self, node: fx.Node) -> str | None:
        """Return the name of a view that is no variable of the user's, after what it is a view of; None if backward
        alone has it."""
        if users_value(node) is None or not is_view(node.target):
            return None
        of, target = node.all_input_nodes[0], cast(OpOverload, node.target)
        self.viewed[node] = self.viewed.get(of) or self.made[of].name
        again = "_again" * (is_backward(node) and not is_backward(of))
        return f"{self.viewed[node]}_{target.overloadpacket.__name__.removeprefix('_unsafe_')}{again}"

    def _stand_ins(self, node: fx.Node) -> dict[fx.Node, TensorProxy]:
        """Return new tensors for the parameters of which a line of backward reads the shape alone, by their nodes:
        where forward frees a parameter, backward would gather it again for its shape."""
        found: dict[fx.Node, TensorProxy] = {}
        for read in read_for_shape(node.target, node.args) if is_backward(node) else ():
            param = self.executor.plan.by_name[self.paths[self.rows[read].name]] if read in self.rows else None
            if param is not None and param.sharded and not param.resident and not param.kept_unsharded:
                like = read.meta["val"]
                found[read] = self._proxy(f"{param.path}_like", like)
                options = {"dtype": like.dtype, "device": like.device}
                _append(line(torch.ops.aten.empty.memory_format, (list(like.shape),), options, found[read]))
        return found

    def _proxies(self, node: fx.Node | None, name: str, value: Any) -> Any:
        """Return proxies for what a node makes. Of several values the first has the node's name if it is what the user
        gets, as of a layer norm; others have their positions, too."""
        if not isinstance(value, tuple | list):
            return self._proxy(name, value)
        getters = (user for user in (node.users if node else ()) if user.target is operator.getitem)
        takers: dict[Any, fx.Node] = {getter.args[1]: getter for getter in getters}
        others = [taker for position, taker in takers.items() if position and taker not in self.names]
        parts = [f"{name}_{position}" for position in range(len(value))]
        if not self.users.isdisjoint(parts):
            parts = [f"{name}__{position}" for position in range(len(value))]
        if not any(users_value(taker) is None or _read_by_forward(taker) for taker in others):
            parts[:1] = [name]
        names = dict(enumerate(parts)) | {
            position: self.names[taker] for position, taker in takers.items() if taker in self.names
        }
        return tuple(self._proxies(takers.get(at), names[at], each) for at, each in enumerate(value))

    def _gathered(self, node: fx.Node) -> TensorProxy:
        """Return the full parameter; inputs that are one parameter share it."""
        path = self.paths[self.rows[node].name]
        if path not in self.full:
            self.full[path] = _renamed(self.executor.lower_synchronize(self.rows[node], path), path)
            self.values[self.full[path].name] = node.meta["val"]
        return self.full[path]

    # Results

    def _ready(self) -> dict[fx.Node, list[int]]:
        """Return the positions of parameters' gradients by the nodes that make them."""
        ready: dict[fx.Node, list[int]] = {}
        for position, (node, of) in enumerate(self.gradients) if self.backward else ():
            if isinstance(node, fx.Node) and of is not None and self.path_of[of] is not None:
                ready.setdefault(node, []).append(position)
        return ready

    def _reduced(self, node: fx.Node, position: int) -> TensorProxy:
        """Return a parameter's reduced gradient. Each reads a value of its own: two may be one value, or an input."""
        path, grad = self._path_of_gradient(position), self.made[node]
        if node.meta["val"].layout is not torch.strided:
            raise RuntimeError(
                f"backward makes a sparse gradient of parameter {path!r}, as an embedding with sparse=True does, and "
                f"gradients are reduced as dense tensors; use sparse=False"
            )
        if grad.name in self.sent:
            grad = self._proxy(f"{node.name}_{position}", node.meta["val"])
            _append(line(torch.ops.aten.clone.default, (self.made[node],), {}, grad))
        self.sent.add(grad.name)
        param = self.executor.plan.by_name[path]
        return _renamed(self.executor.reduced(grad, param), f"t_{path}_grad")

    def _path_of_gradient(self, position: int) -> str:
        _, of = self.gradients[position]
        path = None if of is None else self.path_of[of]
        assert path is not None, "only parameters' gradients are reduced"
        return path

    def _gradient(self, node: Any, position: int, reduced: Mapping[int, TensorProxy]) -> Any:
        if position in reduced or not isinstance(node, fx.Node):
            return reduced.get(position)
        return self._laid_out(node, self.gradients[position][1])

    def _laid_out(self, node: fx.Node, of: int | None) -> Any:
        """Return the gradient of an input, contiguous if the input is: between two graphs it may reach a backward that
        reads memory as it lies, as gloo's of ``all_gather`` does."""
        given = None if of is None else self.values.get(self.inputs[of].name)
        if not isinstance(given, Tensor) or not is_contiguous(given) or is_contiguous(node.meta["val"]):
            return self.made[node]
        copy = self._proxy(f"{node.name}_contiguous", given)
        how = {"memory_format": torch.contiguous_format}
        _append(line(torch.ops.aten.clone.default, (self.made[node],), how, copy))
        return copy

    def _result(self, node: Any) -> Any:
        """Return an output of forward."""
        if node in self.rows:
            raise RuntimeError(returned(self.paths[self.rows[node].name]))
        return self.made[node] if isinstance(node, fx.Node) else node


def written(path: str) -> str:
    """Return why a program is refused that writes to a parameter."""
    return (
        f"forward writes to parameter {path!r}, of which each rank holds its own rows; write to a buffer, or put the "
        f"parameter's module into Policy.ignored"
    )


def returned(path: str) -> str:
    """Return why a program is refused that returns a parameter."""
    return (
        f"forward returns the parameter {path!r} itself, which is sharded; return a value computed from it, such as "
        f"param * 1, or read it with thunder_zero.full_state_dict"
    )


def _append(bsym: BoundSymbol) -> None:
    get_tracectx().bound_symbols.append(bsym)


def _read_by_forward(node: fx.Node) -> bool:
    return any(not is_backward(user) and user.target not in SAME for user in node.users)


def _renamed(proxy: TensorProxy, name: str) -> TensorProxy:
    """Give what the last line makes another name."""
    trace = get_tracectx()
    trace.names.discard(proxy.name)
    renamed = proxy.replace_name(_free(name))
    trace.bound_symbols[-1] = trace.bound_symbols[-1].from_bsym(output=renamed)
    return renamed


def _free(name: str) -> str:
    """Return a name, or a path, as a name that no other value of the trace has, and no symbol of ours."""
    name = re.sub(r"\W", "_", name)
    name = name if name.isidentifier() and not name.startswith("zero_") else f"_{name}"
    return first_free(name, get_tracectx().names)


def _filled(tree: Any, env: Mapping[fx.Node, Any]) -> Any:
    """The arguments of a node with values in place of nodes, in Python's own collections: Thunder prints no others."""
    match tree:
        case fx.Node():
            return env[tree]
        case slice():
            return slice(*(_filled(each, env) for each in (tree.start, tree.stop, tree.step)))
        case dict():
            return {key: _filled(each, env) for key, each in tree.items()}
        case list():
            return [_filled(each, env) for each in tree]
        case tuple() if type(tree) is not torch.Size:
            return tuple(_filled(each, env) for each in tree)
    return tree


def source_of(node: fx.Node) -> tuple[str | None, dis.Positions | None]:
    """The user's file and line that a node comes from."""
    if (found := users_line(node.stack_trace or "")) is None:
        return None, None
    return found[0], dis.Positions(found[1], found[1])
