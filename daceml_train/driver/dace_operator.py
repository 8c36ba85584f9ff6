"""Functions written in DaCe as operators: a PyTorch function to call in a model, with its derivative.

The function is an operator of PyTorch's dispatcher, which runs what DaCe compiled on the CPU, and its derivative is
another one. Where a model is compiled, both are nodes of the same program, as every operator without a rule.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from daceml_train.errors import Invalid, Unsupported

if TYPE_CHECKING:
    from daceml_train.sdfg.programs import Argument, DaceFunction

NAMESPACE = "daceml_train_dace"
TOLERANCE = {torch.float32: 5e-2, torch.float64: 1e-4}
"""How far a derivative along a direction may be from central differences, relative to what contributes to it. Float32's
differences are good to about 1e-3, and a kink near an operand moves them further; wrong derivatives are off by orders.
"""

_libraries: list[torch.library.Library] = []
"""Kept alive: an operator is there as long as its library."""
_defined: dict[str, Callable[..., Any]] = {}


def dace_operator(
    program: Any, *, backward: Any = None, results: Sequence[str] = (), check: bool = True
) -> Callable[..., Any]:
    """A function written under `@dace.program` (or an SDFG) as a function of tensors, to call in a model's `forward`.

    Arguments that the program only reads are its operands, in its order; what it returns, or else arguments that it
    only writes, are new tensors. `results` names written arguments that it reads as well, and whose first values do
    not matter: they are zeros. DaCe compiles it for the CPU. Its derivative is `dace.autodiff`'s, or `backward`:
    a program from the operands and one cotangent per floating-point result to a gradient per floating-point operand.
    The first gradient for each kind of operands is checked against central differences along one direction per
    operand, unless `check=False`: a derivative that is off raises `Invalid`. Raises `Unsupported` for a program that
    is no function of arrays, and, where a gradient is asked for, for one that `dace.autodiff` does not differentiate.
    """
    from daceml_train.sdfg.programs import function_of  # brings DaCe in

    function = function_of(program, results)
    given = None if backward is None else function_of(backward)
    if given is not None:
        _check_signature(function, given)
    label = f"{re.sub(r'[^0-9a-zA-Z_]', '_', function.name)}_{function.key[:8]}"
    label += "" if given is None else f"_{given.key[:8]}"
    label += "" if check else "_unchecked"
    if label not in _defined:
        _defined[label] = _Operator(label, function, given, check).define()
    return _defined[label]


def _check_signature(function: DaceFunction, backward: DaceFunction) -> None:
    """Raise `Invalid` unless one program can be the derivative of the other."""
    expected = [*function.operands, *(a for a in function.results if a.is_float)]
    wanted = [a for a in function.operands if a.is_float]
    for what, found, needed in (("takes", backward.operands, expected), ("returns", backward.results, wanted)):
        kinds = [[(len(a.shape or ()), a.dtype) for a in arguments] for arguments in (found, needed)]
        if kinds[0] != kinds[1]:
            names = ["".join(f" {a.name}: {a.dtype}[{len(a.shape or ())}d]" for a in side) for side in (found, needed)]
            raise Invalid(f"backward of {function.name} {what}{names[0] or ' nothing'}, expected{names[1]}")


class _Operator:
    """What PyTorch is told about one program."""

    def __init__(self, label: str, function: DaceFunction, given: DaceFunction | None, check: bool) -> None:
        self.label, self.function, self.given, self.check = label, function, given, check
        self.checked: set[Any] = set()
        self.lock = threading.Lock()
        self.floats = [i for i, a in enumerate(function.operands) if a.is_float]
        self.seeded = [i for i, a in enumerate(function.results) if a.is_float]

    def define(self) -> Callable[..., Any]:
        """Register the operator and the one of its derivative."""
        operands = [_schema(a, f"x{i}") for i, a in enumerate(self.function.operands)]
        seeds = [f"Tensor g{i}" for i in self.seeded]
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        _libraries.append(library)
        library.define(f"{self.label}({', '.join(operands)}) -> {_returns(len(self.function.results))}")
        library.impl(self.label, self.run, "CPU")
        name = f"{NAMESPACE}::{self.label}"
        torch.library.register_fake(name, self.fake, lib=library)
        namespace = getattr(torch.ops, NAMESPACE)
        if self.floats and self.seeded:
            derivative = f"{self.label}_backward"
            library.define(f"{derivative}({', '.join([*operands, *seeds])}) -> {_returns(len(self.floats))}")
            library.impl(derivative, self.run_backward, "CPU")
            torch.library.register_fake(f"{NAMESPACE}::{derivative}", self.fake_backward, lib=library)
            torch.library.register_autograd(name, self.backward, setup_context=self.remember, lib=library)
            self.derivative_of = getattr(namespace, derivative)
        operator: Callable[..., Any] = getattr(namespace, self.label)
        return operator

    def run(self, *given: Any) -> Any:
        """The program on tensors."""
        return _packed(self._call(self.function, given))

    def fake(self, *given: Any) -> Any:
        """Sizes and types of the results."""
        tensors = self._fitting(given)
        sizes = self.function.sizes([t.shape for t in tensors])
        return _packed([_empty(tensors[0], a, sizes) for a in self.function.results])

    def fake_backward(self, *given: Any) -> Any:
        """Sizes and types of the gradients: those of the operands."""
        return _packed([torch.empty_like(given[i], memory_format=torch.contiguous_format) for i in self.floats])

    def remember(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the operands for the backward pass, and ask for the derivative before anything runs."""
        self.derivative()
        ctx.numbers = [None if isinstance(v, torch.Tensor) else v for v in inputs]
        ctx.save_for_backward(*(v for v in inputs if isinstance(v, torch.Tensor)))
        results = output if isinstance(output, tuple) else (output,)
        ctx.shapes = [results[i] for i in self.seeded]

    def backward(self, ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        """The gradients of the operands."""
        saved = iter(ctx.saved_tensors)
        operands = [next(saved) if v is None else v for v in ctx.numbers]
        seeds = [cotangents[i] for i in self.seeded]
        seeds = [torch.zeros_like(y) if g is None else g for g, y in zip(seeds, ctx.shapes, strict=True)]
        found = self.derivative_of(*operands, *seeds)
        result = iter(found if isinstance(found, tuple | list) else (found,))
        gradients = [next(result) if i in self.floats else None for i in range(len(operands))]
        return gradients[0] if len(gradients) == 1 else tuple(gradients)

    def run_backward(self, *given: Any) -> Any:
        """The derivative on tensors; the first one for each kind of operands is checked."""
        found = self._call(self.derivative(), given)
        key = tuple((tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else None for v in given)
        if self.check and key not in self.checked:
            self._compare(given, found)
            self.checked.add(key)
        return _packed(found)

    def derivative(self) -> DaceFunction:
        """The program of the derivative. Raises `Unsupported` where there is none."""
        with self.lock:
            if self.given is None:
                self.given = self.function.derivative()
            return self.given

    def _call(self, function: DaceFunction, given: Sequence[Any]) -> list[torch.Tensor]:
        self._fitting(given)
        arrays = [v.detach().contiguous().numpy() if isinstance(v, torch.Tensor) else v for v in given]
        pairs = zip(arrays, function.operands, strict=True)
        arrays = [v.reshape(1) if a.shape == (1,) and v.ndim == 0 else v for v, a in pairs]
        return [torch.from_numpy(result) for result in function(*arrays)]

    def _fitting(self, given: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors among the operands. Raises `Invalid` for another type."""
        arguments = self.function.operands
        for value, argument in zip(given, arguments, strict=False):
            if argument.shape is not None and value.dtype is not getattr(torch, argument.dtype):
                kind = str(value.dtype).removeprefix("torch.")
                raise Invalid(f"{argument.name} of {self.function.name} is {argument.dtype}, given {kind}")
        return [v for v, a in zip(given, arguments, strict=False) if a.shape is not None]

    def _compare(self, given: Sequence[Any], gradients: Sequence[torch.Tensor]) -> None:
        """Raise `Invalid` where a gradient along a direction is not what central differences say."""
        operands, seeds = list(given[: len(self.function.operands)]), given[len(self.function.operands) :]
        draw = torch.Generator().manual_seed(0)
        for position, gradient in zip(self.floats, gradients, strict=True):
            x = operands[position]
            if not x.numel() or not torch.isfinite(x).all():
                continue
            direction = torch.randn(x.shape, generator=draw, dtype=x.dtype)
            step = float(torch.finfo(x.dtype).eps ** (1 / 3) * max(1.0, float(x.abs().max())))
            moved = [self._call(self.function, _with(operands, position, x + s * direction)) for s in (step, -step)]
            ends = [[side[i].double() * g.double() for i, g in zip(self.seeded, seeds, strict=True)] for side in moved]
            terms = [(a - b) / (2 * step) for a, b in zip(*ends, strict=True)]
            products = gradient.double() * direction.double()
            expected, found = float(sum(t.sum() for t in terms)), float(products.sum())
            noise = torch.finfo(x.dtype).eps / step * sum(float(e.abs().sum()) for e in ends[0])
            size = float(products.abs().sum()) + sum(float(t.abs().sum()) for t in terms)
            if not abs(expected - found) <= TOLERANCE[x.dtype] * size + noise:
                name = self.function.operands[position].name
                raise Invalid(
                    f"the derivative of {self.function.name} by {name} is {found:.6g} along a direction, central "
                    f"differences say {expected:.6g}",
                    advice="pass backward=, a derivative of yours; or check=False where differences mean nothing",
                )


def _with(values: Sequence[Any], position: int, value: Any) -> list[Any]:
    return [value if i == position else v for i, v in enumerate(values)]


def _schema(argument: Argument, name: str) -> str:
    if argument.shape is not None:
        return f"Tensor {name}"
    kinds = {"float": "float", "int": "int", "bool": "bool"}
    found = next((kind for start, kind in kinds.items() if argument.dtype.startswith(start)), None)
    if found is None:
        raise Unsupported(f"{argument.name} is a number of type {argument.dtype}")
    return f"{found} {name}"


def _returns(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _packed(results: Sequence[Any]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def _empty(like: torch.Tensor, argument: Argument, sizes: dict[str, Any]) -> torch.Tensor:
    from daceml_train.sdfg.programs import evaluated

    shape = [evaluated(size, sizes) for size in argument.shape or ()]
    return like.new_empty(shape, dtype=getattr(torch, argument.dtype))


__all__ = ["dace_operator"]
