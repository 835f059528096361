"""Counts the FLOPs of a line's products, attention and convolutions, from the shapes of tensors.

A product of (M, K) and (K, N) has 2 M N K: a multiplication and an addition each, as ``torch.utils.flop_counter``
counts. Attention counts all scores, also where a causal mask makes a kernel skip half of them. A fused region has the
sum of its parts. Everything else counts 0: the memory's bandwidth decides how long it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

Shape = tuple[int, ...]
Count = Callable[[list[Shape], BoundSymbol], int]  # of the shapes of the tensors among the arguments, in order


def flops_of(bsym: BoundSymbol) -> int:
    """FLOPs of a line: by its own name, or else the sum of its subsymbols'. 0 for a name that nobody knows."""
    count = COUNTS.get(bsym.sym.name)
    return sum(map(flops_of, bsym.subsymbols)) if count is None else count(_shapes(bsym), bsym)


def _shapes(bsym: BoundSymbol) -> list[Shape]:
    """Of tensors that are arguments themselves or in a sequence (``addmm_vjp`` has its inputs in one)."""
    return [tuple(map(int, proxy.shape)) for proxy in bsym.flat_proxy_args if isinstance(proxy, TensorProxy)]


def _output(bsym: BoundSymbol) -> Shape:
    return tuple(map(int, bsym.output.shape))


def _product(shapes: list[Shape], bsym: BoundSymbol) -> int:
    """``matmul``, ``linear`` and others whose first tensor has the contracted dimension last."""
    return 2 * prod(_output(bsym)) * shapes[0][-1]


def _added_product(shapes: list[Shape], bsym: BoundSymbol) -> int:
    """``addmm`` and others: a tensor is added to the product of the next two."""
    return 2 * prod(_output(bsym)) * shapes[1][-1]


def _product_vjp(shapes: list[Shape], bsym: BoundSymbol) -> int:
    """The product is computed again, then the gradients of both factors: three products of the same size."""
    left, right = shapes[0], shapes[1]
    return 3 * 2 * prod(left) * (right[-1] if len(right) > 1 else 1)


def _added_product_vjp(shapes: list[Shape], bsym: BoundSymbol) -> int:
    return _product_vjp(shapes[1:], bsym)


def _scores(query: Shape, key: Shape, *widths: int) -> int:
    """Products of (queries, keys) with these widths of a head; query heads may share key heads."""
    return 2 * prod(query[:-1]) * key[-2] * sum(widths)


def _attention(shapes: list[Shape], bsym: BoundSymbol) -> int:
    """Scores and their product with the values."""
    query, key, value = shapes[:3]
    return _scores(query, key, query[-1], value[-1])


def _attention_backward(shapes: list[Shape], bsym: BoundSymbol) -> int:
    """The scores again, then the gradients of weights, values, queries and keys. The output's gradient comes first."""
    _, query, key, value = shapes[:4]
    return _scores(query, key, *[query[-1]] * 3, *[value[-1]] * 2)


def _mask_backward(shapes: list[Shape], bsym: BoundSymbol) -> int:
    """The scores again, and the gradient of the weights."""
    _, query, key, value = shapes[:4]
    return _scores(query, key, query[-1], value[-1])


def _primitive_convolution(shapes: list[Shape], bsym: BoundSymbol) -> int:
    """``convolution(a, weight, bias, stride, padding, dilation, transposed, output_padding, groups)``."""
    return (_transposed_convolution if bsym.args[6] else _convolution)(shapes, bsym)


def _convolution(shapes: list[Shape], bsym: BoundSymbol) -> int:
    """Each element of the output meets the filters of its group."""
    return 2 * prod(_output(bsym)) * prod(shapes[1][1:])


def _transposed_convolution(shapes: list[Shape], bsym: BoundSymbol) -> int:
    """Each element of the input does."""
    return 2 * prod(shapes[0]) * prod(shapes[1][1:])


def _transposed_convolution_vjp(shapes: list[Shape], bsym: BoundSymbol) -> int:
    """The convolution again, then the gradients of input and weight, which take as much each."""
    return 3 * _transposed_convolution(shapes, bsym)


def _convolution_input_gradient(shapes: list[Shape], bsym: BoundSymbol) -> int:
    """As many as forward: ``(grad, input, weight, stride, padding, dilation, transposed, ...)``."""
    return 2 * prod(shapes[1 if bsym.args[6] else 0]) * prod(shapes[2][1:])


def _convolution_weight_gradient(shapes: list[Shape], bsym: BoundSymbol) -> int:
    """As many as forward: ``(grad, input, weight_shape, has_bias, stride, padding, dilation, transposed, ...)``."""
    channels_and_taps: int = prod(bsym.args[2][1:])
    return 2 * prod(shapes[1 if bsym.args[7] else 0]) * channels_and_taps


def _named(count: Count, names: str) -> dict[str, Count]:
    return dict.fromkeys(names.split(), count)


COUNTS: dict[str, Count] = {
    **_named(_product, "matmul linear bmm mm mv dot"),
    **_named(_added_product, "addmm baddbmm"),
    **_named(_product_vjp, "bmm_vjp mm_vjp mv_vjp dot_vjp"),
    **_named(_added_product_vjp, "addmm_vjp baddbmm_vjp"),
    **_named(
        _attention,
        """scaled_dot_product_attention cpu_flash_attention cudnn_sdpa_fwd fa3_fwd nv_sdpfa_fwd
        sdpaex_grad_forward_scaled_dot_product_efficient_attention
        sdpafx_grad_forward_scaled_dot_product_efficient_attention""",
    ),
    **_named(
        _attention_backward,
        """cpu_flash_attention_backward cudnn_sdpa_bwd fa3_bwd nv_sdpfa_bwd
        sdpaex_scaled_dot_product_efficient_attention_backward
        sdpafx_scaled_dot_product_efficient_attention_backward""",
    ),
    **_named(_mask_backward, "cpu_flash_attention_mask_backward"),
    **_named(_primitive_convolution, "convolution"),
    **_named(_convolution, "conv1d conv2d conv3d"),
    **_named(_transposed_convolution, "conv_transpose1d conv_transpose2d conv_transpose3d"),
    **_named(_convolution_input_gradient, "convolution_input_gradient"),
    **_named(_convolution_weight_gradient, "convolution_weight_gradient"),
    **_named(_transposed_convolution_vjp, "conv_transpose1d_vjp conv_transpose2d_vjp conv_transpose3d_vjp"),
}
