"""Runs the lines of a trace on meta tensors: fused regions operator by operator.

A fused region is one line of a trace. Its operators run one by one. Only some results get a buffer::

    y = inductor_0(x, w, v)     h = aten.mm(x, w)         a buffer, until g overwrites it
                                a = aten.mul(h, 0.5)      no buffer: the kernel of g computes a
                                g = aten.tanh(a)          a buffer, since a matmul reads it
                                y = aten.mm(g, v)         a buffer, which is returned
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thunder_zero.compat.private import OpOverload, disable_current_modes
from thunder_zero.schedule.ops import Work
from thunder_zero.tools.forecast.watch import META, WithoutValues
from thunder_zero.traces.operators import operator_of
from thunder_zero.traces.work import work_of

from thunder.core import dtypes, prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol

INLINED = (Work.POINTWISE, Work.VIEW, Work.NONE, Work.REDUCTION)
NOT_RUN = (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.COMMENT)


def run_line(line: BoundSymbol, functions: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Run a line, and add its results to ``values``, which are keyed by name. ``functions`` run our own lines."""
    operator = operator_of(line)
    if isinstance(operator, OpOverload):
        args, kwargs = filled(tuple(line.args), values), filled(dict(line.kwargs), values)
        _assign(line.output, operator(*args, **kwargs), values)
    elif line.sym.id not in NOT_RUN:
        imports, calls, objects = line.gather_ctxs()
        code = "\n".join(line.python(indent=0, print_depth=1))
        exec(compile(code, "<line>", "exec"), {**imports, **calls, **objects, **functions}, values)


def filled(tree: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(tree, Proxy):
        return values[tree.name]
    if isinstance(tree, dict):
        return {key: filled(item, values) for key, item in tree.items()}
    return type(tree)(filled(item, values) for item in tree) if type(tree) in (list, tuple) else tree


def _assign(output: Any, result: Any, values: dict[str, Any]) -> None:
    if isinstance(output, Proxy):
        values[output.name] = result
    elif isinstance(output, list | tuple):  # another output is a number, known before
        for item, value in zip(output, result, strict=True):
            _assign(item, value, values)


def run_region(region: BoundSymbol, values: dict[str, Any], record: Callable[[Tensor], object]) -> None:
    """Run a fused line like :func:`run_line`. ``record`` counts a tensor's storage until the storage is freed."""
    returned = {proxy.name for proxy in region.flat_proxy_outs}
    counted = returned | _buffers(region.subsymbols)
    last_reader = _last_readers(region.subsymbols, counted)
    region_values = {proxy.name: values[proxy.name] for proxy in region.flat_proxy_args}
    with disable_current_modes(), WithoutValues():
        for position, line in enumerate(region.subsymbols):
            run_line(line, {}, region_values)
            results = [region_values[proxy.name] for proxy in line.flat_proxy_outs if proxy.name in counted]
            unread = [name for name in region_values if last_reader.get(name, -1) <= position and name not in returned]
            if work_of(line) not in INLINED:
                _record(results, record)
            for name in unread:
                del region_values[name]
            _record(results, record)  # a fused loop may write where it reads
    values.update((name, region_values[name]) for name in returned)


def run_convolution(line: BoundSymbol, values: dict[str, Any], record: Callable[[Tensor], object]) -> None:
    """Run a convolution as oneDNN does on CPUs, with copies of what it reads and writes, for each result in turn.

    With a stride, it copies the input's gradient twice. It copies nothing of float64, in channels_last, or for a kernel
    of one element.
    """
    arguments, is_backward = filled(tuple(line.args), values), not isinstance(line.output, Proxy)
    *gradient, x, weight = arguments[: 2 + is_backward]
    stride, transposed = arguments[3 + is_backward], arguments[6 + is_backward]
    is_large = weight.shape[2:].numel() > 1 or max(stride) > 1
    copies = is_large and not transposed and x.is_contiguous() and x.dtype is not torch.float64
    reads = ((*gradient, weight), (*gradient, x)) if is_backward else ((x, weight),)
    with disable_current_modes(), WithoutValues():
        run_line(line, {}, values)
        for output, read in zip(line.output if is_backward else (line.output,), reads, strict=False):
            if output is not None and copies:
                copied = [torch.empty_like(tensor) for tensor in (*read, values[output.name])]
                _record(copied, record)
                del copied[:-1]
                if is_backward and read[-1] is weight and max(stride) > 1:
                    copied.append(torch.empty_like(copied[0]))
                    _record(copied, record)
                record(values[output.name])
    _record((values[proxy.name] for proxy in line.flat_proxy_outs), record)


def _record(results: Iterable[Any], record: Callable[[Tensor], object]) -> None:
    for result in results:
        if isinstance(result, Tensor):
            record(result)


def _buffers(lines: Sequence[BoundSymbol]) -> set[str]:
    """Return the values that get a buffer inside a region. The result may omit outputs of the region.

    Operators with their own kernels, such as matmuls, read and write buffers. A reduction to fewer bytes writes a
    buffer. All other values are computed inside the kernels that read them.
    """
    buffers: set[str] = set()
    for line in lines:
        outputs = [proxy for proxy in line.flat_proxy_outs if isinstance(proxy, TensorProxy)]
        inputs = [proxy for proxy in line.flat_proxy_args if isinstance(proxy, TensorProxy)]
        work, largest = work_of(line), max((proxy.numel for proxy in inputs), default=0)
        if work not in INLINED:
            buffers.update(proxy.name for proxy in (*inputs, *outputs))
        elif work is Work.REDUCTION:
            buffers.update(proxy.name for proxy in outputs if proxy.numel < largest)
    return buffers


def _last_readers(lines: Sequence[BoundSymbol], counted: set[str]) -> dict[str, int]:
    """Return the position of each value's last reader. Reads through values without a buffer are included."""
    last: dict[str, int] = {}
    for position, line in reversed(list(enumerate(lines))):
        outputs = {proxy.name for proxy in line.flat_proxy_outs}
        through = max((last.get(name, position) for name in outputs), default=position)
        reader = position if outputs & counted else through
        for proxy in line.flat_proxy_args:
            last[proxy.name] = max(last.get(proxy.name, 0), reader)
    return last


def empty_like(proxy: Any) -> Any:
    """Return a meta tensor like a tensor proxy, or the value of a number proxy."""
    if not isinstance(proxy, TensorProxy):
        return proxy.value
    return torch.empty(proxy.shape, dtype=dtypes.to_torch_dtype(proxy.dtype), device=META)
