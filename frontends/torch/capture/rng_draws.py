"""Random numbers as eager execution draws them: PyTorch's own operators, run in its order before the program.

A program that takes them as inputs cannot leave one out, repeat one, or draw in another order.
"""

from __future__ import annotations

import ast
import builtins
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch import types
from daceml_train.tensor import Shape, evaluate

Randomness = Literal["seeded", "eager"]
"""`seeded`: the kernels generate numbers from a seed per call. `eager`: the numbers are those of eager execution."""

_ANY_OVERLOAD = "rand randn randint randperm rand_like randn_like randint_like new_rand uniform random exponential"
_INDEPENDENT = frozenset(
    [
        *_ANY_OVERLOAD.split(),
        "geometric",
        "log_normal",
        "cauchy",
        "normal_functional",
        "bernoulli.p",
        "normal.float_float",
    ]
)
"""Random operators that depend on sizes and types of tensors only, never on their values."""


@dataclass(frozen=True)
class Like:
    """A placeholder for a tensor of which only sizes, strides and type matter."""

    shape: Shape
    strides: Shape
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")


_KNOWN = {"math": math, "torch": torch}
"""What PyTorch writes numbers with in Python."""


@dataclass(frozen=True)
class Given:
    """A number that is computed from inputs of the graph: an expression, and its symbols with the inputs' names."""

    expression: sympy.Expr
    inputs: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        _ = self._function  # an expression without a function is refused before the program is compiled

    def __call__(self, values: Mapping[str, float]) -> float:
        """The number for these values of the symbols."""
        return self._function(*(values[symbol] for symbol, _ in self.inputs))

    @functools.cached_property
    def _function(self) -> Callable[..., float]:
        """The expression in Python. Raises `Unsupported` for functions that Python does not have."""
        names = [symbol for symbol, _ in self.inputs]
        text = f"lambda {', '.join(names)}: {PythonPrinter().doprint(self.expression)}"
        unknown = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)} - {
            *names,
            *_KNOWN,
            *dir(builtins),
        }
        if unknown:
            raise Unsupported(f"random numbers that depend on {self.expression}")
        found: Callable[..., float] = eval(text, dict(_KNOWN))
        return found

    def __reduce__(self) -> Any:
        return Given, (self.expression, self.inputs)


@dataclass(frozen=True, eq=False)
class Draw:
    """One call of a random operator."""

    target: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def __call__(self, sizes: Mapping[str, Any]) -> Tensor:
        """Draw, with these values of the size symbols, and of the symbols in `given`."""
        if self._settled is None:
            arguments, keywords = self._concrete(sizes, Like)
        else:
            settled, keywords, likes = self._settled
            arguments = list(settled)  # other threads draw, too
            for place, (shape, strides, dtype, device) in likes:
                arguments[place] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        result = self.target(*arguments, **keywords)
        assert isinstance(result, Tensor)
        return result

    @property
    def settled(self) -> bool:
        """Whether all calls draw as many numbers, with the same arguments."""
        return self._settled is not None

    @property
    def given(self) -> tuple[tuple[str, str], ...]:
        """The symbols of numbers among the arguments, and the names of the inputs that hold them."""
        leaves = pytree.tree_leaves((self.arguments, self.keywords))
        return tuple(pair for leaf in leaves if isinstance(leaf, Given) for pair in leaf.inputs)

    @functools.cached_property
    def _settled(self) -> tuple[list[Any], dict[str, Any], list[tuple[int, tuple[Any, ...]]]] | None:
        """Arguments without size symbols, and the place and the form of each tensor; None where there are symbols."""
        likes = [(place, like) for place, like in enumerate(self.arguments) if isinstance(like, Like)]
        inner = [a for a in self.arguments if not isinstance(a, Like)], self.keywords
        parts = [*pytree.tree_leaves(inner), *(n for _, like in likes for n in (*like.shape, *like.strides))]
        if any(isinstance(n, Like | Given) or (isinstance(n, sympy.Expr) and n.free_symbols) for n in parts):
            return None
        arguments, keywords = self._concrete({}, ())
        forms = [
            (place, ([evaluate(n, {}) for n in a.shape], [evaluate(n, {}) for n in a.strides], a.dtype, a.device))
            for place, a in likes
        ]
        return list(arguments), keywords, forms

    def _concrete(self, sizes: Mapping[str, Any], tensors: Any) -> tuple[Any, dict[str, Any]]:
        """The arguments with these values of the size symbols, and a new tensor for each placeholder of this class."""

        def concrete(argument: Any) -> Any:
            if isinstance(argument, tensors):
                shape, strides = ([concrete(n) for n in part] for part in (argument.shape, argument.strides))
                return torch.empty_strided(shape, strides, dtype=argument.dtype, device=argument.device)
            if isinstance(argument, Given):
                return argument(sizes)
            return evaluate(argument, sizes) if isinstance(argument, sympy.Expr) else argument

        arguments, keywords = pytree.tree_map(
            concrete, (self.arguments, self.keywords), is_leaf=lambda leaf: isinstance(leaf, Like)
        )
        return arguments, keywords


def is_random(target: Any) -> bool:
    """Whether an operator of the trace draws from PyTorch's generator."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def draw_of(node: fx.Node, outside: Callable[[torch.SymFloat], Given]) -> Draw:
    """The draw of a node of the trace, which takes numbers from `outside` the graph.

    Raises `Unsupported` if it depends on the values of tensors.
    """
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    name = target._opname
    if name not in _INDEPENDENT and f"{name}.{target._overloadname}" not in _INDEPENDENT:
        raise Unsupported(
            f"{target}, whose random numbers depend on data, drawn as eager execution draws them",
            advice='leave out random="eager"',
        )
    described = functools.partial(_described, outside=outside)
    arguments, keywords = pytree.tree_map_only(fx.Node, described, (tuple(node.args), dict(node.kwargs)))
    if target is torch.ops.aten.bernoulli.p:  # what is left of `bernoulli_`, which draws in the order of memory
        return Draw(torch.ops.aten.bernoulli_.float, arguments, keywords)
    return Draw(target, arguments, keywords)


def mask_of(x: fx.Node, keep: float | Given) -> Draw:
    """What dropout draws for `x`: ones with the probability `keep`, else zeros."""
    return Draw(torch.ops.aten.bernoulli_.float, (_described(x), keep), {})


def _described(node: fx.Node, outside: Callable[[torch.SymFloat], Given] | None = None) -> Any:
    example = node.meta["val"]
    if isinstance(example, torch.SymFloat) and outside is not None:
        return outside(example)
    if isinstance(example, Tensor):
        return Like(types.sizes(example.shape), types.sizes(example.stride()), example.dtype, example.device)
    return types.size(example) if isinstance(example, torch.SymInt) else example
