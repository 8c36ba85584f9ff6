import numpy as np
import pytest
import torch

from daceml_train.analysis.traffic import traffic
from daceml_train.codegen.kernel.analysis import analyze
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.ops.elementwise import Elementwise
from daceml_train.ops.kernel import Kernel, Statement
from daceml_train.ops.read import Read
from daceml_train.ops.reduction import Reduce
from daceml_train.tensor import Tensor
from tests.ops.checking import check_op, numbers

WINDOWS = Read((2, 4, 3), ((0, 0, 1), (1, 1, 2), (2, 1, 1)), (0, 1))
DIAGONAL = Read((4,), ((0, 0, 1), (0, 1, 1)), (0, 1))
SKEWED = Read((3, 2), ((0, 0, 1), (0, 1, -1), (1, 1, 1)), (1, 2))
REPEATED = Read((2, 5, 3), ((0, 0, 2),), (1, 0))


@pytest.mark.parametrize(
    ("op", "shape", "index"),
    [
        (WINDOWS, (2, 12), lambda x: x[:, 1:].unfold(1, 3, 2)[:, :4]),
        (DIAGONAL, (4, 5), lambda x: x.diagonal(1)),
        (SKEWED, (4, 4), lambda x: torch.stack([torch.stack([x[1 + i, 2 - i + j] for j in (0, 1)]) for i in range(3)])),
        (REPEATED, (4, 1), lambda x: x[1::2, 0][:, None, None].expand(2, 5, 3)),
    ],
)
def test_read(op: Read, shape: tuple[int, ...], index) -> None:
    check_op(op, numbers(*shape), reference=index, symbolic=False)


def test_bounds() -> None:
    for wrong in (Read((3,), ((0, 0, 2),), (0,)), Read((2,), ((0, 0, 1),), (-1,)), Read((2,), ((0, 0, -1),), (0,))):
        with pytest.raises(Invalid, match=r"leaves dimension 0: indices run over"):
            wrong.infer(Tensor((4,)))
    with pytest.raises(Invalid, match="expects 1 offsets"):
        Read((2,), (), ()).infer(Tensor((4,)))
    with pytest.raises(Invalid, match="names a dimension that does not exist"):
        Read((2,), ((1, 0, 1),), (0,)).infer(Tensor((4,)))


def test_windows_are_reads_inside_a_kernel() -> None:
    """A sum over windows is one loop nest that reads the array itself."""
    body = Kernel(
        ("x", "w"),
        (
            Statement(WINDOWS, ("x",), ("windows",)),
            Statement(Elementwise("mul"), ("windows", "w"), ("product",)),
            Statement(Reduce("sum", (2,)), ("product",), ("y",)),
        ),
        ("y",),
    )
    domain = analyze(body, [Tensor((2, 12)), Tensor((3,))])
    (read,) = [leaf for leaf in domain.leaves.values() if leaf.argument == 0]
    assert sorted(multiple for _, _, multiple in read.terms) == [1, 1, 2]
    assert read.offset == ((1, 1),)


def test_overlapping_windows_count_once() -> None:
    graph = Graph()
    x = graph.input("x", Tensor((2, 12)))
    graph.output(*graph.emit(Elementwise("exp"), *graph.emit(WINDOWS, x)))
    assert traffic(graph).bytes == (2 * 9 + 2 * 4 * 3) * 4
    assert np.prod(WINDOWS.shape) == 24
