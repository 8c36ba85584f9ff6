"""Models with large external data: weights are mapped, never copied, also beyond 2 GiB."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import daceml_train as dt

WIDTH, KNOWN = 1024, 5


def table_model(folder: Path, rows: int) -> Path:
    """Rows of a table times a matrix; the weights' file has holes, so it takes no disk."""
    split, end = rows * WIDTH * 4, (rows + 16) * WIDTH * 4
    with open(folder / "weights.bin", "wb") as file:
        file.truncate(end)
        file.seek(KNOWN * WIDTH * 4)
        file.write(np.arange(WIDTH, dtype=np.float32).tobytes())
        file.seek(split)
        file.write(np.ones(16 * WIDTH, np.float32).tobytes())

    def weight(name: str, shape: tuple[int, int], start: int, stop: int) -> TensorProto:
        result = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", "weights.bin"), ("offset", start), ("length", stop - start)):
            result.external_data.add(key=key, value=str(value))
        return result

    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "rows"], ["h"]), helper.make_node("MatMul", ["h", "head"], ["y"])],
        "large",
        [helper.make_tensor_value_info("rows", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 16])],
        [weight("table", (rows, WIDTH), 0, split), weight("head", (WIDTH, 16), split, end)],
    )
    result = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(result, folder / "large.onnx")
    return folder / "large.onnx"


def memory_of_its_own() -> int:
    """Bytes of this process that are no file's."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.compiled
@pytest.mark.parametrize("rows", [1 << 18, pytest.param(590_000, marks=pytest.mark.wide)])
def test_weights_are_mapped_and_never_copied(rows: int, tmp_path: Path) -> None:
    """1 GiB, and with `--wide` 2.25 GiB."""
    path = table_model(tmp_path, rows)
    (tmp_path / "small").mkdir()
    small = table_model(tmp_path / "small", 8)
    asked = torch.tensor([KNOWN, KNOWN + 1])
    dt.optimize(dt.load_onnx(small))(asked)  # what compiling itself takes is there before
    before = memory_of_its_own()
    results = dt.optimize(dt.load_onnx(path))(asked)
    assert memory_of_its_own() - before < rows * WIDTH  # a quarter of the weights
    torch.testing.assert_close(results[:, 0], torch.tensor([WIDTH * (WIDTH - 1) / 2, 0.0]))
