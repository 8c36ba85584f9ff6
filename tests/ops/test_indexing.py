import numpy as np
import pytest
import torch

from daceml_train.errors import Invalid
from daceml_train.ops.indexing import Gather, Index, IndexPut, MaskedPut, MaskedTake, Scatter
from daceml_train.tensor import DType, Tensor
from tests.ops.checking import check_op, numbers


def chosen(*shape: int, below: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).integers(0, below, shape)


def apart(count: int, below: int) -> np.ndarray:
    return np.random.default_rng(5).permutation(below)[:count]


@pytest.mark.parametrize(
    ("shape", "dims", "indices"),
    [
        ((5, 3), (0,), [(4,)]),
        ((5, 3), (1,), [(2, 2)]),
        ((5, 3), (0,), [()]),
        ((5, 3, 2), (0, 1), [(4,), (4,)]),
        ((5, 3, 2), (0, 2), [(4, 1), (2,)]),
        ((2, 5, 3), (1, 2), [(4,), (1,)]),
        ((5, 1), (0,), [(0,)]),
        ((1, 4), (0,), [(3,)]),
    ],
)
def test_index(shape: tuple[int, ...], dims: tuple[int, ...], indices: list[tuple[int, ...]]) -> None:
    arrays = [chosen(*s, below=shape[d], seed=d) for s, d in zip(indices, dims, strict=True)]

    def reference(x: torch.Tensor, *found: torch.Tensor) -> torch.Tensor:
        whole: list = [slice(None)] * x.dim()
        for d, index in zip(dims, found, strict=True):
            whole[d] = index
        return x[tuple(whole)]

    check_op(Index(dims), numbers(*shape), *arrays, reference=reference, symbolic=False)


def test_index_from_the_end() -> None:
    check_op(Index((0,)), numbers(5, 3), np.array([-1, 0, -5]), reference=lambda x, i: x[i], symbolic=False)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("dims", "shape"), [((0,), (3, 4)), ((1,), (5, 3)), ((0, 1), (3,))])
def test_index_put(accumulate: bool, dims: tuple[int, ...], shape: tuple[int, ...]) -> None:
    indices = [chosen(3, below=4, seed=d) if accumulate else apart(3, 4) for d in dims]

    def reference(x: torch.Tensor, v: torch.Tensor, *found: torch.Tensor) -> torch.Tensor:
        where = tuple(found) if dims[0] == 0 else (slice(None), *found)
        return x.index_put(tuple(found), v, accumulate) if dims[0] == 0 else _put(x, where, v, accumulate)

    check_op(
        IndexPut(dims, accumulate),
        numbers(5, 4),
        numbers(*shape, seed=1),
        *indices,
        reference=reference,
        symbolic=False,
    )


def _put(x: torch.Tensor, where: tuple, v: torch.Tensor, accumulate: bool) -> torch.Tensor:
    y = x.clone()
    y[where] = y[where] + v if accumulate else v
    if accumulate:
        return x.index_add(1, where[1], v)
    return y


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", [(5, 3), (2, 3), (5, 1), (0, 3)])
def test_gather_and_scatter(dim: int, sizes: tuple[int, int]) -> None:
    shape = (5, 3)
    index = chosen(*sizes, below=shape[dim])
    smooth = index.size > 0
    check_op(
        Gather(dim), numbers(*shape), index, reference=lambda x, i: x.gather(dim, i), symbolic=False, smooth=smooth
    )
    check_op(
        Scatter(dim, accumulate=True),
        numbers(*shape),
        index,
        numbers(*sizes, seed=1),
        reference=lambda x, i, v: x.scatter_add(dim, i, v),
        symbolic=False,
        smooth=smooth,
    )


def test_scatter() -> None:
    index = np.array([[2, 0, 1], [0, 1, 2]])
    check_op(
        Scatter(0), numbers(5, 3), index, numbers(2, 3), reference=lambda x, i, v: x.scatter(0, i, v), symbolic=False
    )


@pytest.mark.parametrize("rest", [(), (3,)])
def test_masked_put_and_take(rest: tuple[int, ...]) -> None:
    mask = np.array([[True, False, True], [False, False, True]])
    x, rows = numbers(2, 3, *rest), numbers(3, *rest, seed=1)
    check_op(MaskedPut(), x, mask, rows, reference=lambda x, m, v: x.index_put((m,), v), symbolic=False)
    check_op(MaskedTake(3), x, mask, reference=lambda x, m: x[m], symbolic=False)


def test_errors() -> None:
    x, index = Tensor((5, 3)), Tensor((2,), DType.int64)
    with pytest.raises(Invalid, match="expects i64 or i32 indices, given f32"):
        Index((0,)).infer(x, Tensor((2,)))
    with pytest.raises(Invalid, match="an index array for each of some ascending dimensions of f32"):
        Index((1, 0)).infer(x, index, index)
    with pytest.raises(Invalid, match=r"index_put into f32\[5, 3\] expects values \[2, 3\] of its type"):
        IndexPut((0,)).infer(x, Tensor((3, 3)), index)
    with pytest.raises(Invalid, match="no larger than it in other dimensions"):
        Gather(0).infer(x, Tensor((2, 4), DType.int64))
    with pytest.raises(Invalid, match="scatter into"):
        Scatter(0).infer(x, Tensor((2, 3), DType.int64), Tensor((1, 3)))
    with pytest.raises(Invalid, match="a mask over the first dimensions"):
        MaskedTake(2).infer(x, Tensor((4,), DType.bool))
