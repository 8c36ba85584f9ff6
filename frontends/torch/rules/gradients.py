"""Rules of the marks around the gradients that code of the user's reads; see `training.user_update`."""

from __future__ import annotations

from collections.abc import Sequence

from daceml_train.frontends.torch.rules.translate import Translator, rule
from daceml_train.ops.gradient import FinalGradients, LossGradients
from daceml_train.ops.operator import Value


@rule("daceml_train.loss_gradients.default")
def _loss_gradients(t: Translator, loss: Value, parameters: Sequence[Value]) -> tuple[Value, ...]:
    return t.graph.emit(LossGradients(), loss, *parameters)


@rule("daceml_train.final_gradients.default")
def _final_gradients(t: Translator, gradients: Sequence[Value]) -> tuple[Value, ...]:
    return t.graph.emit(FinalGradients(), *gradients)
