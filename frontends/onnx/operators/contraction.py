"""Matmuls and contractions."""

from __future__ import annotations

import torch
from torch import Tensor

from daceml_train.frontends.onnx.rules import rule

_NATIVE = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


@rule("MatMul")
def matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in _NATIVE or a.dtype in (torch.int32, torch.int64):
        return torch.matmul(a, b)
    return torch.matmul(a.to(torch.int64), b.to(torch.int64)).to(a.dtype)


@rule("Gemm", since=7)
def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    left, right = a.t() if transA else a, b.t() if transB else b
    if c is not None and alpha == beta == 1.0 and c.dtype in _NATIVE and c.dim() <= 2:
        return torch.addmm(c, left, right)
    product = matmul(left, right)
    product = product if alpha == 1.0 else (alpha * product).to(a.dtype)
    return product if c is None else product + (c if beta == 1.0 else (beta * c).to(a.dtype))


@rule("Gemm")
def gemm_limited(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    broadcast: int = 0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    return gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)


@rule("Einsum", since=12)
def einsum(*xs: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation.replace(" ", ""), *xs)
