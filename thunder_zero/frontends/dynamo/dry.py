"""Captures the graph of a module that never runs, from tensors without memory.

In: a module whose parameters are placeholders, and its inputs. Out: :class:`Exported`. It has the joint graph that
``tz.compile`` would train, and rebuilds forward's result from the graph's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, fx, nn
from torch.types import py_sym_types

from thunder_zero.compat import aot, dynamo
from thunder_zero.frontends.dynamo.attention import as_on_gpu
from thunder_zero.frontends.dynamo.captured import paths_of, restoring, with_slices
from thunder_zero.frontends.dynamo.checkpoints import joint_of
from thunder_zero.frontends.dynamo.proxies import source_of
from thunder_zero.plan.params import Plan
from thunder_zero.sharded.placeholders import Memoryless, Placeholder, shape_of
from thunder_zero.sharded.slices import require_unhooked


@dataclass(frozen=True)
class Exported:
    """A module's graph, captured once.

    Attributes:
        joint: the graph, with its backward.
        paths: for each input, the path of a parameter or None.
        buffers: a mapping from positions of inputs to paths, for buffers and unplanned parameters.
        markers: an object for each output of the graph.
        returned: the result of forward, with markers in place of the graph's outputs.
    """

    joint: aot.Joint
    paths: Sequence[str | None]
    buffers: Mapping[int, str]
    markers: Sequence[Any]
    returned: Any

    def restored(self, outputs: Sequence[Any]) -> Any:
        """Build the result of the module's forward from the outputs of the forward trace."""
        return restoring(self.returned, self.markers, self.joint.plain_outputs())(outputs)


def export(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    plan: Plan,
    *,
    for_gpu: bool = False,
    dynamic: bool = False,
) -> Exported:
    """Capture a module's forward.

    Args:
        args, kwargs: the arguments of forward.
        for_gpu: True to use the GPU's attention kernels even if tensors are on the CPU.
        dynamic: True to make the arguments' sizes symbols.

    Raises:
        RuntimeError: dynamo captures no graph or several graphs, or forward reads a number from a tensor.
    """
    name = type(module).__name__
    captures: list[tuple[aot.Joint, Sequence[Any], Sequence[str | None], Sequence[Any]]] = []

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # Here dynamo captures a number that is read from a tensor. In training dynamo breaks the graph there.
        values = ((node, node.meta.get("example_value")) for node in graph.graph.nodes)
        numbers = [node for node, value in values if isinstance(value, py_sym_types) and aot.hint(value) is None]
        if numbers:
            return partial(_refuse_number, name, numbers[0])
        if for_gpu:
            as_on_gpu(graph)
        paths, inputs = paths_of(inputs), with_slices(graph, inputs)
        joint = joint_of(graph, inputs, paths, plan)

        def run(*args: Any) -> Sequence[Any]:
            markers = tuple(_marker(joint.results[position]) for position in joint.plain_outputs())
            captures.append((joint, inputs, paths, markers))
            return markers

        return run

    capturing = partial(dynamo.capturing, [], (Placeholder, Memoryless))
    captured = dynamo.capture(module, backend, capturing, dynamic=dynamic, whole=True)
    with dynamo.floats_constant():
        returned = captured(*args, **kwargs)
    if not captures:
        raise RuntimeError(f"forward of {name} computes nothing with tensors, so there is no trace of it")
    require_unhooked(dict(module.named_parameters()))
    joint, inputs, paths, markers = captures[-1]
    names = {id(tensor): name for name, tensor in (*module.named_buffers(), *module.named_parameters())}
    buffers = {
        position: names[id(value)]
        for position, value in enumerate(inputs)
        if not paths[position] and id(value) in names
    }
    return Exported(joint, paths, buffers, markers, returned)


def _refuse_number(name: str, number: fx.Node, *inputs: Any) -> NoReturn:
    file, positions = source_of(number)
    where = f" at {file}:{positions.lineno}" if positions else ""
    raise RuntimeError(
        f"forward of {name} reads a number from a tensor{where}, where dynamo ends a graph, and a trace shows one "
        f"graph; keep it a tensor, or train a step of tz.compile and read tz.traces_of(model, graph=0)"
    )


def _marker(node: Any) -> Any:
    value = node.meta["val"] if isinstance(node, fx.Node) else node
    return shape_of(value) if isinstance(value, Tensor) else value
