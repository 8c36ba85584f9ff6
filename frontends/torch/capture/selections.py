"""Sizes that depend on data: what selects elements is computed from the arguments before the program runs.

`x[mask]`, `masked_select`, `nonzero`, `unique` and `repeat_interleave` have results whose sizes depend on values. Where
these values are those of arguments, or are computed from arguments alone (`labels != -100`), the indices of what is
selected are computed by PyTorch before the program, which then gathers by indices of a symbolic size. Where they are
computed from parameters, the graph remains `Unsupported`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.dynamo import data_sizes, origin, packed
from daceml_train.frontends.torch.results import example_of

_NAMES = """
abs add all amax amin and_ any arange argmax argmin argsort argwhere as_tensor bincount bitwise_and bitwise_not
bitwise_or bitwise_xor bool broadcast_to bucketize cat ceil clamp clamp_max clamp_min clone contiguous cpu cumprod
cumsum detach diagonal diff div double eq expand expand_as eye flatten flip float floor floor_divide floordiv full
full_like gather ge getitem gt half index_select int inv invert isfinite isin isinf isnan le linspace logical_and
logical_not logical_or logical_xor long lt masked_fill masked_select max maximum min minimum mod mul ne neg new_full
new_ones new_zeros nonzero not_ one_hot ones ones_like or_ permute pow prod remainder repeat_interleave reshape roll
round searchsorted shape short sign size sort squeeze stack sub sum sym_size t take tensor tile to topk transpose tril
triu truediv trunc type unbind unflatten unique unique_consecutive unsqueeze view view_as where xor zeros zeros_like
"""
_SAME_VALUES = frozenset(_NAMES.split())
"""Functions and methods that draw no random numbers and change no tensor, by name."""

FEW = "fewer than two elements are selected, or their number is one that the trace has ruled out"
"""Why a call runs in pieces."""

_SELECTING = frozenset(["argwhere", "bincount", "masked_select", "nonzero", "unique", "unique_consecutive"])
"""Functions whose results may have sizes that depend on values, beside `where`, `repeat_interleave` and indices."""


@dataclass(frozen=True, eq=False)
class Selection:
    """Indices, and other values of sizes that depend on data, computed from a captured graph's operands."""

    module: fx.GraphModule
    positions: tuple[int, ...]
    """The operands that it reads."""
    first: int
    """Its results are the operands from this position on."""
    sizes: tuple[tuple[str, int, int], ...]
    """Symbol of a size, and the result and the dimension that have it."""
    conditions: tuple[sympy.Basic, ...] = ()
    """What PyTorch's trace assumed of the sizes."""
    assumptions: tuple[str, ...] = ()
    """What the program assumes of values, said the other way round; the last results are whether each holds."""

    @property
    def symbols(self) -> tuple[str, ...]:
        """The sizes that depend on data."""
        return tuple(name for name, _, _ in self.sizes)

    def __call__(self, operands: Sequence[Any] | Mapping[int, Any]) -> tuple[Tensor, ...]:
        """The results, from the operands of the captured graph."""
        with torch.no_grad():
            results: tuple[Tensor, ...] = self.module(*(operands[position] for position in self.positions))
        return results

    def misfit(self, results: Sequence[Tensor]) -> str:
        """Why the program is not for sizes and values such as these; empty if it is."""
        for assumption, holds in zip(self.assumptions[::-1], reversed(results), strict=False):
            if not holds:
                return assumption
        known = {name: results[index].shape[dim] for name, index, dim in self.sizes}
        enough = min(known.values(), default=data_sizes.LEAST) >= data_sizes.LEAST
        return "" if enough and all(_holds(condition, known) for condition in self.conditions) else FEW


def _holds(condition: sympy.Basic, sizes: Mapping[str, int]) -> bool:
    values = {s: sizes[s.name] for s in condition.free_symbols if s.name in sizes}
    return bool(condition.xreplace(values) == sympy.true)


