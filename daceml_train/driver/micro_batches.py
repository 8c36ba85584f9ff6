"""Micro-batches: a training step over a batch in parts, whose gradients are added up before one update.

A step is two programs that share parameters and arena: one adds the gradients of a part to what is accumulated, the
other does so for the last part and updates. It equals as many forward and backward passes and one update in PyTorch:
normalisations take the statistics of a part, their running statistics move once per part, dropout draws per part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree

from daceml_train.driver.compilation import Options
from daceml_train.driver.joint import Trained
from daceml_train.driver.step import Loss, ScheduleKind, TrainingStep
from daceml_train.errors import Invalid, Unsupported
from daceml_train.runtime.gradients import Clipping

Reduction = Literal["mean", "sum"]
"""What a loss does over a batch: with "mean" each of n parts counts 1/n, with "sum" each counts whole."""


class _Accumulating(TrainingStep):
    """Adds the gradients of a part to `accumulated`, and updates nothing."""

    share = 1.0

    def _wanted(self, by_name: Mapping[str, torch.Tensor], given: set[int]) -> tuple[list[Trained], list[str]]:
        trained, _ = super()._wanted(by_name, given)
        return [replace(t, accumulates=True, first=False, share=self.share) for t in trained], []


class MicroBatchedStep(TrainingStep):
    """`step(inputs, *targets)` as `TrainingStep`, over `count` parts of the batch.

    Every tensor among inputs and targets is cut along its first dimension, which must be the same for all and a
    multiple of `count`. The loss returned is the mean, or the sum, of the parts' losses.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss | None,
        optimizer: torch.optim.Optimizer,
        options: Options,
        count: int,
        reduction: Reduction = "mean",
        clipping: Clipping | None = None,
        scaler: torch.amp.GradScaler | None = None,
        schedule: ScheduleKind = "ahead_of_time",
    ) -> None:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise Invalid(f"micro_batches is a positive whole number, given {count!r}")
        if reduction not in ("mean", "sum"):
            raise Invalid(f"reduction is 'mean' or 'sum', given {reduction!r}")
        super().__init__(model, loss, optimizer, options, clipping=clipping, scaler=scaler, schedule=schedule)
        self.count, self.share = count, 1 / count if reduction == "mean" else 1.0
        self.accumulating = _Accumulating(model, loss, optimizer, options, scaler=scaler, schedule=schedule)
        self.accumulating.share = self.share
        self.accumulating.arenas, self.accumulating.accumulated = self.arenas, self.accumulated
        self.accumulating.records, self.accumulating.recorders = self.records, self.recorders

    def _wanted(self, by_name: Mapping[str, torch.Tensor], given: set[int]) -> tuple[list[Trained], list[str]]:
        trained, _ = super()._wanted(by_name, given)
        return [replace(t, accumulated=True, share=self.share) for t in trained], []

    def _step(self, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        parts = split(inputs, targets, self.count)
        owners: list[TrainingStep] = [*[self.accumulating] * (self.count - 1), self]
        checked: list[TrainingStep] = [self.accumulating, self]
        for owner, part in zip(checked, (parts[0], parts[-1]), strict=True):
            if owner._find(*part)[2] is None:
                return self._parts_in_pieces(owner, parts)
        for total in self.accumulated.values():
            total.zero_()
        losses = []
        for position, (owner, part) in enumerate(zip(owners, parts, strict=True)):
            key, flat, bound = owner._find(*part)
            loss = None if bound is None else owner._run_bound(key, flat, bound, *part)
            if loss is None and position == 0:
                return self._parts_in_pieces(owner, parts)
            if loss is None:
                raise Unsupported(
                    f"part {position + 1} of {self.count} cannot run as one program though the first could; nothing is "
                    "updated, but buffers such as running statistics have seen the parts before it"
                )
            losses.append(loss)
        return torch.stack(losses).sum() * self.share

    def _parts_in_pieces(self, owner: TrainingStep, parts: Sequence[tuple[Any, tuple[Any, ...]]]) -> torch.Tensor:
        """The same step with PyTorch's autograd and optimizer around the compiled model."""
        self.breaks += [why for why in owner.breaks if why not in self.breaks]
        parameters = self._parameters()
        for parameter in parameters:
            parameter.grad = None
        total = None
        for inputs, targets in parts:
            loss = self._loss_in_pieces(None, inputs, targets) * self.share
            self._backward_in_pieces(loss)
            total = loss.detach() if total is None else total + loss.detach()
        self._update_in_pieces()
        for parameter in parameters:
            parameter.grad = None
        assert total is not None
        return total


def split(inputs: Any, targets: tuple[Any, ...], count: int) -> list[tuple[Any, tuple[Any, ...]]]:
    """(inputs, targets) of each part. Raises `Invalid` where a batch has no `count` equal parts."""
    leaves, form = pytree.tree_flatten((inputs, targets))
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim}
    if len(sizes) > 1:
        raise Invalid(
            f"micro_batches cuts every tensor along its first dimension, whose sizes are {sorted(sizes)} here",
            advice="put the batch first in all inputs and targets",
        )
    size = next(iter(sizes), 0)
    if not size or size % count:
        raise Invalid(f"a batch of {size} has no {count} equal parts", advice=f"use a multiple of {count}")
    each = size // count
    parts = []
    for start in range(0, size, each):
        cut = [x.narrow(0, start, each) if isinstance(x, torch.Tensor) and x.ndim else x for x in leaves]
        made = pytree.tree_unflatten(cut, form)
        parts.append((made[0], tuple(made[1])))
    return parts


__all__ = ["MicroBatchedStep", "Reduction", "split"]
