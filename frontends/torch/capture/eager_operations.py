"""Operations of eager execution on a GPU: what PyTorch would launch, as `lowering.device_time` reads it.

The kernels are counted as in `eager_traffic`, on any device; what a GPU does otherwise than a CPU is changed here:
convolutions convert layouts as cuDNN does, and optimizers take their multi-tensor kernels, as they do on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from daceml_train.frontends.torch import types
from daceml_train.frontends.torch.capture.eager_traffic import entries_of, operands_of, size_of, storage_of
from daceml_train.lowering.device_time import Operation, converted_bytes, multiplies_in
from daceml_train.tensor import DType

_FOREACH = 110
"""Tensors of one multi-tensor kernel; more take several (aten/src/ATen/native/cuda/MultiTensorApply.cuh)."""


def eager_operations(function: Callable[[], object], tf32: bool = False) -> list[Operation]:
    """The kernels that PyTorch would launch for `function` on a GPU; run it once before, so that lazy state exists.

    `tf32` says whether float32 matmuls may multiply in TF32.
    """
    watch = _Watch(tf32)
    with watch:
        function()
    return watch.operations


def with_foreach(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer with multi-tensor kernels, which PyTorch takes for parameters on a GPU where nothing else is asked
    for.
    """
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = not any(p.is_sparse for p in group["params"])
    return optimizer


def prepared(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer with its state, which its first step creates, here with gradients of zero."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


class _Watch(TorchDispatchMode):
    def __init__(self, tf32: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tf32 = tf32
        self.operations: list[Operation] = []
        self.held: list[Any] = []
        """Storages of results, so that no two have the same identity. A tensor that is held would change the step:
        autograd copies gradients that somebody else has."""

    def __torch_dispatch__(
        self, function: Any, kinds: Sequence[type], arguments: tuple[Any, ...] = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        result = function(*arguments, **keywords)
        results = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and not t.is_sparse]
        self.held += [t.untyped_storage() for t in results]
        if not isinstance(function, torch._ops.OpOverload) or function.namespace in ("prim", "profiler"):
            return result
        name = function._schema.name.split("::")[-1]
        if name.startswith("_foreach"):
            self._foreach(function, name, arguments, keywords, result)
            return result
        whole = operands_of(function, name, arguments, keywords, result)
        for part, entry in enumerate(entries_of(function, arguments, keywords, result)):
            read, written = whole if name != "convolution_backward" else _gradient(part, arguments, result)
            dtype = multiplies_in(name, _dtype(read), float(entry.flops), self.tf32)
            converted = _converted(arguments, read, written) if "convolution" in name else 0.0
            reads = _in_proportion(read, float(sum(entry.reads.values())))
            writes = _in_proportion(written, float(sum(entry.writes.values())))
            elements = float(sum(t.numel() for t in written))
            self.operations.append(
                Operation(name, "eager", reads, writes, float(entry.flops), elements, dtype, converted)
            )
        return result

    def _foreach(self, function: Any, name: str, arguments: Any, keywords: Any, result: Any) -> None:
        """A multi-tensor kernel, or several if it has many tensors."""
        read, written = operands_of(function, name, arguments, keywords, result)
        count = max(len(written), 1)
        launches = -(-count // _FOREACH)
        for part in range(launches):
            reads = tuple((storage_of(t), float(size_of(t))) for t in read[part::launches])
            writes = tuple((storage_of(t), float(size_of(t))) for t in written[part::launches])
            flops = sum(size / 4 for _, size in writes)
            self.operations.append(Operation(name, "eager", reads, writes, flops))


def _gradient(part: int, arguments: Sequence[Any], result: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What the kernels of a convolution's backward pass read and write: that by the input, if any, comes first."""
    gradient, x, weight, *_ = arguments
    if result[0] is not None and part == 0:
        return [gradient, weight], [result[0]]
    return [gradient, x], [r for r in result[1:] if r is not None]


def _dtype(tensors: Sequence[torch.Tensor]) -> DType:
    floating = [t for t in tensors if t.is_floating_point()]
    return types.tensor(min(floating, key=lambda t: t.element_size())).dtype if floating else DType.float32


def _in_proportion(tensors: Sequence[torch.Tensor], whole: float) -> tuple[tuple[int, float], ...]:
    """Storages and their shares of the bytes that the kernel touches."""
    sizes: dict[int, float] = {}
    for tensor in tensors:
        sizes.setdefault(storage_of(tensor), float(size_of(tensor)))
    total = sum(sizes.values())
    return tuple((key, size * whole / total) for key, size in sizes.items()) if total and whole else ()


def _converted(arguments: Sequence[Any], read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> float:
    """Bytes of conversions between layouts; PyTorch's own kernel of depthwise convolutions needs none."""
    groups = arguments[-1] if isinstance(arguments[-1], int) else arguments[-2]
    images = [t for t in (*read, *written) if t.dim() > 3]
    if groups > 1 and any(t.shape[1] == groups for t in images):
        return 0.0
    return converted_bytes([(t.shape, t.stride(), t.element_size()) for t in images])
