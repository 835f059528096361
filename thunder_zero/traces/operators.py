"""Represents torch's operators as lines of a trace: a symbol for each overload, printed as a call.

::

    mm = torch.ops.aten.mm.default(x, w)

The class of work, views, random numbers and FLOPs of a line follow from the operator's tags, its schema and torch's
registry of FLOPs. A short table covers untagged operators.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils._pytree import tree_map_only

from thunder_zero.compat.lines import bind
from thunder_zero.compat.private import HigherOrderOperator, OpOverload
from thunder_zero.schedule.ops import Work

from thunder.core import codeutils, prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.extend import OperatorExecutor

EXECUTOR = OperatorExecutor("torch_operators")  # owns the symbols of torch's operators

_UNTAGGED = {  # names of operators for whose work torch has no tag
    Work.REDUCTION: """
        _softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm
        native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward native_group_norm native_group_norm_backward
        native_batch_norm native_batch_norm_backward _native_batch_norm_legit_functional _batch_norm_with_update
        _batch_norm_with_update_functional batch_norm_backward nll_loss_forward nll_loss_backward nll_loss2d_forward
        nll_loss2d_backward cumsum cumprod logcumsumexp avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d
        _adaptive_avg_pool2d_backward max_pool2d_with_indices max_pool2d_with_indices_backward""",
    Work.INDEX: """
        embedding embedding_dense_backward gather scatter scatter_add index index_put index_add index_select
        index_select_backward _unsafe_index _unsafe_index_put sort topk take""",
    Work.POINTWISE: """
        _to_copy copy cat stack full full_like zeros zeros_like ones ones_like new_zeros new_ones new_full arange empty
        empty_like scalar_tensor constant_pad_nd repeat tril triu select_backward slice_backward flip roll
        lift_fresh_copy _conj_physical split_with_sizes_copy clone""",
}
UNTAGGED = {name: work for work, names in _UNTAGGED.items() for name in names.split()}
NOT_CHEAP = frozenset(("empty", "empty_like"))
OVER_ROWS = frozenset(("_softmax", "_log_softmax", "_safe_softmax", "native_layer_norm", "_fused_rms_norm"))
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


CALL = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)(?=\()")
METHODS = (  # views called as methods, which takes half the time of a call by name
    (re.compile(r"\btorch\.ops\.aten\.t\.default\((\w+)\)"), r"\1.t()"),
    (re.compile(r"\btorch\.ops\.aten\.transpose\.int\((\w+), "), r"\1.transpose("),
    (re.compile(r"\btorch\.ops\.aten\.reshape\.default\((\w+), \[([^\[\]]+)\]\)"), r"\1.reshape(\2)"),
)
DIRECT = {  # torch functions that take an operator's arguments and call its kernel in half the time
    torch.ops.aten.add.Tensor: torch.add,
    torch.ops.aten.addmm.default: torch.addmm,
    torch.ops.aten.bmm.default: torch.bmm,
    torch.ops.aten.cat.default: torch.cat,
    torch.ops.aten.embedding.default: torch.embedding,
    torch.ops.aten.mm.default: torch.mm,
    torch.ops.aten.mul.Tensor: torch.mul,
    torch.ops.aten.native_layer_norm.default: torch.native_layer_norm,
    torch.ops.aten.reshape.default: torch.reshape,
    torch.ops.aten.sum.dim_IntList: torch.sum,
}


def bind_operators(text: str) -> tuple[str, dict[str, Any]]:
    """Return the text with each operator replaced by a global name, and a mapping from these names to functions.

    >>> bind_operators("y = torch.ops.aten.relu.default(x)")[0]
    'y = zero_aten_relu_default(x)'
    """
    called: dict[str, Any] = {}

    def name(match: re.Match[str]) -> str:
        space, packet, overload = match.groups()
        name = f"zero_{space}_{packet}_{overload}"  # never the name of a value
        if name not in called:
            operator = getattr(getattr(getattr(torch.ops, space), packet), overload)
            called[name] = DIRECT.get(operator, operator._op)  # ``_op`` skips ``__call__``
        return name

    for view, method in METHODS:
        text = view.sub(method, text)
    return CALL.sub(name, text), called


@cache
def _symbol_of(target: Any, random: bool) -> Symbol:
    tags = [prims.OpTags.RANDOM_OP] if random else []
    tags += [prims.OpTags.IN_PLACE] if isinstance(target, OpOverload) and target._schema.is_mutable else []
    name = (
        target.overloadpacket.__name__ if isinstance(target, OpOverload) else str(getattr(target, "__name__", target))
    )
    return Symbol(name, id=target, tags=tags, executor=EXECUTOR, python_printer=_print_line, is_prim=True)


def line(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> BoundSymbol:
    """Return a line that calls an operator, or a Python function, with these arguments."""
    called = {"torch": torch} if isinstance(target, OpOverload | HigherOrderOperator) else {_plain(target): target}
    draws = draws_random_numbers(target, args, kwargs)
    return bind(_symbol_of(target, draws), args, kwargs, output, called)


def operator_of(line: BoundSymbol) -> Any:
    """Return the operator of torch that a line calls, or None if it calls something else."""
    return line.sym.id if line.sym.executor is EXECUTOR and not line.sym.is_fusion else None


def draws_random_numbers(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws random numbers. Torch also tags attention, which draws only with dropout."""
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for index, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            value = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value)
    return True


