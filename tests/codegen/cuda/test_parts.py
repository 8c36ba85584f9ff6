"""Kernels whose second launch combines sums over rows: the two launches apart, each with the pointers it touches."""

import pytest
import torch

from tests.codegen import groups
from tests.codegen.cuda.running import check, code_of, emulated, run
from tests.codegen.running import Case
from tests.codegen.test_families import case

pytestmark = pytest.mark.compiled


def sums() -> list[Case]:
    """Sums over rows beside results of the rows, alone, and over rows that teams of several warps share."""
    r = torch.randn
    norm = case("norm", groups.layer_norm_backward, r(40, 96), r(40, 96), r(96), r(40, 1), r(40, 1))
    wide = case("wide norm", groups.layer_norm_backward, r(300, 768), r(300, 768), r(768), r(300, 1), r(300, 1))
    return [norm, wide, case("gelu", groups.bias_gelu_backward, r(40, 96), r(40, 96), r(96))]


def test_the_parts_compute_the_whole():
    """A pointer that a part reads and does not have would be null."""
    cases = sums()
    assert all(len(code_of(c).parts) == 2 for c in cases)
    check(cases, apart=True)


def test_the_rows_are_complete_after_the_first_part():
    c = sums()[0]
    code = code_of(c)
    first, second = code.parts
    big = [i for i, x in enumerate(c.inputs) if x.numel() == c.inputs[0].numel()]
    assert {*big} <= {*first.positions} and not {*big} & {*second.positions}
    run(c, code, emulated([code]), parts=[first])
    rows = [x.clone() for x in c.outputs if x.numel() == c.inputs[0].numel()]
    check([c])
    whole = [x for x in c.outputs if x.numel() == c.inputs[0].numel()]
    assert rows and all(torch.equal(x, y) for x, y in zip(rows, whole, strict=True))


def test_kernels_of_one_launch_have_no_parts():
    assert not code_of(case("softmax", groups.softmax, torch.randn(8, 40))).parts
    assert not code_of(case("gelu", groups.bias_gelu, torch.randn(8, 40), torch.randn(40))).parts
