"""Chains of elementwise operators: one kernel forward, one backward, and nothing kept but what a chain reads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from daceml_train.autodiff.partition import partition
from daceml_train.autodiff.reverse import differentiate
from daceml_train.graph.graph import Graph, Role
from daceml_train.ops.contraction import Matmul
from daceml_train.ops.elementwise import Elementwise
from daceml_train.ops.kernel import Kernel
from daceml_train.tensor import Tensor
from daceml_train.transformations.pipelines import TRAINING
from tests.passes.training_graphs import captured

CHAINS: dict[str, Callable[[Any], Any]] = {
    "mish": F.mish,
    "mish by hand": lambda x: x * torch.tanh(F.softplus(x)),
    "silu": F.silu,
    "silu by hand": lambda x: x * torch.sigmoid(x),
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu by hand": lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3))),
    "dropout": lambda x: F.dropout(F.gelu(x), 0.3),
}


def joint(name: str) -> Graph:
    """y = chain(x) and the gradient for x, before differentiation's results are transformed."""
    graph = TRAINING.run(captured(CHAINS[name], torch.randn(6, 8, requires_grad=True)), ("forward",)).copy()
    (y,) = graph.outputs
    cotangent = graph.input("g", graph.tensors[y], Role.cotangent)
    (x,) = (n for n, entry in graph.inputs.items() if entry.tensor.rank and n != "g")
    gradient = differentiate(graph, {y: cotangent}, [x])[x]
    assert gradient is not None
    graph.outputs.append(gradient.name)
    return TRAINING.run(graph, ("intra_operator",))


REST = ("fusion", "layout", "global_movement")


@pytest.mark.parametrize("name", CHAINS)
def test_alone(name: str) -> None:
    halves = partition(joint(name), 1)
    assert halves.saved == ()
    assert len(halves.kept) == (2 if name == "dropout" else 1)  # the input, and the seed from which the mask is drawn
    for half in (halves.forward, halves.backward):
        assert len(TRAINING.run(half, REST).nodes) == 1


@pytest.mark.parametrize("name", CHAINS)
def test_between_products(name: str) -> None:
    """h = a w, y = chain(h + b), z = y v: beside h, only y and the gradient of h are arrays in memory."""
    chain = TRAINING.run(captured(CHAINS[name], torch.randn(6, 8, requires_grad=True)), ("forward",))
    graph = Graph("test")
    a, w, v, b, g = (
        graph.input(n, Tensor(s)) for n, s in zip("awvbg", ((6, 4), (4, 8), (8, 5), (8,), (6, 5)), strict=True)
    )
    (h,) = graph.emit(Matmul(), a, w)
    now = {n: h + b if e.tensor.rank else graph.input("seed", e.tensor) for n, e in chain.inputs.items()}
    for node in chain.nodes:
        now.update(zip(node.outputs, graph.emit(node.op, *(now[i] for i in node.inputs)), strict=True))
    (z,) = graph.emit(Matmul(), now[chain.outputs[0]], v)
    gradients = differentiate(graph, {z.name: g}, ["a", "w", "v", "b"])
    graph.output(z, *(value for value in gradients.values() if value is not None))
    after = TRAINING.run(graph, tuple(level for level, _ in TRAINING.passes if level != "forward"))
    kernels = [node for node in after.nodes if isinstance(node.op, Kernel | Elementwise)]
    results = [o for node in kernels for o in node.outputs if after.tensors[o].shape == (6, 8)]
    assert len(results) == 2, after
