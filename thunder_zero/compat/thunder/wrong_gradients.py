"""needed while: Thunder gets gradients of in-place writes, lists and complex numbers wrong.

In: a trace. Out: nothing, or an error about a line whose gradient Thunder silently gets wrong. There are five kinds.
Thunder saves a value for backward, and then an in-place operation writes to the value::

    t3 = torch.sum(t2, -1)
    t4 = torch.div(t2, t3)
    t5 = copy_(t4, t2)        # w /= w.sum(-1); the gradient of the division needs the old t2

Thunder loses a gradient where forward writes through a view, or under ``no_grad``, to a value that has a gradient::

    h[:, :2].mul_(2)

An operator that Thunder registered automatically has no gradient for tensors in a list::

    t2 = torch.hstack([t0, t1])

Values lose their gradient where they are put into a tensor that has none::

    t1 = torch.index_put(zeros, (index,), t0)

The gradient of complex numbers lacks a conjugate::

    t2 = torch.mul(t1, frequencies)
"""

from __future__ import annotations

from collections.abc import Iterator

from thunder.core import prims
from thunder.core.dtypes import is_complex_dtype, is_inexact_dtype
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.update_aliases import _is_inplace_op

# Operators whose gradients are right for complex numbers: linear operators without a factor, and abs. Automatically
# registered operators have torch's own gradient.
WITHOUT_CONJUGATE = {
    *("abs", "add", "cat", "chunk", "clone", "contiguous", "expand", "flatten", "getitem", "index_select", "mean"),
    *("movedim", "neg", "permute", "repeat", "reshape", "select", "split", "squeeze", "stack", "sub", "sum", "t", "to"),
    *("transpose", "type", "unbind", "unflatten", "unsqueeze", "view"),
}


def require_unwritten(forward: TraceCtx, module: str) -> None:
    """Check that forward does not write in place to a value that it saves for backward.

    Raises:
        RuntimeError: forward writes to a saved value.
    """
    saved = _names(forward.bound_symbols[-1].args[1])
    alias: dict[str, str] = {}  # new name of a value -> its name before an operation in place
    for line in _lines(forward.bound_symbols):
        if line.sym.name == prims.update_aliases.name:
            alias |= {new.name: old.name for old, new in zip(line.args[0], line.output, strict=True)}
        if line.sym.name != prims.copy_.name:
            continue
        name: str | None = line.args[1].name
        while name is not None:
            if name in saved:
                raise RuntimeError(
                    f"forward of {module} writes in place to a value that backward reads as it was before, and Thunder "
                    f"would compute another gradient; write x = x / y, say, where it has x /= y{_where(line)}"
                )
            name = alias.get(name)


def require_gradients(computation: TraceCtx, module: str) -> None:
    """Check that Thunder would lose no gradient of a program. Call this before autodiff.

    Raises:
        RuntimeError: an automatically registered operator gets a list of tensors, values with a gradient are put into a
            tensor without a gradient, or complex numbers with a gradient are multiplied. Forbidden in-place writes also
            raise it: to an input with a gradient, to a view of a parameter, to memory that is later read through
            another view, or, under no_grad, to a value with a gradient.
    """
    lines = computation.bound_symbols
    leaves = {proxy.name for proxy in computation.args if proxy.requires_grad}
    trained = set(leaves)  # values with a gradient
    shared: set[str] = set()  # values in the memory that the next line writes to
    slices: dict[str, object] = {}  # view -> the index of the view
    stale: dict[str, BoundSymbol] = {}  # value -> the line that wrote to its memory through another value
    for position, line in enumerate(lines):
        if line.sym.name == prims.update_aliases.name:
            pairs = list(zip(line.args[0], line.output, strict=True))
            leaves |= {new.name for old, new in pairs if old.name in leaves}
            trained |= {new.name for old, new in pairs if old.name in trained}
            stale |= {new.name: stale[old.name] for old, new in pairs if old.name in stale}
            slices |= {new.name: slices[old.name] for old, new in pairs if old.name in slices}
            shared = {new.name for _, new in pairs}
            continue
        if line.sym.name == prims.python_return.name:
            _require_fresh(_names(line.args[0]["output"]), stale, module)
            break
        input_names = _names((line.args, line.kwargs))
        _require_known(line, trained, module)
        _require_real(line, trained & input_names, module)
        outputs = line.flat_proxy_outs
        detached = any(ProxyTag.DETACHED_AUTOGRAD_GRAPH in proxy.tags for proxy in outputs)
        if _is_inplace_op(line):
            written_names = shared if line.args[0].name in shared else {line.args[0].name}
            _require_writable(line, leaves & written_names, line.args[0].name in trained and detached, module)
            if trained & (input_names | written_names) and not _is_assigned_next(line, lines[position + 1 :], slices):
                _require_fresh(input_names, stale, module)
                stale |= dict.fromkeys(written_names - {line.args[0].name}, line)
        else:
            _require_fresh(input_names, stale, module)
        if line.sym.name == "getitem":
            slices |= {proxy.name: line.args[1] for proxy in outputs}
        if trained & input_names and not detached:
            trained |= {proxy.name for proxy in outputs}


