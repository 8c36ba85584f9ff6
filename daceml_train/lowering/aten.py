"""ATen: the library call of each vendor operator.

A call is data: an overload of a PyTorch operator and its arguments, in which `Operand(i)` stands for the i-th input
array and `Result(i)` for an output array that the call writes in place. The executor turns it into views and calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from daceml_train.errors import Unsupported
from daceml_train.ops.fallback import Operand
from daceml_train.ops.operator import Operator
from daceml_train.tensor import Tensor


@dataclass(frozen=True)
class Result:
    """Placeholder for the i-th output array, which the call writes."""

    index: int = 0


@dataclass(frozen=True)
class Call:
    """One library call.

    `target` is an overload such as `aten::convolution` (with `overload` its name), or one of the executor's direct
    entries `mm`, `addmm`, `bmm`, `baddbmm`, whose first argument is the result. `returns` lists, per value that the
    call returns, the output it becomes (None: dropped); outputs written through `Result` are not included.
    """

    target: str
    arguments: tuple[Any, ...]
    overload: str = ""
    returns: tuple[int | None, ...] = (0,)
    dense_rows: tuple[int, ...] = ()
    """Operands whose last dimension the library assumes, without a check, to have stride 1."""
    seen: tuple[int | None, ...] = ()
    """The call's view of arrays of this many dimensions, if it differs: for each of its dimensions, the dimension of
    the array; None is a dimension of size 1 before the next.
    """

    @property
    def direct(self) -> bool:
        """Whether the executor calls this without the dispatcher."""
        return "::" not in self.target


def call_for(op: Operator, operands: tuple[Tensor, ...], results: tuple[Tensor, ...], target: str = "cpu") -> Call:
    """The library call of a vendor operator. Raises `Unsupported` for one that has none."""
    own = CALLS_OF.get(target, {})
    rule = own.get(op.label) or CALLS.get(op.label) or CALLS.get(op.name)
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


SEQUENCE = (0, 1, None, 2)
"""A sequence as a single-row image. ATen itself runs one-dimensional convolutions this way, but copies channels-last
sequences.
"""


def show(tensor: Tensor, seen: Sequence[int | None]) -> Tensor:
    """The type of an array in the call's view; see `Call.seen`."""
    if not seen or tensor.rank != sum(d is not None for d in seen):
        return tensor
    place = {d: position for position, d in enumerate(seen)}
    order = [place[d] for d in tensor.order or range(tensor.rank)]
    for position in (p for p, d in enumerate(seen) if d is None):
        order.insert(order.index(position + 1), position)
    shape = tuple(1 if d is None else tensor.shape[d] for d in seen)
    return Tensor(shape, tensor.dtype, None if order == sorted(order) else tuple(order))


def _window(op: Any) -> tuple[Any, ...]:
    stride, padding, dilation, output_padding = op.stride, op.padding, op.dilation, op.output_padding
    if len(stride) == 1:
        stride, padding, dilation, output_padding = (1, *stride), (0, *padding), (1, *dilation), (0, *output_padding)
    return (stride, padding, dilation, op.transposed, output_padding, op.groups)


def _seen(op: Any) -> tuple[int | None, ...]:
    return SEQUENCE if len(op.stride) == 1 else ()


