"""needed while: inductor compiles a graph of operators under private names alone.

In: a graph of torch's operators without autograd, and its inputs as AOTAutograd's trace has them, without values. Out:
a function of the list of inputs. Inductor keeps what it compiles on disk, by the text of the graph and the looks of its
inputs, so the next process compiles none of it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from thunder_zero.compat.private import (
    InductorError,
    ShapeEnvGuardError,
    TracingContext,
    compile_fx_inner,
    fx_config,
    python_dispatcher,
    select_decomp_table,
    tracing,
)

Kernel = Callable[[list[Any]], Sequence[Any]]


class HoldsForSomeSizes(Exception):
    """Inductor's code would be right for some of the sizes that the graph is for, and nobody would check which."""


def kernel(
    graph: fx.GraphModule, inputs: Sequence[Any], wanted: Sequence[Any], mode: Any
) -> tuple[Kernel, Sequence[Any]]:
    """Compile a graph; return a function, and what its outputs look like.

    Args:
        graph: its placeholders are tensors, and integers for the symbols of their sizes; it returns a list.
        inputs: fake tensors and symbolic integers.
        wanted: what has the strides that an output should have; None: those that inductor chooses.
        mode: the FakeTensorMode of the inputs.

    Raises:
        HoldsForSomeSizes: see there.
        RuntimeError: inductor cannot compile it.
    """

    def laid_out(*args: Any) -> list[Any]:
        return [_like(output, like) for output, like in zip(graph(*args), wanted, strict=True)]

    try:
        with tracing(TracingContext(mode)), faking(mode), _for_all_sizes(mode.shape_env):
            traced = make_fx(laid_out, decomposition_table=select_decomp_table())(*inputs)
            results: Any = traced.graph.output_node().args[0]
            outputs = [node.meta["val"] if isinstance(node, fx.Node) else node for node in results]
            traced.graph.output_node().meta["user_visible_output_idxs"] = list(range(len(results)))
            return compile_fx_inner(traced, list(inputs), is_inference=True), outputs
    except ShapeEnvGuardError as error:
        raise HoldsForSomeSizes(str(error)) from error
    except InductorError as error:
        if isinstance(error.inner_exception, ShapeEnvGuardError):
            raise HoldsForSomeSizes(str(error)) from error
        raise RuntimeError(str(error).partition("\n")[0]) from error


@contextmanager
def faking(mode: Any) -> Iterator[None]:
    """Compute what values look like: with fake tensors of a mode, whose sizes may be symbols."""
    with torch.no_grad(), mode, python_dispatcher():
        yield


def _like(value: Any, like: Any) -> Any:
    """Return a value with other strides; symbols are compared as text, which asks no question of them."""
    if not isinstance(like, Tensor) or str(value.stride()) == str(like.stride()):
        return value
    empty = torch.empty_strided(like.shape, like.stride(), dtype=value.dtype, device=value.device)
    return torch.ops.aten.copy.default(empty, value)


@contextmanager
def _for_all_sizes(shapes: Any) -> Iterator[None]:
    """Compile for all sizes that symbols stand for: dynamo has already guarded what it knows of them."""
    if shapes is None:
        yield
        return
    with fx_config.patch(backed_size_oblivious=True), shapes.error_on_new_guards():
        yield