def _require_known(line: BoundSymbol, trained: set[str], module: str) -> None:
    """Raise if Thunder has no gradient for an input of a line."""
    if line.sym.name == "index_put" and not _names(line.args[0]) & trained and _names(line.args[2]) & trained:
        raise RuntimeError(
            f"forward of {module} puts values into a tensor that has no gradient, by index_put, and Thunder would lose "
            f"theirs; assign them, as in out[index] = values{_where(line)}"
        )
    if prims.OpTags.AUTO_REGISTERED in (line.sym.tags or ()) and any(map(_has_numbers, line.args)):
        raise RuntimeError(
            f"forward of {module} gives {line.sym.id} a list of tensors, and Thunder has no gradient for them: "
            f"they would get none, without a word; use another operator, such as torch.cat for torch.hstack"
        )


def _require_real(line: BoundSymbol, trained: set[str], module: str) -> None:
    """Raise if the gradient of a line would lack a conjugate. ``trained`` has the inputs with a gradient."""
    if (
        trained
        and line.sym.name not in WITHOUT_CONJUGATE
        and prims.OpTags.AUTO_REGISTERED not in (line.sym.tags or ())
        and any(map(_is_complex, (*line.flat_proxy_args, *line.flat_proxy_outs)))
    ):
        raise RuntimeError(
            f"forward of {module} computes {line.sym.name} of complex numbers that have a gradient, and Thunder would "
            f"leave out a conjugate there; compute with real and imaginary parts{_where(line)}"
        )


def _require_writable(line: BoundSymbol, leaves: set[str], loses_gradient: bool, module: str) -> None:
    """Raise if a line writes to ``leaves``, or if its write loses a gradient."""
    if loses_gradient:
        raise RuntimeError(
            f"forward of {module} writes in place, under no_grad, to a value that has a gradient, which Thunder "
            f"would lose; write h = h + (new - h).detach(){_where(line)}"
        )
    if leaves:
        raise RuntimeError(
            f"forward of {module} writes in place to an input that requires a gradient, to a view of one or of a "
            f"parameter, or to what Thunder takes for one, as weight.transpose(0, 1).contiguous(), and loses the "
            f"gradient; write to a clone, weight.transpose(0, 1).clone(){_where(line)}"
        )


def _require_fresh(read: set[str], stale: dict[str, BoundSymbol], module: str) -> None:
    """Raise if a read value's memory was written to through another value."""
    for name in sorted(read & stale.keys()):
        raise RuntimeError(
            f"forward of {module} writes in place to a value and then reads another view of its memory, as in "
            f"h[:, :2].mul_(2) and a use of h, and Thunder would lose a part of the gradient; assign to the tensor "
            f"itself, as in h[:, :2] *= 2, and make views of it afterwards{_where(stale[name])}"
        )


def _is_assigned_next(line: BoundSymbol, following: list[BoundSymbol], slices: dict[str, object]) -> bool:
    """Return whether the next line assigns a written slice to its old position, as in h[:, :2] *= 2."""
    written = _names(line.output)
    for after in following:
        if after.sym.name == prims.update_aliases.name:
            written |= {new.name for old, new in zip(after.args[0], after.output, strict=True) if old.name in written}
            continue
        is_back = after.sym.name == "setitem_" and bool(_names(after.args[2]) & written)
        return is_back and after.args[1] == slices.get(line.args[0].name)
    return False


def _names(values: object) -> set[str]:
    return {leaf.name for leaf in tree_iter(values) if isinstance(leaf, Proxy)}


def _has_numbers(arg: object) -> bool:
    """Return whether an argument is a list or tuple with a tensor that may have a gradient."""
    if not isinstance(arg, list | tuple):
        return False
    return any(isinstance(item, TensorProxy) and is_inexact_dtype(item.dtype) for item in arg) or any(
        map(_has_numbers, arg)
    )


def _is_complex(proxy: Proxy) -> bool:
    return isinstance(proxy, TensorProxy) and is_complex_dtype(proxy.dtype)


def _lines(bsyms: list[BoundSymbol]) -> Iterator[BoundSymbol]:
    """Yield lines. For a fused region, yield the lines inside it."""
    for bsym in bsyms:
        yield from _lines(bsym.subsymbols) if bsym.sym.is_fusion else (bsym,)


def _where(line: BoundSymbol) -> str:
    """Return the user's file and line in brackets, if Thunder knows them."""
    return "" if line.source_positions is None else f" ({line.source_filename}:{line.source_positions.lineno})"
