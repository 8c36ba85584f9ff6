"""Types of what operators outside of a recursion return, for other numbers of rows than those that they were learned for."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from daceml_train.frontends.torch.recursion.cells import Fakes
from daceml_train.frontends.torch.recursion.lazy import lazy_of, meta_of
from daceml_train.frontends.torch.recursion.outside import Results

WEIGHT = torch.randn(5, 3, requires_grad=True)
CALLS: dict[str, Any] = {
    "linear": (F.linear, lambda x: (x, WEIGHT), {}),
    "cross entropy": (F.cross_entropy, lambda x: (x, torch.zeros(len(x), dtype=torch.int64)), {}),
    "each": (F.cross_entropy, lambda x: (x, torch.zeros(len(x), dtype=torch.int64)), {"reduction": "none"}),
    "weighted": (F.cross_entropy, lambda x: (x, torch.zeros(len(x), dtype=torch.int64), torch.ones(3)), {}),
    "softmax": (F.softmax, lambda x: (x, 0), {}),
    "tanh": (torch.tanh, lambda x: (x,), {}),
    "rows and columns": (torch.mm, lambda x: (x, x.detach().T), {}),
    "the first rows": (torch.narrow, lambda x: (x, 0, 0, min(len(x), 4)), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_types_are_those_of_pytorch(name: str) -> None:
    function, arguments, keywords = CALLS[name]
    results = Results(Fakes())
    for rows in (7, 1, 3, 5, 9, 12, 7):
        x = torch.randn(rows, 3, requires_grad=True)
        args = arguments(x)
        found, why = results.of(function, (lazy_of(None, 0, meta_of(x)), *args[1:]), keywords)
        assert found is meta_of(function(*args, **keywords)) and not why


def test_other_numbers_of_rows_are_not_asked_for() -> None:
    fakes = Fakes()
    results = Results(fakes)
    for rows in range(6, 30):
        results.of(F.linear, (lazy_of(None, 0, meta_of(torch.randn(rows, 3))), WEIGHT), {})
    assert len(results.known) == 1
