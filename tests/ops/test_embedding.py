import numpy as np
import pytest
import torch
import torch.nn.functional as F

from daceml_train.errors import Invalid
from daceml_train.ops.embedding import AddRows, Embedding, EmbeddingBag, EmbeddingGrad
from daceml_train.tensor import DType, Tensor
from tests.ops.checking import check_op, numbers


@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("shape", [(4,), (2, 3), (), (0,), (2, 1, 2)])
def test_embedding(shape: tuple[int, ...], padding: int) -> None:
    indices = np.random.default_rng(0).integers(0, 5, shape)
    reference = lambda w, i: F.embedding(i, w, None if padding < 0 else padding)  # noqa: E731
    wrt = [0] if indices.size else []  # PyTorch's derivative refuses empty indices
    options = {"smooth": padding < 0, "symbolic": False, "wrt": wrt}
    check_op(Embedding(padding), numbers(5, 3), indices, reference=reference, **options)
    dense = lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, 5, padding, False)  # noqa: E731
    if wrt:
        check_op(EmbeddingGrad(5, padding), numbers(*shape, 3), indices, reference=dense, symbolic=False)


def test_embedding_bag() -> None:
    indices, offsets = np.random.default_rng(0).integers(0, 5, 6), np.array([0, 2, 4])
    reference = lambda w, i, o: w[i].reshape(3, 2, 3).sum(1)  # noqa: E731
    check_op(EmbeddingBag(), numbers(5, 3), indices, offsets, reference=reference, wrt=[0], symbolic=False)


@pytest.mark.parametrize("shape", [(4,), (2, 3), ()])
def test_add_rows(shape: tuple[int, ...]) -> None:
    indices = np.random.default_rng(0).integers(0, 5, shape)
    reference = lambda t, i, r: t.index_put((i,), r, accumulate=True)  # noqa: E731
    check_op(AddRows(), numbers(5, 3), indices, numbers(*shape, 3), reference=reference, wrt=[0, 2], symbolic=False)


def test_no_indices_give_no_gradient() -> None:
    (table,) = EmbeddingGrad(4).evaluate(np.zeros((0, 3)), np.zeros(0, np.int64))
    assert table.shape == (4, 3) and not table.any()


def test_errors() -> None:
    with pytest.raises(Invalid, match=r"expects i64 or i32 indices, given f32\[2\]"):
        Embedding().infer(Tensor((5, 3)), Tensor((2,)))
    with pytest.raises(Invalid, match=r"a table \[R, D\]"):
        Embedding().infer(Tensor((5,)), Tensor((2,), DType.int64))
    with pytest.raises(Invalid, match=r"a cotangent \[\*indices, D\]"):
        EmbeddingGrad(5).infer(Tensor((3, 4)), Tensor((2,), DType.int64))
    with pytest.raises(Invalid, match=r"embedding_bag expects"):
        EmbeddingBag().infer(Tensor((5, 3)), Tensor((2, 2), DType.int64), Tensor((2,), DType.int64))
    with pytest.raises(Invalid, match=r"add_rows expects a table"):
        AddRows().infer(Tensor((5, 3)), Tensor((2,), DType.int64), Tensor((3, 3)))
