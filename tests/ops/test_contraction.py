import numpy as np
import pytest
import torch

from daceml_train.errors import Invalid
from daceml_train.ops.contraction import Matmul, MatmulAdd
from daceml_train.tensor import DType, Tensor, symbol
from tests.ops.checking import check_op, numbers


@pytest.mark.parametrize(("m", "k", "n"), [(3, 4, 5), (1, 4, 1), (4, 4, 4), (0, 3, 2), (2, 0, 3)])
def test_matmul(m: int, k: int, n: int) -> None:
    check_op(Matmul(), numbers(m, k), numbers(k, n, seed=1), reference=torch.mm)
    check_op(Matmul(), numbers(2, m, k), numbers(2, k, n, seed=1), reference=torch.bmm)
    check_op(MatmulAdd(), numbers(n), numbers(m, k), numbers(k, n, seed=1), reference=torch.addmm)
    check_op(MatmulAdd(), numbers(m, n), numbers(m, k), numbers(k, n, seed=1), reference=torch.addmm)
    check_op(MatmulAdd(), numbers(2, m, n), numbers(2, m, k), numbers(2, k, n, seed=1), reference=torch.baddbmm)


def test_integers() -> None:
    check_op(Matmul(), np.arange(6).reshape(2, 3), np.arange(6).reshape(3, 2), reference=torch.mm)


def test_flops() -> None:
    s = symbol("s")
    assert Matmul().flops(Tensor((s, 4)), Tensor((4, 5))) == 40 * s
    assert Matmul().flops(Tensor((2, 3, 4)), Tensor((2, 4, 5))) == 2 * 2 * 3 * 4 * 5
    assert MatmulAdd().flops(Tensor((5,)), Tensor((3, 4)), Tensor((4, 5))) == 9 * 15


def test_errors() -> None:
    a = Tensor((3, 4))
    for other in (Tensor((3, 4)), Tensor((4,)), Tensor((4, 5), DType.float64), Tensor((2, 4, 5))):
        with pytest.raises(Invalid, match=r"matmul expects .* given f32\[3, 4\] and"):
            Matmul().infer(a, other)
    with pytest.raises(Invalid, match=r"matmul_add expects .* or one row of it to add to, given"):
        MatmulAdd().infer(Tensor((4,)), a, Tensor((4, 5)))
