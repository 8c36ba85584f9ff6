"""What the generator for the CPU is tested with, CUDA kernels compute, too: layouts, reductions, element types."""

import pytest
import torch

from tests.codegen import test_layouts, test_reductions
from tests.codegen.cuda.running import check

pytestmark = pytest.mark.compiled

LAYOUTS = ["broadcasting", "layouts_of_operands", "movement_inside", "updates_in_place", "special_values"]
REDUCTIONS = ["every_set_of_dimensions", "booleans"]
MORE = ["the_same_kernels_serve_other_sizes", "nothing_to_reduce", "long_sums_are_accurate"]


@pytest.mark.parametrize("name", [*LAYOUTS, pytest.param("integers_and_booleans", marks=pytest.mark.wide)])
def test_layouts_and_types(name, monkeypatch):
    monkeypatch.setattr(test_layouts, "check", check)
    getattr(test_layouts, f"test_{name}")()


@pytest.mark.parametrize("name", [*REDUCTIONS, *(pytest.param(n, marks=pytest.mark.wide) for n in MORE)])
def test_sums_and_maxima(name, monkeypatch):
    monkeypatch.setattr(test_reductions, "check", check)
    getattr(test_reductions, f"test_{name}")()


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["max", "min", "prod"])
def test_kinds(kind, monkeypatch):
    monkeypatch.setattr(test_reductions, "check", check)
    test_reductions.test_kinds(kind)


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8])
def test_element_types(dtype, monkeypatch):
    monkeypatch.setattr(test_reductions, "check", check)
    test_reductions.test_element_types(dtype)
