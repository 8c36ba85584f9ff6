"""The rule table: ATen overload -> operators of the graph. Importing this module fills `translate.RULES`."""

from daceml_train.frontends.torch.capture import autograd_function, control_flow, requirements
from daceml_train.frontends.torch.rules import (
    collectives,
    creation,
    division,
    dropout,
    expressions,
    gradients,
    indexing,
    movement,
    network,
    pointwise,
    reductions,
)
from daceml_train.frontends.torch.rules.translate import RULES

__all__ = [
    "RULES",
    "autograd_function",
    "collectives",
    "control_flow",
    "creation",
    "division",
    "dropout",
    "expressions",
    "gradients",
    "indexing",
    "movement",
    "network",
    "pointwise",
    "reductions",
    "requirements",
]
