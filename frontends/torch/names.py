"""The name table: ATen overload -> our operators. Importing this module fills `translate.RULES`."""

from daceml_train.frontends.torch import (
    autograd_function,
    control_flow,
    indexing,
    movement,
    network,
    pointwise,
    reductions,
    requirements,
)
from daceml_train.frontends.torch.translate import RULES

__all__ = [
    "RULES", "autograd_function", "control_flow", "indexing", "movement", "network", "pointwise", "reductions",
    "requirements",
]  # fmt: skip
