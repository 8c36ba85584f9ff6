"""index_add: rows are added to a table at given indices, in a hand-written loop nest (`native/index_add.h`).

The library's `index_put_` sorts the indices or runs on one thread; here every thread adds some columns of all rows, in
the order of the indices, so results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from daceml_train.analysis.aliases import view_strides
from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.codegen.kernel.loops import Layout
from daceml_train.codegen.library.launch import launch_of
from daceml_train.ops.embedding import AddRows, EmbeddingGrad
from daceml_train.ops.operator import Operator
from daceml_train.tensor import Dim, DType, product, simplify


def add_rows(op: Operator, operands: Sequence[Layout], results: Sequence[Layout]) -> KernelCode | None:
    """The code of `add_rows` where it works in place; None leaves it to the library."""
    assert isinstance(op, AddRows)
    table, indices, rows = operands
    return rows_between(table, indices, rows, 0, table.shape[0]) if op.in_place else None


def row_gradient(op: Operator, operands: Sequence[Layout], results: Sequence[Layout]) -> KernelCode | None:
    """The code of `embedding_grad`: `embedding_dense_backward` takes three times as long."""
    assert isinstance(op, EmbeddingGrad)
    (rows, indices), (table,) = operands, results
    return rows_between(table, indices, rows, 0, table.shape[0], op.padding_idx, "gradient")


def rows_between(
    table: Layout, indices: Layout, rows: Layout, first: Dim, last: Dim, skipped: int = -1, function: str = "add"
) -> KernelCode | None:
    """The code that adds to rows `first` to `last` of the table, the chunk that is in memory.

    Nothing is added to row `skipped`. The `function` `gradient` adds to zeros.
    None if there is none for these types, if indices do not lie along one stride, or rows along more than two: those
    of bags lie along one for bags and none within a bag, whose indices share a row.
    """
    count, width = product(indices.shape), table.shape[1]
    places = view_strides(indices.shape, indices.strides, (count,))
    lying = next(filter(None, (_along(rows, group) for group in range(len(rows.shape) - 1, -1, -1))), None)
    if table.dtype not in (DType.float32, DType.float64) or places is None or lying is None:
        return None
    call = f"rows::{function}<{table.dtype.c}, {indices.dtype.c}>"
    lines = simplify((width + 15) // 16) if isinstance(width, int) else width
    numbers = (count, width, first, last, skipped, *table.strides, *places, *lying)
    written = last - first if function == "gradient" else 0  # rows of zeros: they may be many more than those added
    return launch_of("index_add.h", call, numbers, lines, simplify((count + written) * width))


def _along(rows: Layout, group: int) -> tuple[Dim, ...] | None:
    """How many rows the dimensions from `group` on hold, and the strides of groups, of rows within one, and of columns;
    None if rows do not lie so.
    """
    within, width = product(rows.shape[group:-1]), rows.shape[-1]
    lying = view_strides(rows.shape, rows.strides, (product(rows.shape[:group]), within, width))
    return None if lying is None else (within, *lying)
