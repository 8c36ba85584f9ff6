"""From a call's arguments to a captured graph's inputs, and from its outputs to the call's results."""

from __future__ import annotations

import contextlib
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree

from daceml_train.errors import Invalid, Unsupported
from daceml_train.frontends.torch.capture.capture import Captured
from daceml_train.frontends.torch.results import OutputSource
from daceml_train.runtime.gpu.plan import same_strides
from daceml_train.runtime.native_library import share_version
from daceml_train.tensor import evaluate


def input_tensors(captured: Captured, arguments: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Graph input -> tensor, without the seed and random numbers."""
    if captured.selection is not None:
        arguments = [*arguments, *captured.selection(arguments)]
    found: dict[str, torch.Tensor] = {}
    for source in captured.inputs:
        if source.kind == "tensor":
            assert source.position is not None
            found[source.name] = arguments[source.position]
        elif source.kind == "number" and source.name:
            assert source.position is not None
            found[source.name] = torch.tensor(_known(arguments[source.position]), device="cpu")
        elif source.kind == "attribute":
            found[source.name] = source.value
    return found


def _known(number: Any) -> int:
    """A number, or the example of a symbolic one, of which PyTorch then notes nothing."""
    return int(number.node.hint if isinstance(number, torch.SymInt) else number)


def numbers_of(captured: Captured, arguments: Sequence[Any]) -> dict[str, int]:
    """The values of the symbols that stand for integers which no shape tells."""
    return {
        str(source.value): _known(arguments[source.position])
        for source in captured.inputs
        if source.kind == "number" and source.position is not None
    }


def differentiable_outputs(captured: Captured) -> tuple[int, ...]:
    """The graph outputs that carry a gradient in eager execution."""
    graph = captured.graph
    pairs = zip(captured.outputs, captured.detached, strict=True)
    carrying = {o.index for o, detached in pairs if o.kind == "graph" and not detached}
    return tuple(i for i in sorted(carrying) if graph.tensors[graph.outputs[i]].dtype.is_float)


def sizes_of(captured: Captured, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The values of the graph's size symbols on these inputs."""
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items() if captured.sized else ():
        for size, value in zip(captured.graph.inputs[name].tensor.shape, tensor.shape, strict=True):
            if isinstance(size, sympy.Symbol):
                sizes[str(size)] = value
    return sizes


def drawn_with(captured: Captured, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
    """What random numbers are drawn with: sizes, and numbers that these tensors hold whenever they are looked up."""
    sizes = sizes_of(captured, tensors) if captured.draws else {}
    numbers = {symbol: tensors[name] for draw in captured.draws.values() for symbol, name in draw.given}
    return ChainMap(_Numbers(numbers), sizes) if numbers else sizes


def random_inputs(captured: Captured, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The random numbers of a call on these tensors, in eager execution's order."""
    values = drawn_with(captured, tensors)
    return {name: draw(values) for name, draw in captured.draws.items()}


class _Numbers(dict[str, Any]):
    """Names -> numbers, which stand in tensors."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name).item()


def memory_span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the byte after its last one."""
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size() * bool(tensor.numel())


def shares_memory(tensors: Sequence[torch.Tensor], written: Sequence[int]) -> bool:
    """Whether an input that is written overlaps another one, which may have a storage of its own for that memory."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    memories = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
    for cluster in _overlapping(memories):
        for i in set(written).intersection(cluster):
            start, end = memory_span(tensors[i])
            spans = (memory_span(tensors[k]) for k in cluster if k != i)
            if any(start < last and first < end for first, last in spans):
                return True
    return False


def _overlapping(spans: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Groups of two and more spans, by position, that overlap one another directly or through others."""
    cluster: list[int] = []
    end = 0
    for i in sorted((i for i, (start, stop) in enumerate(spans) if start < stop), key=lambda i: spans[i]):
        if cluster and spans[i][0] >= end:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(i)
        end = max(end, spans[i][1])
    if len(cluster) > 1:
        yield cluster


def check_apart(mutable: Sequence[torch.Tensor], fixed: Sequence[torch.Tensor]) -> None:
    """Raise `Unsupported` if a tensor that the step updates shares memory with another tensor of the step."""
    both = [*((t, True) for t in mutable), *((t, False) for t in fixed)]
    spans = sorted((*memory_span(t), written) for t, written in both if t.numel())
    end, previous_written = 0, False
    for start, stop, written in spans:
        if start < end and (written or previous_written):
            raise Unsupported("parameters, buffers or optimizer state that share memory with one another")
        previous_written = written if stop >= end else previous_written
        end = max(end, stop)


def changed_often(
    captured: Captured, by_name: Mapping[str, torch.Tensor], written: Collection[str]
) -> list[tuple[torch.Tensor, int]]:
    """Tensors whose changes in place eager execution counts otherwise than a program, which writes once; how far."""
    often = ((name, count - (name in written)) for name, count in captured.changes.items() if name in by_name)
    return [(by_name[name], count) for name, count in often if count]


def raise_versions(changed: Iterable[tuple[torch.Tensor, int]]) -> None:
    """Advance the versions of tensors by so many changes, or set them back by as many."""
    for tensor, count in changed:
        if not tensor.is_inference():
            torch._C._autograd._unsafe_set_version_counter((tensor,), (tensor._version + count,))


def laid_out(captured: Captured, outputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> list[torch.Tensor]:
    """The graph's outputs as eager execution returns them: in its strides, disjoint in memory, of its version.

    Other results of a program are copied: its layouts, arrays that serve as several results, and larger arrays of which
    a result is a part, are its own.
    """
    results = list(outputs)
    owners: set[int] = set()
    for index, source in captured.arrays:
        tensor = results[index]
        memory = tensor.untyped_storage()
        strides = None if source.strides is None else tuple(evaluate(s, sizes) for s in source.strides)
        if strides is not None and not same_strides(tensor, strides):
            tensor = copied(tensor, strides)
        elif memory._cdata in owners or (source.whole and memory.nbytes() > tensor.nbytes):
            tensor = copied(tensor, tensor.stride() if strides is None else strides)
        if not tensor.is_inference() and tensor._version != source.version:
            torch._C._autograd._unsafe_set_version_counter((tensor,), (source.version,))
        owners.add(tensor.untyped_storage()._cdata)
        results[index] = tensor
    return results


def copied(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy of a tensor in these strides; elements along a stride of zero have to be equal."""
    once = tensor
    for dimension, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dimension] > 1:
            once = once.narrow(dimension, 0, 1)
    copy = torch.empty_strided(once.shape, strides, dtype=tensor.dtype, device=tensor.device)
    copy.data.copy_(once)  # no change that its version counts
    return copy if once is tensor else copy.expand(tensor.shape)


SMALL = 4096
"""Elements of a result that is copied where the backward pass reads its memory."""


def apart(results: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results, which may be changed in place while others `saved` in the same memory are to be read as they are.

    Small ones are copied. Others count their changes together with what is saved, as views do: reading it is an error.
    """
    found, memory = list(results), [tensor.untyped_storage()._cdata for tensor in saved]
    for position, result in enumerate(results if saved else ()):
        storage = result.untyped_storage()._cdata
        others = [s for s, own in zip(saved, memory, strict=True) if own == storage and s is not result]
        if others and result.numel() <= SMALL:
            found[position] = copied(result, result.stride())
            torch._C._autograd._unsafe_set_version_counter((found[position],), (result._version,))
        elif others:
            share_version(result, others)
    return found


@contextlib.contextmanager
def counted(tensors: Sequence[torch.Tensor], changes: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Tensors change in place, those at these positions so many times, and have the versions of eager execution."""
    changed = [(tensors[i], tensors[i]._version + count) for i, count in changes if not tensors[i].is_inference()]
    yield
    for tensor, version in changed:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def results_of(captured: Captured, outputs: Sequence[torch.Tensor], arguments: Sequence[Any]) -> Any:
    """The results in the structure that the captured code returns."""
    sized = any(source.view is not None or source.kind == "size" for source in captured.outputs)
    sizes = sizes_of(captured, input_tensors(captured, arguments)) | numbers_of(captured, arguments) if sized else {}
    leaves = [
        _result(source, detached, outputs, arguments, sizes)
        for source, detached in zip(captured.outputs, captured.detached, strict=True)
    ]
    return tuple(leaves) if captured.flat else pytree.tree_unflatten(leaves, captured.out_spec)


def _result(
    source: OutputSource,
    detached: bool,
    outputs: Sequence[torch.Tensor],
    arguments: Sequence[Any],
    sizes: dict[str, int],
) -> Any:
    match source.kind:
        case "graph":
            result = outputs[source.index]
            result = result.detach() if detached and result.requires_grad else result
            return result if source.view is None else viewed(result, source, sizes)
        case "input":
            owner = arguments[source.index]
            if source.view is None:
                return owner
            return viewed(owner.detach() if detached and owner.requires_grad else owner, source, sizes)
        case "size":
            return evaluate(source.value, sizes)
    return source.value


def viewed(owner: torch.Tensor, source: OutputSource, sizes: Mapping[str, int]) -> torch.Tensor:
    """A result that is a view of `owner`. Raises `Invalid` where the layout is not that of the capture."""
    view, expected = source.view, source.strides
    assert view is not None and expected is not None
    if not same_strides(owner, [evaluate(s, sizes) for s in expected]):
        shown = tuple(evaluate(s, sizes) for s in expected)
        raise Invalid(
            f"a result that shares memory with {source.kind} {source.index}, compiled for strides {shown}, "
            f"found {owner.stride()}"
        )
    shape, strides = ([evaluate(s, sizes) for s in dims] for dims in (view.shape, view.strides))
    offset = evaluate(view.offset, sizes)
    memory = _lazily(owner, False, False)
    if view.dtype is not None:
        memory = _reinterpreted(memory, view.dtype)
    result = memory.as_strided(shape, strides, memory.storage_offset() + offset)
    return _lazily(result, view.conjugated, view.negated)


def _lazily(tensor: torch.Tensor, conjugated: bool, negated: bool) -> torch.Tensor:
    """A view of the same memory, whose elements are, or are not, lazily conjugated and negated."""
    tensor = tensor if tensor.is_conj() == conjugated else torch.conj(tensor)
    return tensor if tensor.is_neg() == negated else torch._neg_view(tensor)


def _reinterpreted(owner: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """All elements of a tensor's memory from its first one on, as elements of another type."""
    start = owner.storage_offset()
    count = owner.untyped_storage().nbytes() // owner.element_size() - start
    if dtype.is_complex and not owner.is_complex():
        return torch.view_as_complex(owner.as_strided((count // 2, 2), (2, 1), start))
    flat = owner.as_strided((count,), (1,), start)
    if owner.is_complex() and not dtype.is_complex:
        return torch.view_as_real(flat)
    whole = count - count % max(1, dtype.itemsize // owner.element_size())
    return flat[:whole].view(dtype)
