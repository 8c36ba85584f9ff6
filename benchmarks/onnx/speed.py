"""Inference of an ONNX model, by `dt.optimize` and by ONNX Runtime, in milliseconds."""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

import daceml_train as dt
from benchmarks.networks import NETWORKS

BATCHES = (1, 16)
TURNS, CALLS = 4, 4
TOLERANCE = 2e-3
"""Of outputs, relative to the greatest element: networks of full depth with random weights."""


@dataclass
class Speed:
    """Medians over alternating turns, in milliseconds, and the difference of the outputs; or why there are none."""

    name: str
    batch: int
    ours: float = 0.0
    theirs: float = 0.0
    difference: float = 0.0
    wrong: str = ""

    @property
    def ratio(self) -> float:
        """How many times as fast as ONNX Runtime."""
        return self.theirs / self.ours if self.ours else 0.0


def run(name: str, batch: int) -> Speed:
    """Export one network, in its full size but with `batch` examples, and time both."""
    result = Speed(name, batch)
    logging.disable(logging.WARNING)
    try:
        _timed(result)
    except Exception as error:
        result.wrong = f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        logging.disable(logging.NOTSET)
    return result


def _timed(result: Speed) -> None:
    torch._dynamo.reset()
    problem = NETWORKS[result.name].build(dropout=False)
    given = problem.inputs if isinstance(problem.inputs, tuple) else (problem.inputs,)
    inputs = tuple(cut(x, given[0].shape[0], result.batch) for x in given)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        torch.onnx.export(problem.model.eval(), inputs, file, dynamo=True, verbose=False)
        onnxruntime.set_default_logger_severity(3)
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
        feed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
        compiled = dt.optimize(dt.load_onnx(file).eval())

        def ours() -> Tensor:
            with torch.inference_mode():
                return compiled(*inputs)  # type: ignore[no-any-return]

        def theirs() -> Any:
            return session.run(None, feed)[0]

        want = torch.from_numpy(np.asarray(theirs()))
        result.difference = float((ours() - want).abs().max()) / max(float(want.abs().max()), 1e-6)
        if result.difference > TOLERANCE:
            result.wrong = f"outputs differ by {result.difference:.2g}"
            return
        result.ours, result.theirs = _medians(ours, theirs)


def cut(x: Tensor, size: int, batch: int) -> Tensor:
    """The array with `batch` examples, taken round and round, along the first dimension that has `size`."""
    if size not in x.shape:
        return x
    return x.index_select(x.shape.index(size), torch.arange(batch) % size).contiguous()


def _medians(*runs: Callable[[], object]) -> list[float]:
    """Each run's median. They take turns of a few calls, of which the first does not count: it comes while threads of
    the other's pool still spin.
    """
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(TURNS):
        for spent, call in zip(times, runs, strict=True):
            call()
            for _ in range(CALLS):
                begin = time.perf_counter()
                call()
                spent.append(1e3 * (time.perf_counter() - begin))
    return [statistics.median(spent) for spent in times]
