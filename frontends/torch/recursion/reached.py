"""What a backward pass reaches: a parameter that no gradient comes to has none, as in PyTorch's own pass.

The levels of a batch are one node of autograd, whose gradients are dense: a row that nothing reaches would have one of
zeros, and with it all that it was computed from. An optimizer decays a parameter that has zeros, and leaves alone one
that has no gradient. Therefore what reads rows notes to which of them a gradient came, and levels go on from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from daceml_train.frontends.torch.recursion.kinds import Layout

Numbers = np.ndarray[Any, Any]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Marks:
    """The rows of a tensor that the backward pass of now has reached."""

    __slots__ = ("_mask", "_task")

    def __init__(self) -> None:
        self._task = -1
        self._mask: Mask | None = None

    def add(self, rows: Numbers, count: int) -> None:
        """Note rows, given by numbers or as a mask, of a tensor that has `count` of them."""
        task = torch._C._current_graph_task_id()
        if self._mask is None or task != self._task:
            self._task, self._mask = task, np.zeros(count, dtype=bool)
        self._mask[rows] = True

    @property
    def rows(self) -> Mask | None:
        """Which rows were noted; None if none was, by a reader that does not tell."""
        return self._mask if self._task == torch._C._current_graph_task_id() else None


@dataclass(frozen=True)
class Part:
    """Rows of one tensor, which are those in `positions` of what is gathered; None: all of them.

    A row consists of `length` slices from the one in `at` on, or of that slice; without `at`, of the whole tensor.
    """

    at: torch.Tensor | None
    positions: torch.Tensor | None
    length: int | None = None
    marks: Marks | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows."""
        if self.at is None:
            assert self.positions is not None
            return tensor.expand(len(self.positions), *tensor.shape)
        if self.length is None:
            return tensor.index_select(0, self.at)
        found: torch.Tensor = tensor.index_select(0, self._slices()).unflatten(0, (len(self.at), self.length))
        return found

    def _slices(self) -> torch.Tensor:
        assert self.at is not None and self.length is not None
        return (self.at[:, None] + torch.arange(self.length)).flatten()

    def gradient(self, gradient: torch.Tensor, shape: torch.Size, reached: Mask | None) -> torch.Tensor | None:
        """The tensor's gradient by that of what is gathered; None if none of its rows is reached."""
        if self.positions is not None:
            gradient = gradient.index_select(0, self.positions)
            reached = None if reached is None else reached[self.positions.numpy()]
        if reached is not None and not reached.any():
            return None
        if self.at is None:
            return gradient.sum(0) if len(gradient) > 1 else gradient[0]
        if self.marks is not None:
            rows = self.at.numpy()
            self.marks.add(rows if reached is None else rows[reached], shape[0])
        zeros = gradient.new_zeros(shape)
        if self.length is None:
            return zeros.index_add(0, self.at, gradient)
        return zeros.index_add(0, self._slices(), gradient.flatten(0, 1))


def gathered(parts: Sequence[Part], tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Marks | None]:
    """The rows of all parts, and what a reader may tell of those that have a gradient."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        marks = Marks()
        return _Gathered.apply(marks, parts, *tensors), marks  # type: ignore[no-untyped-call]
    return _joined(parts, tensors), None


def _joined(parts: Sequence[Part], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    found = [part(tensor) for part, tensor in zip(parts, tensors, strict=True)]
    if len(found) == 1:
        return found[0]
    order = torch.cat([part.positions for part in parts if part.positions is not None])
    return torch.cat(found).index_select(0, order.argsort())


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marks: Marks, parts: Sequence[Part], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.marks, ctx.parts, ctx.shapes = marks, parts, [t.shape for t in tensors]
        found = _joined(parts, tensors)
        return found.clone() if len(parts) == 1 and parts[0].at is None else found  # a view of an operand

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        reached = ctx.marks.rows
        found: list[torch.Tensor | None] = []
        for part, shape, needed in zip(ctx.parts, ctx.shapes, ctx.needs_input_grad[2:], strict=True):
            found.append(part.gradient(gradient, shape, reached) if needed else None)
        return None, None, *found


def apart(tensor: torch.Tensor, at: Sequence[int], marks: Marks) -> Sequence[torch.Tensor]:
    """Rows as tensors of their own, which user code may change in place."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        found: Sequence[torch.Tensor] = _Apart.apply(marks, at, tensor)  # type: ignore[no-untyped-call]
    else:
        found = _split(tensor, at)
    return [row.squeeze(0) for row in found]


def _split(tensor: torch.Tensor, at: Sequence[int]) -> Sequence[torch.Tensor]:
    # user code may not change views that have one base
    found: Sequence[torch.Tensor] = torch.unsafe_split(tensor.index_select(0, torch.tensor(at)), 1)
    return found


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marks: Marks, at: Sequence[int], tensor: torch.Tensor) -> Any:
        ctx.marks, ctx.at, ctx.shape = marks, at, tensor.shape
        ctx.set_materialize_grads(False)
        return tuple(_split(tensor, at))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        given = [(row, g) for row, g in zip(ctx.at, gradients, strict=True) if g is not None]
        if not given:
            return None, None, None
        at = torch.tensor([row for row, _ in given])
        ctx.marks.add(at.numpy(), ctx.shape[0])
        rows = torch.cat([g for _, g in given])
        return None, None, rows.new_zeros(ctx.shape).index_add(0, at, rows)


