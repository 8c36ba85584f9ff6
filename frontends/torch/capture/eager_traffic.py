"""Traffic of eager execution: the bytes that PyTorch's own kernels move, operator by operator, as ATen runs them.

`eager_traffic` observes the calls of the dispatcher while a function runs. Every kernel reads each distinct operand
once and writes its results; views and uninitialized memory cost nothing; an operator that works in place reads what it
changes. These are the rules of `analysis.traffic`, with two of ATen's own: each gradient of a convolution is a kernel
of its own, and a gather reads what the indices name. Reorders of oneDNN within a convolution count as in
`Operator.reorders`. Under `fake` tensors nothing is computed, so that a step of any size is counted
in milliseconds per operator.

An observed backward pass differs from an ordinary one in three places, where the ordinary one is counted:
gradients add up out of place instead of in place (the same bytes), sparse gradients are cloned, and a gradient of
indexing is put into a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from daceml_train.analysis.traffic import Entry, Traffic
from daceml_train.frontends.torch import types
from daceml_train.ops.convolution import Convolution, ConvolutionInputGrad, ConvolutionWeightGrad
from daceml_train.ops.operator import Origin

_aten = torch.ops.aten

_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
_OVERWRITING = frozenset({"zero_", "fill_", "copy_", "bernoulli_", "uniform_", "normal_", "random_", "exponential_"})
"""In-place operators that do not read what they change."""
_FREE = frozenset({"_local_scalar_dense", "_indices", "_values", "indices", "values", "is_same_size", "resize_"})
_UNREAD: Mapping[str, tuple[int, ...]] = {
    "max_pool2d_with_indices_backward": (1,),
    "max_pool3d_with_indices_backward": (1,),
    "avg_pool2d_backward": (1,),
    "native_batch_norm_backward": (3, 4),
    "native_layer_norm_backward": (6,),
    "nll_loss_backward": (1,),
    "nll_loss2d_backward": (1,),
    "ones_like": (0,),
    "zeros_like": (0,),
    "full_like": (0,),
    "rand_like": (0,),
    "randn_like": (0,),
    "new_zeros": (0,),
    "new_ones": (0,),
    "new_full": (0,),
}
"""Operands of which only the shape is used."""
_GATHERING = frozenset(
    {"embedding", "_embedding_bag", "index_select", "gather", "index", "nll_loss_forward", "nll_loss2d_forward"}
)
"""Operators that read only those elements of their first operand that the indices in the second one name."""


def eager_traffic(function: Callable[[], object]) -> Traffic:
    """The bytes that PyTorch moves while `function` runs; run it once before, so that lazily created state exists."""
    count = _Count()
    with count:
        function()
    return Traffic(count.entries, {})


def fake() -> FakeTensorMode:
    """A mode in which tensors have sizes and no memory: model, batch and step are created and run under it."""
    return FakeTensorMode()


class _Count(TorchDispatchMode):
    """Records an entry per operator that moves something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []

    def __torch_dispatch__(
        self, function: Any, kinds: Sequence[type], arguments: tuple[Any, ...] = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        result = function(*arguments, **keywords)
        if isinstance(function, torch._ops.OpOverload) and function.namespace not in ("prim", "profiler"):
            self.entries += entries_of(function, arguments, keywords, result)
        return result


def entries_of(function: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Iterator[Entry]:
    """What one call of the dispatcher moves: an entry per kernel, none if it moves nothing."""
    name = function._schema.name.split("::")[-1]
    if function.is_view or name in _UNINITIALISED or name in _FREE:
        return
    if name == "convolution_backward":
        yield from _convolution_backward(arguments, result)
        return
    read, written = operands_of(function, name, arguments, keywords, result)
    if not written:
        return
    reads = {f"operand {i}": size for i, size in enumerate(_distinct(read))}
    writes = {f"result {i}": size for i, size in enumerate(_distinct(written))}
    if name in _GATHERING:
        reads["operand 0"] = min(reads["operand 0"], _gathered(name, arguments, written[0]))
    if name in ("index_put", "index_put_", "_index_put_impl_") or any(x.is_sparse for x in read):
        if name == "clone":
            return
        touched = sum(_distinct(x for x in read if x is not arguments[0]))
        reads, writes = {"operand 0": touched, "operands": touched}, {"result 0": touched}
    reorders = 0
    if name == "convolution":
        x, weight, _, *window = arguments
        op = Convolution(**_geometry(window))
        reorders = int(op.reorders(types.tensor(x, laid_out=True), types.tensor(weight, laid_out=True)))
    yield _entry(function, reads, writes, _flops(function, arguments, keywords, result), reorders)


def operands_of(
    function: Any, name: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any], result: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors that are read and written."""
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    unread = _UNREAD.get(name, ())
    for place, declared in enumerate(function._schema.arguments):
        if place < len(arguments):
            given = arguments[place]
        elif declared.name in keywords:
            given = keywords[declared.name]
        else:
            continue
        tensors = [t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)]
        changed = declared.alias_info is not None and declared.alias_info.is_write
        if changed:
            written += tensors
        if place not in unread and not (changed and (name in _OVERWRITING or declared.kwarg_only)):
            read += tensors
    own = {storage_of(t) for t in (*read, *written)}
    results = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    written += [t for t in results if storage_of(t) not in own]
    return read, written


def _convolution_backward(arguments: tuple[Any, ...], result: Any) -> Iterator[Entry]:
    """The gradients by the input, and by weight and bias, as two kernels."""
    function = _aten.convolution_backward.default
    gradient, x, weight, _, *window = arguments[:-1]
    geometry = _geometry(window)
    by_input = ConvolutionInputGrad(input_shape=tuple(x.shape), **geometry)
    by_weight = ConvolutionWeightGrad(weight_shape=tuple(weight.shape), **geometry)
    for place, other, op in ((0, weight, by_input), (1, x, by_weight)):
        results = [r for r in result[place : 2 * place + 1] if r is not None]
        if results:
            reads = {"grad": size_of(gradient), "operand": size_of(other)}
            writes = {f"result {i}": size_of(r) for i, r in enumerate(results)}
            mask = [place == 0, place == 1, False]
            flops = _flops(function, (*arguments[:-1], mask), {}, result)
            operands = types.tensor(gradient, laid_out=True), types.tensor(other, laid_out=True)
            yield _entry(function, reads, writes, flops, int(op.reorders(*operands)))


def _geometry(window: Sequence[Any]) -> dict[str, Any]:
    """The options of a convolution, from ATen's arguments after the bias."""
    stride, padding, dilation, transposed, output_padding, groups = window
    spatial = {"stride": stride, "padding": padding, "dilation": dilation, "output_padding": output_padding}
    options: dict[str, Any] = {name: tuple(value) for name, value in spatial.items()}
    return options | {"transposed": transposed, "groups": groups}


def _entry(function: Any, reads: dict[str, int], writes: dict[str, int], flops: int, reorders: int) -> Entry:
    return Entry(str(function), Origin(), dict(reads), dict(writes), flops, reorders)


def _flops(function: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> int:
    """Operations of matmuls and convolutions by PyTorch's own count; one operation per result element for others."""
    counted = flop_registry.get(function._overloadpacket)
    if counted is not None:
        return int(counted(*arguments, **keywords, out_val=result))
    return sum(t.numel() for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and not t.is_sparse)


def _gathered(name: str, arguments: tuple[Any, ...], result: torch.Tensor) -> int:
    """Bytes of the elements that the indices name."""
    table, indices = arguments[:2]
    if name == "_embedding_bag":
        return int(indices.numel() * table.shape[1] * table.element_size())
    return int(indices.numel() * table.element_size()) if name.startswith("nll") else size_of(result)


def _distinct(tensors: Any) -> list[int]:
    """Bytes of tensors, each piece of memory once."""
    sizes: dict[Any, int] = {}
    for tensor in tensors:
        sizes.setdefault(_memory(tensor), size_of(tensor))
    return list(sizes.values())


def _memory(tensor: torch.Tensor) -> Any:
    """The identity of a piece of memory."""
    if tensor.is_sparse:
        return id(tensor)
    return storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory."""
    return id(tensor) if tensor.is_sparse else tensor.untyped_storage()._cdata


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of the distinct elements of a tensor; of a sparse one, of its values and indices."""
    if tensor.is_sparse:
        return size_of(tensor._values()) + size_of(tensor._indices())
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= int(size) if stride != 0 else 1
    return count * tensor.element_size() if tensor.numel() else 0