def hoist(gm: fx.GraphModule, examples: Sequence[Any]) -> tuple[fx.GraphModule, list[Any], Selection] | None:
    """The graph whose selections are operands, its examples, and what computes these operands.

    None for a graph without sizes that depend on data and assumptions of values. Raises `Unsupported`, naming the
    user's line, where one of them depends on more than the arguments.
    """
    if not any(node.target is packed.ASSUMPTION or _symbols(example_of(node)) for node in gm.graph.nodes):
        return None
    return _Hoisting(gm, list(examples)).run()


class _Hoisting:
    """Divides a graph: `before` computes selections from the operands, `after` is the graph that takes them."""

    def __init__(self, gm: fx.GraphModule, examples: list[Any]) -> None:
        self.gm, self.examples = gm, examples
        self.before, self.after = fx.Graph(), fx.Graph()
        self.early: dict[fx.Node, fx.Node] = {}
        """Nodes of the captured graph -> nodes of `before`."""
        self.late: dict[fx.Node, Any] = {}
        """Nodes of the captured graph -> nodes of `after`, or tuples of them."""
        self.results: list[fx.Node] = []
        """The selections in `before`."""
        self.operands: list[Tensor] = []
        """Examples of the selections."""
        self.known: set[sympy.Symbol] = set()
        self.sizes: dict[sympy.Symbol, tuple[int, int]] = {}
        self.node: fx.Node
        """The node that selects."""
        self.masks: dict[fx.Node, list[fx.Node]] = {}
        self.read: set[fx.Node] = set()
        """Sizes of arguments, which `before` reads from these."""
        self.assumptions: list[tuple[fx.Node, str]] = []
        """Truth values in `before`, and what is assumed."""

    def run(self) -> tuple[fx.GraphModule, list[Any], Selection]:
        for node in self.gm.graph.find_nodes(op="placeholder"):
            self.early[node] = self.before.node_copy(node)
            self.late[node] = self._copy(node)
        for node in self.gm.graph.nodes:
            if node.op == "placeholder" or _is_assertion(node):
                continue
            if node.target is packed.ASSUMPTION:
                self.node, (holds, message) = node, node.args
                self.assumptions.append((self._early(holds), message))
                continue
            sizes = _symbols(example_of(node))
            selects = bool(sizes - self.known) or (bool(sizes) and _selects(node))
            self.known |= sizes
            self.late[node] = self._selected(node) if selects else self._copy(node)
        if missing := self.known - self.sizes.keys():
            raise Unsupported(f"a size that depends on data ({', '.join(map(str, missing))})")
        return self._main(), [*self.examples, *self.operands], self._selection()

    def _main(self) -> fx.GraphModule:
        main = fx.GraphModule(self.gm, self.after)
        main.meta.update(self.gm.meta)
        given = [n for n in self.after.nodes if n.op == "placeholder"]
        for previous, node in itertools.pairwise(given):
            previous.append(node)
        for node in [*self.after.nodes][::-1]:  # sizes of which only assertions were made
            unused = node.op.startswith("call") and not node.users
            if unused and isinstance(example_of(node), torch.SymInt | torch.SymBool):
                self.after.erase_node(node)
        main.recompile()
        return main

    def _selection(self) -> Selection:
        self.before.output((*self.results, *(holds for holds, _ in self.assumptions)))
        given = [n for n in self.before.nodes if n.op == "placeholder"]
        positions = tuple(i for i, node in enumerate(given) if node.users)
        for node in given:
            if not node.users:
                self.before.erase_node(node)
        sizes = tuple((str(s), index, dim) for s, (index, dim) in self.sizes.items())
        module = fx.GraphModule({}, self.before)
        assumptions = tuple(message for _, message in self.assumptions)
        return Selection(module, positions, len(self.examples), sizes, assumptions=assumptions)

    # ---- the two graphs -----------------------------------------------------------------------------------------
    def _copy(self, node: fx.Node) -> fx.Node:
        created = self.after.node_copy(node, self.late.__getitem__)
        if hasattr(node, "_dynamo_source"):
            created._dynamo_source = node._dynamo_source
        return created

    def _early(self, node: fx.Node) -> fx.Node:
        """A node in the graph that runs before the program. Raises `Unsupported` where it may not."""
        if isinstance(example_of(node), torch.SymInt) and node not in self.read:
            self.early[node] = self._early_size(node)
            self.read.add(node)
        if node in self.read:
            return self.early[node]
        leaves = [leaf for leaf in pytree.tree_leaves(example_of(node)) if isinstance(leaf, Tensor)]
        given = node.op != "placeholder" or isinstance(example_of(node), Tensor)
        if not given or any(leaf.requires_grad or leaf._version for leaf in leaves):
            raise self._refused(node)
        if node not in self.early:
            calls = node.op in ("call_function", "call_method")
            if not calls or _name(node) not in _SAME_VALUES or "out" in node.kwargs:
                raise self._refused(node)
            for each in node.all_input_nodes:
                self._early(each)
            self.early[node] = self.before.node_copy(node, self.early.__getitem__)
        return self.early[node]

    def _early_size(self, node: fx.Node) -> fx.Node:
        """A size of an argument, which may have been read from another tensor."""
        for argument in self.gm.graph.find_nodes(op="placeholder"):
            example = example_of(argument)
            for dim, size in enumerate(example.shape if isinstance(example, Tensor) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr == example_of(node).node.expr:
                    return self.before.call_function(torch.ops.aten.sym_size.int, (self.early[argument], dim))
        raise self._refused(node)

    def _operand(self, early: fx.Node, example: Tensor, like: fx.Node) -> fx.Node:
        """An operand of the program for a result of the graph before it."""
        created = self.after.placeholder(f"selection_{len(self.results)}")
        created.meta = {key: like.meta[key] for key in ("stack_trace", "nn_module_stack") if key in like.meta}
        created.meta["example_value"] = example
        for dim, size in enumerate(example.shape):
            if isinstance(size, torch.SymInt) and size.node.expr in self.known:
                self.sizes.setdefault(size.node.expr, (len(self.results), dim))
        self.results.append(early)
        self.operands.append(example)
        return created

    # ---- selections ---------------------------------------------------------------------------------------------
    def _selected(self, node: fx.Node) -> Any:
        """What replaces a node whose result has a size that depends on data."""
        self.node, name, example = node, _name(node), example_of(node)
        arguments: Sequence[Any] = node.args
        if name == "getitem" and isinstance(_example_of(arguments[0]), Tensor):
            return self._indexed(node, *arguments)
        if name == "masked_select" and len(arguments) == 2 and not node.kwargs:
            return self._masked(node, *arguments)
        if name == "repeat_interleave" and len(arguments) + len(node.kwargs) > 1:
            return self._repeated(node, *arguments, **node.kwargs)
        early = self._early(node)
        if isinstance(example, Tensor):
            return self._operand(early, example, node)
        if not isinstance(example, tuple | list) or not all(isinstance(e, Tensor) for e in example):
            raise self._refused(node)
        parts = [self.before.call_function(operator.getitem, (early, i)) for i in range(len(example))]
        return tuple(self._operand(part, e, node) for part, e in zip(parts, example, strict=True))

    def _indices(self, mask: fx.Node, like: fx.Node) -> list[fx.Node]:
        """The operands for the indices of the true elements of a mask in `before`, one per dimension."""
        if mask not in self.masks:
            example, present = example_of(like), _symbols(_example_of(like.args[0]))
            sizes = [s for s in example.shape if isinstance(s, torch.SymInt) and not _symbols_of(s) <= present]
            if len({str(size) for size in sizes}) != 1 or not sizes[0].node.expr.is_Symbol:
                raise self._refused(like)
            with example.fake_mode:
                indices = torch.empty((sizes[0],), dtype=torch.int64, device=example.device)
            found = self.before.call_method("nonzero", (mask,), {"as_tuple": True})
            parts = [self.before.call_function(operator.getitem, (found, i)) for i in range(mask.meta["dimensions"])]
            dense = [self.before.call_method("contiguous", (part,)) for part in parts]
            self.masks[mask] = [self._operand(part, indices, like) for part in dense]
        return self.masks[mask]

    def _indexed(self, node: fx.Node, source: fx.Node, index: Any) -> fx.Node:
        entries: list[Any] = []
        for entry in index if isinstance(index, tuple | list) else (index,):
            if _is_mask(entry):
                mask = self._early(entry)
                mask.meta["dimensions"] = example_of(entry).ndim
                entries += self._indices(mask, node)
            else:
                entries.append(fx.map_arg(entry, self.late.__getitem__))
        return self._call(node, operator.getitem, self.late[source], tuple(entries))

    def _masked(self, node: fx.Node, source: fx.Node, mask: fx.Node) -> fx.Node:
        shape = torch.broadcast_shapes(_example_of(source).shape, _example_of(mask).shape)
        if not all(isinstance(size, int) for size in shape):
            raise self._refused(node)
        broadcast = self.before.call_method("expand", (self._early(mask), *shape))
        broadcast.meta["dimensions"] = len(shape)
        expanded = self.after.call_method("expand", (self.late[source], *shape))
        expanded.meta = {**node.meta, "example_value": _example_of(source).expand(shape)}
        return self._call(node, operator.getitem, expanded, tuple(self._indices(broadcast, node)))

    def _repeated(self, node: fx.Node, source: Any, repeats: Any = None, dim: Any = None, **rest: Any) -> fx.Node:
        if not isinstance(repeats, fx.Node) or dim is None or rest or _example_of(repeats).ndim != 1:
            raise self._refused(node)
        rows = self.before.call_function(torch.repeat_interleave, (self._early(repeats),))
        example = example_of(node)
        with example.fake_mode:
            indices = torch.empty((example.shape[dim],), dtype=torch.int64, device=example.device)
        return self._call(node, torch.index_select, self.late[source], dim, self._operand(rows, indices, node))

    def _call(self, like: fx.Node, target: Any, *arguments: Any) -> fx.Node:
        created = self.after.call_function(target, arguments)
        created.meta = dict(like.meta)
        return created

    def _refused(self, node: fx.Node) -> Unsupported:
        """`node` keeps what is selected from being computed before the program."""
        through = "" if node is self.node else f", through {_name(node)}"
        what = f"{_name(self.node)}, whose result's size depends on data{through}"
        if self.node.target is packed.ASSUMPTION:
            what = f"lengths of packed sequences that depend on more than arguments{through}"
        return Unsupported(what, where=str(origin.origin(self.node)))


def with_conditions(selection: Selection, operands: Sequence[Any]) -> Selection:
    """The selection with what PyTorch has asserted of the sizes once all of the graph is traced."""
    given: Any = [size for x in operands[selection.first :] for size in x.shape if isinstance(size, torch.SymInt)]
    if not given:
        return selection
    asserted = given[0].node.shape_env.deferred_runtime_asserts
    return replace(selection, conditions=tuple(each.expr for some in asserted.values() for each in some))


def _is_assertion(node: fx.Node) -> bool:
    """Whether a node asserts what PyTorch's trace assumes of a size, which `Selection.fits` compares."""
    asserts = node.target is torch.ops.aten._assert_scalar.default
    return asserts and str(node.args[1]).startswith("Runtime assertion failed for expression")


def _selects(node: fx.Node) -> bool:
    """Whether a node selects by values, perhaps what another node has selected by the same ones."""
    name, given = _name(node), [*node.args, *node.kwargs.values()]
    if name == "where":
        return len(given) == 1
    if name == "repeat_interleave":
        return all(isinstance(entry, fx.Node) for entry in given[:2])
    if name != "getitem":
        return name in _SELECTING
    index = node.args[1] if isinstance(node.args[1], tuple | list) else (node.args[1],)
    return any(_is_mask(entry) for entry in index)


def _is_mask(entry: Any) -> bool:
    example = _example_of(entry)
    return isinstance(example, Tensor) and example.dtype in (torch.bool, torch.uint8)


def _name(node: fx.Node) -> str:
    target = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", target)).split(".")[0]


def _example_of(value: Any) -> Any:
    return example_of(value) if isinstance(value, fx.Node) else value


def _symbols(example: Any) -> set[sympy.Symbol]:
    """The sizes that depend on data in the shapes of a result; numbers that are read from tensors are no sizes."""
    shapes = (leaf.shape for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor))
    return {s for shape in shapes for size in shape for s in _symbols_of(size)}


def _symbols_of(size: Any) -> set[sympy.Symbol]:
    return set(free_unbacked_symbols(size)) if isinstance(size, torch.SymInt) else set()
