"""Operators: one file per family, where each says its signature, shapes, lowering, derivative and cost.

Importing this package makes every operator known by its name.
"""

from daceml_train.ops import (
    attention,
    contraction,
    control,
    convolution,
    elementwise,
    embedding,
    fallback,
    fused_attention,
    gradient,
    indexing,
    kernel,
    loss,
    movement,
    normalization,
    optimizer,
    ordering,
    pooling,
    random,
    reduction,
    requirement,
    resample,
    softmax,
)

__all__ = [
    "attention",
    "contraction",
    "control",
    "convolution",
    "elementwise",
    "embedding",
    "fallback",
    "fused_attention",
    "gradient",
    "indexing",
    "kernel",
    "loss",
    "movement",
    "normalization",
    "optimizer",
    "ordering",
    "pooling",
    "random",
    "reduction",
    "requirement",
    "resample",
    "softmax",
]
