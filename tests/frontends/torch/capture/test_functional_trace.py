"""The functional graph of one run: what changes operands, and when PyTorch's own two runs are needed."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from daceml_train.frontends.torch.capture.decompositions import table
from daceml_train.frontends.torch.capture.functional_trace import FunctionalGraph, traced_once
from daceml_train.frontends.torch.capture.prepass import GradientAware
from tests.frontends.torch.check import check


def traced(function: Callable[..., Any], *operands: Tensor) -> FunctionalGraph | None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    memory: dict[int, Tensor] = {}
    for x in operands:
        memory.setdefault(x.untyped_storage().data_ptr(), mode.from_tensor(x))
    with mode:
        fakes = [
            memory[x.untyped_storage().data_ptr()].as_strided(x.shape, x.stride(), x.storage_offset()) for x in operands
        ]
    return traced_once(function, fakes, mode, table())


def test_new_values_of_changed_operands_come_first_and_views_are_seen() -> None:
    def change(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor]:
        z[1:].t().mul_(2)
        x.add_(y)
        return (x @ z,)

    graph = traced(change, torch.randn(3, 3), torch.randn(3, 3), torch.randn(3, 3))
    assert graph is not None
    nodes = list(graph.module.graph.nodes)
    assert graph.changed == (nodes[0].name, nodes[2].name)
    assert len(nodes[-1].args[0]) == 3
    assert not any(str(node.target).split(".")[1].endswith("_") for node in nodes if node.op == "call_function")
    x, y, z = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3, 3)
    new_x, new_z, result = graph.module(x, y, z)
    (expected,) = change(x, y, z)
    torch.testing.assert_close([new_x, new_z, result], [x, z, expected])


def test_one_run_does_not_tell_of_replaced_or_shared_memory() -> None:
    x = torch.randn(4)
    assert traced(lambda x: (x.t_().sum(),), torch.randn(2, 3)) is None
    assert traced(lambda a, b: (a.add_(1).sum() + b.sum(),), x[:2], x[1:]) is None
    assert traced(lambda a, b: (a.sum() + b.sum(),), x[:2], x[1:]) is not None


def test_one_tensor_as_two_operands() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(3))
    graph = traced_once(lambda a, b: (a - 2 * b,), [x, x], mode, table())
    assert graph is not None
    a, b = torch.randn(3), torch.randn(3)
    torch.testing.assert_close(graph.module(a, b)[0], a - 2 * b)
    assert traced_once(lambda a, b: (a.add_(1), b + 1), [x, x], mode, table()) is None  # PyTorch's two runs refuse it


def test_what_nothing_reads_is_no_part_of_the_graph() -> None:
    def unread(x: Tensor) -> tuple[Tensor]:
        x.exp().clone()
        return (x + 1,)

    graph = traced(unread, torch.randn(3))
    assert graph is not None
    assert [node.op for node in graph.module.graph.nodes] == ["placeholder", "call_function", "output"]


class _Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)).relu_()


def test_models_run_once_also_where_they_change_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[None] = []
    forward = GradientAware.forward
    monkeypatch.setattr(GradientAware, "forward", lambda *operands: runs.append(None) or forward(*operands))
    trace = importlib.import_module("daceml_train.frontends.torch.capture.trace")
    monkeypatch.setattr(trace, "aot_export_module", lambda *_, **__: pytest.fail("two runs"))
    check(_Changing(), torch.randn(8, 4))
    assert len(runs) == 1
