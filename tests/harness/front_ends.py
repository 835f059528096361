"""Runs what a test does under another front end: ``thunder.jit`` with ZeroTransform, or dynamo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import thunder_zero as tz
from thunder_zero.dynamo.compile import DynamoTransform

import thunder

JIT, DYNAMO = "jit", "dynamo"


@contextmanager
def using(front_end: str) -> Iterator[None]:
    """Inside the block, ``thunder.jit(module, transforms=[tz.ZeroTransform(...)])`` is this front end."""
    if front_end == JIT:
        yield
        return
    with mock.patch.object(thunder, "jit", _captured(thunder.jit)):
        yield


def _captured(jit: Callable[..., Any]) -> Callable[..., Any]:
    def captured(module: Any, *args: Any, transforms: Sequence[Any] = (), **options: Any) -> Any:
        for transform in transforms:
            if type(transform) is tz.ZeroTransform:
                transform.__class__ = DynamoTransform
        return jit(module, *args, transforms=transforms, **options)

    return captured
