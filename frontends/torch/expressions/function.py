"""Function: `dt.expression`, and the operator of PyTorch's dispatcher that every expression is.

There is one operator, `daceml_train::expression(Tensor[] operands, str program) -> Tensor[]`. Its derivative is the
same operator with the adjoint program, so derivatives of every order exist.
"""

from __future__ import annotations

import functools
import inspect
import types as types_of_python
from collections.abc import Callable, Iterable, Sequence
from numbers import Number
from typing import Any

import torch

from daceml_train.errors import Invalid, Unsupported
from daceml_train.expressions.adjoint import derivative, with_saved
from daceml_train.expressions.batched import batched
from daceml_train.expressions.notation import trace
from daceml_train.expressions.program import Program, parsed
from daceml_train.expressions.reference import reference
from daceml_train.expressions.term import Array
from daceml_train.frontends.torch import types
from daceml_train.frontends.torch.expressions.evaluate import evaluate

NAME = "daceml_train::expression"
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_library = torch.library.Library("daceml_train", "FRAGMENT")


def _run(operands: Sequence[torch.Tensor], program: str) -> list[torch.Tensor]:
    with torch._C._ExcludeDispatchKeyGuard(_VIEWS):  # results are not views, whichever way they are computed
        return evaluate(parsed(program), operands)


def _fake(operands: Sequence[torch.Tensor], program: str) -> list[torch.Tensor]:
    result = parsed(program)
    device = operands[0].device if operands else torch.device("cpu")
    return [torch.empty(o.shape, dtype=types.TORCH_DTYPES[o.dtype], device=device) for o in result.outputs]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    """Keep what the derivative reads of the operands and the results."""
    operands, ctx.program = inputs
    result = parsed(ctx.program)
    ctx.wanted = tuple(a.dtype.is_float and x.requires_grad for a, x in zip(result.inputs, operands, strict=True))
    everything = tuple(o.dtype.is_float for o in result.outputs)
    ctx.kept = [i for i in derivative(ctx.program, everything, ctx.wanted)[1] if i < len(operands) + len(output)]
    ctx.save_for_backward(*((*operands, *output)[i] for i in ctx.kept))


def _backward(ctx: Any, cotangents: Sequence[torch.Tensor | None]) -> Any:
    return _gradients(ctx, cotangents, _operator), None


def _gradients(ctx: Any, cotangents: Sequence[torch.Tensor | None], run: Any) -> list[torch.Tensor | None]:
    """The gradients of the operands, by the adjoint program."""
    result = parsed(ctx.program)
    count = len(result.inputs)
    seeded = tuple(g is not None and o.dtype.is_float for g, o in zip(cotangents, result.outputs, strict=True))
    if not any(seeded) or not any(ctx.wanted):
        return [None] * count
    text, reads = derivative(ctx.program, seeded, ctx.wanted)
    given = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
    present = [g for g, s in zip(cotangents, seeded, strict=True) if s]
    given |= {count + len(result.outputs) + i: g for i, g in enumerate(present) if g is not None}
    found = iter(run([given[i] for i in reads], with_saved(text)))
    return [next(found) if w else None for w in ctx.wanted]


def _batched(info: Any, in_dims: Sequence[Any], operands: Sequence[torch.Tensor], program: str, run: Any = None) -> Any:
    """`torch.vmap`: the program with one more axis."""
    dims = in_dims[0]
    moved = [x if d is None else x.movedim(d, 0) for x, d in zip(operands, dims, strict=True)]
    results = (run or _operator)(moved, batched(program, info.batch_size, tuple(d is not None for d in dims)))
    return results, [0] * len(results)


