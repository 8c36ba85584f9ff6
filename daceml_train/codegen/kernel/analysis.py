"""Analysis: from the body of a kernel to its domain. Axes are unified statement by statement, and split if needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from daceml_train.codegen.kernel.axis_table import AxisTable, Transposed, Unequal
from daceml_train.codegen.kernel.domain import Axes, Domain, Leaf, Result, Split
from daceml_train.errors import Refused
from daceml_train.ops.elementwise import Cast, Elementwise, Full, Iota
from daceml_train.ops.kernel import Kernel, Statement
from daceml_train.ops.movement import Expand, Permute, Reorder, Slice, View
from daceml_train.ops.operator import Operator
from daceml_train.ops.random import Uniform
from daceml_train.ops.read import Read
from daceml_train.ops.reduction import Reduce
from daceml_train.tensor import Dim, DType, Tensor, hint, product, same, same_shape, simplify

REPEATED = 8
"""How often a kernel may compute a reduction again, because other values have dimensions that it lacks, at most."""


@dataclass(frozen=True)
class _Memory:
    """An argument under an index map, while its axes may still be split."""

    argument: int
    dtype: DType
    terms: tuple[tuple[int, int, Dim], ...]
    offset: tuple[tuple[int, Dim], ...] = ()


@dataclass
class _Draft:
    """A leaf while its axes may still be split."""

    op: Operator
    inputs: list[_Memory | _Draft]
    dtype: DType
    reduced: list[int] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    statement: str = ""


@dataclass(frozen=True)
class _Value:
    source: _Memory | _Draft
    dims: tuple[tuple[int, ...], ...]
    tensor: Tensor
    chain: tuple[Operator, ...] | None = None
    """The movement from the argument to this value; None for computed values."""


class _Analysis:
    """One attempt. `apart` contains the (statement, operand) pairs that read their argument with axes of their own."""

    def __init__(self, kernel: Kernel, operands: Sequence[Tensor], apart: set[tuple[int, int]]) -> None:
        self.kernel, self.operands, self.apart = kernel, operands, apart
        self.axes = AxisTable()
        self.values: dict[str, _Value] = {name: self.argument(i) for i, name in enumerate(kernel.arguments)}

    def argument(self, position: int) -> _Value:
        tensor = self.operands[position]
        dims = tuple(tuple(self.axes.dim(size)) for size in tensor.shape)
        terms = tuple((axis, d, 1) for d, dim in enumerate(dims) for axis in dim)
        self.axes.value(dims)
        return _Value(_Memory(position, tensor.dtype, terms), dims, tensor, ())

    def run(self) -> None:
        """Process every statement. After a transposition, `apart` has grown if another attempt is worthwhile."""
        for number, statement in enumerate(self.kernel.statements):
            inputs = [self.values[name] for name in statement.inputs]
            for position, value in enumerate(inputs):
                if (number, position) in self.apart and isinstance(value.source, _Memory):
                    inputs[position] = self.again(value)
            try:
                self.values[statement.outputs[0]] = self.statement(statement, inputs)
            except Unequal:
                raise Refused(f"{statement} pairs sizes that have no common factors") from None
            except Transposed:
                fresh = [
                    (number, p)
                    for p, value in enumerate(inputs)
                    if value.chain is not None and (number, p) not in self.apart and value.dims
                ]
                if not fresh:
                    raise Refused(f"{statement} uses one value under two orders of its dimensions") from None
                self.apart.add(fresh[-1])
                raise

    def again(self, value: _Value) -> _Value:
        """The same argument and movement with axes of its own."""
        assert isinstance(value.source, _Memory) and value.chain is not None
        result = self.argument(value.source.argument)
        for op in value.chain:
            result = self.movement(op, result)
        return result

    def statement(self, statement: Statement, inputs: list[_Value]) -> _Value:
        op = statement.op
        if any(v.tensor.dtype.is_complex for v in inputs):
            raise Refused(f"{statement} computes with complex numbers, which kernels do not support")
        if isinstance(op, View | Permute | Expand | Slice | Read):
            try:
                return self.movement(op, inputs[0])
            except Refused as refusal:
                raise Refused(f"{statement} {refusal.message}") from None
        (tensor,) = op.infer(*(v.tensor for v in inputs))
        draft = _Draft(op, [v.source for v in inputs], tensor.dtype, statement=str(statement))
        match op:
            case Elementwise() | Cast():
                dims = self.elementwise(inputs, tensor.rank)
            case Reorder():  # the layout of the result determines the memory order
                dims, draft.op = list(map(list, inputs[0].dims)), Cast(tensor.dtype)
            case Full():
                dims = [self.axes.dim(size) for size in tensor.shape]
            case Iota():
                dims = [self.axes.dim(size) for size in tensor.shape]
                draft.index = dims[op.dim] if tensor.rank else []
            case Uniform():
                dims = [self.axes.dim(size) for size in tensor.shape]
                draft.index = [axis for dim in dims for axis in dim]
            case Reduce():
                operand = inputs[0]
                chosen = {d % operand.tensor.rank for d in op.dims} if operand.tensor.rank else set()
                draft.reduced = [axis for d in chosen for axis in operand.dims[d]]
                kept = [[] if d in chosen else list(dim) for d, dim in enumerate(operand.dims)]
                dims = kept if op.keepdim else [dim for d, dim in enumerate(kept) if d not in chosen]
                if not draft.reduced:  # over sizes of 1: the value itself
                    draft.op = Cast(tensor.dtype)
            case _:
                raise Refused(f"{statement} is not an operator of kernels")
        result = _Value(draft, tuple(map(tuple, dims)), tensor)
        self.axes.value(result.dims)
        return result

    def elementwise(self, inputs: list[_Value], rank: int) -> list[list[int]]:
        dims: list[list[int]] = [[] for _ in range(rank)]
        for value in inputs:
            for d, axes in enumerate(value.dims, rank - value.tensor.rank):
                if axes and dims[d]:
                    self.axes.unify(dims[d], axes)
                elif axes:
                    dims[d] = list(axes)
        return dims

    def movement(self, op: Operator, value: _Value) -> _Value:
        (tensor,) = op.infer(value.tensor)
        source, dims = value.source, [list(dim) for dim in value.dims]
        match op:
            case Permute():
                dims = [dims[d] for d in op.dims]
            case Expand():
                missing = tensor.rank - value.tensor.rank
                before: list[list[int]] = [[] for _ in range(missing)] + dims
                dims = [old or self.axes.dim(size) for old, size in zip(before, tensor.shape, strict=True)]
            case View():
                dims = self.view(dims, tensor)
            case Slice():
                source, dims[op.dim] = self.slice(op, value)
            case Read():
                source, dims = self.read(op, value)
        result = replace(value, source=source, dims=tuple(map(tuple, dims)), tensor=tensor)
        self.axes.value(result.dims)
        return result if value.chain is None else replace(result, chain=(*value.chain, op))

    def view(self, dims: list[list[int]], tensor: Tensor) -> list[list[int]]:
        fresh = [self.axes.dim(size) for size in tensor.shape]
        self.axes.unify([a for dim in dims for a in dim], [a for dim in fresh for a in dim])
        return fresh

    def slice(self, op: Slice, value: _Value) -> tuple[_Memory | _Draft, list[int]]:
        axes, count = self.axes.resolve(value.dims[op.dim]), op.count
        if same(count, value.tensor.shape[op.dim]):
            return value.source, axes
        if isinstance(value.source, _Draft):
            if isinstance(value.source.op, Full):
                return value.source, self.axes.dim(count)
            raise Refused("slices a computed value")
        memory = self.resolved(value.source)
        terms = {axis: (dim, multiple) for axis, dim, multiple in memory.terms}
        if len(terms) < len(memory.terms):
            raise Refused("slices a diagonal")
        fresh = self.axes.dim(count)
        if any(axis in terms for axis in axes):
            if not all(axis in terms for axis in axes):
                raise Refused("slices a partly expanded dimension")
            dim, step = terms[axes[-1]]
            whole: Dim = 1
            for axis in reversed(axes):
                if terms[axis][0] != dim or not same(terms[axis][1], step * whole):
                    raise Refused("slices several merged dimensions")
                whole = whole * self.axes.size[axis]
            added = tuple((axis, dim, simplify(step * op.step)) for axis in fresh)
            memory = replace(
                memory,
                terms=tuple(t for t in memory.terms if t[0] not in axes) + added,
                offset=(*memory.offset, (dim, simplify(step * op.start))),
            )
        return memory, fresh

    def read(self, op: Read, value: _Value) -> tuple[_Memory | _Draft, list[list[int]]]:
        """An argument under an affine index map: one axis per dimension of the result."""
        if isinstance(value.source, _Draft):
            raise Refused("reads a computed value under an index map")
        memory = self.resolved(value.source)
        terms = {axis: (dim, multiple) for axis, dim, multiple in memory.terms}
        if len(terms) < len(memory.terms):
            raise Refused("reads a diagonal under another index map")
        fresh = [self.axes.dim(size) for size in op.shape]
        added: list[tuple[int, int, Dim]] = []
        offset = list(memory.offset)
        for of, axes in enumerate(value.dims):
            own = [axis for axis in self.axes.resolve(axes) if not same(self.axes.size[axis], 1)]
            if not any(axis in terms for axis in own):  # a size of 1, or repeated elements
                continue
            if not all(axis in terms for axis in own):
                raise Refused("reads a partly expanded dimension under an index map")
            dim, step = terms[own[-1]]
            whole: Dim = 1
            for axis in reversed(own):
                if terms[axis][0] != dim or not same(terms[axis][1], step * whole):
                    raise Refused("reads several merged dimensions under an index map")
                whole = whole * self.axes.size[axis]
            offset.append((dim, simplify(step * op.offsets[of])))
            added += [(a, dim, simplify(step * c)) for d, k, c in op.terms if k == of for a in fresh[d]]
        return replace(memory, terms=tuple(added), offset=tuple(offset)), fresh

    def resolved(self, memory: _Memory) -> _Memory:
        """The same index map in terms of the current parts of its axes."""
        terms: list[tuple[int, int, Dim]] = []
        for axis, dim, multiple in memory.terms:
            step = multiple
            for part in reversed(self.axes.resolve([axis])):
                terms.append((part, dim, step))
                step = simplify(step * self.axes.size[part])
        return replace(memory, terms=tuple(terms))

    def beside(self) -> None:
        """Give results of equal sizes the same axes, unless a value has both: a kernel copies several arrays."""
        results = [self.values[name] for name in self.kernel.yields]
        for value in results[1:]:
            first = results[0]
            if same_shape(value.tensor.shape, first.tensor.shape) and not self.axes.meet(first.dims, value.dims):
                for mine, theirs in zip(first.dims, value.dims, strict=True):
                    if mine and theirs:
                        self.axes.unify(mine, theirs)

    # ---- the finished domain ----------------------------------------------------------------------------------
    def domain(self) -> Domain:
        """Leaves that the results need, with final axes. Raises `Refused` if no split is legal."""
        numbers: dict[int, int] = {}
        sizes: list[Dim] = []
        leaves: dict[str, Leaf] = {}
        statements: dict[str, str] = {}
        outputs: dict[object, str] = {}

        def axes(raw: Sequence[int]) -> list[int]:
            found = self.axes.resolve(raw)
            for axis in found:
                if axis not in numbers:
                    numbers[axis] = len(sizes)
                    sizes.append(self.axes.size[axis])
            return [numbers[axis] for axis in found]

        def index(raw: Sequence[int]) -> tuple[tuple[int, Dim], ...]:
            terms: list[tuple[int, Dim]] = []
            step: Dim = 1
            for axis in reversed(axes(raw)):
                terms.append((axis, step))
                step = simplify(step * sizes[axis])
            return tuple(terms)

        def add(source: _Memory | _Draft) -> str:
            if isinstance(source, _Memory):
                return read(source)
            if id(source) in outputs:
                return outputs[id(source)]
            inputs = tuple(add(i) for i in source.inputs)
            where = index(source.index)
            reduced = frozenset(axes(source.reduced))
            depends = frozenset(a for i in inputs for a in leaves[i].axes) | {a for a, _ in where}
            name = f"v{len(leaves)}"
            leaves[name] = Leaf(name, source.op, inputs, source.dtype, depends - reduced, reduced, where)
            outputs[id(source)], statements[name] = name, source.statement
            return name

        def read(memory: _Memory) -> str:
            terms: list[tuple[int, int, Dim]] = []
            for part, dim, multiple in self.resolved(memory).terms:
                terms.append((axes([part])[0], dim, multiple))
            total: dict[int, Dim] = {}
            for dim, multiple in memory.offset:
                total[dim] = simplify(total.get(dim, 0) + multiple)
            offset = tuple(sorted((d, m) for d, m in total.items() if not same(m, 0)))
            key = (memory.argument, tuple(sorted(terms, key=lambda t: t[0])), offset)
            if key not in outputs:
                name = f"v{len(leaves)}"
                depends = frozenset(t[0] for t in terms)
                leaves[name] = Leaf(
                    name, None, (), memory.dtype, depends, argument=memory.argument, terms=key[1], offset=offset
                )
                outputs[key], statements[name] = name, self.kernel.arguments[memory.argument]
            return outputs[key]

        targets = dict(self.kernel.updates)
        results: list[Result] = []
        for position, name in enumerate(self.kernel.yields):
            value = self.values[name]
            leaf = add(value.source)
            dims = tuple(tuple(axes(dim)) for dim in value.dims)
            results.append(Result(leaf, dims, value.tensor.dtype, targets.get(position)))
        everything = frozenset(range(len(sizes)))
        splits = _splits(everything, leaves, results, statements, sizes)
        return Domain(tuple(sizes), leaves, tuple(results), splits)


def _splits(
    everything: Axes, leaves: dict[str, Leaf], results: Sequence[Result], statements: dict[str, str], sizes: list[Dim]
) -> tuple[Split, ...]:
    """The legal splits; empty if all are. Raises `Refused` with the first sentence if there is none."""
    parts = [leaf.reduced for leaf in leaves.values() if leaf.reduced] + [r.axes for r in results]
    proper = [p for p in dict.fromkeys(parts) if p and p != everything]
    if not proper:
        return ()
    refusals: list[str] = []
    legal: list[Split] = []
    first = proper[0]
    for split in (Split(everything - first, first), Split(first, everything - first)):
        refusal = _refusal(split, everything, leaves, results, statements, sizes)
        if refusal:
            refusals.append(refusal)
        else:
            legal.append(split)
    if not legal:
        raise Refused(refusals[0])
    return tuple(legal)


def _refusal(
    split: Split,
    everything: Axes,
    leaves: dict[str, Leaf],
    results: Sequence[Result],
    statements: dict[str, str],
    sizes: list[Dim],
) -> str:
    """Why a split is not legal, or an empty string."""
    for leaf in leaves.values():
        if leaf.reduced and leaf.reduced not in (split.rows, split.lanes, everything):
            return f"{statements[leaf.name]} reduces dimensions that are neither all rows nor all lanes of the kernel"
        if leaf.reduced == split.lanes and not leaves[leaf.inputs[0]].axes & split.rows:
            return f"{statements[leaf.name]} reduces a value that is the same for all rows of the kernel"
        kept = everything - leaf.reduced
        repeated = kept - leaves[leaf.inputs[0]].axes if leaf.reduced and leaf.reduced != everything else kept - kept
        if repeated and repeated != kept and hint(product(sizes[a] for a in repeated)) >= REPEATED:
            return f"{statements[leaf.name]} would be reduced once per element of dimensions that it does not have"
    for result in results:
        depends, stored = leaves[result.leaf].axes, result.axes
        if stored not in (everything, split.rows, split.lanes, frozenset()) or not depends <= stored:
            return f"result {statements[result.leaf]} has neither all rows nor all lanes of the kernel"
    return ""


def analyze(kernel: Kernel, operands: Sequence[Tensor]) -> Domain:
    """The domain of a kernel on operands of these types. Raises `Refused` with a sentence that names the statement."""
    apart: set[tuple[int, int]] = set()
    while True:
        analysis = _Analysis(kernel, operands, apart)
        try:
            analysis.run()
        except Transposed:
            continue
        analysis.beside()
        return analysis.domain()
