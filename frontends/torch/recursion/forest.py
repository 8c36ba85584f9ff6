"""A forest: runs in groups of equal height and structure, whose operands are rows of buffers, as PyTorch runs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from daceml_train.frontends.torch.recursion.cells import Cell
from daceml_train.frontends.torch.recursion.derivatives import first_only
from daceml_train.frontends.torch.recursion.lazy import Lazy, Meta, known, set_value
from daceml_train.frontends.torch.recursion.reached import Marks, Mask, Part, apart, gathered
from daceml_train.frontends.torch.recursion.runs import Pick, Run, Shared


class Group:
    """Runs of one height and structure: consecutive rows of each output's buffer, from `starts` on."""

    __slots__ = ("cell", "count", "operands", "runs", "starts")

    def __init__(self, cell: Cell, runs: list[Run]) -> None:
        self.cell, self.runs, self.count = cell, runs, len(runs)
        self.starts: dict[int, int] = {}
        self.operands: list[tuple[Meta | None, Any]] = []
        """Per input of the cell: a buffer and the rows in it, or None and the number of an array."""


class Forest:
    """Recorded runs as groups in the order of their heights; a cell's inputs come from earlier groups or from data."""

    def __init__(self, structures: Any, runs: Sequence[Run]) -> None:
        self.sizes: dict[Meta, int] = {}
        self.fixed: list[tuple[Meta, int, Any]] = []
        """Rows of buffers that no group computes."""
        self.arrays: list[torch.Tensor] = []
        self.array_marks: list[Marks | None] = []
        self.groups = self._grouped(structures, runs)
        for group in self.groups:
            self._bind(group)
        self.shared: dict[Shared, None] = {s: None for group in self.groups for s in group.cell.shared}
        self.marks = {m: Marks() for m in self.sizes}
        self.buffers = self._run()
        for group in self.groups:
            for run in group.runs:
                run.height = run.stage = 0
                run.inputs = []
                run.values = []  # which refer to the run

    # ---- the plan -----------------------------------------------------------------------------------------------
    def _grouped(self, structures: Any, runs: Sequence[Run]) -> list[Group]:
        found: dict[tuple[int, Any], list[Run]] = {}
        for run in runs:
            run.forest = self
            found.setdefault((run.height, run.at), []).append(run)
        groups = []
        for (_, at), members in sorted(found.items(), key=lambda item: item[0][0]):
            if at.cell is None:
                at.cell = Cell(at)
                structures.cells.append(at.cell)
            at.cell.want(alive(members))
            groups.append(Group(at.cell, members))
        for group in groups:
            for k in group.cell.outputs:
                m = group.cell.metas[k]
                group.starts[k] = self.sizes.get(m, 0)
                self.sizes[m] = group.starts[k] + group.count
            for position, run in enumerate(group.runs):
                run.group, run.position = group, position
        return groups

    def _bind(self, group: Group) -> None:
        for k, m in enumerate(group.cell.inputs):
            found = [run.inputs[k] for run in group.runs]
            if any(type(a) is Lazy and type(a.source) is Run and a.source.forest is self for a in found):
                group.operands.append((m, torch.from_numpy(np.array([self._row(a, m) for a in found]))))
            else:
                group.operands.append((None, len(self.arrays)))
                array, marks = rows(found)
                self.arrays.append(array)
                self.array_marks.append(marks)

    def _row(self, a: Any, m: Meta) -> int:
        if type(a) is Lazy and type(a.source) is Run and a.source.forest is self:
            source = a.source
            return int(source.group.starts[a.index]) + source.position
        row = self.sizes.get(m, 0)
        self.sizes[m] = row + 1
        self.fixed.append((m, row, known(a)))
        return row

    # ---- its execution ------------------------------------------------------------------------------------------
    def _run(self) -> dict[Meta, torch.Tensor]:
        shared = [s.tensor for s in self.shared]
        fixed = [tensor for _, _, tensor in self.fixed]
        given = [*shared, *fixed, *self.arrays]
        if torch.is_grad_enabled() and any(t.requires_grad for t in given):
            results = _Levels.apply(self, *given)  # type: ignore[no-untyped-call]
        else:
            results = self.forward(shared, fixed, self.arrays, None)
        return dict(zip(self.sizes, results, strict=True))

    def forward(self, shared: Any, fixed: Any, arrays: Any, saved: list[Any] | None) -> tuple[torch.Tensor, ...]:
        """All buffers; `saved` receives what the derivative needs of each group."""
        buffers = {m: torch.zeros((n, *m.shape), dtype=m.dtype, device=m.device) for m, n in self.sizes.items()}
        for (m, row, _), tensor in zip(self.fixed, fixed, strict=True):
            buffers[m][row] = tensor.detach()
        tensors = dict(zip(self.shared, shared, strict=True))
        for group in self.groups:
            inputs = [arrays[at].detach() if m is None else buffers[m].index_select(0, at) for m, at in group.operands]
            own = [tensors[s] for s in group.cell.shared]
            if saved is not None:
                flags = [arrays[at].requires_grad if m is None else m.requires_grad for m, at in group.operands]
                inputs = [t.requires_grad_(flag) for t, flag in zip(inputs, flags, strict=True)]
                with torch.enable_grad():
                    results = group.cell.rows(inputs, own, group.count)
                saved.append((inputs, own, results))
            else:
                results = group.cell.rows(inputs, own, group.count)
            for k, rows in zip(group.cell.outputs, results, strict=True):
                start = group.starts[k]
                buffers[group.cell.metas[k]][start : start + group.count] = rows.detach()
        return tuple(buffers.values())

    def backward(self, cotangents: Sequence[torch.Tensor | None], saved: list[Any], keep: bool) -> list[Any]:
        """The cotangents of shared tensors, fixed rows, and arrays."""
        of: dict[Meta, torch.Tensor] = {}
        reached: dict[Meta, Mask] = {}
        for (m, n), given in zip(self.sizes.items(), cotangents, strict=True):
            if m.requires_grad:
                of[m] = torch.zeros((n, *m.shape), dtype=m.dtype, device=m.device) if given is None else given.clone()
                marked = None if given is None else self.marks[m].rows
                reached[m] = np.full(n, given is not None) if marked is None else marked.copy()
        shared: dict[Shared, torch.Tensor] = {}
        arrays: list[Any] = [None] * len(self.arrays)
        for group, (inputs, own, outputs) in zip(self.groups[::-1], saved[::-1], strict=True):
            results, seeds = self._seeds(group, outputs, of, reached)
            wanted = [t for t in (*inputs, *own) if t.requires_grad]
            if not results or not wanted:
                continue
            through = self._spread(group, reached)
            found = torch.autograd.grad(results, wanted, seeds, retain_graph=keep, allow_unused=True)
            by_id = {id(t): g for t, g in zip(wanted, found, strict=True)}
            for k, ((buffer, at), tensor) in enumerate(zip(group.operands, inputs, strict=True)):
                if (gradient := by_id.get(id(tensor))) is None or k not in through:
                    continue
                if buffer is None:
                    arrays[at] = gradient
                else:
                    total = of[buffer]
                    own_rows = gradient.untyped_storage().data_ptr() == total.untyped_storage().data_ptr()
                    total.index_add_(0, at, gradient.clone() if own_rows else gradient)
            for s, tensor in zip(group.cell.shared, own, strict=True):
                if s in through and (gradient := by_id.get(id(tensor))) is not None:
                    shared[s] = gradient if s not in shared else shared[s] + gradient
        rows = [of[m][row] if m in reached and reached[m][row] else None for m, row, _ in self.fixed]
        return [*[shared.get(s) for s in self.shared], *rows, *arrays]

    def _seeds(self, group: Group, outputs: Sequence[torch.Tensor], of: Any, reached: dict[Meta, Mask]) -> Any:
        """The results of a group that are reached, and their gradients."""
        found = []
        for k, tensor in zip(group.starts, outputs, strict=True):  # the cell may have more outputs since
            own, start = group.cell.metas[k], group.starts[k]
            if tensor.requires_grad and own in reached and reached[own][start : start + group.count].any():
                found.append((tensor, of[own][start : start + group.count]))
        return [tensor for tensor, _ in found], [seed for _, seed in found]

    def _spread(self, group: Group, reached: dict[Meta, Mask]) -> set[Any]:
        """The inputs, by number, and the shared tensors that are reached through a group; their rows are marked."""
        found: set[Any] = set()
        for k, start in group.starts.items():
            own, (inputs, shared) = group.cell.metas[k], group.cell.flows[k]
            mask = reached[own][start : start + group.count] if own in reached else np.zeros(0, dtype=bool)
            if not mask.any():
                continue
            found |= shared | inputs
            for number in inputs:
                buffer, at = group.operands[number]
                if buffer is not None:
                    reached[buffer][at.numpy()[mask]] = True
                elif (marks := self.array_marks[at]) is not None:
                    marks.add(mask, group.count)
        return found

    def place(self, value: Lazy) -> tuple[torch.Tensor, Marks, int]:
        """The tensor that has a value, what its readers mark, and the row."""
        run = value.source
        assert isinstance(run, Run)
        return self.buffers[value.meta], self.marks[value.meta], run.group.starts[value.index] + run.position

    def value(self, value: Lazy) -> torch.Tensor:
        """A computed value."""
        tensor, marks, row = self.place(value)
        return apart(tensor, [row], marks)[0]


class _Levels(torch.autograd.Function):
    """A forest as one node of PyTorch's autograd."""

    @staticmethod
    def forward(ctx: Any, forest: Forest, *given: torch.Tensor) -> Any:
        first, second = len(forest.shared), len(forest.shared) + len(forest.fixed)
        own = [t.detach().requires_grad_(t.requires_grad) for t in given[:first]]
        saved: list[Any] = []
        results = forest.forward(own, given[first:second], given[second:], saved)
        ctx.forest, ctx.saved = forest, saved
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for m, t in zip(forest.sizes, results, strict=True) if not m.requires_grad])
        return results

    @staticmethod
    @first_only
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        if ctx.saved is None:
            raise RuntimeError("a second backward pass through a recursion; the first needs retain_graph=True")
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        with torch.enable_grad():
            found = ctx.forest.backward(cotangents, ctx.saved, keep)
        if not keep:
            ctx.saved = None
        return None, *found


def alive(members: Sequence[Run]) -> set[int]:
    """The values of runs of one structure that others read, or that user code holds."""
    found: set[int] = set().union(*{id(run.used): run.used for run in members}.values())
    references = sys.getrefcount
    plain = [run for run in members if type(run.used) is set]  # others have all that user code can have
    for k in range(len(members[0].values)):
        if k not in found and any(references(run.values[k]) > 2 for run in plain):  # the run, this call
            found.add(k)
    return found


def _base(a: Any) -> tuple[torch.Tensor, Marks | None, int, int | None] | None:
    """The tensor of which an input is a slice, or several, what its readers mark, which slice, and how many."""
    if type(a) is not Lazy or a.value is not None:
        return None
    source = a.source
    if type(source) is Pick:
        return source.tensor, None, source.start, source.length
    if type(source) is Run and source.forest is not None:
        return *source.forest.place(a), None
    return None


def rows(found: Sequence[Any]) -> tuple[torch.Tensor, Marks | None]:
    """Inputs of runs as the rows of one tensor; what its reader may tell of the rows that a gradient came to."""
    if isinstance(found, np.ndarray):
        return torch.from_numpy(found), None
    if list in set(map(type, found)):  # of numbers
        if len(set(map(type, found))) > 1:
            found = [a if type(a) is list else known(a).tolist() for a in found]
        if set(map(len, found)) == {1} and set(map(type, [a[0] for a in found])) == {int}:
            return torch.from_numpy(np.array(found, dtype=np.int64)), None
        return torch.tensor(found), None
    source = found[0].source if type(found[0]) is Lazy else None
    places = getattr(source.forest, "places", None) if type(source) is Run else None
    if places is not None and (one := places(found)) is not None:
        tensor, marks, at = one
        return gathered([Part(torch.from_numpy(at), None, None, marks)], [tensor])
    if all(a is found[0] for a in found):
        return known(found[0]).unsqueeze(0).expand(len(found), *found[0].shape), None
    return _merged(found)


def _merged(found: Sequence[Any]) -> tuple[torch.Tensor, Marks | None]:
    """Rows of several tensors in the order in which they are given."""
    slices: dict[Any, tuple[torch.Tensor, Marks | None, list[int], list[int]]] = {}
    whole: dict[int, tuple[torch.Tensor, list[int]]] = {}
    for position, a in enumerate(found):
        if (base := _base(a)) is None:
            tensor = known(a)
            whole.setdefault(id(tensor), (tensor, []))[1].append(position)
            continue
        tensor, marks, start, length = base
        _, _, starts, positions = slices.setdefault((id(tensor), length), (tensor, marks, [], []))
        starts.append(start)
        positions.append(position)
    if not slices and len(whole) == len(found) and not any(t.requires_grad for t, _ in whole.values()):
        return torch.stack([t for t, _ in whole.values()]), None
    one = len(slices) + len(whole) == 1  # whose rows are in order
    parts = [
        Part(torch.tensor(starts), None if one else torch.tensor(positions), length, marks)
        for (_, length), (_, marks, starts, positions) in slices.items()
    ]
    parts += [Part(None, torch.tensor(positions)) for _, positions in whole.values()]
    return gathered(parts, [*(each[0] for each in slices.values()), *(each[0] for each in whole.values())])


def as_tensors(args: Any) -> Any:
    """Arguments of a function with tensors in place of lazy values; those in one list are read from buffers at once."""
    results = []
    for a in args:
        if type(a) in (list, tuple) and len(a) > 1 and all(type(b) is Lazy and b.value is None for b in a):
            for (tensor, marks, _, length), group, at in _by_buffer(a):
                if marks is not None:
                    found = apart(tensor, at, marks)
                else:
                    whole, _ = gathered([Part(torch.tensor(at), None, length)], [tensor])
                    found = [row.squeeze(0) for row in torch.unsafe_split(whole, 1)]
                for value, row in zip(group, found, strict=True):
                    set_value(value, row)
        results.append(known(a))
    return tuple(results)


def _by_buffer(values: Sequence[Lazy]) -> list[tuple[Any, list[Lazy], list[int]]]:
    """The values of which several are slices of one tensor: the first one's base, the values, and their slices."""
    found: dict[Any, tuple[Any, list[Lazy], list[int]]] = {}
    for value in dict.fromkeys(values):
        if (base := _base(value)) is not None:
            tensor, _, start, length = base
            _, group, at = found.setdefault((id(tensor), length), (base, [], []))
            group.append(value)
            at.append(start)
    return [each for each in found.values() if len(each[1]) > 1]
