"""Operators: one file per family, where each says its signature, shapes, lowering, derivative and cost.

Importing this package makes every operator known by its name.
"""

from daceml_train.ops import (
    attention,
    contraction,
    convolution,
    elementwise,
    embedding,
    fallback,
    fused_attention,
    gradient,
    kernel,
    loss,
    movement,
    normalization,
    optimizer,
    pooling,
    random,
    reduction,
    softmax,
)

__all__ = [
    "attention",
    "contraction",
    "convolution",
    "elementwise",
    "embedding",
    "fallback",
    "fused_attention",
    "gradient",
    "kernel",
    "loss",
    "movement",
    "normalization",
    "optimizer",
    "pooling",
    "random",
    "reduction",
    "softmax",
]
