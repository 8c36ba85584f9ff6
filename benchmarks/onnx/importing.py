"""How long importing takes: BERT at base width with more and more layers, its weights as external data."""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import onnx
import torch

import daceml_train as dt

LAYERS = (3, 6, 12)


def run() -> list[dict[str, Any]]:
    """Nodes, bytes of weights, and the best of three imports in seconds, for each number of layers."""
    import transformers

    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    rows = []
    for layers in LAYERS:
        model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=layers)).eval()
        program = torch.onnx.export(model, (torch.randint(0, 30522, (1, 128)),), dynamo=True, verbose=False)
        assert program is not None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bert.onnx"
            program.save(path, external_data=True)
            nodes = len(onnx.load(path, load_external_data=False).graph.node)
            size = sum(file.stat().st_size for file in Path(folder).iterdir())
            times = []
            for _ in range(3):
                begin = time.perf_counter()
                dt.load_onnx(path)
                times.append(time.perf_counter() - begin)
        rows.append({"layers": layers, "nodes": nodes, "bytes": size, "seconds": min(times)})
    logging.disable(logging.NOTSET)
    return rows


def text(rows: list[dict[str, Any]]) -> str:
    """A line for each number of layers."""
    return "\n".join(
        f"BERT-base with {row['layers']:2} layers: {row['nodes']:5} nodes, {row['bytes'] / 1e6:.0f} MB, imported in "
        f"{row['seconds']:.2f} s, {1e6 * row['seconds'] / row['nodes']:.0f} us per node"
        for row in rows
    )