def _batched_gradients(operands: Sequence[torch.Tensor], program: str) -> list[torch.Tensor]:
    """`is_grads_batched=True`, whose batches are other tensors than those of `torch.vmap`."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    dims = [_batch_of(x, level) for x in operands]
    while all(dim is None for dim in dims):  # a batch of one that is further out
        level -= 1
        dims = [_batch_of(x, level) for x in operands]
    sizes = [dim for dim in dims if dim is not None]
    moved = [x if d is None else _without_batch(x, level, d) for x, d in zip(operands, dims, strict=True)]
    results = _operator(moved, batched(program, sizes[0], tuple(dim is not None for dim in dims)))
    return [torch._add_batch_dim(result, 0, level) for result in results]


def _batch_of(x: torch.Tensor, level: int) -> int | None:
    """The size of a tensor's batch; None for one that is the same in all of a batch, and takes any size."""
    one, two = (_without_batch(x, level, size).shape[0] for size in (1, 2))
    return int(one) if one == two else None


def _without_batch(x: torch.Tensor, level: int, size: int) -> torch.Tensor:
    """All samples of a tensor, along a first axis."""
    found: torch.Tensor = torch._remove_batch_dim(x, level, size, 0)
    return found


_library.define("expression(Tensor[] operands, str program) -> Tensor[]")
_library.impl("expression", _run, "CompositeExplicitAutograd")
_library.impl("expression", _batched_gradients, "Batched")
torch.library.register_fake(NAME, _fake, lib=_library)
torch.library.register_autograd(NAME, _backward, setup_context=_remember, lib=_library)
torch.library.register_vmap(NAME, _batched, lib=_library)


def _operator(operands: Sequence[torch.Tensor], program: str) -> Sequence[torch.Tensor]:
    _refuse_forward_mode("an expression", operands)
    results: Sequence[torch.Tensor] = torch.ops.daceml_train.expression(operands, program)
    return results


class _Transformed(torch.autograd.Function):
    """The same under the transforms of `torch.func`, which do not differentiate operators of the dispatcher."""

    @staticmethod
    def forward(program: str, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(_operator(list(operands), program))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        program, *operands = inputs
        _remember(ctx, (operands, program), output)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        return None, *_gradients(ctx, cotangents, _transformed)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        raise _forward_mode("an expression")

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], program: str, *operands: torch.Tensor) -> Any:
        results, dims = _batched(info, (in_dims[1:],), operands, program, _transformed)
        return tuple(results), tuple(dims)


def _transformed(operands: Sequence[torch.Tensor], program: str) -> Sequence[torch.Tensor]:
    return _Transformed.apply(program, *operands)  # type: ignore[no-any-return, no-untyped-call]


def _apply(operands: Sequence[torch.Tensor], program: str) -> Sequence[torch.Tensor]:
    """The results of a program, recorded by autograd."""
    transforms = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    return (_transformed if transforms else _operator)(operands, program)


class _Options:
    """The options of a call, where what is equal but not the same differs: 2 and 2.0, 1 and True, 0.0 and -0.0."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.key = tuple((name, _identity(value)) for name, value in values.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Options) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _identity(value: Any) -> Any:
    """A key that only values of one type and one meaning have."""
    if isinstance(value, tuple):
        return type(value), *map(_identity, value)
    return type(value), repr(value) if isinstance(value, Number) else value


def _fixed(value: Any) -> Any:
    """An option as a number, where it is a symbol of a tracer's: the tracer then checks it in each call."""
    if type(value) is tuple:
        return tuple(map(_fixed, value))
    kinds: dict[Any, Callable[[Any], Any]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kinds[type(value)](value) if type(value) in kinds else value


@functools.lru_cache(maxsize=4096)
def _traced(function: Callable[..., Any], kinds: tuple[Any, ...], options: _Options) -> Program:
    operands = [Array(name, shape, dtype) for name, shape, dtype in kinds]
    return trace(function, operands, options.values)


def _bound(function: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]) -> tuple[Any, Any]:
    """The operands and the options of a call, by name."""
    try:
        given = inspect.signature(function).bind(*arguments, **keywords).arguments
    except TypeError as error:
        raise Invalid(f"{function.__name__}: {error}") from None
    operands = {n: v for n, v in given.items() if isinstance(v, torch.Tensor)}
    if not operands:
        kinds = ", ".join(type(v).__name__ for v in given.values()) or "nothing"
        raise Invalid(f"the expression {function.__name__} is called without a tensor, given {kinds}")
    _check_operands(f"the expression {function.__name__}", operands)
    return operands, {n: v for n, v in given.items() if n not in operands}


