"""needed while: Thunder counts no FLOPs of its symbols, and tags few with a kind of work.

In: a line of a Thunder trace. Out: the kind of work, and the FLOPs. ``traces/operators.py`` finds the kind and the
FLOPs of torch's operators.

The table is conservative: an unlisted name is OTHER work and no view. A line that may copy, such as a reshape, is
VIEW work but not in ``VIEWS``, since a trace does not know strides::

    t2 = matmul(t0, t1)     (8, 4) @ (4, 16)     MATMUL, 2 * 8 * 16 * 4 FLOPs
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

from thunder_zero.schedule.timeline import Work

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

# Names of Thunder's primitives, of the executors' symbols that replace them, and of composites that have kernels.
NAMES = {
    Work.ATTENTION: """
        scaled_dot_product_attention cpu_flash_attention cpu_flash_attention_backward cpu_flash_attention_mask_backward
        cudnn_sdpa_fwd cudnn_sdpa_bwd fa3_fwd fa3_bwd nv_sdpfa_fwd nv_sdpfa_bwd
        sdpaex_grad_forward_scaled_dot_product_efficient_attention
        sdpaex_scaled_dot_product_efficient_attention_backward
        sdpafx_grad_forward_scaled_dot_product_efficient_attention
        sdpafx_scaled_dot_product_efficient_attention_backward""",
    Work.CONVOLUTION: """
        convolution convolution_backward convolution_input_gradient convolution_weight_gradient conv1d conv2d conv3d
        conv_transpose1d conv_transpose2d conv_transpose3d""",
    Work.MATMUL: """
        matmul linear addmm baddbmm bmm dot einsum mm mv outer te_functional_linear_bwd te_functional_linear_fwd
        _grouped_mm torch.linalg.multi_dot""",
    Work.INDEX: """
        embedding embedding_backward take take_along_axis take_along_dim gather scatter scatter_add index_add index_copy
        index_put index_select copy_with_setitem copy_with_setitem_impl sort argsort topk
        torch.ops.aten.embedding_backward""",
    Work.REDUCTION: """
        amax amin prod sum var var_mean std argmax argmin cumsum softmax softmax_backward log_softmax logsumexp
        layer_norm native_layer_norm layer_norm_backward batch_norm group_norm instance_norm nll_loss
        adaptive_avg_pool2d max_pool1d max_pool2d max_pool3d max_pool2d_with_indices
        max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward
        torch.ops.aten._adaptive_avg_pool2d_backward torch.ops.aten._log_softmax_backward_data
        torch_nll_loss_backward_impl""",
    Work.RANDOM: """
        uniform uniform_philox ops.rngprims.philox_rand get_and_update_rng_state get_and_update_rng_state_impl
        multinomial_helper""",
    Work.POINTWISE: """
        abs acos acosh add asin asinh atan atan2 atanh bitcast bitwise_and bitwise_left_shift bitwise_not bitwise_or
        bitwise_right_shift bitwise_xor cat ceil clone contiguous convert_element_type copy_ copysign cos cosh
        device_put digamma div empty eq erf erfc erfcinv erfinv exp exp2 expm1 flip floor fmod frexp full ge gelu
        gelu_backward gt iota isfinite le lerp lgamma log log10 log1p log2 lt maximum minimum mul ndtri ne neg nextafter
        pad pow reciprocal remainder repeat round rsqrt sign signbit silu silu_backward sin sinh sqrt stack stride_order
        sub tan tanh
        tensor_from_sequence to torch.ops.aten.log_sigmoid_backward torch_div_prim_impl torch_erfcinv_impl
        torch_pad_prim_impl torch_stride_order_prim_impl trunc where zero_cast zeta""",
    Work.VIEW: """
        broadcast_in_dim chunk diagonal expand expand_as flatten imag movedim narrow permute real reshape select
        shallow_copy slice_prim split squeeze tensor_split torch_prims_reshape_impl torch_slice_prim_impl transpose
        unbind unfold unsqueeze update_aliases view view_as""",
    Work.NONE: "get_grad item python_return shape sink unpack_list unpack_tuple",
}
WORK = {name: work for work, names in NAMES.items() for name in names.split()}
MAY_COPY = {"flatten", "reshape", "torch_prims_reshape_impl", "unfold", "update_aliases"}  # depends on strides
VIEWS = {name for name, work in WORK.items() if work is Work.VIEW} - MAY_COPY
NOT_CHEAP = {"device_put", "empty", "update_aliases"}  # though they are POINTWISE or VIEW work
# Operators that reduce rows if their second argument, the dims, is the last dims.
OF_ROWS = {"amax", "amin", "prod", "sum", "var", "var_mean", "argmax", "argmin", "cumsum", "softmax"}

Shape = tuple[int, ...]
Count = Callable[[list[Shape], BoundSymbol], int]  # (shapes of the tensors among the arguments, line) -> FLOPs


def flops_of_symbol(bsym: BoundSymbol) -> int | None:
    """Return the FLOPs of a line, or None if ``COUNTS`` lacks the line's symbol."""
    count = COUNTS.get(bsym.sym.name)
    # A tensor is an argument, or an item of an argument (``addmm_vjp`` has its inputs in a sequence).
    shapes = [tuple(map(int, proxy.shape)) for proxy in bsym.flat_proxy_args if isinstance(proxy, TensorProxy)]
    return None if count is None else count(shapes, bsym)


