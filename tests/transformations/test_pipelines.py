"""The pipelines that come with the package, on small whole models."""

from collections import Counter

from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.traffic import traffic
from daceml_train.autodiff.reverse import differentiate
from daceml_train.graph.graph import Graph, Role
from daceml_train.ops.operator import Value, make
from daceml_train.passes.pipeline import Pipeline
from daceml_train.tensor import DType, Tensor, symbol
from daceml_train.transformations.pipelines import INFERENCE, TRAINING
from tests.transformations.checking import arrays, check_same

PLAIN = Pipeline(**{level: () for level, _ in TRAINING.passes})


def train(forward: Graph, pipeline: Pipeline) -> Graph:
    """The graph with gradients of its first output by all parameters."""
    graph = pipeline.run(forward, ("forward",))
    graph = graph.copy()
    loss = graph.value(graph.outputs[0])
    parameters = [name for name, entry in graph.inputs.items() if entry.role is Role.parameter]
    gradients = differentiate(graph, {loss.name: loss.constant(1.0)}, parameters)
    for name, gradient in gradients.items():
        assert gradient is not None
        graph.write(name, graph.value(name) - gradient * 0.1)
    return pipeline.run(graph, ("intra_operator", "fusion", "layout", "global_movement"))


def linear(x: Value, graph: Graph, name: str, size: int) -> Value:
    w = graph.input(f"{name}.w", Tensor((size, x.shape[-1])), Role.parameter)
    b = graph.input(f"{name}.b", Tensor((size,)), Role.parameter)
    return x @ w.T + b


def classifier() -> Graph:
    graph = Graph("classifier")
    batch = symbol("s0")
    x, t = graph.input("x", Tensor((batch, 16))), graph.input("t", Tensor((batch,), DType.int64))
    hidden = linear(x, graph, "first", 32).unary("gelu_erf")
    logp = linear(hidden, graph, "second", 10).apply(make("log_softmax", dim=1))
    graph.output(graph.emit(make("nll_loss"), logp, t)[0])
    return graph


def recurrent(steps: int) -> Graph:
    """h' = tanh(x[:, t] @ u + h @ v)."""
    graph = Graph("recurrent")
    batch = symbol("s0")
    x = graph.input("x", Tensor((batch, steps, 16)), Role.parameter)
    u = graph.input("u", Tensor((16, 8)), Role.parameter)
    v = graph.input("v", Tensor((8, 8)), Role.parameter)
    (h,) = graph.emit(make("full", value=0.0, shape=(batch, 8)))
    for t in range(steps):
        h = (x.slice(1, t, t + 1).view((batch, 16)) @ u + h @ v).unary("tanh")
    graph.output(h.sum((0, 1)))
    return graph


def test_classifier() -> None:
    before, after = train(classifier(), PLAIN), train(classifier(), TRAINING)
    check_same(before, after, exact=False, s0=5)
    labels = Counter(node.op.label for node in after.nodes)
    assert labels["matmul"] + labels["matmul_add"] == 5
    assert labels["log_softmax"] == labels["nll_loss"] == 0
    assert traffic(after, {"s0": 64}).bytes < traffic(before, {"s0": 64}).bytes


def test_recurrent() -> None:
    before, after = train(recurrent(6), PLAIN), train(recurrent(6), TRAINING)
    check_same(before, after, exact=False, s0=3)
    labels = Counter(node.op.label for node in after.nodes)
    assert labels["pad"] == 0
    assert labels["matmul_add"] > 10


def test_the_gradient_of_a_sequence_grows_linearly() -> None:
    def moved(steps: int, pipeline: Pipeline) -> int:
        size = traffic(train(recurrent(steps), pipeline), {"s0": 4}).bytes
        assert isinstance(size, int)
        return size

    assert moved(64, TRAINING) < 2.2 * moved(32, TRAINING)
    assert moved(64, PLAIN) < 2.2 * moved(32, PLAIN), "the reverse pass puts the gradients of steps side by side"


def test_inference() -> None:
    forward = classifier()
    after = INFERENCE.run(forward)
    check_same(forward, after, exact=False, s0=5)
    assert all(not node.op.is_composite for node in after.nodes)
    assert interpret(after, arrays(after, s0=5)).outputs[0] > 0