@dataclass(frozen=True)
class _Result:
    """What a kind's calls compute that has a gradient: the tensor that has it, and the operands that it depends on."""

    number: int
    start: int
    """The row of the first call."""
    shared: frozenset[int]
    data: frozenset[int]
    children: frozenset[tuple[int, int]]
    """Operands that name rows, with the states that these are rows of."""


class Reach:
    """The structure of a batch, as its backward pass needs it.

    `numbers` has the rows of children, by operand; `results` and `data` the marks of what is read of the batch, and of
    the rows of data that it reads.
    """

    def __init__(
        self, layout: Layout, bounds: Numbers, counts: Sequence[int], numbers: Mapping[int, Numbers], data: Any
    ) -> None:
        self.bounds, self.numbers = bounds, numbers
        self.data: Mapping[int, Marks] = data
        self.results = [Marks() for _ in layout.results]
        self.calls: list[int] = bounds[-1].tolist()
        self.kinds: list[list[_Result]] = [[] for _ in layout.every]
        starts = np.cumsum([0, *counts]).tolist()
        self.sizes = [starts[-1]] * len(layout.results)
        for kind in layout.kinds:
            assert kind.cell is not None
            for k, (is_state, number) in kind.outputs.items():
                if not is_state:
                    self.sizes[number] = counts[kind.number]
                inputs, tensors = kind.cell.flows[k]
                shared = frozenset(1 + layout.shared.index(s) for s in tensors)
                operands = [kind.inputs[i] for i in inputs]
                rows = frozenset(operand for operand, state in operands if state is None)
                children = frozenset((operand, state) for operand, state in operands if state is not None)
                if shared or operands:
                    start = starts[kind.number] if is_state else 0
                    self.kinds[kind.number].append(_Result(number, start, shared, rows, children))
        for state, kind in layout.feeders.items():  # whose calls are rows of data
            rows = frozenset(operand for operand, _ in kind.inputs)
            self.kinds[kind.number].append(_Result(state, starts[kind.number], frozenset(), rows, frozenset()))

    def __call__(self, gradients: Sequence[torch.Tensor | None]) -> set[int]:
        """Which operands have a gradient, by the gradients of all results; what reads rows of data is told of them."""
        masks = []
        for gradient, marks, size in zip(gradients, self.results, self.sizes, strict=True):
            rows = None if gradient is None else marks.rows
            masks.append(np.full(size, gradient is not None) if rows is None else rows.copy())
        found, data = self._at_once([m.copy() for m in masks]) or self._by_level(masks)
        for operand, mask in data.items():
            if mask.any():
                found.add(operand)
                if operand in self.data:
                    self.data[operand].add(mask, len(mask))
        return found

    def _by_level(self, masks: list[Mask]) -> tuple[set[int], dict[int, Mask]]:
        """The shared operands that are reached, and the rows of data, from the results of the last level on."""
        found, data = set[int](), self._none()
        for level in range(len(self.bounds) - 2, -1, -1):
            for kind in np.flatnonzero(self.bounds[level] < self.bounds[level + 1]).tolist():
                first, last = self.bounds[level, kind], self.bounds[level + 1, kind]
                for result in self.kinds[kind]:
                    own = masks[result.number][result.start + first : result.start + last]
                    if not own.any():
                        continue
                    found |= result.shared
                    for operand, state in result.children:
                        masks[state][self.numbers[operand][first:last][own]] = True
                    for operand in result.data:
                        data[operand][first:last] |= own
        return found, data

    def _at_once(self, masks: list[Mask]) -> tuple[set[int], dict[int, Mask]] | None:
        """The same for a batch all of which is reached, as nearly all are; None if that does not show at once.

        If all results of each call depend on its children, and each call is read, or a child, all of them are reached.
        """
        used = [(results, calls) for results, calls in zip(self.kinds, self.calls, strict=True) if results and calls]
        for results, calls in used:
            for operand, state in frozenset.intersection(*(r.children for r in results)):
                masks[state][self.numbers[operand][:calls]] = True
        found, data = set[int](), self._none()
        for results, calls in used:
            rows = [masks[r.number][r.start : r.start + calls] for r in results]
            if not np.logical_or.reduce(rows).all():
                return None
            found |= frozenset.intersection(*(r.shared for r in results))
            for operand in frozenset.intersection(*(r.data for r in results)):
                data[operand][:] = True
            for result, own in zip(results, rows, strict=True):
                if own.any():
                    found |= result.shared
                for operand in result.data:
                    data[operand] |= own
        whole = found.issuperset(s for results, _ in used for r in results for s in r.shared)
        return (found, data) if whole and all(mask.all() for mask in data.values()) else None

    def _none(self) -> dict[int, Mask]:
        kinds = zip(self.kinds, self.calls, strict=True)
        return {o: np.zeros(calls, dtype=bool) for results, calls in kinds for r in results for o in r.data}
