"""What the generator for the CPU is tested with, CUDA kernels compute, too: layouts, reductions, element types."""

import pytest

from tests.codegen import test_layouts, test_reductions
from tests.codegen.cuda.running import check

pytestmark = pytest.mark.compiled

LAYOUTS = ["broadcasting", "layouts_of_operands", "movement_inside", "updates_in_place", "special_values"]
REDUCTIONS = ["every_set_of_dimensions", "the_same_kernels_serve_other_sizes", "booleans", "nothing_to_reduce"]


@pytest.mark.parametrize("name", [*LAYOUTS, "integers_and_booleans"])
def test_layouts_and_types(name, monkeypatch):
    monkeypatch.setattr(test_layouts, "check", check)
    getattr(test_layouts, f"test_{name}")()


@pytest.mark.parametrize("name", [*REDUCTIONS, "long_sums_are_accurate"])
def test_sums_and_maxima(name, monkeypatch):
    monkeypatch.setattr(test_reductions, "check", check)
    getattr(test_reductions, f"test_{name}")()
