"""Rows added to a table where it lies, by a kernel of ours: those of bags, too, whose indices share a row."""

import pytest
import torch

from daceml_train.lowering.program import KernelLaunch
from tests.lowering.test_lower import check
from tests.transformations.checking import program

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize(
    ("rows", "indices", "body"),
    [
        ("g: f32[7, 40]", "i64[7]", "%e = view(%g, shape=(7, 40))"),
        ("g: f32[7, 40]", "i64[7, 3]", "%v = view(%g, shape=(7, 1, 40))\n%e = expand(%v, shape=(7, 3, 40))"),
        ("g: f32[7, 40]", "i64[2, 7]", "%e = expand(%g, shape=(2, 7, 40))"),
        ("g: f32[40]", "i64[7, 3]", "%e = expand(%g, shape=(7, 3, 40))"),
        ("g: f32[7, 40, 3]", "i64[7, 3]", "%e = permute(%g, dims=(0, 2, 1))"),
        ("g: f32[0, 40]", "i64[0, 3]", "%v = view(%g, shape=(0, 1, 40))\n%e = expand(%v, shape=(0, 3, 40))"),
        ("g: f32[n, 40]", "i64[n, 3]", "%v = view(%g, shape=(n, 1, 40))\n%e = expand(%v, shape=(n, 3, 40))"),
    ],
    ids=["rows", "bags", "repeated", "one row", "transposed", "none", "any number"],
)
def test_rows_are_added_in_place(rows: str, indices: str, body: str, dtype: str) -> None:
    signature = f"p: f32[50, 40] parameter, {rows}, i: {indices}".replace("f32", dtype)
    graph = program(signature, f"{body}\n%n = add_rows(%p, %i, %e, in_place=True)\nwrite p <- %n")
    lowered = check(graph, **({"n": 4} if "[n" in rows else {})).program
    assert [type(launch) for launch in lowered.launches] == [KernelLaunch]


@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize(
    ("rows", "indices", "body"),
    [
        ("g: f32[7, 40]", "i64[7]", ""),
        ("g: f32[7, 40]", "i32[7, 3]", "%v = view(%g, shape=(7, 1, 40))\n%e = expand(%v, shape=(7, 3, 40))"),
        ("g: f32[7, 40, 3]", "i64[7, 3]", "%e = permute(%g, dims=(0, 2, 1))"),
        ("g: f32[0, 40]", "i64[0]", ""),
        ("g: f32[n, 40]", "i64[n, 3]", "%v = view(%g, shape=(n, 1, 40))\n%e = expand(%v, shape=(n, 3, 40))"),
    ],
    ids=["rows", "bags", "transposed", "none", "any number"],
)
def test_gradients_of_tables(rows: str, indices: str, body: str, dtype: str, padding: int) -> None:
    signature = f"{rows}, i: {indices}".replace("f32", dtype)
    of = "%e" if body else "%g"
    graph = program(signature, f"{body}\n%d = embedding_grad({of}, %i, rows=50, padding_idx={padding})", "%d")
    lowered = check(graph, **({"n": 4} if "[n" in rows else {})).program
    assert [type(launch) for launch in lowered.launches] == [KernelLaunch]


def test_columns_that_threads_share_out() -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            check(
                program(
                    "p: f64[9, 70] parameter, g: f64[300, 70], i: i64[300, 4]",
                    "%v = view(%g, shape=(300, 1, 70))\n%e = expand(%v, shape=(300, 4, 70))\n"
                    "%n = add_rows(%p, %i, %e, in_place=True)\n%d = embedding_grad(%e, %i, rows=9)\nwrite p <- %n",
                    "%d",
                )
            )
    finally:
        torch.set_num_threads(before)
