"""Random numbers, drawn from PyTorch's generator; a `seed` attribute seeds a generator of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from daceml_train.frontends.onnx import elements
from daceml_train.frontends.onnx.rules import rule


def _generator(seed: float | None) -> torch.Generator | None:
    return None if seed is None else torch.Generator().manual_seed(int(seed))


@rule("RandomNormal", random=True)
def random_normal(
    *, shape: tuple[int, ...], dtype: int = 1, mean: float = 0.0, scale: float = 1.0, seed: float | None = None
) -> Tensor:
    return mean + scale * torch.randn(shape, dtype=elements.dtype(dtype), generator=_generator(seed))


@rule("RandomNormalLike", random=True)
def random_normal_like(
    x: Tensor, *, dtype: int | None = None, mean: float = 0.0, scale: float = 1.0, seed: float | None = None
) -> Tensor:
    element = x.dtype if dtype is None else elements.dtype(dtype)
    return mean + scale * torch.randn(x.shape, dtype=element, generator=_generator(seed))


@rule("RandomUniform", random=True)
def random_uniform(
    *, shape: tuple[int, ...], dtype: int = 1, high: float = 1.0, low: float = 0.0, seed: float | None = None
) -> Tensor:
    return low + (high - low) * torch.rand(shape, dtype=elements.dtype(dtype), generator=_generator(seed))


@rule("RandomUniformLike", random=True)
def random_uniform_like(
    x: Tensor, *, dtype: int | None = None, high: float = 1.0, low: float = 0.0, seed: float | None = None
) -> Tensor:
    element = x.dtype if dtype is None else elements.dtype(dtype)
    return low + (high - low) * torch.rand(x.shape, dtype=element, generator=_generator(seed))


@rule("Bernoulli", since=15, random=True)
def bernoulli(x: Tensor, *, dtype: int | None = None, seed: float | None = None) -> Tensor:
    drawn = torch.bernoulli(x, generator=_generator(seed))
    return drawn.to(x.dtype if dtype is None else elements.dtype(dtype))


@rule("Multinomial", since=7, random=True)
def multinomial(x: Tensor, *, dtype: int = 6, sample_size: int = 1, seed: float | None = None) -> Tensor:
    """From unnormalized log-probabilities."""
    drawn = torch.multinomial(torch.softmax(x, 1), sample_size, replacement=True, generator=_generator(seed))
    return drawn.to(elements.dtype(dtype))
