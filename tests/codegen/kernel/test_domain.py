"""The domain of a kernel: how its axes divide one another."""

from __future__ import annotations

from daceml_train.codegen.kernel.analysis import analyze
from daceml_train.codegen.kernel.domain import divide
from daceml_train.ops.kernel import Kernel
from daceml_train.tensor import symbol


def test_sizes_divide_where_the_quotient_is_whole_for_all_values() -> None:
    size = symbol("s0")
    assert divide(12, 4) == 3 and divide(12, 5) is None
    assert divide(2 * size, size) == 2
    assert divide(6 * size, 2) == 3 * size
    assert divide(size, 2) is None and divide(size, 2 * size) is None
    assert divide(size * size + size, size) == size + 1


def test_a_kernel_of_nothing_has_no_axes() -> None:
    """A group of constants alone has no results."""
    assert analyze(Kernel((), (), ()), []).sizes == ()
