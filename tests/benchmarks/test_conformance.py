import dataclasses
from pathlib import Path

import pytest
import torch
from torch.testing._internal.opinfo.core import SampleInput

from benchmarks import conformance
from benchmarks.conformance import Results, as_module, difference


def results(*values: torch.Tensor) -> Results:
    return Results(list(values), [], [], [False] * len(values))


def test_a_difference_is_measured_against_float64() -> None:
    exact = torch.tensor([1.0, 2.0, 1000.0, torch.inf], dtype=torch.float64)
    eager, off = results(exact.float()), exact.float() + torch.tensor([0, 1e-3, 0, 0])
    assert difference(eager, eager, results(exact)) == ""
    assert difference(results(off), eager, results(exact)) == "values[0]: 1 of 4 elements, such as 2.001 instead of 2"
    assert "should not be finite" in difference(results(exact.float().clamp(max=9)), eager, None)
    assert "requires_grad" in difference(dataclasses.replace(eager, differentiable=[True]), eager, None)
    assert "float64[4] instead of" in difference(results(exact), eager, None)


def test_a_sample_as_a_module() -> None:
    a, b = torch.randn(3), torch.randn(3)
    made, tensors = as_module(torch.cat, SampleInput([a, b], kwargs={"dim": 0}), residual=False)
    assert len(tensors) == 2
    torch.testing.assert_close(made()(*tensors), torch.cat([a, b]))


@pytest.mark.compiled
def test_an_operator_is_right(tmp_path: Path) -> None:
    (op,) = (op for op in conformance.entries() if op.name == "exp")
    found = list(conformance.outcomes(op, 1, str(tmp_path)))
    assert [(o.form, o.kind) for o in found] == [("op", "right"), ("h + op(h)", "right")]