def _convolution(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    bias = Operand(2) if len(operands) > 2 else None
    return Call("aten::convolution", (Operand(0), Operand(1), bias, *_window(op)), seen=_seen(op))


def _convolution_backward(op: Any, x: Any, w: Any, mask: tuple[bool, bool, bool]) -> Call:
    returns = tuple(0 if wanted else None for wanted in mask)
    arguments = (Operand(0), x, w, None, *_window(op), mask)
    return Call("aten::convolution_backward", arguments, returns=returns, seen=_seen(op))


def _input_grad(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    # The derivative with respect to the input does not read the input: any array of its shape works, so one without
    # elements in memory replaces it.
    return _convolution_backward(op, Placeholder(show(results[0], _seen(op))), Operand(1), (True, False, False))


def _weight_grad(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    return _convolution_backward(op, Operand(1), Placeholder(show(results[0], _seen(op))), (False, True, False))


@dataclass(frozen=True)
class Placeholder:
    """Placeholder for an array of this type whose elements are never read."""

    tensor: Tensor


def _pool_arguments(op: Any) -> tuple[Any, ...]:
    return (op.kernel, op.stride, op.padding, op.dilation, op.ceil_mode)


def _average_arguments(op: Any) -> tuple[Any, ...]:
    return (op.kernel, op.stride, op.padding, op.ceil_mode, op.count_include_pad, op.divisor)


def _in_memory_order(operands: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Channels-last sequences as row-major arrays: ATen returns row-major results for them."""
    x = operands[0]
    last = x.rank == 3 and x.order is not None and all(t.order == x.order for t in operands)
    return x.order if last and x.order is not None else tuple(range(x.rank))


def _moved(target: str, operands: tuple[Tensor, ...], arguments: Callable[[tuple[int, ...]], tuple[Any, ...]]) -> Call:
    order = _in_memory_order(operands)
    return Call(target, arguments(order), seen=() if order == tuple(range(len(order))) else order)


def _pad(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    def arguments(order: tuple[int, ...]) -> tuple[Any, ...]:
        amounts = tuple(amount for d in reversed(order) for amount in op.pads[d])
        return (Operand(0), amounts, op.value)

    return _moved("aten::constant_pad_nd", operands, arguments)


def _concat(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    parts = tuple(Operand(k) for k in range(len(operands)))
    return _moved("aten::cat", operands, lambda order: (parts, order.index(op.dim)))


def _flip(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    return _moved("aten::flip", operands, lambda order: (Operand(0), tuple(order.index(d) for d in op.dims)))


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


def _attention_function(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    mask = Operand(3) if len(operands) > 3 else None
    arguments = (Operand(0), Operand(1), Operand(2), op.causal, mask, op.scale)
    return Call("daceml::attention", arguments, returns=(0, 1), dense_rows=(0, 1, 2))


def _attention_grad_function(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    mask = Operand(6) if len(operands) > 6 else None
    arguments = (*(Operand(i) for i in range(6)), op.causal, mask, op.scale)
    return Call("daceml::attention_grad", arguments, returns=(0, 1, 2), dense_rows=(0, 1, 2, 3, 4))


def _windows(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    if op.last:
        raise Unsupported(f"{op.label} of {operands[0]} with channels-last layout, for which only the CPU has a kernel")
    size = (op.size,) if op.label == "col2im" else ()
    return Call(f"aten::{op.label}", (Operand(0), *size, *op.geometry))


def _index(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    return Call("aten::index", (Operand(0), _chosen(op, operands[0], 1)), overload="Tensor")


def _index_put(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    return Call("aten::index_put", (Operand(0), _chosen(op, operands[0], 2), Operand(1), op.accumulate))


def _put_rows(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    name, returns = ("aten::index_put_", (None,)) if op.in_place else ("aten::index_put", (0,))
    return Call(name, (Operand(0), (Operand(1),), Operand(2), True), returns=returns)


def _add_rows(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    """Twice as fast as `index_put` on a CPU. On a GPU, its order of additions varies from run to run."""
    if operands[1].rank != 1:
        return _put_rows(op, operands, results)
    name, returns = ("aten::index_add_", (None,)) if op.in_place else ("aten::index_add", (0,))
    return Call(name, (Operand(0), 0, Operand(1), Operand(2)), returns=returns)


def _chosen(op: Any, x: Tensor, first: int) -> tuple[Operand | None, ...]:
    """The index arrays, operands from `first` on, at the dimensions that they index."""
    numbers = {d: Operand(first + i) for i, d in enumerate(op.dims)}
    return tuple(numbers.get(d) for d in range(max(op.dims) + 1))


def _gather(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    if operands[0].rank == 1:  # `gather` takes 2 ns an element there, four times as long
        return Call("aten::index_select", (Operand(0), 0, Operand(1)))
    return Call("aten::gather", (Operand(0), op.dim, Operand(1), False))


def _scatter(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    name, overload = ("aten::scatter_add", "") if op.accumulate else ("aten::scatter", "src")
    arguments, own = (Operand(0), op.dim, Operand(1), Operand(2)), op.in_place
    return Call(f"{name}_" if own else name, arguments, overload, (None,) if own else (0,))


def _fallback(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    namespace, name, overload = op.target.split(".")
    arguments = Keywords(op.arguments, op.keywords).positional(op.target)
    return Call(f"{namespace}::{name}", arguments, _plain(overload), tuple(range(len(results))))


def _plain(overload: str) -> str:
    return "" if overload == "default" else overload


@dataclass(frozen=True)
class Keywords:
    """Arguments as a user writes them, before they are put in the order of the operator's schema."""

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
    """The memory format, layout or device with that name."""
    import torch

    return getattr(torch, name.removeprefix("torch.")) if name.startswith("torch.") else torch.device(name)


def _collective(op: Any, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Call:
    return Call(f"daceml::{op.label}", (Operand(0), op.position))


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
    "add_rows": _add_rows,
    "embedding_grad": lambda op, i, o: Call(
        "aten::embedding_dense_backward", (Operand(0), Operand(1), op.rows, op.padding_idx, False)
    ),
    "all_reduce": _collective,
    "reduce_scatter": _collective,
    "all_gather": _collective,
    "all_to_all": _collective,
    "broadcast": lambda op, i, o: Call("daceml::broadcast", (Operand(0), op.root, op.position)),
    "reduce_to": lambda op, i, o: Call("daceml::reduce_to", (Operand(0), op.root, op.position)),
    "group_collective": lambda op, i, o: Call(
        "daceml::group_collective", (Operand(0), op.kind, op.group, op.reduction, op.root)
    ),
    "start": lambda op, i, o: Call("daceml::start", (Operand(0), op.kind, op.position)),
    "await": lambda op, i, o: Call("daceml::await", (Operand(0), op.position), returns=(None,)),
    "own_shards": lambda op, i, o: Call("daceml::own_shards", (tuple(Operand(k) for k in range(len(i))),)),
    "sum_rows": lambda op, i, o: Call(
        "daceml::sum_rows", (tuple(Operand(k) for k in range(len(i))), op.rows, op.padding, op.position)
    ),
    "lookup_rows": lambda op, i, o: Call("daceml::lookup_rows", (Operand(0), Operand(1), op.rows, op.position)),
    "return_rows": lambda op, i, o: Call("daceml::return_rows", (Operand(0), Operand(1), op.rows, op.position)),
    "attention": _attention,
    "attention_grad": _attention_grad,
    "pad": _pad,
    "concat": _concat,
    "flip": _flip,
    "index": _index,
    "index_put": _index_put,
    "gather": _gather,
    "scatter": _scatter,
    "masked_put": lambda op, i, o: Call("aten::index_put", (Operand(0), (Operand(1),), Operand(2), False)),
    "masked_take": lambda op, i, o: Call("aten::index", (Operand(0), (Operand(1),)), overload="Tensor"),
    "cumsum": lambda op, i, o: Call("aten::cumsum", (Operand(0), op.dim, o[0].dtype)),
    "sort": lambda op, i, o: Call(
        "aten::sort", (Operand(0), True, op.dim, op.descending), overload="stable", returns=(0, 1)
    ),
    "topk": lambda op, i, o: Call("aten::topk", (Operand(0), op.count, op.dim, op.largest, op.ordered), returns=(0, 1)),
    "im2col": _windows,
    "col2im": _windows,
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

CALLS_OF: dict[str, dict[str, Rule]] = {
    "cuda": {
        "attention": _attention_function,
        "attention_grad": _attention_grad_function,
        "add_rows": _put_rows,
        "require": lambda op, i, o: Call("daceml::require", (Operand(0), op.message)),
    },
}
"""Overrides for devices with a library call of their own."""
