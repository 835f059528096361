"""needed while: torch has no public API to compile a graph of operators with inductor.

In: a graph of torch's operators without autograd, and the fake inputs of AOTAutograd's trace. Out: a function of the
list of inputs. Inductor caches its code on disk, so that the next process need not compile. The cache key is the text
of the graph, and the shapes, strides and dtypes of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from thunder_zero.compat.private import (
    DisableAutocast,
    InductorError,
    ShapeEnvGuardError,
    TracingContext,
    fx_config,
    inductor_config,
    python_dispatcher,
    tracing,
)

Kernel = Callable[[list[Any]], Sequence[Any]]


class HoldsForSomeSizes(Exception):
    """Raised if inductor's code would be valid for only some sizes of the graph's inputs, and would not check them."""


def kernel(
    graph: fx.GraphModule, inputs: Sequence[Any], layouts: Sequence[Any], mode: Any
) -> tuple[Kernel, Sequence[Any]]:
    """Compile a graph that returns a list. Return a function and the fake outputs.

    The inputs are fake tensors, and integers for symbolic sizes. An output gets the strides of its tensor in
    ``layouts``; inductor chooses for None. Raise HoldsForSomeSizes if the code would depend on the value of a symbolic
    size.
    """
    try:
        return _compiled(graph, inputs, layouts, mode)
    except HoldsForSomeSizes:  # code from inductor's cache may be valid for fewer sizes
        with inductor_config.patch(fx_graph_cache=False):
            return _compiled(graph, inputs, layouts, mode)


def _compiled(
    graph: fx.GraphModule, inputs: Sequence[Any], layouts: Sequence[Any], mode: Any
) -> tuple[Kernel, Sequence[Any]]:
    from thunder_zero.compat.private import compile_fx_inner, select_decomp_table  # import most of inductor

    try:
        with tracing(TracingContext(mode)), faking(mode), for_all_sizes(mode):
            # Tracing tells inputs apart by identity, and one fake tensor may stand for several inputs.
            distinct = [value.detach() if isinstance(value, Tensor) else value for value in inputs]
            traced = make_fx(lambda *args: laid_out(graph(*args), layouts), decomposition_table=select_decomp_table())(
                *distinct
            )
            results: Any = traced.graph.output_node().args[0]
            outputs = [node.meta["val"] if isinstance(node, fx.Node) else node for node in results]
            traced.graph.output_node().meta["user_visible_output_idxs"] = list(range(len(results)))
            return compile_fx_inner(traced, distinct, is_inference=True), outputs
    except (ShapeEnvGuardError, InductorError) as error:
        if (guard := _guard_behind(error)) is not None:
            raise HoldsForSomeSizes(str(guard)) from error
        raise RuntimeError(str(error).partition("\n")[0]) from error


def _guard_behind(error: BaseException | None) -> BaseException | None:
    """Return the ShapeEnvGuardError that caused inductor's error, or None."""
    while error is not None and not isinstance(error, ShapeEnvGuardError):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return error


@contextmanager
def faking(mode: Any) -> Iterator[None]:
    """Compute with fake tensors inside the block. Their sizes may be symbols. Autocast is off, as in programs."""
    with torch.no_grad(), DisableAutocast(), mode, python_dispatcher():
        yield


def laid_out(outputs: Sequence[Any], layouts: Sequence[Any]) -> list[Any]:
    """Return outputs with the strides of the tensors in ``layouts``. An output whose layout is None is unchanged."""
    return [_laid_out_like(output, layout) for output, layout in zip(outputs, layouts, strict=True)]


def _laid_out_like(value: Any, layout: Any) -> Any:
    """Return the value, copied if its strides differ from those of ``layout``."""
    # Symbols are compared as text: comparing their values would add a guard.
    if not isinstance(layout, Tensor) or str(value.stride()) == str(layout.stride()):
        return value
    empty = torch.empty_strided(layout.shape, layout.stride(), dtype=value.dtype, device=value.device)
    return torch.ops.aten.copy.default(empty, value)


@contextmanager
def for_all_sizes(mode: Any) -> Iterator[None]:
    """Make new guards on symbolic sizes raise inside the block, since dynamo has already created its guards."""
    if mode.shape_env is None:
        yield
        return
    with fx_config.patch(backed_size_oblivious=True), mode.shape_env.error_on_new_guards():
        yield