def _output(bsym: BoundSymbol) -> Shape:
    return tuple(map(int, bsym.output.shape))


def _product(shapes: list[Shape], bsym: BoundSymbol, *, left: int = 0) -> int:
    """Return the FLOPs of a product, such as ``matmul``. The last dimension of tensor ``left`` is contracted."""
    return 2 * prod(_output(bsym)) * shapes[left][-1]


def _product_vjp(shapes: list[Shape], bsym: BoundSymbol, *, left: int = 0) -> int:
    """Return the FLOPs of a line that computes a product and its gradient: three products of equal size.

    These are the recomputed product, and the gradients of both factors.
    """
    right = shapes[left + 1]
    return 3 * 2 * prod(shapes[left]) * (right[-1] if len(right) > 1 else 1)


def _attention(shapes: list[Shape], bsym: BoundSymbol, *, query: int = 0, widths: tuple[int, int] = (1, 1)) -> int:
    """Return the FLOPs of attention, ``2 * queries * keys * (widths[0] * query width + widths[1] * value width)``.

    In forward ``widths`` is (1, 1), for two products: the scores, and the weighted sums of the values. Query heads may
    share key heads. ``shapes[query]`` is the shape of the queries, followed by the shapes of keys and values.
    """
    queries, keys, values = shapes[query : query + 3]
    width = widths[0] * queries[-1] + widths[1] * values[-1]
    return 2 * prod(queries[:-1]) * keys[-2] * width


def _convolution(positions: Shape, filters: Shape, *, times: int = 1) -> int:
    """Return the FLOPs of ``times`` equal convolutions. Each position uses the filters of its group."""
    return times * 2 * prod(positions) * prod(filters[1:])


def _named(count: Count, names: str) -> dict[str, Count]:
    return dict.fromkeys(names.split(), count)


COUNTS: dict[str, Count] = {
    **_named(_product, "matmul linear bmm mm mv dot"),
    **_named(partial(_product, left=1), "addmm baddbmm"),  # add the first tensor to the product of the next two
    **_named(_product_vjp, "bmm_vjp mm_vjp mv_vjp dot_vjp"),
    **_named(partial(_product_vjp, left=1), "addmm_vjp baddbmm_vjp"),
    **_named(
        _attention,
        """scaled_dot_product_attention cpu_flash_attention cudnn_sdpa_fwd fa3_fwd nv_sdpfa_fwd
        sdpaex_grad_forward_scaled_dot_product_efficient_attention
        sdpafx_grad_forward_scaled_dot_product_efficient_attention""",
    ),
    # The first argument is the output's gradient. Backward computes the scores again, then the gradients of weights,
    # values, queries and keys.
    **_named(
        partial(_attention, query=1, widths=(3, 2)),
        """cpu_flash_attention_backward cudnn_sdpa_bwd fa3_bwd nv_sdpfa_bwd
        sdpaex_scaled_dot_product_efficient_attention_backward
        sdpafx_scaled_dot_product_efficient_attention_backward""",
    ),
    # This computes the scores again, and the gradient of the weights.
    **_named(partial(_attention, query=1), "cpu_flash_attention_mask_backward"),
    # Positions are counted in the output of a convolution, or in the input of a transposed convolution. Each gradient
    # takes the FLOPs of forward. The arguments of forward are (a, weight, bias, stride, padding, dilation, transposed,
    # ...); a gradient has the output's gradient in front of these arguments.
    "convolution": lambda shapes, bsym: _convolution(shapes[0] if bsym.args[6] else _output(bsym), shapes[1]),
    "convolution_input_gradient": lambda shapes, bsym: _convolution(shapes[1 if bsym.args[6] else 0], shapes[2]),
    "convolution_weight_gradient": lambda shapes, bsym: _convolution(shapes[1 if bsym.args[7] else 0], bsym.args[2]),
    **_named(lambda shapes, bsym: _convolution(_output(bsym), shapes[1]), "conv1d conv2d conv3d"),
    **_named(lambda shapes, bsym: _convolution(*shapes[:2]), "conv_transpose1d conv_transpose2d conv_transpose3d"),
    **_named(  # the convolution is computed again, then the gradients of input and weight
        lambda shapes, bsym: _convolution(*shapes[:2], times=3),
        "conv_transpose1d_vjp conv_transpose2d_vjp conv_transpose3d_vjp",
    ),
}
