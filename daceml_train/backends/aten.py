"""ATen: which library call runs each vendor operator.

A call is data: an overload of a PyTorch operator and its arguments, in which `Operand(i)` stands for the i-th input
array and `Result(i)` for an output array that the call writes in place. The executor turns it into views and calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from daceml_train.errors import Unsupported
from daceml_train.ops.fallback import Operand
from daceml_train.ops.operator import Operator
from daceml_train.tensor import Tensor


@dataclass(frozen=True)
class Result:
    """Stands for the i-th output array, which the call fills."""

    index: int = 0


@dataclass(frozen=True)
class Call:
    """One library call.

    `target` is an overload such as `aten::convolution` (with `overload` its name), or one of the executor's direct
    entries `mm`, `addmm`, `bmm`, `baddbmm`, whose first argument is the result. `returns` lists, per value that the
    call returns, the output it becomes (None: dropped); outputs written through `Result` are not in it.
    """

    target: str
    arguments: tuple[Any, ...]
    overload: str = ""
    returns: tuple[int | None, ...] = (0,)
    dense_rows: tuple[int, ...] = ()
    """Operands of which the library takes for granted, without looking, that the last dimension has stride 1."""

    @property
    def direct(self) -> bool:
        """Whether the executor calls this without the dispatcher."""
        return "::" not in self.target


def call_for(op: Operator, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    """The library call of a vendor operator. Raises `Unsupported` for one that has none."""
    rule = CALLS.get(op.label) or CALLS.get(op.name)
    if rule is None:
        raise Unsupported(f"no library call is known for operator {op.label}")
    return rule(op, operands, results)


Rule = Callable[[Any, tuple[Tensor, ...], tuple[Tensor, ...]], Call]


def _matmul(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    direct = "mm" if operands[0].rank == 2 else "bmm"
    return Call(direct, (Result(), Operand(0), Operand(1)), returns=())


def _matmul_add(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    direct = "addmm" if operands[1].rank == 2 else "baddbmm"
    return Call(direct, (Result(), Operand(0), Operand(1), Operand(2)), returns=())


def _window(op: Any) -> tuple[Any, ...]:
    return (op.stride, op.padding, op.dilation, op.transposed, op.output_padding, op.groups)


def _convolution(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    bias = Operand(2) if len(operands) > 2 else None
    return Call("aten::convolution", (Operand(0), Operand(1), bias, *_window(op)))


def _convolution_backward(op: Any, x: Any, w: Any, mask: tuple[bool, bool, bool]) -> Call:
    returns = tuple(0 if wanted else None for wanted in mask)
    return Call("aten::convolution_backward", (Operand(0), x, w, None, *_window(op), mask), returns=returns)


def _input_grad(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    # The derivative by the input does not read the input: any array of its shape will do, so one without elements
    # in memory stands in for it.
    return _convolution_backward(op, Placeholder(results[0]), Operand(1), (True, False, False))


def _weight_grad(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    return _convolution_backward(op, Operand(1), Placeholder(results[0]), (False, True, False))


@dataclass(frozen=True)
class Placeholder:
    """Stands for an array of this type whose elements are never read."""

    tensor: Tensor


def _pool_arguments(op: Any) -> tuple[Any, ...]:
    return (op.kernel, op.stride, op.padding, op.dilation, op.ceil_mode)


def _average_arguments(op: Any) -> tuple[Any, ...]:
    return (op.kernel, op.stride, op.padding, op.ceil_mode, op.count_include_pad, op.divisor)


def _pad(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    amounts = tuple(amount for pair in reversed(op.pads) for amount in pair)
    return Call("aten::constant_pad_nd", (Operand(0), amounts, op.value))


def _attention(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    mask = Operand(3) if len(operands) > 3 else None
    arguments = (Operand(0), Operand(1), Operand(2), 0.0, op.causal, mask, op.scale)
    target = "aten::_scaled_dot_product_flash_attention_for_cpu"
    return Call(target, arguments, returns=(0, 1), dense_rows=(0, 1, 2))


def _attention_grad(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    mask = Operand(6) if len(operands) > 6 else None
    arguments = (*(Operand(i) for i in range(6)), 0.0, op.causal, mask, op.scale)
    target = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    return Call(target, arguments, returns=(0, 1, 2), dense_rows=(0, 1, 2, 3, 4))


def _index(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    return Call("aten::index", (Operand(0), _chosen(op, operands[0], 1)), overload="Tensor")


def _index_put(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    return Call("aten::index_put", (Operand(0), _chosen(op, operands[0], 2), Operand(1), op.accumulate))


def _chosen(op: Any, x: Tensor, first: int) -> tuple[Operand | None, ...]:
    """The index arrays, operands from `first` on, at the dimensions that they index."""
    numbers = {d: Operand(first + i) for i, d in enumerate(op.dims)}
    return tuple(numbers.get(d) for d in range(max(op.dims) + 1))


def _scatter(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    arguments = (Operand(0), op.dim, Operand(1), Operand(2))
    return Call("aten::scatter_add", arguments) if op.accumulate else Call("aten::scatter", arguments, overload="src")


def _fallback(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    namespace, name, overload = op.target.split(".")
    arguments = Keywords(op.arguments, op.keywords).positional(op.target)
    return Call(f"{namespace}::{name}", arguments, _plain(overload), tuple(range(len(results))))


def _plain(overload: str) -> str:
    return "" if overload == "default" else overload


@dataclass(frozen=True)
class Keywords:
    """Arguments as a user writes them, to be put in the order of the operator's schema."""

    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]

    def positional(self, target: str) -> tuple[Any, ...]:
        """All arguments in schema order, defaults filled in."""
        import torch

        namespace, name, overload = target.split(".")
        schema = getattr(getattr(getattr(torch.ops, namespace), name), overload)._schema
        named = dict(self.keywords)
        ordered: list[Any] = list(self.arguments)
        for argument in schema.arguments[len(ordered) :]:
            ordered.append(named.get(argument.name, argument.default_value))
        return tuple(
            _from_name(value) if isinstance(value, str) and "str" not in str(argument.type) else value
            for value, argument in zip(ordered, schema.arguments, strict=True)
        )


def _from_name(name: str) -> Any:
    """The memory format, layout or device of that name."""
    import torch

    return getattr(torch, name.removeprefix("torch.")) if name.startswith("torch.") else torch.device(name)


CALLS: dict[str, Rule] = {
    "matmul": _matmul,
    "matmul_add": _matmul_add,
    "convolution": _convolution,
    "convolution_input_grad": _input_grad,
    "convolution_weight_grad": _weight_grad,
    "max_pool2d": lambda op, i, o: Call(
        "aten::max_pool2d_with_indices", (Operand(0), *_pool_arguments(op)), returns=(0, 1)
    ),
    "max_pool2d_grad": lambda op, i, o: Call(
        "aten::max_pool2d_with_indices_backward",
        (Operand(0), Placeholder(o[0]), *_pool_arguments(op), Operand(1)),
    ),
    "avg_pool2d": lambda op, i, o: Call("aten::avg_pool2d", (Operand(0), *_average_arguments(op))),
    "avg_pool2d_grad": lambda op, i, o: Call(
        "aten::avg_pool2d_backward", (Operand(0), Placeholder(o[0]), *_average_arguments(op))
    ),
    "embedding": lambda op, i, o: Call("aten::embedding", (Operand(0), Operand(1), op.padding_idx, False, False)),
    "embedding_bag": lambda op, i, o: Call(
        "aten::_embedding_bag",
        (Operand(0), Operand(1), Operand(2), False, 0, False, None, False, -1),
        returns=(0, None, None, None),
    ),
    "add_rows": lambda op, i, o: Call(
        "aten::index_put_" if op.in_place else "aten::index_put",
        (Operand(0), (Operand(1),), Operand(2), True),
        returns=(None,) if op.in_place else (0,),
    ),
    "embedding_grad": lambda op, i, o: Call(
        "aten::embedding_dense_backward", (Operand(0), Operand(1), op.rows, op.padding_idx, False)
    ),
    "attention": _attention,
    "attention_grad": _attention_grad,
    "pad": _pad,
    "concat": lambda op, i, o: Call("aten::cat", (tuple(Operand(k) for k in range(len(i))), op.dim)),
    "flip": lambda op, i, o: Call("aten::flip", (Operand(0), op.dims)),
    "index": _index,
    "index_put": _index_put,
    "gather": lambda op, i, o: Call("aten::gather", (Operand(0), op.dim, Operand(1), False)),
    "scatter": _scatter,
    "masked_put": lambda op, i, o: Call("aten::index_put", (Operand(0), (Operand(1),), Operand(2), False)),
    "masked_take": lambda op, i, o: Call("aten::index", (Operand(0), (Operand(1),)), overload="Tensor"),
    "cumsum": lambda op, i, o: Call("aten::cumsum", (Operand(0), op.dim, None)),
    "sort": lambda op, i, o: Call(
        "aten::sort", (Operand(0), True, op.dim, op.descending), overload="stable", returns=(0, 1)
    ),
    "topk": lambda op, i, o: Call("aten::topk", (Operand(0), op.count, op.dim, op.largest, op.ordered), returns=(0, 1)),
    "im2col": lambda op, i, o: Call("aten::im2col", (Operand(0), *op.geometry)),
    "col2im": lambda op, i, o: Call("aten::col2im", (Operand(0), op.size, *op.geometry)),
    "resample": lambda op, i, o: Call(f"aten::{op.call}", (Operand(0), op.target, *op.options)),
    "resample_grad": lambda op, i, o: Call(
        f"aten::{op.call}_backward", (Operand(0), op.target, o[0].shape, *op.options)
    ),
    "require": lambda op, i, o: Call(
        "aten::_functional_assert_async", (Operand(0), op.message, Operand(0)), overload="msg"
    ),
    "aten": _fallback,
}
"""Operator label -> its library call."""
