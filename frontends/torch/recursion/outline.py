"""Outlining: statements of a recursive function that only compute with tensors become blocks, recorded once.

A block is a function of what its statements read. The first call for operands of these types runs its statements, and
what they record is kept; later calls repeat the record. All else of the user's function runs as it is, at each call.
"""

from __future__ import annotations

import ast
import contextlib
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.nn

from daceml_train.frontends.torch.recursion.blocks import Block
from daceml_train.frontends.torch.recursion.lazy import Lazy
from daceml_train.frontends.torch.recursion.lifting import Lifter
from daceml_train.frontends.torch.recursion.pure import Checker, calls, named, parsed
from daceml_train.frontends.torch.recursion.simple import called_computes


class _Parameters(ast.NodeTransformer):
    """Replaces what a block reads by parameters: names, attributes, and `torch.tensor` of Python's numbers.

    A name is one parameter wherever it is read. Attributes are read as often as the user's code does it: they may be
    properties, which compute, count, or consume.
    """

    def __init__(self, checker: Checker, inside: set[str]) -> None:
        self.checker, self.inside = checker, inside
        self.found: dict[str, tuple[str, ast.expr]] = {}
        self.numbers: set[str] = set()
        """Parameters that are given as Python's numbers, of which a tensor is made."""

    def _parameter(self, node: ast.expr) -> ast.expr:
        key = node.id if isinstance(node, ast.Name) else f"{len(self.found)} {ast.dump(node)}"
        name, _ = self.found.setdefault(key, (f"p{len(self.found)}", node))
        return ast.copy_location(ast.Name(name, ast.Load()), node)

    def _tensor(self, node: ast.Call) -> ast.expr:
        """The parameter for a call of `torch.tensor`."""
        given = node.args[0] if len(node.args) == 1 and not node.keywords else None
        if not isinstance(given, ast.List) or any(
            isinstance(e, ast.List | ast.Tuple | ast.Starred) for e in given.elts
        ):
            return self._parameter(node)
        name = f"p{len(self.found)}"
        self.found[f"{name} {ast.dump(given)}"] = name, given
        self.numbers.add(name)
        return ast.copy_location(ast.Name(name, ast.Load()), node)

    def visit(self, node: ast.AST) -> Any:
        """The node with parameters."""
        checker = self.checker
        if isinstance(node, ast.Call):
            read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            func = node.func
            assert isinstance(func, ast.Attribute)
            if checker.library(func):
                if func.attr == "tensor" and read.isdisjoint(self.inside):
                    return self._tensor(node)
            elif checker.of_model(func):
                node.func = self._parameter(func)
            else:
                func.value = self.visit(func.value)
            node.args = [self.visit(a) for a in node.args]
            node.keywords = [ast.keyword(k.arg, self.visit(k.value)) for k in node.keywords]
            return node
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Load):
            if checker.library(node):
                return node
            if checker.chain(node) and checker.root(node) not in self.inside:
                return self._parameter(node)
        return self.generic_visit(node)


