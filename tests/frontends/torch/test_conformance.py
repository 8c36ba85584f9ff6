"""PyTorch's own operator samples: every operator gives eager's values and gradients, or says that it is unsupported."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from daceml_train.autodiff.reverse import differentiate
from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.capture import Captured, capture
from daceml_train.graph.interpret import interpret
from daceml_train.ops.fallback import Aten
from tests.frontends.torch.check import array, output

UNINITIALISED = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted"}
UNSUPPORTED = {
    "allclose", "argwhere", "as_strided", "chalf", "combinations", "corrcoef", "cov", "equal", "hash_tensor",
    "index_fill", "index_put", "linalg.eig", "linalg.eigvals",
    "item", "linalg.lstsq", "masked_select", "narrow", "nn.functional.ctc_loss",
    "nn.functional.gaussian_nll_loss", "nonzero", "sparse.mm", "sparse.sampled_addmm", "tensor_split", "unique",
    "unique_consecutive", "sparse.mm.reduce",
}  # fmt: skip
"""Some of their samples have results whose sizes or structure depend on data, or types and layouts that we have not."""
OUT_OF_SCOPE = UNINITIALISED | {"to_sparse", "broadcast_shapes", "bfloat16", "frexp", "nn.functional.embedding_bag"}
"""No values to compare, sparse results, no tensors, low precision against float64, internal results of other sizes
than PyTorch's fake tensors say."""
OPERATORS = [op for op in op_db if torch.float32 in op.dtypes and op.name not in OUT_OF_SCOPE]


def graph_of(op: Any, sample: Any) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The sample as a graph with one call, as an importer without Dynamo makes it."""
    flat, structure = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    graph, tensors = fx.Graph(), []
    for i, argument in enumerate(flat):
        if isinstance(argument, torch.Tensor):
            flat[i] = graph.placeholder(f"x{len(tensors)}")
            flat[i].meta["requires_grad"] = argument.requires_grad
            tensors.append(argument)
    args, kwargs = pytree.tree_unflatten(flat, structure)

    def call(*args: Any, **kwargs: Any) -> Any:
        return sample.output_process_fn_grad(op.op(*args, **kwargs))

    call.__name__ = op.name.replace(".", "_")
    graph.output((graph.call_function(call, tuple(args), kwargs),))
    return fx.GraphModule({}, graph), tensors


def plain(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().resolve_conj().resolve_neg().numpy() if tensor.is_complex() else array(tensor)


def compare(captured: Captured, tensors: list[torch.Tensor], expected: list[Any]) -> None:
    arrays = {
        s.name: plain(s.value if s.kind == "attribute" else tensors[s.position]) for s in captured.inputs if s.name
    }
    if captured.random:
        arrays["seed"] = np.asarray(3)
    results = interpret(captured.graph, arrays)
    made = [output(o, tensors, results.outputs, results.sizes) for o in captured.outputs]
    random = captured.random or any(isinstance(n.op, Aten) and n.op.random for n in captured.graph.nodes)
    for got, wanted, detached in zip(made, expected, captured.detached, strict=True):
        if isinstance(wanted, torch.Tensor):
            assert got.shape == wanted.shape and detached == (not wanted.requires_grad)
            if not random:
                np.testing.assert_allclose(plain(got), plain(wanted), 2e-3, 2e-3)
    if not random:
        compare_gradients(captured, arrays, tensors, expected)


def compare_gradients(captured: Captured, arrays: dict, tensors: list[torch.Tensor], expected: list[Any]) -> None:
    pairs = [
        (captured.graph.outputs[o.index], w)
        for o, w in zip(captured.outputs, expected, strict=True)
        if isinstance(w, torch.Tensor) and w.requires_grad and o.kind == "graph" and not w.is_complex()
    ]
    leaves = [(s.name, t) for s in captured.inputs if s.kind == "tensor" and (t := tensors[s.position]).requires_grad]
    leaves = [(name, t) for name, t in leaves if not t.is_complex()]
    if not pairs or not leaves:
        return
    ones = [torch.ones_like(w) for _, w in pairs]
    wanted = torch.autograd.grad([w for _, w in pairs], [t for _, t in leaves], ones, allow_unused=True)
    graph = captured.graph.copy()
    of = {name: graph.input(graph.fresh("cotangent"), graph.tensors[name]) for name, _ in pairs}
    found = differentiate(graph, of, [name for name, _ in leaves])
    graph.outputs, graph.writes = [v.name for v in found.values() if v is not None], {}
    cotangents = {of[name].name: np.ones(w.shape) for name, w in pairs}
    made = iter(interpret(graph, {**arrays, **cotangents}).outputs)
    for (name, leaf), gradient in zip(leaves, wanted, strict=True):
        got = np.zeros(leaf.shape) if found[name] is None else np.broadcast_to(next(made), leaf.shape)
        np.testing.assert_allclose(got, np.zeros(leaf.shape) if gradient is None else array(gradient), 5e-3, 5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: f"{op.name}.{op.variant_test_name}".rstrip("."))
def test_operator(op: Any) -> None:
    warnings.simplefilter("ignore")
    for sample in list(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))[:2]:
        module, tensors = graph_of(op, sample)
        try:
            expected = pytree.tree_leaves(module(*tensors))
        except (RuntimeError, NameError, AssertionError):
            continue  # eager refuses this sample here, or it has an argument that a graph cannot print
        try:
            compare(capture(module, tensors), tensors, expected)
        except Unsupported:
            assert op.name in UNSUPPORTED
