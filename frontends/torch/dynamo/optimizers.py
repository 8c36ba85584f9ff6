"""The step of an optimizer that the user wrote, traced as the methods of any object are.

TorchDynamo traces an optimizer as one of PyTorch's: `_init_group` runs while it traces, when no parameter has a
gradient yet, the option `capturable` becomes true, and attributes that the step assigns are lost.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables.builder import VariableBuilder

from daceml_train.frontends.torch.traces import Traces


@functools.cache
def _install() -> None:
    builder: Any = VariableBuilder
    original = builder._wrap

    def _wrap(self: Any, value: object) -> Any:
        if not traces.depth or not isinstance(value, torch.optim.Optimizer):
            return original(self, value)
        self.install_guards(GuardBuilder.ID_MATCH)
        return self.wrap_user_defined(value)

    builder._wrap = _wrap


traces = Traces(_install)
"""Traces that may contain such a step."""
