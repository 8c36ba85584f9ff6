"""Captures in which sizes may depend on data: those of what `x[mask]` or `nonzero` select.

TorchDynamo then gives such a size a symbol, where it would break the graph otherwise. `capture.selections` computes
what is selected before the program, which runs for two elements or more: none makes an empty sum, and one an axis that
is broadcast.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from daceml_train.frontends.torch.traces import Traces

LEAST = 2
"""The least value of a size that depends on data for which a program is compiled."""


@functools.cache
def _install() -> None:
    environment: Any = ShapeEnv
    original = environment._constrain_range_for_size

    @functools.wraps(original)
    def constrain(self: Any, a: Any, min: int | None = None, max: int | None = None) -> None:
        original(self, a, LEAST if _traces.depth and (min is None or min < LEAST) else min, max)

    environment._constrain_range_for_size = constrain


_traces = Traces(_install)


@contextlib.contextmanager
def admitted(admit: bool) -> Iterator[None]:
    """Capture sizes that depend on data, if `admit`."""
    if not admit:
        yield
        return
    with _traces, torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield
