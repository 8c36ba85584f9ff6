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
        self.groups = self._grouped(structures, runs)
        for group in self.groups:
            self._bind(group)
        self.shared: dict[Shared, None] = {s: None for group in self.groups for s in group.cell.shared}
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
                self.arrays.append(rows(found))

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
        reached = {m for m, given in zip(self.sizes, cotangents, strict=True) if given is not None}
        for (m, n), given in zip(self.sizes.items(), cotangents, strict=True):
            if m.requires_grad:
                of[m] = torch.zeros((n, *m.shape), dtype=m.dtype, device=m.device) if given is None else given.clone()
        shared: dict[Shared, torch.Tensor] = {}
        arrays: list[Any] = [None] * len(self.arrays)
        for group, (inputs, own, outputs) in zip(self.groups[::-1], saved[::-1], strict=True):
            seeds: list[torch.Tensor] = []
            results: list[torch.Tensor] = []
            for k, tensor in zip(group.starts, outputs, strict=True):  # the cell may have more outputs since
                if tensor.requires_grad and group.cell.metas[k] in reached:
                    start = group.starts[k]
                    results.append(tensor)
                    seeds.append(of[group.cell.metas[k]][start : start + group.count])
            wanted = [t for t in (*inputs, *own) if t.requires_grad]
            if not results or not wanted:
                continue
            found = torch.autograd.grad(results, wanted, seeds, retain_graph=keep, allow_unused=True)
            by_id = {id(t): g for t, g in zip(wanted, found, strict=True)}
            for (buffer, at), tensor in zip(group.operands, inputs, strict=True):
                if (gradient := by_id.get(id(tensor))) is None:
                    continue
                if buffer is None:
                    arrays[at] = gradient
                else:
                    total = of[buffer]
                    own_rows = gradient.untyped_storage().data_ptr() == total.untyped_storage().data_ptr()
                    total.index_add_(0, at, gradient.clone() if own_rows else gradient)
                    reached.add(buffer)
            for s, tensor in zip(group.cell.shared, own, strict=True):
                if (gradient := by_id.get(id(tensor))) is not None:
                    shared[s] = gradient if s not in shared else shared[s] + gradient
        rows = [of[m][row] if m in reached else None for m, row, _ in self.fixed]
        return [*[shared.get(s) for s in self.shared], *rows, *arrays]

    def place(self, value: Lazy) -> tuple[torch.Tensor, int]:
        """The tensor and the row in it that have a value."""
        run = value.source
        assert isinstance(run, Run)
        return self.buffers[value.meta], run.group.starts[value.index] + run.position

    def value(self, value: Lazy) -> torch.Tensor:
        """A computed value."""
        tensor, row = self.place(value)
        return tensor[row].clone()  # user code may change it in place, and not its neighbors


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


def _base(a: Any) -> tuple[torch.Tensor, int, int | None] | None:
    """The tensor of which an input is a slice, and which one."""
    if type(a) is not Lazy or a.value is not None:
        return None
    source = a.source
    if type(source) is Pick:
        return source.tensor, source.start, source.length
    if type(source) is Run and source.forest is not None:
        return *source.forest.place(a), None
    return None


def rows(found: Sequence[Any]) -> torch.Tensor:
    """Inputs of runs as the rows of one tensor."""
    if isinstance(found, np.ndarray):
        return torch.from_numpy(found)
    if list in set(map(type, found)):  # of numbers
        if len(set(map(type, found))) > 1:
            found = [a if type(a) is list else known(a).tolist() for a in found]
        if set(map(len, found)) == {1} and set(map(type, [a[0] for a in found])) == {int}:
            return torch.from_numpy(np.array(found, dtype=np.int64))
        return torch.tensor(found)
    source = found[0].source if type(found[0]) is Lazy else None
    places = getattr(source.forest, "places", None) if type(source) is Run else None
    if places is not None and (one := places(found)) is not None:
        tensor: torch.Tensor = one[0].index_select(0, torch.from_numpy(one[1]))
        return tensor
    bases = [_base(a) for a in found]
    first = bases[0]
    if first is not None and all(b is not None and b[0] is first[0] and b[2] == first[2] for b in bases):
        return _picked(first[0], [b[1] for b in bases if b is not None], first[2])
    if all(a is found[0] for a in found):
        return known(found[0]).unsqueeze(0).expand(len(found), *found[0].shape)  # type: ignore[no-any-return]
    if all(b is not None for b in bases):
        return _merged([b for b in bases if b is not None])
    return torch.stack([known(a) for a in found])


def _picked(tensor: torch.Tensor, starts: list[int], length: int | None) -> torch.Tensor:
    at = torch.tensor(starts)
    if length is None:
        return tensor.index_select(0, at)
    at = (at[:, None] + torch.arange(length)).flatten()
    parts: torch.Tensor = tensor.index_select(0, at).unflatten(0, (len(starts), length))
    return parts


def _merged(bases: Sequence[tuple[torch.Tensor, int, int | None]]) -> torch.Tensor:
    """Rows of several tensors in the order in which they are given."""
    groups: dict[Any, list[int]] = {}
    for position, (tensor, _, length) in enumerate(bases):
        groups.setdefault((id(tensor), length), []).append(position)
    order = torch.tensor([position for group in groups.values() for position in group])
    parts = [_picked(bases[g[0]][0], [bases[k][1] for k in g], bases[g[0]][2]) for g in groups.values()]
    return torch.cat(parts).index_select(0, order.argsort())


def gathered(function: Any, args: Any) -> Any:
    """Arguments of a function with tensors in place of lazy values; those in one list are read from buffers at once."""
    results = []
    for a in args:
        if type(a) in (list, tuple) and len(a) > 1 and all(type(b) is Lazy and b.value is None for b in a):
            for group in _by_buffer(a):
                # user code may change each of them in place, which it may not where they are parts of one tensor
                parts = torch.unsafe_split(rows(group), 1)
                for value, part in zip(group, parts, strict=True):
                    set_value(value, part.squeeze(0))
        results.append(known(a))
    return tuple(results)


def _by_buffer(values: Sequence[Lazy]) -> list[list[Lazy]]:
    found: dict[int, list[Lazy]] = {}
    for value in dict.fromkeys(values):
        if (base := _base(value)) is not None:
            found.setdefault(id(base[0]), []).append(value)
    return [group for group in found.values() if len(group) > 1]