def read_for_shape(target: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments that a backward operator reads only for their shape and dtype, on all devices: a layer
    norm's bias, and a layer's weight if the input needs no gradient."""
    candidates: Sequence[Any]
    match target:
        case torch.ops.aten.convolution_backward.default:
            candidates = () if args[-1][0] else (args[2],)
        case torch.ops.aten.native_layer_norm_backward.default:
            candidates = (args[6],) if args[7][0] else args[5:7]
        case torch.ops.aten.native_group_norm_backward.default:
            candidates = () if args[9][0] else (args[4],)
        case _:
            return ()
    return [arg for arg in candidates if arg is not None and sum(arg is other for other in args) == 1]


@cache
def is_view(target: Any) -> bool:
    """Return whether an operator's outputs are views of its first argument."""
    if target is torch.ops._c10d_functional.wait_tensor.default:
        return True
    return isinstance(target, OpOverload) and (target.is_view or target is torch.ops.aten._unsafe_view.default)


def is_collective(target: Any) -> bool:
    """Return whether an operator is one of torch's own collectives, or waits for a collective."""
    return isinstance(target, OpOverload) and target.namespace == "_c10d_functional"


@cache
def work_of_operator(target: Any) -> Work:
    """Return the class of work of an operator."""
    if target is operator.getitem:
        return Work.NONE
    if not isinstance(target, OpOverload):
        return Work.OTHER
    name = target.overloadpacket.__name__
    if is_view(target):
        return Work.VIEW
    if "attention" in name:
        return Work.ATTENTION
    if "convolution" in name:
        return Work.CONVOLUTION
    if target.overloadpacket in flop_counter.flop_registry:
        return Work.MATMUL
    if torch.Tag.nondeterministic_seeded in target.tags:
        return Work.RANDOM
    if name in UNTAGGED:
        return UNTAGGED[name]
    if torch.Tag.pointwise in target.tags:
        return Work.POINTWISE
    return Work.REDUCTION if torch.Tag.reduction in target.tags else Work.OTHER


def is_cheap_line(line: BoundSymbol) -> bool:
    """Return whether a line only does pointwise work, makes views, or reduces the last dimensions."""
    target, name = operator_of(line), line.sym.name
    if target is operator.getitem or work_of_operator(target) in (Work.POINTWISE, Work.VIEW):
        return name not in NOT_CHEAP and not _moves(line)
    if name in OVER_ROWS:
        return True
    if torch.Tag.reduction not in getattr(target, "tags", ()) or len(line.args) < 2:
        return False
    rank, dims = line.args[0].ndim, line.args[1]
    if not isinstance(dims, list | tuple | int) or not rank:
        return False
    reduced = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)}
    return 0 < len(reduced) < rank and reduced == set(range(rank - len(reduced), rank))


def _moves(line: BoundSymbol) -> bool:
    """Return whether a line copies to another device."""
    tensors = [proxy for proxy in line.flat_proxy_args if isinstance(proxy, TensorProxy)]
    return line.sym.name == "_to_copy" and bool(tensors) and tensors[0].device != line.output.device


def flops_of_line(line: BoundSymbol) -> int:
    """Return the FLOPs of a line by torch's formula for its operator, or 0 if torch has no formula."""
    target = operator_of(line)
    if not isinstance(target, OpOverload):
        return 0
    packet = target.overloadpacket
    if packet is CPU_ATTENTION:
        return int(flop_counter.sdpa_flop_count(*(_shape(arg) for arg in line.args[:3])))
    if packet is CPU_ATTENTION_BACKWARD:
        return int(flop_counter.sdpa_backward_flop_count(*(_shape(arg) for arg in line.args[:4])))
    if packet is torch.ops.aten.convolution_backward:  # torch counts the weights of all groups for each group
        output, x, weight = (list(_shape(arg)) for arg in line.args[:3])
        flops = flop_counter.conv_flop_count(x, weight, output, transposed=line.args[7])
        return int(flops * sum(line.args[-1][:2]))
    if all(isinstance(arg, TensorProxy) for arg in (*line.args, line.output)) and not line.kwargs:
        return _flops_of_product(packet, tuple(map(_shape, line.args)), _shape(line.output))
    count = flop_counter.flop_registry.get(packet)
    if count is None:
        return 0
    args, kwargs, output = tree_map_only(Proxy, _on_meta, (tuple(line.args), dict(line.kwargs), line.output))
    return int(count(*args, **kwargs, out_val=output))


@cache
def _flops_of_product(packet: Any, shapes: tuple[torch.Size, ...], output: torch.Size) -> int:
    """Return the FLOPs of an operator on tensors alone. The result is cached, since many lines have equal shapes."""
    count = flop_counter.flop_registry.get(packet)
    tensors = [torch.empty(shape, device="meta") for shape in (*shapes, output)]
    return 0 if count is None else int(count(*tensors[:-1], out_val=tensors[-1]))


def _shape(proxy: TensorProxy) -> torch.Size:
    return torch.Size(map(int, proxy.shape))


def _on_meta(proxy: Proxy) -> Any:
    return torch.empty(_shape(proxy), device="meta") if isinstance(proxy, TensorProxy) else proxy


def _plain(target: Any) -> str:
    """Return the name by which a trace calls a Python function."""
    return f"python_{getattr(target, '__name__', 'function')}"


def _print_line(line: BoundSymbol, out: Any, args: Any, kwargs: Any) -> str:
    """Return the line as text: ``t5 = torch.ops.aten.mm.default(x, w)``."""
    target = line.sym.id
    if isinstance(target, OpOverload):
        called = f"torch.ops.{target}"
    elif isinstance(target, HigherOrderOperator):
        called = f"torch.ops.higher_order.{target}"
    else:
        called = _plain(target)
    show = codeutils.prettyprint
    arguments = ", ".join([*map(show, args), *(f"{name}={show(arg)}" for name, arg in kwargs.items())])
    assigned = "" if line.output is None else f"{show(out, literals_as_underscores=True)} = "
    return f"{assigned}{called}({arguments})"
