"""Derivatives of levels: first ones, and an error that says so where a second one is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from daceml_train.errors import Unsupported


class _First(torch.autograd.Function):
    """Gradients that cannot be differentiated once more. The first input makes PyTorch ask for that at all."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *gradients: torch.Tensor) -> Any:
        return tuple(g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise Unsupported(
            "the second derivative of a recursion that runs level by level",
            advice="run the model itself where its gradients are differentiated, rather than the optimized one",
        )


def first_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that computes without a graph; its results say why they have no derivative."""

    @functools.wraps(backward)
    def first(ctx: Any, *cotangents: Any) -> Any:
        again = torch.is_grad_enabled()
        with torch.no_grad():
            found: Sequence[torch.Tensor | None] = backward(ctx, *cotangents)
        given = [g for g in found if g is not None]
        if not again or not given:
            return found
        marked = iter(_First.apply(torch.zeros((), requires_grad=True), *given))  # type: ignore[no-untyped-call]
        return tuple(None if g is None else next(marked) for g in found)

    return first
