import numpy as np
import pytest
import torch
import torch.nn.functional as F

from daceml_train.autodiff.reverse import differentiate
from daceml_train.errors import Invalid, Unsupported
from daceml_train.graph.graph import Graph
from daceml_train.ops.attention import TOKEN_MAJOR, Attention, AttentionGrad
from daceml_train.tensor import DType, Tensor, symbol
from tests.ops.checking import check_op, numbers

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def qkv(t: int = 5, s: int = 7, e: int = 4) -> list[np.ndarray]:
    return [numbers(2, 3, length, e, seed=i) for i, length in enumerate((t, s, s))]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("t", "s"), [(5, 7), (5, 5), (7, 5), (1, 1)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention(t: int, s: int, causal: bool, scale: float | None) -> None:
    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, logsumexp = FLASH(q, k, v, 0.0, causal, scale=scale)
        return y, logsumexp.detach()

    check_op(Attention(causal=causal, scale=scale), *qkv(t, s), reference=reference, second=False, symbolic=False)


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (5, 1), (2, 3, 5, 7), (2, 1, 1, 7)])
def test_mask_has_a_gradient(shape: tuple[int, ...]) -> None:
    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, m), None

    check_op(Attention(), *qkv(), numbers(*shape, seed=3), reference=reference, second=False, symbolic=False)


def test_causal_mask_gradient() -> None:
    triangle = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, m + triangle), None

    options = {"second": False, "symbolic": False}
    check_op(Attention(causal=True), *qkv(5, 5), numbers(5, 5, seed=3), reference=reference, **options)


def test_rows_that_see_nothing_give_zeros() -> None:
    mask = np.zeros((2, 1, 5, 7))
    mask[0, 0, 2], mask[1, 0, :, 3] = -np.inf, -np.inf

    def reference(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, logsumexp = FLASH(q, k, v, attn_mask=m)
        return y, logsumexp.detach()

    options = {"wrt": [0, 1, 2], "second": False, "symbolic": False, "smooth": False}
    check_op(Attention(), *qkv(), mask, reference=reference, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_is_that_of_aten(causal: bool) -> None:
    q, k, v = map(torch.as_tensor, qkv())
    y, logsumexp = FLASH(q, k, v, 0.0, causal)
    g = torch.as_tensor(numbers(2, 3, 5, 4, seed=9))
    results = AttentionGrad(causal=causal).evaluate(*(t.numpy() for t in (g, q, k, v, y, logsumexp)))
    for got, want in zip(results, FLASH_BACKWARD(g, q, k, v, y, logsumexp, 0.0, causal), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_and_memory_orders_are_those_of_aten(dtype: torch.dtype, projected: bool) -> None:
    """For q, k, v with the heads of a token together, as one matmul computes them all or each of them."""
    tensors = [Tensor(s.shape, DType[str(dtype)[6:]], None if projected else TOKEN_MAJOR) for s in qkv()]
    if projected:
        batch, heads, _, size = tensors[0].shape
        longest = max(t.shape[2] for t in tensors)
        whole = torch.zeros(batch, longest, 3, heads, size, dtype=dtype).permute(2, 0, 3, 1, 4)
        arrays = [part[:, :, : t.shape[2]] for part, t in zip(whole.unbind(0), tensors, strict=True)]
    else:
        arrays = [torch.empty_strided(t.shape, t.strides, dtype=dtype).zero_() for t in tensors]
    results, outputs = Attention().infer(*tensors), FLASH(*arrays)
    backward = AttentionGrad().infer(results[0], *tensors, *results)
    made_backward = FLASH_BACKWARD(outputs[0], *arrays, *outputs, 0.0, False)
    for tensor, array in zip((*results, *backward), (*outputs, *made_backward), strict=True):
        assert (tensor.shape, str(array.dtype)) == (tuple(array.shape), f"torch.{tensor.dtype.name}")
        assert tensor.strides == array.stride()


def test_derivatives_that_do_not_exist() -> None:
    graph = Graph()
    x = graph.input("x", Tensor((1, 1, 2, 2)))
    y, logsumexp = graph.emit(Attention(), x, x, x)
    with pytest.raises(Unsupported, match="the derivative of attention's logsumexp"):
        differentiate(graph, {logsumexp.name: graph.input("g", logsumexp.tensor)}, ["x"])
    gradients = differentiate(graph, {y.name: graph.input("h", y.tensor)}, ["x"])
    assert gradients["x"] is not None
    with pytest.raises(Unsupported, match="attention_grad has no derivative"):
        differentiate(graph, {gradients["x"].name: graph.input("i", x.tensor)}, ["x"])


def test_flops() -> None:
    n = symbol("n")
    x = Tensor((2, 3, n, 8))
    assert Attention().flops(x, x, x) == 2 * 3 * n**2 * (4 * 8 + 14)


def test_errors() -> None:
    q = Tensor((2, 3, 5, 4))
    with pytest.raises(Invalid, match=r"attention expects q \[B, H, T, E\], k and v"):
        Attention().infer(q, q, Tensor((2, 3, 6, 4)))
    with pytest.raises(Invalid, match="not empty"):
        Attention().infer(Tensor((2, 3, 0, 4)), q, q)
    with pytest.raises(Invalid, match="one mask of rank 2 or 4 and type f32, given b1"):
        Attention().infer(q, q, q, Tensor((5, 5), DType.bool))
    with pytest.raises(Invalid, match="broadcast"):
        Attention().infer(q, q, q, Tensor((5, 6)))
