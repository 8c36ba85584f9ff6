"""Templates: hand-written C++ kernels for operators that are not a loop nest over their operands.

Each is a function template in `native/`, which takes the pointers and integers of a launch; the text generated here
only selects its types. So they are compiled, cached and launched like generated kernels, and serve all sizes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import sympy

from daceml_train.codegen.cpu.launch import KernelCode, Layout
from daceml_train.codegen.library.depthwise import depthwise_weight_gradient
from daceml_train.codegen.library.im2col import sums_of, windows_of
from daceml_train.codegen.library.index_add import add_rows, row_gradient
from daceml_train.codegen.library.launch import launch_of
from daceml_train.codegen.library.winograd import transformed_filters, weight_gradient
from daceml_train.ops.fused_attention import FusedAttention, FusedAttentionGrad, Masked, threshold
from daceml_train.ops.operator import Operator
from daceml_train.tensor import Dim, DType, product, same, symbol

BAND = 32
"""Queries per block of scores, as in `native/attention.h`."""
Rule = Callable[[Operator, Sequence[Layout], Sequence[Layout]], KernelCode | None]


def written_kernel(op: Operator, operands: Sequence[Layout], results: Sequence[Layout]) -> KernelCode | None:
    """The hand-written kernel for an operator with these operand and result layouts; None if there is none."""
    rule = TEMPLATES.get(op.label)
    return rule(op, operands, results) if rule is not None else None


def has_template(op: Operator) -> bool:
    """Whether `written_kernel` knows an operator of this kind."""
    return op.label in TEMPLATES


def _attention(op: Operator, operands: Sequence[Layout], results: Sequence[Layout]) -> KernelCode:
    """Results are y and logsumexp."""
    assert isinstance(op, FusedAttention)
    q, k, v, *rest = operands
    size = q.shape[3]
    keys, width = _padded(k.shape[2], q.dtype), _padded(size, q.dtype)
    scratch = (size * keys + k.shape[2] * width + BAND * (keys + width)) * q.dtype.bytes * symbol("blocks")
    units = product(q.shape[:2]) * _whole(q.shape[2], BAND)
    return _attention_code(op, q, k, rest, (q, k, v, results[0]), 4, units, scratch)


def _attention_grad(op: Operator, operands: Sequence[Layout], results: Sequence[Layout]) -> KernelCode:
    """Results are the gradients for q, k and v."""
    assert isinstance(op, FusedAttentionGrad)
    grad, q, k, v, y, _, *rest = operands
    size = q.shape[3]
    keys, width = _padded(k.shape[2], q.dtype), _padded(size, q.dtype)
    heads = 2 * size * keys + 3 * k.shape[2] * width
    scratch = (heads + BAND * (2 * keys + 3 * width)) * q.dtype.bytes * symbol("blocks")
    return _attention_code(op, q, k, rest, (grad, q, k, v, y, *results), 10, product(q.shape[:2]), scratch)


def _attention_code(
    op: Masked,
    q: Layout,
    k: Layout,
    rest: Sequence[Layout],
    arrays: Sequence[Layout],
    flops: int,
    units: Dim,
    scratch: Dim,
) -> KernelCode:
    sizes = (*q.shape[:3], k.shape[2], q.shape[3])
    numbers = [*sizes, op.before, op.stream, *map(_bits, (threshold(op.p), 1 / (1 - op.p), op.scale))]
    numbers += [stride for array in arrays for stride in array.strides]
    for mask, fill in zip(rest[op.before :], op.fills, strict=True):
        missing = 4 - len(mask.shape)
        steps = (0 if same(n, 1) else s for n, s in zip(mask.shape, mask.strides, strict=True))
        numbers += [int(fill is not None), _bits(fill or 0.0), *[0] * missing, *steps]
    call = f"vm::{op.label}<{q.dtype.c}, {len(op.fills)}>"
    return launch_of("attention.h", call, numbers, units, flops * product(sizes), (scratch,))


def _bits(number: float) -> int:
    """The bits of a float64 as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _whole(size: Dim, group: int) -> Dim:
    """How many groups hold `size` elements."""
    return -(-size // group) if isinstance(size, int) else sympy.ceiling(size / group)


def _padded(size: Dim, dtype: DType) -> Dim:
    """A size in whole vectors of 64 bytes."""
    lanes = 64 // dtype.bytes
    return lanes * _whole(size, lanes)


TEMPLATES: dict[str, Rule] = {
    "fused_attention": _attention,
    "fused_attention_grad": _attention_grad,
    "convolution_weight_grad": depthwise_weight_gradient,
    "im2col": windows_of,
    "col2im": sums_of,
    "add_rows": add_rows,
    "embedding_grad": row_gradient,
    "winograd_filter": transformed_filters,
    "winograd_weight_grad": weight_gradient,
}
"""Operator -> the kernel for these layouts, None if the library or generated code is better."""
