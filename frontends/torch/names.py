"""The name table: ATen overload -> our operators. Importing this module fills `translate.RULES`."""

from daceml_train.frontends.torch import (
    autograd_function,
    indexing,
    movement,
    network,
    pointwise,
    reductions,
    requirements,
)
from daceml_train.frontends.torch.translate import RULES

__all__ = ["RULES", "autograd_function", "indexing", "movement", "network", "pointwise", "reductions", "requirements"]
