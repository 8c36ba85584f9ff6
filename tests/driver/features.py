"""What PyTorch models do besides computing, as a table of small modules: each is trained as eager execution trains it.

`wide` entries cost more or differ less from others; `pytest --wide` runs them too, and all entries as steps that are
not `stepped`. `module` and `step` say what is
part of the reason where the compiled module or the step runs as PyTorch does; None: everything is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.driver.holding import Function

ANY = ""
"""Dynamo runs parts of it as Python, which leaves a reason in some cases only."""


@dataclass
class Feature:
    """A module's maker, its arguments' maker, and how it may run."""

    make: Callable[[], nn.Module]
    arguments: Callable[[], tuple[Any, ...]]
    module: str | None = None
    step: str | None = None
    wide: bool = False
    stepped: bool = False
    tolerance: float = 2e-5


FEATURES: dict[str, Feature] = {}
ARGUMENT = "requires a gradient"


def x(*shape: int, grad: bool = False) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(shape, requires_grad=grad),)


def feature(name: str, make: Callable[[], nn.Module], arguments: Any = None, **options: Any) -> None:
    assert name not in FEATURES
    FEATURES[name] = Feature(make, arguments or x(3, 4), **options)


def function(name: str, arguments: Any = None, shape: tuple[int, ...] = (4,), **options: Any) -> Any:
    def enter(f: Callable[..., Any]) -> Callable[..., Any]:
        feature(name, lambda: Function(f, *shape), arguments, **options)
        return f

    return enter
