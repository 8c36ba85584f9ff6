"""The clipping of a training step: a bound that may change between steps, which programs read at each call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from daceml_train.runtime.ranks import Ranks
from daceml_train.training.gradients import Clipping, GradientOptions, scaling_of


class Clipped:
    """A step that clips gradients. A changed bound compiles nothing, unless it becomes zero or was zero."""

    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    ranks: Ranks | None = None
    """The processes that train together, if there are several."""
    _clipping = Clipping()
    _bound: dict[Any, Any]
    bounds: dict[str, float]
    """The bound as programs read it."""

    @property
    def clipping(self) -> Clipping:
        """How gradients are clipped."""
        return self._clipping

    @clipping.setter
    def clipping(self, clipping: Clipping) -> None:
        before, self._clipping = self._compiled_clipping(), clipping
        if self._compiled_clipping() == before:
            self.bounds.update(clipping.bounds)
        else:
            self.bounds, self._bound = clipping.bounds, {}

    @property
    def clip_norm(self) -> float | None:
        """The greatest norm of all gradients together; it may be changed between steps."""
        return self.clipping.norm

    @clip_norm.setter
    def clip_norm(self, norm: float | None) -> None:
        self.clipping = replace(self.clipping, norm=norm)

    @property
    def clip_value(self) -> float | None:
        """The greatest size of a gradient's element; it may be changed between steps."""
        return self.clipping.value

    @clip_value.setter
    def clip_value(self, value: float | None) -> None:
        self.clipping = replace(self.clipping, value=value)

    def _compiled_clipping(self) -> Clipping:
        """What a program knows of the clipping."""
        return self.clipping.read_at_each_call()

    def _gradients(self) -> GradientOptions:
        ranks = 1 if self.ranks is None else self.ranks.size
        return GradientOptions(self._compiled_clipping(), scaling_of(self.scaler), ranks)
