"""Micro-batches: a training step over a batch in parts, whose gradients are added up before one update.

A step is two programs that share parameters and arena: one adds the gradients of a part to the accumulated ones, the
other does so for the last part and updates. With `reduction="batch"` the loss is that of the whole batch, whatever it
is a mean over; with "mean" and "sum" it equals as many forward and backward passes and one update in PyTorch. In each
case normalizations use the statistics of a part, running statistics are updated once per part, and dropout draws per
part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
import torch.utils._pytree as pytree

from daceml_train import logs
from daceml_train.driver.bound_step import BoundStep, has_gradient_hooks
from daceml_train.driver.capture_only import CapturedCall, CaptureDone
from daceml_train.driver.checking import device_of
from daceml_train.driver.distribution import rows_of
from daceml_train.driver.on_ranks import Sharing
from daceml_train.driver.options import ScheduleKind
from daceml_train.driver.settings import Settings
from daceml_train.driver.step import Loss, TrainingStep
from daceml_train.driver.whole import Wholes
from daceml_train.errors import Invalid, Unsupported, nearest
from daceml_train.graph.graph import Graph
from daceml_train.ops.optimizer import SGDUpdate
from daceml_train.training.gradients import Clipping
from daceml_train.training.joint import Trained
from daceml_train.training.optimizers import Update

_NO_UPDATE = Update(SGDUpdate(), ())
"""Of a part whose gradients are only added up."""

Reduction = Literal["batch", "mean", "sum"]
"""How the losses of parts form that of the batch: with "mean" each of n parts has weight 1/n, with "sum" weight 1;
"batch" derives the weights from the loss itself, see `autodiff.whole_batch`.
"""


class _Part(TrainingStep):
    """A training step on the parts of a batch."""

    keeps_state = False
    whole_batches = False
    traces_user_code = False

    share: float | None = 1.0
    """The weight of each part; None: derived for each kind of batch."""
    counts = 1.0
    """The weight of each part of the batch that is bound."""
    wholes: Wholes
    batch: tuple[Any, tuple[Any, ...]] = ((), ())
    """Inputs and targets of the batch that is split."""

    def _bind_captured(self, done: CaptureDone, flat: Sequence[Any], scope: dict[str, Any]) -> BoundStep:
        if self.share is not None or self.idle:  # without data, no loss needs a weight
            self.counts = 1.0 if self.share is None else self.share
            return super()._bind_captured(done, flat, scope)
        seen = CapturedCall.of(done.captured, done.arguments)
        device = device_of(self.model, seen.tensors, flat)
        self.counts, captured, denominators = self.wholes.split(seen, *self.batch, device)
        bound = super()._bind_captured(done.with_graph(captured), flat, scope)
        bound.share, bound.denominators = self.counts, denominators
        return bound


class _Accumulating(_Part):
    """Adds the gradients of a part to `accumulated` and updates nothing."""

    def _wanted(
        self, by_name: Mapping[str, torch.Tensor], given: set[int], hooked: bool = False
    ) -> tuple[list[Trained], list[str]]:
        of_tensor = {id(t): name for name, t in by_name.items() if t.requires_grad and id(t) not in given}
        if any(has_gradient_hooks(t) for t in by_name.values() if id(t) in of_tensor):
            raise Unsupported("a parameter has a gradient hook")
        updated = [p for group in self.optimizer.param_groups for p in group["params"] if id(p) in of_tensor]
        return [Trained(of_tensor[id(p)], _NO_UPDATE, 0, accumulates=True, share=self.counts) for p in updated], []

    def _choose_tables(self, graph: Graph, by_name: Mapping[str, torch.Tensor]) -> None:
        """Gradients are exchanged with the last part."""
        self._check_changes(graph, by_name)


class MicroBatchedStep(_Part):
    """`step(inputs, *targets)` as `TrainingStep`, over `count` parts of the batch.

    Every tensor among inputs and targets is split along its first dimension, which must be the same for all and a
    multiple of `count`. The loss returned is that of the batch, or the mean, or the sum, of the parts' losses.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss | None,
        optimizer: torch.optim.Optimizer,
        options: Settings,
        count: int,
        reduction: Reduction = "batch",
        clipping: Clipping | None = None,
        scaler: torch.amp.GradScaler | None = None,
        schedule: ScheduleKind = "ahead_of_time",
    ) -> None:
        check_parts(count, reduction)
        super().__init__(model, loss, optimizer, options, clipping=clipping, scaler=scaler, schedule=schedule)
        self.count, self.reduction = count, reduction
        self.share = {"batch": None, "mean": 1 / count, "sum": 1.0}[reduction]
        self.counts = 1.0 if self.share is None else self.share
        self.accumulating = _Accumulating(model, loss, optimizer, options, scaler=scaler, schedule=schedule)
        self.accumulating.share, self.accumulating.counts = self.share, self.counts
        self.accumulating.arenas, self.accumulating.accumulated = self.arenas, self.accumulated
        self.accumulating.records, self.accumulating.cuda_graphs = self.records, self.cuda_graphs
        looking = TrainingStep(model, loss, optimizer, options)
        looking.traces_user_code = False
        self.wholes = self.accumulating.wholes = Wholes(looking, options, count)

    def train_on(self, sharing: Sharing, options: Mapping[str, Any]) -> None:
        """As of any step; all parts have the same ranks."""
        super().train_on(sharing, options)
        self.accumulating.sharing, self.accumulating.ranks = sharing, self.ranks

    def _wanted(
        self, by_name: Mapping[str, torch.Tensor], given: set[int], hooked: bool = False
    ) -> tuple[list[Trained], list[str]]:
        trained, _ = super()._wanted(by_name, given, hooked)
        return [replace(t, accumulated=True, share=self.counts) for t in trained], []

    def _local_step(self, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        self.batch = self.accumulating.batch = inputs, targets
        try:
            loss = self._parts(split(inputs, targets, self.count))
            return loss if self.ranks is None else self.ranks.mean(loss)
        finally:
            self.batch = self.accumulating.batch = (), ()

    def _step_without_data(self, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        if self._divided():
            raise Unsupported("a rank without data in micro-batches that read a ShardedEmbedding")
        loss = super()._step_without_data(inputs, targets)
        return loss if self.ranks is None else self.ranks.mean(loss)

    def _parts(self, parts: Sequence[tuple[Any, tuple[Any, ...]]]) -> torch.Tensor:
        first = self.accumulating._find(*parts[0])[2]
        if first is None:
            return self._parts_in_pieces(self.accumulating, parts)
        last = self._find(*parts[-1])[2]
        final = self.accumulating if last is None else self
        owners: list[TrainingStep] = [*[self.accumulating] * (self.count - 1), final]
        for total in self.accumulated.values():
            total.zero_()
        share = first.share if self.share is None else self.share
        for bound in (first, last):
            if bound is not None and bound.denominators is not None:
                bound.denominators.refresh(pytree.tree_leaves(self.batch))
        if self.ranks is not None and first.weight is not None and last is not None:  # both exchange something
            last.bound_optimizer.refresh()
            rows = rows_of(pytree.tree_leaves(parts[0]))
            self.ranks.begin(f"{first.described}\n{last.described}", rows, bytes(last.bound_optimizer.values))
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
        if last is None:
            self._update_accumulated(first.trained)
        return torch.stack(losses).sum() * share

    def _update_accumulated(self, trained: Sequence[torch.Tensor]) -> None:
        """Let PyTorch update with the accumulated gradients where the last part's program cannot do so."""
        for why in (why for why in self.breaks if why not in self._warned):
            self._warned.add(why)
            logs.warn(f"daceml_train runs the update of a training step as PyTorch does: {why}")
        parameters = self._parameters()
        for parameter in parameters:
            parameter.grad = None
        for parameter in trained:
            parameter.grad = self.accumulated[id(parameter)]
        self._update_in_pieces(rows_of(pytree.tree_leaves(self.batch)))
        for parameter in parameters:
            parameter.grad = None

    def _parts_in_pieces(self, owner: TrainingStep, parts: Sequence[tuple[Any, tuple[Any, ...]]]) -> torch.Tensor:
        """The same step with PyTorch's autograd and optimizer around the compiled model."""
        self.breaks += [why for why in owner.breaks if why not in self.breaks]
        self._drift = self._drift or owner._drift
        parameters = self._parameters()
        for parameter in parameters:
            parameter.grad = None
        total = None
        share = self.wholes.share(parts[0], self.batch) if self.share is None else self.share
        for inputs, targets in parts:
            loss = self._loss_in_pieces(None, inputs, targets) * share
            self._backward_in_pieces(loss)
            total = loss.detach() if total is None else total + loss.detach()
        self._update_in_pieces(rows_of(pytree.tree_leaves(self.batch)))
        for parameter in parameters:
            parameter.grad = None
        assert total is not None
        return total


def check_parts(count: Any, reduction: Any) -> None:
    """Raise `Invalid` for what is no number of parts, or no way to add up their losses."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise Invalid(f"micro_batches is a positive whole number, given {count!r}")
    if reduction not in get_args(Reduction):
        close = nearest(reduction, get_args(Reduction)) if isinstance(reduction, str) else ""
        raise Invalid(f"reduction is 'batch', 'mean' or 'sum', given {reduction!r}{close}")


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
        part = pytree.tree_unflatten(cut, form)
        parts.append((part[0], tuple(part[1])))
    return parts


__all__ = ["MicroBatchedStep", "Reduction", "check_parts", "split"]
