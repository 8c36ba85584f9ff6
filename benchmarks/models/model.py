"""Model: a row of the tables; how to create a model, a batch for it, and a loss, equal each time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A model whose forward takes the batch by name; the functions draw from PyTorch's generator, which `build` seeds.

    `loss` takes the result; None where the result has a field `loss`. `control_flow` says which control flow depends on
    data, so that Dynamo has to break the graph. `rate` is the step size of the three updates.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Any], Tensor] | None = None
    control_flow: str = ""
    rate: float = 1e-2

    def build(self, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Batch]:
        """The model, training and without dropout, and a batch: equal numbers at each call, drawn in float32."""
        torch.manual_seed(0)
        model = without_dropout(self.model().train())
        batch = self.batch()
        return model.to(dtype), {name: _cast(value, dtype) for name, value in batch.items()}

    def objective(self, result: Any) -> Tensor:
        """The loss of a result."""
        if self.loss is not None:
            return self.loss(result)
        loss = result["loss"] if isinstance(result, Mapping) else result.loss
        assert isinstance(loss, Tensor)
        return loss


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def without_dropout(model: nn.Module) -> nn.Module:
    """All probabilities of dropout at 0: compiled programs draw other numbers than eager execution does."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or "drop_prob" in name or "drop_path" in name):
                setattr(module, name, 0.0)
    return model
