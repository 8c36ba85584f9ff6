"""Inputs, outputs, views, writes, symbolic sizes, origins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from daceml_train.analysis.interpret import interpret
from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.capture.capture import capture
from daceml_train.graph.graph import Role
from daceml_train.tensor import symbol
from tests.frontends.torch.check import array, check, operators


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True))
        self.head = nn.Linear(5, 2, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) * self.scale


def test_inputs_have_the_users_names_and_roles() -> None:
    captured = check(Net(), torch.randn(4, 3))
    roles = {i.path: i.role for i in captured.graph.inputs.values()}
    assert roles["body.0.weight"] is roles["head.weight"] is Role.parameter
    assert roles["scale"] is roles["body.1.running_mean"] is Role.buffer
    assert roles["x"] is Role.input
    assert [s.position for s in captured.inputs] == list(range(len(captured.inputs)))


def test_running_statistics_are_writes() -> None:
    captured = check(Net(), torch.randn(4, 3))
    paths = {captured.graph.inputs[name].path for name in captured.graph.writes}
    assert paths == {"body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"}


def test_evaluation_mode_writes_nothing() -> None:
    captured = check(Net().eval(), torch.randn(4, 3))
    assert not captured.graph.writes and "batch_norm_inference" in operators(captured)


def test_origins_name_module_and_line() -> None:
    captured = check(Net(), torch.randn(4, 3))
    matmuls = [node.origin for node in captured.graph.nodes if node.op.label == "matmul"]
    assert [o.module for o in matmuls] == ["body.0", "head"]
    assert all(o.source.startswith("test_capture.py:") for o in matmuls)


def test_structure_of_results_is_rebuilt() -> None:
    def f(x):
        y = x * 2
        return {"a": y, "b": [y, None, 3, x], "c": (y + 1,)}

    captured = check(f, torch.randn(3, requires_grad=True))
    assert len(captured.graph.outputs) == 2


def test_views_of_inputs_are_views() -> None:
    def f(x):
        return x.t()[1:], x, x.detach(), x.view(-1), (x * 1).view(-1)

    x = torch.randn(3, 4, requires_grad=True)
    captured = check(f, x, fullgraph=False)
    assert all(o.kind in ("graph", "input") for o in captured.outputs)


def test_changes_of_inputs_are_writes() -> None:
    def f(x, y):
        x.mul_(2)
        x[0].add_(y)
        y[1:3] = 7
        return x + 1, x

    captured = check(f, torch.randn(3, 4), torch.randn(4))
    assert set(captured.graph.writes) == {"x", "y"}


def test_buffers_of_a_step_counter() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(4))

        def forward(self, x):
            with torch.no_grad():
                self.average.lerp_(x.mean(0), 0.1)
            return x - self.average

    captured = check(Counter(), torch.randn(3, 4, requires_grad=True))
    assert list(captured.graph.writes.values())


def test_input_changed_by_values_with_a_gradient_is_refused() -> None:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(4))
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x):
            self.state.mul_(self.w)
            return x + self.state

    with pytest.raises(Exception, match="values that have a gradient"):
        check(Memory(), torch.randn(4))


def test_symbolic_batch() -> None:
    model = nn.Sequential(
        nn.Linear(3, 5), nn.LayerNorm(5), nn.GELU(), nn.Softmax(-1), nn.Flatten(0), nn.Unflatten(0, (-1, 5))
    )
    captured = check(model, torch.randn(4, 3), dynamic=True)
    graph = captured.graph
    assert any(isinstance(s, type(symbol("a"))) for i in graph.inputs.values() for s in i.tensor.shape)
    given = {s.name: s for s in captured.inputs if s.name}
    held = dict(model.named_parameters())
    for size in (2, 7):
        x = torch.randn(size, 3)
        arrays = {n: array(held[path] if (path := graph.inputs[n].path) in held else x) for n in given}
        result = interpret(graph, arrays).outputs[0]
        np.testing.assert_allclose(result, model(x).detach().numpy(), 1e-5, 1e-5)


def test_symbolic_batch_norm() -> None:
    captured = check(Net(), torch.randn(4, 3), dynamic=True)
    assert captured.graph.symbols and captured.graph.writes


def test_symbolic_images() -> None:
    def f(x, w):
        y = F.max_pool2d(F.conv2d(x, w, stride=2, padding=1), 3, 2, 1)
        return F.avg_pool2d(y, 2).mean((2, 3))

    x = torch.randn(2, 3, 20, 24, dtype=torch.float64, requires_grad=True)
    for dim in (0, 2, 3):
        torch._dynamo.mark_dynamic(x, dim)
    captured = check(f, x, torch.randn(4, 3, 3, 3, dtype=torch.float64, requires_grad=True), dynamic=None)
    assert len(captured.graph.symbols) == 3


def test_sizes_that_are_equal_only_by_number_are_burned_in() -> None:
    x = torch.randn(2, 8, 8, dtype=torch.float64, requires_grad=True)
    captured = check(lambda x, w: x[:, ::2, ::2].flatten(1) @ w, x, torch.randn(16, 3).double(), dynamic=True)
    x_tensor = captured.graph.inputs["x"].tensor
    assert x_tensor.shape[1:] == (8, 8) and len(captured.graph.symbols) == 2  # batch and columns stay symbols


def test_sizes_as_results_and_in_arithmetic() -> None:
    def f(x):
        n, d = x.shape
        y = x.reshape(n * d).sum(0) / n
        z = F.pad(x, (0, 1))[1:, : d // 2]
        return y, z, n * 2, x.new_zeros(n, 3) + n, torch.arange(n, device=x.device) * d

    captured = check(f, torch.randn(6, 4), dynamic=True)
    assert captured.outputs


def test_symbolic_attention_and_concatenation() -> None:
    def f(x, w):
        b, t, d = x.shape
        q, k, v = (x @ w).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
        y = y.transpose(1, 2).reshape(b, t, d)
        return torch.cat([y, x], 1).chunk(2, -1)[0].mean(1)

    x = torch.randn(3, 5, 4, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    check(f, x, torch.randn(4, 12, requires_grad=True), dynamic=None, tolerance=1e-5)


def test_memory_order_of_inputs() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    captured = check(lambda a, b: a * 2 + b.sum(), x, torch.randn(6, 4)[::2])
    first, second = (s for s in captured.inputs)
    assert captured.graph.inputs[first.name].tensor.order == (0, 2, 3, 1) and not first.copy
    assert captured.graph.inputs[second.name].tensor.order is None and second.copy


def test_python_scalars_and_constants() -> None:
    table = torch.tensor([1.0, 2.0, 3.0])

    def f(x, n):
        return x * n + torch.tensor([0.5, 1.0, 2.0]) + table + torch.tensor(3)

    check(f, torch.randn(3, requires_grad=True), 2)


def test_symbolic_number_as_operand() -> None:
    def f(x, n):
        return x * n + n / 2

    check(f, torch.randn(3, requires_grad=True), 5, dynamic=True)


def test_a_graph_that_does_not_come_from_dynamo() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    traced = fx.symbolic_trace(module)
    x = torch.randn(5, 3)
    captured = capture(traced, [x])
    arrays = {s.name: array(s.value if s.kind == "attribute" else x) for s in captured.inputs}
    result = interpret(captured.graph, arrays).outputs[0]
    np.testing.assert_allclose(result, module(x).detach().numpy(), 1e-5, 1e-5)
    assert captured.detached == (False,)
    assert [s.kind for s in captured.inputs] == ["tensor"] + ["attribute"] * 4


def test_tied_parameters_are_one_input() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    captured = check(Tied(), torch.tensor([[1, 2], [3, 1]]))
    assert len(captured.graph.inputs) == 2


def test_autocast() -> None:
    def f(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(x, w)
        return y.float().sum()

    captured = check(f, torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True), tolerance=3e-2)
    assert "cast" in operators(captured)


def test_checkpoint_is_seen_through() -> None:
    from torch.utils.checkpoint import checkpoint

    def f(x, w):
        return checkpoint(lambda v: (v @ w).sigmoid(), x, use_reentrant=False).sum()

    check(f, torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True))


def test_a_sparse_input_is_refused_by_name() -> None:
    graph = fx.Graph()
    x = graph.placeholder("weights")
    graph.output((graph.call_function(torch.sparse.mm, (x, x)),))
    with pytest.raises(Unsupported, match="layout"):
        capture(fx.GraphModule({}, graph), [torch.eye(3).to_sparse_csr()])


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_multi_head_attention_is_no_batch_of_matmuls(need_weights: bool, batch_first: bool) -> None:
    """PyTorch's function is a single call to TorchDynamo; its projections are single matmuls, and no weight is expanded."""
    layer = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    captured = check(lambda x: layer(x, x, x, need_weights=need_weights)[0], torch.randn(3, 5, 8, requires_grad=True))
    ranks = [captured.graph.tensors[n.outputs[0]].rank for n in captured.graph.nodes if n.op.label == "matmul"]
    assert ranks == ([2, 3, 3, 2] if need_weights else [2, 2])
    assert ("attention" in operators(captured)) is not need_weights
