"""Numbers that an element type does not hold: PyTorch's own error, never the number that is left after it wraps."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt

BYTES = torch.arange(0, 250, 25, dtype=torch.uint8)
HALVES = torch.linspace(-2.0, 2.0, 10, dtype=torch.float16)
TOO_LARGE: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    "clamp": (BYTES, lambda x: x.clamp(-1, 300)),
    "clamp_max": (BYTES, lambda x: x.clamp(max=300)),
    "full": (BYTES, lambda x: torch.full((10,), 300, dtype=torch.uint8) + x),
    "full_like": (BYTES, lambda x: torch.full_like(x, -256) + x),
    "new_full": (HALVES, lambda x: x.new_full((10,), 1e6) + x),
    "fill": (BYTES, lambda x: x.clone().fill_(300)),
    "masked_fill": (HALVES, lambda x: x.masked_fill(x > 0, -1e9)),
    "where": (BYTES, lambda x: torch.where(x > 100, x, 300)),
    "index_fill": (BYTES, lambda x: x.index_fill(0, torch.tensor([1]), 300)),
    "hardtanh": (HALVES, lambda x: nn.functional.hardtanh(x, -1e9, 1e9)),
    "threshold": (HALVES, lambda x: nn.functional.threshold(x, 0.0, 1e9)),
    "floats": (torch.linspace(0, 1, 10), lambda x: x.clamp(-1e40, 1e40)),
}
HELD: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    "a negative byte": (BYTES, lambda x: x.masked_fill(x > 100, -1)),
    "a fraction": (BYTES, lambda x: torch.full_like(x, 2.7) + x),
    "infinity": (HALVES, lambda x: x.masked_fill(x > 0, -float("inf"))),
    "arithmetic": (BYTES, lambda x: (x + 300) * 300),
    "comparison": (BYTES, lambda x: x == 300),
    "a truth value": (BYTES, lambda x: torch.full((2,), 3, dtype=torch.bool)),
}


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.filterwarnings("ignore:daceml_train runs")
@pytest.mark.parametrize("name", TOO_LARGE)
def test_pytorchs_error(name: str) -> None:
    x, function = TOO_LARGE[name]
    for call in (function, dt.optimize(Model(function))):
        with pytest.raises(RuntimeError, match="cannot be converted to type .* without overflow"):
            call(x)


@pytest.mark.compiled
@pytest.mark.parametrize("name", HELD)
def test_pytorchs_numbers(name: str) -> None:
    x, function = HELD[name]
    got = dt.optimize(Model(function))(x)
    assert got.dtype is function(x).dtype and torch.equal(got, function(x))
