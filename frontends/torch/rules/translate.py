"""From a functional ATen graph to an operator graph: walks the nodes and lets the rules emit operators."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import sympy
import torch
import torch.utils._pytree as pytree
from sympy.logic.boolalg import BooleanAtom
from torch import fx

from daceml_train.errors import DacemlError, Invalid, Unsupported
from daceml_train.frontends.torch import types
from daceml_train.frontends.torch.capture.rng_draws import Draw, Given, Randomness, draw_of, is_random
from daceml_train.frontends.torch.dynamo.origin import origin
from daceml_train.frontends.torch.rules.size_numbers import BINARY, UNARY, Unproven, is_ratio, real
from daceml_train.graph.graph import Graph, Role
from daceml_train.graph.node import SEED
from daceml_train.ops.fallback import full as constant
from daceml_train.ops.gradient import Detach
from daceml_train.ops.operator import Origin, Value, make
from daceml_train.tensor import Dim, DType, Shape, Tensor, same_shape

Rule = Callable[..., Any]
"""`rule(translator, *arguments, **keywords)`: emits one ATen operator; a Value, a tuple of them, or None to decline."""

RULES: dict[str, Rule] = {}
"""ATen overload, such as `aten.add.Tensor`, -> its rule. `table` fills it."""


Function = TypeVar("Function", bound=Rule)


def rule(*overloads: str) -> Callable[[Function], Function]:
    """Register a function as the rule of these overloads; `add.Tensor` is short for `aten.add.Tensor`."""

    def register(function: Function) -> Function:
        for overload in overloads:
            name = overload if overload.count(".") == 2 else f"aten.{overload}"
            if name in RULES:
                raise Invalid(f"two rules for {name}: {RULES[name].__name__} and {function.__name__}")
            RULES[name] = function
        return function

    return register


_CHECKS = """
_assert_tensor_metadata _assert_scalar sym_constrain_range sym_constrain_range_for_size _functional_assert_scalar
_linalg_check_errors
"""
IGNORED = frozenset(_CHECKS.split())
"""Checks: they compute nothing. (A singular matrix yields infinities instead of an error.)"""


class Translator:
    """Builds `graph` from ATen graphs. One translator per graph: it hands out seeds and numbers random streams."""

    def __init__(self, graph: Graph, fallback: Callable[..., Any], randomness: Randomness = "seeded") -> None:
        self.graph = graph
        self.randomness = randomness
        self.draws: dict[str, Draw] = {}
        """Inputs of the graph that hold random numbers drawn before it runs, in their order."""
        self.fallback = fallback
        self.fallbacks: list[tuple[str, Origin]] = []
        self.given: dict[fx.Node, Any] = {}
        """Nodes whose results are already known: they are not emitted."""
        self.scope: dict[fx.Node, Any] = {}
        """The values of the nodes of the most recent graph."""
        self.node: fx.Node
        self.constants: dict[str, torch.Tensor] = {}
        """Inputs of the graph for constant tensors of the trace."""
        self.required: list[Value] = []
        """The values of checks without a result, on which results have to depend."""
        self._numbers: dict[str, Value] = {}
        self._read_from: dict[str, str] = {}
        """Symbol of a number -> the input of the graph that holds it."""
        self._active: set[str] = set()
        self._looked_at = 0
        self._streams = 0
        self._constants: dict[tuple[type, object, DType], Value] = {}

    # ---- for rules --------------------------------------------------------------------------------------------------
    @property
    def type(self) -> Tensor:
        """PyTorch's type of the only result of the current node."""
        return types.tensor(self.node.meta["val"])

    @property
    def types(self) -> tuple[Tensor | None, ...]:
        """PyTorch's types of the results of the current node; None for an absent one."""
        values = self.node.meta["val"]
        values = values if isinstance(values, tuple | list) else (values,)
        return tuple(types.tensor(t) if isinstance(t, torch.Tensor) else None for t in values)

    def emit(self, name: str, *operands: Value, **attributes: Any) -> Value:
        """The first result of the operator `name`."""
        return self.graph.emit(make(name, **attributes), *operands)[0]

    def emit_all(self, name: str, *operands: Value, **attributes: Any) -> tuple[Value, ...]:
        """All results of the operator `name`."""
        return self.graph.emit(make(name, **attributes), *operands)

    def full(self, value: Any, shape: Shape, dtype: DType) -> Value:
        """A tensor of one constant, given as a Python number or an expression over sizes."""
        if isinstance(value, sympy.Expr):
            if not is_ratio(value):
                return real(self.graph, value).cast(dtype).expand(tuple(shape))
        else:
            value = bool(value) if dtype is DType.bool else value if dtype.is_float else int(value)
            value = float(value) if dtype.is_float and not isinstance(value, complex) else value
        return constant(self.graph, value, tuple(shape), dtype)

    def connected(self, result: Value, *sources: Value) -> Value:
        """A result that does not depend on the values of `sources`; in autograd they get a gradient of zeros."""
        for x in sources if result.dtype.is_float else ():
            if x.dtype.is_float:
                if x.shape != result.shape:
                    x = (x.sum(tuple(range(len(x.shape)))) if x.shape else x).expand(result.shape)
                result = self.emit("overwrite", x.cast(result.dtype), result)
        return result

    def value(self, operand: Any, dtype: DType) -> Value:
        """A tensor operand cast to `dtype`, or a number as a 0-d constant of it."""
        if isinstance(operand, Value):
            return operand.cast(dtype)
        if isinstance(operand, BooleanAtom):  # a comparison of numbers
            operand = bool(operand)
        key = (type(operand), str(operand), dtype)
        if key not in self._constants:
            self._constants[key] = self.full(operand, (), dtype)
        return self._constants[key]

    def seed(self) -> Value:
        """The one seed input of the graph; created at first use."""
        if SEED not in self.graph.inputs:
            return self.graph.input(SEED, Tensor((), DType.int64), Role.state, SEED)
        return self.graph.value(SEED)

    def stream(self) -> int:
        """A number that no other random operator of the graph has."""
        self._streams += 1
        return self._streams - 1

    def number(self, symbol: str, value: Value) -> None:
        """Say that `value`, a 0-d array, holds the number for which PyTorch writes `symbol`."""
        self._numbers[symbol] = value
        if value.name in self.graph.inputs:
            self._read_from[symbol] = value.name

    def count_streams_with(self, other: Translator) -> None:
        """Number random operators after those that `other` has numbered: they share a seed."""
        self._streams = max(self._streams, other._streams)

    def drawn(self, draw: Draw, example: Tensor) -> Value:
        """Random numbers that are drawn before the graph runs."""
        name = self.graph.fresh(f"draw{len(self.draws)}")
        self.draws[name] = draw
        return self.graph.input(name, example, Role.state, name)

    def outside(self, number: torch.SymFloat) -> Given:
        """A number that is known before the graph runs. Raises `Unsupported` if the graph computes it."""
        expression = number.node.shape_env.replace(number.node.expr)
        symbols = sorted(map(str, expression.free_symbols))
        if not self._read_from.keys() >= set(symbols):
            raise Unsupported("random numbers that depend on a number which the graph computes")
        return Given(expression, tuple((symbol, self._read_from[symbol]) for symbol in symbols))

    def uniform(self, shape: Shape, dtype: DType = DType.float32) -> Value:
        """Fresh random numbers in [0, 1): as many digits as `dtype` has, of which rounding would make 1."""
        wide = dtype if dtype is DType.float64 else DType.float32
        drawn = self.emit("uniform", self.seed(), shape=shape, stream=self.stream(), dtype=wide)
        scale = {DType.bfloat16: 2.0**8, DType.float16: 2.0**11}.get(dtype)
        return (drawn if scale is None else (drawn * scale).unary("floor") * (1 / scale)).cast(dtype)

    def dependent(self, value: Value) -> Value:
        """`value`, made dependent on all earlier checks on which no other value depends."""
        for holds in self.required:
            value = holds.where(value, 0)
        self.required = []
        return value

    def require_gradient(self, value: Value) -> None:
        """Declare that a gradient for this input may be requested."""
        self._active.add(value.name)

    def active(self, value: Value) -> bool:
        """Whether a gradient may have to flow through `value`."""
        for node in self.graph.nodes[self._looked_at :]:
            if not self._active.isdisjoint(node.inputs) and not isinstance(node.op, Detach):
                self._active.update(o for o in node.outputs if self.graph.tensors[o].dtype.is_float)
        self._looked_at = len(self.graph.nodes)
        return value.name in self._active

    # ---- walking ----------------------------------------------------------------------------------------------------
    def run(self, module: fx.GraphModule, operands: Sequence[Any], tokens: Sequence[str] = ()) -> list[Any]:
        """Emit a traced graph on `operands` (Values, sizes, constants); its outputs, flattened by the trace.

        `tokens` names placeholders that only order checks with effects; nothing is given for them.
        """
        scope: dict[fx.Node, Any] = {}
        self.scope = scope
        given = iter(operands)
        for node in module.graph.nodes:
            match node.op:
                case "placeholder" if node.name in tokens:
                    scope[node] = None
                case "placeholder":
                    scope[node] = next(given, None)
                    if scope[node] is None and node.users:
                        raise Unsupported(f"a traced graph with the unknown operand {node.name}")
                case "output":
                    return [scope[o] if isinstance(o, fx.Node) else o for o in node.args[0]]
                case "get_attr":
                    scope[node] = self._constant(node, module)
                case "call_function" if node in self.given:
                    scope[node] = self.given[node]
                case "call_function":
                    with self.graph.at(origin(node)):
                        scope[node] = self._call(node, scope)
                case _:
                    raise Unsupported(f"a traced graph with a node {node.format_node()}", where=str(origin(node)))
        raise Invalid("a traced graph has no output")

    def _constant(self, node: fx.Node, module: fx.GraphModule) -> Any:
        """A constant tensor of the trace: operators if it is small, else an input of the graph."""
        attribute: Any = module
        for part in str(node.target).split("."):
            attribute = getattr(attribute, part)
        if not isinstance(attribute, torch.Tensor):
            return attribute
        shape, dtype = types.sizes(attribute.shape), types.element_type(attribute.dtype)
        if attribute.numel() == 1:
            return self.full(attribute.item(), shape, dtype)
        if 0 < attribute.numel() <= 8 and not attribute.is_complex():
            parts = [self.full(number, (1,), dtype) for number in attribute.flatten().tolist()]
            return self.emit("concat", *parts, dim=0).view(shape)
        name = self.graph.fresh(str(node.target).strip("_"))
        self.constants[name] = attribute.detach()
        return self.graph.input(name, types.tensor(attribute, laid_out=True), Role.buffer, name)

    def _call(self, node: fx.Node, scope: dict[fx.Node, Any]) -> Any:
        def resolve(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                return self._read(scope[argument])
            if isinstance(argument, tuple | list):
                return [resolve(a) for a in argument]
            return argument

        if node.target is operator.getitem:
            return resolve(node.args[0])[node.args[1]]
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return self._integer(value, node)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, torch.SymFloat | torch.SymBool | float | bool):
            return self._number(node, value, resolve)
        name = str(node.target)
        if name == "with_effects" and isinstance(node.args[1], torch._ops.OpOverload):
            if _base_name(str(node.args[1])) in IGNORED:
                return (None, None)
            if _base_name(str(node.args[1])) == "_assert_async":
                self.node = node
                RULES[f"{node.args[1]}"](self, *(resolve(a) for a in node.args[2:]))
                return (None, None)
            raise Unsupported(f"{node.args[1]}, which has effects", where=str(origin(node)))
        if _base_name(name) in IGNORED:
            return None
        if _base_name(name) == "_assert_async":
            self.node = node
            RULES[name](self, *(resolve(a) for a in node.args))
            return None
        arguments = [resolve(a) for a in node.args]
        keywords = {key: resolve(a) for key, a in node.kwargs.items()}
        self.node = node
        try:
            return self._emit(name, node, arguments, keywords)
        except TypeError as error:  # an attribute that is an expression over sizes, or an array that holds a number
            symbolic = pytree.tree_leaves([arguments, keywords])
            if not any(isinstance(a, sympy.Expr) for a in symbolic) and not self._numbers:
                raise
            raise Unproven(f"{name} with a symbolic attribute", where=str(origin(node))) from error
        except Unsupported as error:
            raise error if error.where else type(error)(error.message, where=str(origin(node))) from error
        except Invalid as error:
            shapes = [found.shape for found in self.types if found is not None]
            if self.graph.symbols or any(isinstance(size, sympy.Expr) for shape in shapes for size in shape):
                # an equality of symbolic sizes that SymPy does not prove, or an integer that no size tells
                raise Unproven(f"{name} on symbolic sizes: {error.message}", where=str(origin(node))) from error
            raise Invalid(f"translating {name}: {error.message}", where=str(origin(node))) from error

    def _number(self, node: fx.Node, value: Any, resolve: Callable[[Any], Any]) -> Any:
        """A float or truth value: an expression over sizes, or a 0-d tensor if it is a tensor input."""
        if not isinstance(value, torch.SymFloat | torch.SymBool):
            return value
        expression = value.node.shape_env.replace(value.node.expr)
        if expression.is_Symbol and isinstance(node.args[0], fx.Node):
            operand = resolve(node.args[0])
            if isinstance(operand, Value):
                if operand.name in self.graph.inputs:
                    self._read_from[expression.name] = operand.name
                number = operand.view(())  # Python's from here on: no gradient flows through it
                self._numbers[expression.name] = self.emit("detach", number) if number.dtype.is_float else number
        try:
            return self._evaluate(expression)
        except DacemlError as error:
            raise Unsupported(error.message, where=str(origin(node))) from error

    def _integer(self, value: torch.SymInt, node: fx.Node) -> Any:
        """A size, or an expression over numbers that no shape tells, of which `_read` makes operators."""
        try:
            return types.size(value)
        except DacemlError as error:
            raise Unsupported(error.message, where=str(origin(node))) from error

    def _read(self, value: Any) -> Any:
        """What an operator reads: of an expression over numbers that no shape tells, the 0-d array."""
        if not isinstance(value, sympy.Expr) or self._numbers.keys().isdisjoint(map(str, value.free_symbols)):
            return value
        return self._evaluate_integer(value)

    def _evaluate_integer(self, expression: sympy.Expr) -> Value:
        """An expression over integers as operators on int64."""
        if expression.is_Symbol:
            known = self._numbers.get(str(expression))
            return self.value(expression, DType.int64) if known is None else known
        if expression.is_Integer:
            return self.full(int(expression), (), DType.int64)
        if isinstance(expression, sympy.floor):
            above, below = map(self._evaluate_integer, sympy.fraction(sympy.together(expression.args[0])))
            return self.emit("floor_divide", above, below)
        power = expression.exp if isinstance(expression, sympy.Pow) else None
        if power is not None and power.is_Integer and 1 < power <= 64:
            return functools.reduce(
                lambda a, b: self.emit("mul", a, b), [self._evaluate_integer(expression.base)] * int(power)
            )
        kind = {sympy.Add: "add", sympy.Mul: "mul", sympy.Max: "maximum", sympy.Min: "minimum"}.get(expression.func)
        if kind is None:
            raise Unproven(f"the number {expression}")
        return functools.reduce(lambda a, b: self.emit(kind, a, b), map(self._evaluate_integer, expression.args))

    def _evaluate(self, expression: Any) -> Any:
        """An expression in which numbers of tensor inputs may occur: 0-d tensors then."""
        if not any(symbol.name in self._numbers for symbol in expression.free_symbols):
            return types.expression(expression)
        if expression.is_Symbol:
            return self._numbers[expression.name]
        function = type(expression).__name__
        kind = UNARY.get(function) or BINARY.get(function)
        if kind is None:
            raise Unsupported(f"the number {expression}")
        values = [self.value(self._evaluate(a), DType.float64) for a in expression.args]
        if function in UNARY:
            return self.emit(kind, *values)
        return functools.reduce(lambda a, b: self.emit(kind, a, b), values)

    def _emit(self, name: str, node: fx.Node, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if self.randomness == "eager" and is_random(node.target) and name not in _DROPOUTS:
            numbers = self.drawn(draw_of(node, self.outside), types.tensor(node.meta["val"]))
            self._check(name, node, numbers)
            return numbers
        known = RULES.get(name) if name in _OF_ANY_NUMBERS or not _is_complex(node) else None
        result = known(self, *arguments, **keywords) if known is not None else None
        if result is None:
            result = self.fallback(self, node, arguments, keywords)
        self._check(name, node, result)
        return result

    def _check(self, name: str, node: fx.Node, result: Any) -> None:
        """The safety net: the emitted values have PyTorch's types."""
        results = result if isinstance(result, tuple | list) else (result,)
        expected = node.meta["val"]
        expected = expected if isinstance(expected, tuple | list) else (expected,)
        for position, example in enumerate(expected):
            if not isinstance(example, torch.Tensor):
                continue
            value = results[position] if position < len(results) else None
            if value is None and _unused(node, position):
                continue
            wanted = types.tensor(example)
            if not isinstance(value, Value):
                raise Invalid(f"the rule of {name} returned no result {position}, which is {wanted} in PyTorch")
            if value.dtype is not wanted.dtype or not same_shape(value.shape, wanted.shape):
                raise Invalid(f"the rule of {name} returned {value.tensor}, where PyTorch returns {wanted}")


_DROPOUTS = frozenset(["aten.native_dropout.default", "daceml_train.dropout.default"])
"""What multiplies by what it draws: not the numbers themselves."""
_OF_ANY_NUMBERS = frozenset(
    f"{name}.default" for name in ("aten.detach", "aten.detach_", "daceml_train.graft", "daceml_train.overwrite")
)
"""Operators that say where gradients flow and compute nothing, so that their rules hold for complex numbers, too."""


def _base_name(name: str) -> str:
    return name.split(".")[1] if "." in name else name


def _unused(node: fx.Node, position: int) -> bool:
    return all(user.target is operator.getitem and user.args[1] != position for user in node.users)


def _is_complex(node: fx.Node) -> bool:
    nodes = (*node.all_input_nodes, node)
    examples = [n.meta.get("val") for n in nodes]
    return any(isinstance(e, torch.Tensor) and e.is_complex() for e in examples)


def promote(*operands: Value | Dim | float | None) -> DType:
    """The element type in which PyTorch computes an elementwise operator of tensors and numbers."""
    levels: list[torch.dtype | None] = [None, None, None]
    for operand in operands:
        if isinstance(operand, Value):
            level, dtype = (0 if operand.shape else 1), types.TORCH_DTYPES[operand.dtype]
        elif operand is None:
            continue
        else:
            level, dtype = 2, _number_type(operand)
        before = levels[level]
        levels[level] = dtype if before is None else torch.promote_types(before, dtype)
    result = _combine(_combine(levels[0], levels[1]), levels[2])
    assert result is not None
    return types.element_type(result)


def _number_type(number: Any) -> torch.dtype:
    if isinstance(number, sympy.Expr):
        return torch.int64 if number.is_integer else torch.get_default_dtype()
    if isinstance(number, bool):
        return torch.bool
    return torch.int64 if isinstance(number, int) else torch.get_default_dtype()


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """`combine_categories` of ATen's TypeProperties.cpp, for real types."""
    if higher is None or lower is None:
        return higher or lower
    if higher.is_floating_point or higher.is_complex:
        return higher
    if higher is torch.bool or lower.is_floating_point or lower.is_complex:
        return torch.promote_types(higher, lower)
    return higher
