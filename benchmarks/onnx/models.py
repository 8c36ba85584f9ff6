"""Round trips: a model is exported, imported, trained for three steps beside the original, saved and run elsewhere.

Compared are the losses and gradients of three steps with the original's, in float32, and the outputs of the saved
model in ONNX Runtime with the module's. Dropout is off, for streams of random numbers differ.
"""

from __future__ import annotations

import copy
import functools
import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

import daceml_train as dt
from benchmarks.models.library import NAMED
from benchmarks.networks import NETWORKS

STEPS = 3
TOLERANCE = 2e-4
"""Of losses and gradients, relative to the greatest element: exported models compute normalization and attention in
another order, and three updates carry the roundings on."""


@dataclass
class Row:
    """One model: what was compared, in relative differences, and how long things took, in seconds."""

    name: str
    nodes: int = 0
    imported: float = 0.0
    loss: float = 0.0
    gradient: float = 0.0
    runtime: float = 0.0
    breaks: int = 0
    wrong: str = ""


@dataclass(frozen=True)
class Trip:
    """A model, its inputs, and how its output becomes a loss."""

    model: torch.nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[[Any], Tensor]


class _Outputs(torch.nn.Module):
    """A `transformers` model as a function of tensors in order, with a tensor as its result."""

    def __init__(self, model: torch.nn.Module, names: list[str], result: str) -> None:
        super().__init__()
        self.model, self.names, self.result = model, names, result

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = getattr(self.model(**dict(zip(self.names, inputs, strict=True))), self.result)
        return output


def _network(name: str) -> Trip:
    problem = NETWORKS[name].build(small=True, dropout=False)
    inputs = problem.inputs if isinstance(problem.inputs, tuple) else (problem.inputs,)
    return Trip(problem.model, inputs, lambda output: problem.loss(output, problem.targets))


def _transformer(name: str) -> Trip:
    row = next(row for row in NAMED if row.name == name)
    model, batch = row.build()
    names = [key for key, value in batch.items() if isinstance(value, Tensor)]
    with torch.no_grad():
        result = model(**batch)
    keys = result if isinstance(result, Mapping) else vars(result)
    wrapped = _Outputs(model, names, "loss" if "loss" in keys else "logits")
    return Trip(
        wrapped,
        tuple(batch[key] for key in names),
        lambda output: output if output.dim() == 0 else output.square().mean(),
    )


_NETWORKS = (
    "resnet50",
    "wide_resnet50_2",
    "mobilenet_v2",
    "efficientnet_b0",
    "fcn8s",
    "mixer",
    "vit_s",
    "wavenet",
    "bert",
    "gpt2",
    "dlrm",
    "lstm",
)
_TRANSFORMERS = (
    "bert-mlm",
    "bert-qa",
    "gpt2",
    "llama",
    "vit",
    "convnext",
    "resnet",
    "mobilevit",
    "segformer",
    "whisper",
    "wav2vec2",
)
MODELS: dict[str, Callable[[], Trip]] = {
    **{name: functools.partial(_network, name) for name in _NETWORKS},
    **{f"{name} (transformers)": functools.partial(_transformer, name) for name in _TRANSFORMERS},
}


def run(name: str) -> Row:
    """The whole trip of one model."""
    row = Row(name)
    logging.disable(logging.WARNING)
    try:
        _trip(row, MODELS[name]())
    except Exception as error:
        row.wrong = f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        logging.disable(logging.NOTSET)
    return row


def _trip(row: Row, trip: Trip) -> None:
    torch._dynamo.reset()
    original = copy.deepcopy(trip.model)
    # Unoptimized: the exporter's optimizer merges initializers that are equal, and weights begin equal.
    program = torch.onnx.export(original, trip.inputs, dynamo=True, verbose=False, optimize=False)
    assert program is not None
    row.nodes = len(program.model_proto.graph.node)
    begin = time.perf_counter()
    module = dt.load_onnx(program.model_proto, train_mode=True).train(original.training)
    row.imported = time.perf_counter() - begin
    optimized = dt.optimize(module)
    _train(row, trip, original, optimized)
    if row.wrong:
        return
    with tempfile.TemporaryDirectory() as folder:
        file = dt.save_onnx(optimized, Path(folder) / "trained.onnx")
        onnxruntime.set_default_logger_severity(3)
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        feed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), trip.inputs, strict=True)}
        theirs = torch.from_numpy(np.asarray(session.run(None, feed)[0]))
        with torch.no_grad():
            ours = dt.optimize(module.eval())(*trip.inputs)
        row.runtime = _relative(ours, theirs)
        if row.runtime > TOLERANCE:
            row.wrong = f"ONNX Runtime's output of the saved model differs by {row.runtime:.2g}"


def _train(row: Row, trip: Trip, original: torch.nn.Module, optimized: torch.nn.Module) -> None:
    theirs = dict(original.named_parameters())
    ours = _by_alias(original, dict(optimized.named_parameters()))
    used = set(ours)
    updates = [torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9) for model in (original, optimized)]
    for _ in range(STEPS):
        losses = []
        for model, update in zip((original, optimized), updates, strict=True):
            update.zero_grad()
            loss = trip.loss(model(*trip.inputs))
            loss.backward()
            losses.append(loss.detach())
        row.loss = max(row.loss, _relative(losses[1], losses[0]))
        scale = max(float(p.grad.to_dense().abs().max()) for p in theirs.values() if p.grad is not None)
        for name, parameter in theirs.items():
            if parameter.grad is None or name not in used:
                if parameter.grad is not None and bool(parameter.grad.abs().max() > 0):
                    row.wrong = f"{name} has a gradient in the original and is not a parameter of the imported model"
                    return
                continue
            got = ours[name].grad
            if got is None:
                row.wrong = f"{name} has no gradient"
                return
            row.gradient = max(row.gradient, _relative(got.to_dense(), parameter.grad.to_dense(), 1e-3 * scale))
        for update in updates:
            update.step()
    if row.loss > TOLERANCE or row.gradient > TOLERANCE:
        row.wrong = f"loss differs by {row.loss:.2g}, gradients by {row.gradient:.2g}"


def _by_alias(original: torch.nn.Module, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Imported parameters by the original's names: the exporter may choose another name of a tied weight."""
    first = {id(parameter): name for name, parameter in original.named_parameters()}
    aliases = original.named_parameters(remove_duplicate=False)
    return {first[id(parameter)]: ours[alias] for alias, parameter in aliases if alias in ours}


def _relative(got: Tensor, want: Tensor, least: float = 1e-6) -> float:
    """Difference relative to the greatest element, but at least `least`: a key's bias has a gradient of zero, which
    is rounding alone, and says nothing relative to itself.
    """
    greatest = float(want.detach().abs().max()) if want.numel() else 0.0
    return float((got.detach() - want.detach()).abs().max()) / max(greatest, least) if want.numel() else 0.0


def text(row: Row) -> str:
    """The row for the terminal."""
    if row.wrong:
        return f"WRONG: {row.wrong}"
    return (
        f"right: {row.nodes} nodes in {row.imported:.2f} s; loss {row.loss:.1e}, gradients {row.gradient:.1e}, "
        f"ONNX Runtime {row.runtime:.1e}"
    )