class Outliner:
    """Replaces runs of statements that only compute by calls of blocks."""

    def __init__(
        self,
        function: types.FunctionType,
        tree: ast.FunctionDef,
        marked: frozenset[str],
        computes: Callable[[ast.expr], bool],
    ) -> None:
        self.function, self.tree, self.marked, self.computes = function, tree, marked, computes
        self.checker = Checker(function)
        self.lifter = Lifter(self.checker, marked)
        self.blocks: list[Block] = []
        self.reads: dict[str, list[ast.Name]] = {}

    def statement(self, node: ast.stmt) -> bool:
        """Whether a statement can be in a block."""
        if not isinstance(node, ast.Return | ast.Assign) or node.value is None:
            return False
        if isinstance(node, ast.Assign) and named(node.targets) is None:
            return False
        return calls(node.value) and self.checker.pure(node.value, self.marked) and self.without_effects(node.value)

    def without_effects(self, value: ast.expr) -> bool:
        """Whether what an expression calls of the model only computes: a block reads all operands before such calls."""
        functions = [n.func for n in ast.walk(value) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        return all(self.computes(f) for f in functions if self.checker.of_model(f))

    def body(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Statements with blocks."""
        results: list[ast.stmt] = []
        block: list[ast.stmt] = []
        for node in statements:
            if self.statement(node):
                block.append(node)
                continue
            results += self.outlined(block)
            block = []
            for name in ("body", "orelse", "finalbody"):
                if (inner := _statements(node, name)) is not None:
                    setattr(node, name, self.body(inner))
            results.append(node)
        return results + self.outlined(block)

    def whole(self) -> list[ast.stmt]:
        """The function's statements with blocks."""
        self.tree.body = self.all_lifted(self.tree.body)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self.reads.setdefault(node.id, []).append(node)
        return self.body(self.tree.body)

    def all_lifted(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Statements, and those in them, without calls of the recursion in expressions that else only compute."""
        for node in statements:
            for name in ("body", "orelse", "finalbody"):
                if (inner := _statements(node, name)) is not None:
                    setattr(node, name, self.all_lifted(inner))
        return [each for node in statements for each in self.lifted(node)]

    def lifted(self, node: ast.stmt) -> list[ast.stmt]:
        """A statement without calls of the recursion in its expression, after statements that have them."""
        if not isinstance(node, ast.Return | ast.Assign) or node.value is None or self.statement(node):
            return [node]
        whole, before = isinstance(node, ast.Return) or named(node.targets) is not None, list[ast.stmt]()
        if whole and (found := self.lifter.lifted(node.value)) is not None:
            before, node.value = found
        elif not whole and calls(node.value) and self.checker.pure(node.value, self.marked):
            statement, node.value = self.lifter.named(node.value)
            before = [statement]
        return [*before, node]

    def outlined(self, block: list[ast.stmt]) -> list[ast.stmt]:
        """The statement that calls a block of these."""
        if not block:
            return []
        inside: set[str] = set()
        numbers: set[str] = set()
        parameters: dict[str, tuple[str, ast.expr]] = {}
        own = {id(n) for s in block for n in ast.walk(s)}
        for node in block:
            transformer = _Parameters(self.checker, inside)
            transformer.found, transformer.numbers = parameters, numbers
            assert isinstance(node, ast.Return | ast.Assign) and node.value is not None
            node.value = transformer.visit(node.value)
            if isinstance(node, ast.Assign):
                inside |= set(named(node.targets) or ())
        last = block[-1]
        # what is read before it is assigned may be read by the same block again, in a loop
        used = {n for n in inside if n in parameters or any(id(use) not in own for use in self.reads.get(n, ()))}
        results = sorted(used)
        body = list(block)
        if not isinstance(last, ast.Return):
            loaded: list[ast.expr] = [ast.Name(n, ast.Load()) for n in results]
            body.append(ast.copy_location(ast.Return(ast.Tuple(loaded, ast.Load())), last))
        names = [ast.arg(name) for name, _ in parameters.values()]
        arguments = ast.arguments([], names, None, [], [], None, [])
        result = ast.copy_location(ast.FunctionDef(self.tree.name, arguments, body, [], None), block[0])
        code = _compiled(result, self.function)
        given = frozenset(k for k, (name, _) in enumerate(parameters.values()) if name in numbers)
        self.blocks.append(Block(types.FunctionType(code, self.function.__globals__), self.function, given))
        call = ast.Call(ast.Constant(_placeholder(len(self.blocks) - 1)), [e for _, e in parameters.values()], [])
        target: list[ast.expr] = [ast.Tuple([ast.Name(n, ast.Store()) for n in results], ast.Store())]
        site: ast.stmt = ast.Return(call) if isinstance(last, ast.Return) else ast.Assign(target, call)
        return [ast.fix_missing_locations(ast.copy_location(site, block[0]))]


class _Types(ast.NodeTransformer):
    """Replaces `type(...)`, which is that of a tensor where a value of the recursion is given."""

    def __init__(self, function: types.FunctionType) -> None:
        self.own = "type" in (*function.__code__.co_varnames, *function.__globals__)
        self.found = False

    def visit_Call(self, node: ast.Call) -> Any:
        """A call with another function in place of `type`."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1 and not self.own:
            self.found = True
            node.func = ast.copy_location(ast.Constant(CLASS), node.func)
        return node


def asks_for_types(function: types.FunctionType) -> bool:
    """Whether a function compares what `type` says with a class of tensors."""
    names = {*function.__code__.co_names, *function.__code__.co_freevars}
    if "type" not in names or names.isdisjoint(CLASSES):
        return False
    tree = parsed(function)
    if tree is None:
        return True
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.Call | ast.Subscript):
            inside = list(ast.walk(node))
            called = [n.func for n in inside if isinstance(n, ast.Call)]
            asks = any(isinstance(f, ast.Name) and f.id == "type" for f in called)
            if asks and any((getattr(n, "attr", None) or getattr(n, "id", None)) in CLASSES for n in inside):
                return True
    return False


CLASSES = frozenset(("Tensor", "Parameter"))
CLASS = "<the class of a value of a recursion>"


def class_of(value: Any) -> type:
    """What `type` is in PyTorch."""
    return torch.Tensor if type(value) is Lazy else type(value)


def _statements(node: ast.stmt, name: str) -> list[ast.stmt] | None:
    """The statements in a statement of the same function."""
    inner = getattr(node, name, None)
    nested = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
    return inner if isinstance(inner, list) and not nested else None


def _placeholder(number: int) -> str:
    return f"<block {number} of a recursion>"


def _compiled(tree: ast.FunctionDef, function: types.FunctionType) -> types.CodeType:
    module = ast.fix_missing_locations(ast.Module([tree], []))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # calls of constants, which blocks are
        code = compile(module, function.__code__.co_filename, "exec", dont_inherit=True)
    return next(c for c in code.co_consts if isinstance(c, types.CodeType))


def outline(
    function: Callable[..., Any], marked: frozenset[str], modules: Sequence[torch.nn.Module] = ()
) -> tuple[types.CodeType, list[Block]] | None:
    """The code of a recursive function of a model's modules with blocks, and these; None without any, or a source."""
    if not isinstance(function, types.FunctionType) or function.__code__.co_freevars:
        return None
    tree = parsed(function)
    if tree is None or any(isinstance(n, ast.Global | ast.Nonlocal | ast.Yield | ast.Await) for n in ast.walk(tree)):
        return None
    outliner = Outliner(function, tree, marked, called_computes(function, modules))
    tree.body = outliner.whole()
    types_ = _Types(function)
    tree = types_.visit(tree)
    if not outliner.blocks and not types_.found:
        return None
    code = _compiled(tree, function)
    places: dict[str, Any] = {_placeholder(k): block.entry for k, block in enumerate(outliner.blocks)}
    places[CLASS] = class_of
    consts = tuple(places.get(c, c) if isinstance(c, str) else c for c in code.co_consts)
    return code.replace(co_consts=consts, co_qualname=function.__code__.co_qualname), outliner.blocks


def outlined(
    functions: Iterable[Callable[..., Any]],
    codes: dict[int, types.CodeType],
    blocks: set[types.CodeType],
    modules: Sequence[torch.nn.Module],
) -> dict[types.FunctionType, types.CodeType]:
    """The code with blocks of each function that has any, for a model of these modules.

    `codes` and `blocks` receive what belongs to the recursion.
    """
    functions = list(functions)
    marked = frozenset(getattr(f, "__name__", "") for f in functions)
    found: dict[types.FunctionType, types.CodeType] = {}
    for function in functions:
        if (results := outline(function, marked, modules)) is None:
            continue
        assert isinstance(function, types.FunctionType)
        found[function] = results[0]
        _SOURCES[results[0]] = function.__code__
        for code in (results[0], *(block.function.__code__ for block in results[1])):
            codes[id(code)] = code
        blocks.update(block.function.__code__ for block in results[1])
        _BLOCKS[results[0]] = tuple(block.function.__code__ for block in results[1])
    return found


_LOCK = threading.Lock()
_SOURCES: weakref.WeakKeyDictionary[types.CodeType, types.CodeType] = weakref.WeakKeyDictionary()
"""Code without blocks, by the code with them."""
_BLOCKS: weakref.WeakKeyDictionary[types.CodeType, tuple[types.CodeType, ...]] = weakref.WeakKeyDictionary()
"""The code of blocks, by the code that calls them."""
_USERS: dict[types.FunctionType, int] = {}
"""How many recordings run functions with blocks now, which have the same results everywhere."""


@contextlib.contextmanager
def with_codes(
    found: dict[types.FunctionType, types.CodeType],
) -> Iterator[Mapping[types.CodeType, Sequence[types.CodeType]]]:
    """Run functions with blocks; gives the code that they run, with that of its blocks.

    It is another model's where that one runs the same functions now, in another thread.
    """
    with _LOCK:
        # what was given other code since is run as it is
        found = {f: code for f, code in found.items() if _USERS.get(f) or f.__code__ is _SOURCES.get(code)}
        before = {function: function.__code__ for function in found if not _USERS.get(function)}
        for function, code in found.items():
            _USERS[function] = _USERS.get(function, 0) + 1
            if function in before:
                _PLAIN[function], function.__code__ = before[function], code
        codes = {function.__code__: _BLOCKS.get(function.__code__, ()) for function in found}
    try:
        yield codes
    finally:
        with _LOCK:
            for function in found:
                _USERS[function] -= 1
                if not _USERS[function]:
                    function.__code__ = _PLAIN.pop(function)


@contextlib.contextmanager
def without_codes() -> Iterator[None]:
    """Have functions as they were written, whoever runs them with blocks in another thread."""
    with _LOCK:
        before = {function: function.__code__ for function in _PLAIN}
        for function in before:
            function.__code__ = _PLAIN[function]
        try:
            yield
        finally:
            for function, code in before.items():
                function.__code__ = code


_PLAIN: dict[types.FunctionType, types.CodeType] = {}
