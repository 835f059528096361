"""Rewrites the trace of a plain module into that of a sharded module, in two transforms.

A synchronise of a parameter comes before the first line that reads it, and a reduction of a gradient right after the
line that computes it::

    def computation(x, w):                    def computation(x, t_w):
      y = aten.mm(x, w)                         w = zero_synchronize(t_w, 'w')
      y_grad = get_grad(y)              ->      y = aten.mm(x, w)
      w_grad = aten.mm(x.t(), y_grad)           y_grad = get_grad(y)
      return y, w_grad                          w_grad = aten.mm(x.t(), y_grad)
                                                t_w_grad = zero_reduce(w_grad, 'w')
                                                return y, t_w_grad

These lines are names for lines that ``lower.py`` writes: nothing is gathered or reduced yet. A parameter that is full
at rest needs no synchronise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from thunder_zero.compat.lines import set_signature
from thunder_zero.plan.params import Param
from thunder_zero.traces.lift import forward_lines, is_joint
from thunder_zero.traces.operators import line as line_of
from thunder_zero.traces.operators import operator_of, read_for_shape
from thunder_zero.traces.symbols import Facts, JointTrace, free_name

from thunder.core import prims
from thunder.core.devices import to_torch_device
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceProvenance, from_trace, tracectx


def insert_synchronize(plain: JointTrace) -> JointTrace:
    """Return the trace with rows in place of parameters, each synchronised before its first reader."""
    facts, lines = plain.facts, plain.trace.bound_symbols
    trace = from_trace(plain.trace)
    trace.names = set(trace.names)  # a copy: the plain trace does not change
    full: dict[str, TensorProxy] = {}  # path: the full parameter
    swaps: dict[Any, Proxy] = {}  # another input of a parameter: the full parameter
    with tracectx(trace):
        rows = {arg.name: _rows(arg, facts) for arg in plain.trace.args}
        new_lines = [prims.unpack_trivial.bind(arg, name=arg.name, output=arg) for arg in rows.values()]
        for line, is_forward in zip(lines[:-1], forward_lines(lines)[:-1], strict=True):
            if line.sym is prims.unpack_trivial:
                continue
            shapes = {} if is_forward else dict(_stand_ins(line, facts))
            for proxy in line.flat_proxy_args:
                path = facts.inputs.get(proxy.name)
                if path is None or variableify(proxy) in shapes:
                    continue
                if path not in full:
                    full[path] = proxy
                    if rows[proxy.name] is not proxy:
                        new_lines.append(facts.executor.synchronize.bind(rows[proxy.name], path, output=proxy))
                elif full[path].name != proxy.name:
                    swaps[variableify(proxy)] = full[path]
            new_lines += [stand_in for stand_in in shapes.values()]
            replaced = swaps | {name: stand_in.output for name, stand_in in shapes.items()}
            new_lines.append(line.from_bsym_swap_proxies(replaced, skip_output=True) if replaced else line)
    result = lines[-1].args[0]
    args = [arg if arg is None else rows.get(arg.name, arg) for arg in result["flat_args"]]
    trace.args = list(rows.values())
    trace.bound_symbols = [*new_lines, lines[-1].from_bsym(args=({**result, "flat_args": args},))]
    set_signature(trace, "computation", (arg.name for arg in trace.args))
    trace.set_provenance(TraceProvenance("Insert synchronise (thunder_zero)"))
    inputs = {rows[name].name: path for name, path in facts.inputs.items()}
    return JointTrace(trace, replace(facts, inputs=inputs))


def insert_reductions(joint: JointTrace) -> JointTrace:
    """Return the trace with the mean over ranks of each parameter's gradient as the result in place of the gradient."""
    facts, (*lines, end) = joint.facts, joint.trace.bound_symbols
    result = end.args[0]
    if not is_joint(result):
        return joint
    pairs = zip(result["flat_args"], result["output"], strict=True)
    names = [(arg.name, grad.name) for arg, grad in pairs if isinstance(arg, Proxy) and isinstance(grad, Proxy)]
    paths = {grad: facts.inputs[arg] for arg, grad in names if arg in facts.inputs}
    trace = from_trace(joint.trace)
    trace.names = set(trace.names)
    means: dict[str, TensorProxy] = {}  # name of a gradient: its mean
    with tracectx(trace):
        for line in lines:
            trace.bound_symbols.append(line)
            for grad in line.flat_proxy_outs:
                if grad.name in paths and grad.name not in means:
                    mean = means[grad.name] = facts.executor.mean_of(grad, paths[grad.name])
                    trace.bound_symbols.append(facts.executor.reduce.bind(grad, paths[grad.name], output=mean))
    output = tuple(grad if grad is None else means.get(grad.name, grad) for grad in result["output"])
    trace.bound_symbols.append(end.from_bsym(args=({**result, "output": output},)))
    trace.set_provenance(TraceProvenance("Insert reductions (thunder_zero)"))
    return JointTrace(trace, facts)


def _rows(arg: Any, facts: Facts) -> Any:
    """Return the rows of a parameter, or the argument itself if it is another one, or full at rest."""
    path = facts.inputs.get(arg.name)
    param = None if path is None else facts.executor.plan.by_name[path]
    return arg if param is None or _is_full(param) else facts.executor.rows_of(arg, param, free_name(f"t_{path}"))


def _is_full(param: Param) -> bool:
    """Return whether a parameter at rest is the parameter that lines read."""
    return not param.sharded and not param.is_cast


def _stand_ins(line: BoundSymbol, facts: Facts) -> Iterator[tuple[Any, BoundSymbol]]:
    """Yield a line that makes an empty tensor for each freed parameter of which a line of backward reads the shape.

    This saves backward the gather. The pairs are (parameter, line).
    """
    for full in read_for_shape(operator_of(line), line.args):
        path = facts.inputs.get(full.name)
        param = None if path is None else facts.executor.plan.by_name[path]
        if param is not None and param.sharded and not param.resident and not param.kept_unsharded:
            output = full.replace_name(free_name(f"{path}_like"))
            options = {"dtype": to_torch_dtype(full.dtype), "device": to_torch_device(full.device)}
            yield (
                variableify(full),
                line_of(torch.ops.aten.empty.memory_format, (list(full.shape),), options, output),
            )
