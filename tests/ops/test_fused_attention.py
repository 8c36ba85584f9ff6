import numpy as np
import pytest
import torch

from daceml_train.analysis.interpret import interpret
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.ops.fused_attention import FusedAttention, FusedAttentionGrad
from daceml_train.ops.random import Dropout
from daceml_train.tensor import DType, Tensor
from tests.ops.checking import check_op, numbers


def qkv(t: int = 5, s: int = 7, e: int = 4) -> list[np.ndarray]:
    return [numbers(2, 3, length, e, seed=i) for i, length in enumerate((t, s, s))]


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (2, 3, 5, 7), (2, 1, 1, 7), (7,)])
def test_added_mask(shape: tuple[int, ...]) -> None:
    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = 0.3 * q @ k.mT + m
        return scores.softmax(-1) @ v, scores.logsumexp(-1).detach()

    op = FusedAttention(scale=0.3, fills=(None,))
    check_op(op, *qkv(), numbers(*shape, seed=3), reference=reference, second=False, symbolic=False)


@pytest.mark.parametrize("fill", [-np.inf, -1e9, 0.5])
def test_filled_mask(fill: float) -> None:
    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = (0.3 * q @ k.mT).masked_fill(m, fill)
        return scores.softmax(-1) @ v, scores.logsumexp(-1).detach()

    op = FusedAttention(scale=0.3, fills=(fill,))
    hidden = np.random.default_rng(0).random((2, 1, 5, 7)) < 0.4
    check_op(op, *qkv(), hidden, reference=reference, second=False, symbolic=False)


def test_dropout_is_that_of_the_operator() -> None:
    seed = np.array(7)

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = 0.5 * q @ k.mT
        graph = Graph()
        x, given = (
            graph.input("x", Tensor(tuple(scores.shape), DType.float64)),
            graph.input("s", Tensor((), DType.int64)),
        )
        graph.output(*graph.emit(Dropout(0.4, stream=2), x, given))
        (kept,) = interpret(graph, {"x": np.ones(scores.shape), "s": seed}).outputs
        return (scores.softmax(-1) * torch.as_tensor(kept)) @ v, scores.logsumexp(-1).detach()

    op = FusedAttention(scale=0.5, p=0.4, stream=2)
    check_op(op, *qkv(), seed, reference=reference, second=False, symbolic=False)


def test_dropout_whose_probability_is_an_operand() -> None:
    """With a mask: values, and gradients of q, k, v, and the mask."""
    seed, mask = np.array(7), numbers(5, 7, seed=3)
    constant, given = (FusedAttention(scale=0.5, fills=(None,), stream=2, p=p, given=not p) for p in (0.4, 0.0))

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        factors = constant.weights(q.detach().numpy(), k.detach().numpy(), [seed, mask])[2]
        scores = 0.5 * q @ k.mT + rest[2]
        return (scores.softmax(-1) * torch.as_tensor(factors)) @ v, scores.logsumexp(-1).detach()

    operands = (*qkv(), seed, np.array(0.4), mask)
    check_op(given, *operands, reference=reference, wrt=(0, 1, 2, 5), second=False, symbolic=False)
    for found, expected in zip(
        given.evaluate(*qkv(), seed, np.array(0.4), mask), constant.evaluate(*qkv(), seed, mask), strict=True
    ):
        assert np.array_equal(found, expected)


def test_a_row_that_sees_nothing_is_nan_as_written() -> None:
    hidden = np.zeros((5, 7), bool)
    hidden[1] = True
    y, _ = FusedAttention(scale=1.0, fills=(-np.inf,)).evaluate(*qkv(), hidden)
    assert np.isnan(y[:, :, 1]).all()
    assert not np.isnan(np.delete(y, 1, axis=2)).any()


def test_errors() -> None:
    q, mask = Tensor((2, 3, 5, 4)), Tensor((5, 5))
    with pytest.raises(Invalid, match="expects 1 masks"):
        FusedAttention(scale=1.0, fills=(None,)).infer(q, q, q)
    with pytest.raises(Invalid, match="expects a seed and 0 masks"):
        FusedAttention(scale=1.0, p=0.5).infer(q, q, q)
    with pytest.raises(Invalid, match="expects a seed, a probability and 0 masks"):
        FusedAttention(scale=1.0, given=True).infer(q, q, q, Tensor((), DType.int64))
    with pytest.raises(Invalid, match="a mask that broadcasts"):
        FusedAttention(scale=1.0, fills=(0.0,)).infer(q, q, q, mask)
    with pytest.raises(Invalid, match="expects f32 or f64"):
        FusedAttention(scale=1.0).infer(*[Tensor((2, 3, 5, 4), DType.bfloat16)] * 3)
    with pytest.raises(Invalid, match="a cotangent like"):
        FusedAttentionGrad(scale=1.0).infer(Tensor((2, 3, 5, 5)), q, q, q, q, Tensor((2, 3, 5)))
