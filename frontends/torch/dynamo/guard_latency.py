"""The time that a call's guards take is not measured: TorchDynamo flushes the processor's caches to do so.

It does this once per compiled function, for a log entry. The flush takes longer than building the guards of a small
model.
"""

from __future__ import annotations

import functools
from typing import Any

import torch._dynamo.guards
from torch._C._dynamo.guards import profile_guard_manager

from daceml_train.frontends.torch.traces import Traces

measure = profile_guard_manager
"""TorchDynamo's measurement."""


@functools.cache
def _install() -> None:
    guards: Any = torch._dynamo.guards
    guards.profile_guard_manager = _latency


def _latency(*arguments: Any) -> Any:
    return 0.0 if traces.depth else measure(*arguments)


traces = Traces(_install)
"""Traces whose guards are not timed."""
