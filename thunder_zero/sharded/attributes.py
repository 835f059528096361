"""Keeps the attributes that users set on parameters, such as ``no_weight_decay``."""

from __future__ import annotations

from torch import Tensor, nn

from thunder_zero.compat.torch.tensors import IS_PARAM


def parameter_like(original: Tensor, values: Tensor) -> nn.Parameter:
    """A parameter of these values, with the attributes of another one, which trains if that does."""
    return with_attributes_of(nn.Parameter(values, original.requires_grad), original)


def with_attributes_of(param: nn.Parameter, original: Tensor) -> nn.Parameter:
    """The parameter, with the attributes that another one has now, and no others."""
    own = vars(param)
    kept = {name: value for name, value in own.items() if name == IS_PARAM}
    own.clear()
    own.update({name: value for name, value in vars(original).items() if name != IS_PARAM}, **kept)
    return param