def _check_operands(what: str, operands: dict[str, torch.Tensor]) -> None:
    (first, like), *others = operands.items()
    for name, x in operands.items():
        if x.layout is not torch.strided:
            raise Invalid(f"the operand {name} of {what} has layout {x.layout}", advice="pass it as x.to_dense()")
    for name, x in others:
        if x.device != like.device:
            raise Invalid(f"the operand {name} of {what} is on {x.device}, and {first} is on {like.device}")
    _refuse_forward_mode(what, operands.values())


def _refuse_forward_mode(what: str, operands: Iterable[torch.Tensor]) -> None:
    """Raise `Unsupported` for operands that carry a tangent, which an operator of the dispatcher would drop."""
    if torch.autograd.forward_ad._current_level < 0:
        return
    if any(torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in operands):
        raise _forward_mode(what)


def _forward_mode(what: str) -> Unsupported:
    advice = "use reverse mode: torch.autograd.grad, torch.func.vjp, torch.func.jacrev"
    return Unsupported(f"{what} has no derivative in forward mode (jvp, jacfwd, hessian)", advice=advice)


def _program(function: Callable[..., Any], operands: dict[str, torch.Tensor], options: dict[str, Any]) -> Program:
    kinds = tuple((n, tuple(map(int, x.shape)), types.element_type(x.dtype)) for n, x in operands.items())
    for name, _, dtype in kinds:
        if dtype.is_complex:
            message = f"the operand {name} of the expression {function.__name__} is complex"
            raise Invalid(message, advice="pass its parts: torch.view_as_real(x)")
    given = _Options({n: _fixed(v) for n, v in options.items()})
    try:
        hash(given)
    except TypeError as error:
        message = f"an option of the expression {function.__name__} is of an {error}"
        raise Invalid(message, advice="options are numbers, strings, or tuples of them") from None
    return _traced(function, kinds, given)


def expression(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose results are comprehensions over index axes, as a function of tensors.

    It has derivatives of every order, works under `torch.compile`, and is an operator of the graph in `optimize` and
    `training_step`. Tensors among its arguments are its operands, and all others are options. Its attribute `program`
    returns the program for such arguments; `reference` runs the function itself on NumPy arrays, element by element.
    Raises `Invalid` for anything but a Python function whose parameters have names.
    """
    if not isinstance(function, types_of_python.FunctionType | types_of_python.MethodType):
        given = function.__name__ if isinstance(function, type) else f"an object of type {type(function).__name__}"
        raise Invalid(f"expression takes a Python function, given {given}")
    for p in inspect.signature(function).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            advice = "name each operand and each option"
            raise Invalid(f"the expression {function.__name__} has the parameter {p}", advice=advice)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        operands, options = _bound(function, arguments, keywords)
        program = _program(function, operands, options)
        results = _apply(list(operands.values()), with_saved(program.text))[: len(program.outputs)]
        return results[0] if len(results) == 1 else tuple(results)

    def program_of(*arguments: Any, **keywords: Any) -> Program:
        return _program(function, *_bound(function, arguments, keywords))

    code: Any = call
    code.__code__ = code.__code__.replace(co_name=function.__name__)  # tracers tell functions apart by their code
    call.program = program_of  # type: ignore[attr-defined]
    call.reference = functools.partial(reference, function)  # type: ignore[attr-defined]
    return torch.compiler.allow_in_graph(call)  # type: ignore[no-any-return]
