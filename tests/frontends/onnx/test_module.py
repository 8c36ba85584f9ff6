import copy
import pickle

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import daceml_train as dt
from daceml_train.frontends.onnx import load
from tests.frontends.onnx.models import model, perceptron, random, tensor

X = torch.from_numpy(random(5, 4, seed=3))


def reference(x: torch.Tensor) -> torch.Tensor:
    weights = {t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy()) for t in perceptron().graph.initializer}
    hidden = torch.relu(x @ weights["layers.0.weight"].T + weights["layers.0.bias"])
    return hidden @ weights["head"]


def test_initializers_are_parameters_under_their_own_names():
    module = load(perceptron())
    assert {name for name, _ in module.named_parameters()} == {"layers.0.weight", "layers.0.bias", "head"}
    torch.testing.assert_close(module(X), reference(X))


def test_the_source_is_python_with_a_comment_per_node():
    assert "relu" in load(perceptron()).source and "# /layers.0/Gemm" in load(perceptron()).source


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, {"layers.0.weight", "layers.0.bias", "head"}),
        (False, set()),
        (True, {"layers.0.weight", "layers.0.bias", "head"}),
        (["head"], {"head"}),
        (lambda name: name.startswith("layers"), {"layers.0.weight", "layers.0.bias"}),
    ],
)
def test_which_initializers_train(choice, expected):
    module = load(perceptron(), trainable=choice)
    assert {name for name, _ in module.named_parameters()} == expected
    assert len(module.state_dict()) == 3


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"trainable": ["tail"]}, "'tail', which is not a floating-point initializer"),
        ({"trainable": ["haed"]}, "'haed', which is not .*, did you mean 'head'?"),
        ({"trainable": "head"}, "trainable is names, a predicate over names, True, False or None, given 'head'"),
        ({"trainable": 3}, "trainable is names, .* given 3"),
        ({"trainable": [3]}, "trainable is names, .* given .3."),
        ({"train_mode": "yes"}, "train_mode is True or False, given 'yes'"),
    ],
)
def test_options_that_do_not_fit_are_named(options, sentence):
    with pytest.raises(dt.Invalid, match=sentence):
        load(perceptron(), **options)


def test_what_the_exporter_notes_decides_over_where_a_value_stands():
    result = perceptron()
    for name, kind in (("head", "BUFFER"), ("layers.0.bias", "PARAMETER")):
        info = result.graph.value_info.add(name=name)
        info.type.tensor_type.elem_type = TensorProto.FLOAT
        info.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value=kind)
    assert {name for name, _ in load(result).named_parameters()} == {"layers.0.weight", "layers.0.bias"}


@pytest.mark.compiled
def test_training_equals_the_same_model_in_pytorch():
    module, eager = dt.optimize(perceptron()), load(perceptron())
    updates = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, eager)]
    for _ in range(3):
        for each, update in zip((module, eager), updates, strict=True):
            update.zero_grad()
            each(X).square().mean().backward()
            update.step()
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.compiled
def test_a_whole_step_is_one_graph_and_sizes_may_vary():
    module = load(perceptron())
    step = dt.training_step(module, torch.nn.functional.mse_loss, torch.optim.SGD(module.parameters(), lr=0.1))
    losses = [float(step(X[:n], torch.zeros(n, 3))) for n in (5, 3, 4)]
    assert losses[2] < losses[0]


def test_copies_and_pickles_keep_values_and_what_trains():
    module = load(perceptron())
    with torch.no_grad():
        module.head.add_(1.0)
    module.head.requires_grad_(False)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(other(X), module(X))
        assert other.head is not module.head and not other.head.requires_grad


def test_sizes_stay_symbolic_through_shape_arithmetic():
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["n"]),
        helper.make_node("Unsqueeze", ["n", "axis"], ["n1"]),
        helper.make_node("Concat", ["n1", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    constants = {"zero": np.array(0), "axis": np.array([0]), "rest": np.array([2, -1])}
    result = model(nodes, [tensor("x", "n", 6)], [tensor("y", "n", 2, 3)], **constants)
    module = load(result)
    assert "as_tensor" not in module.source and not list(module.buffers())
    assert module(torch.zeros(7, 6)).shape == (7, 2, 3)


def test_nodes_over_constants_are_computed_at_import():
    nodes = [helper.make_node("Add", ["a", "b"], ["c"]), helper.make_node("Mul", ["x", "c"], ["y"])]
    result = model(
        nodes, [tensor("x", 3)], [tensor("y", 3)], a=np.arange(3.0, dtype=np.float32), b=np.ones(3, np.float32)
    )
    module = load(result, trainable=False)
    assert module.source.count("# Add") == 0
    torch.testing.assert_close(module(torch.ones(3)), torch.tensor([1.0, 2.0, 3.0]))


def branches() -> onnx.ModelProto:
    def body(operator):
        return helper.make_graph(
            [helper.make_node(operator, ["x", "w"], [operator])], operator, [], [tensor(operator, 3)]
        )

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], "/If", then_branch=body("Mul"), else_branch=body("Sub")),
    ]
    weights = {"w": np.array([1, 2, 3], np.float32), "zero": np.array(0, np.float32)}
    return model(nodes, [tensor("x", 3)], [tensor("y", 3)], **weights)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_branch_on_data_trains(sign):
    module = dt.optimize(branches())
    x = sign * torch.tensor([1.0, 2.0, 0.5])
    y = module(x)
    torch.testing.assert_close(y, x * module.w if sign > 0 else x - module.w)
    y.sum().backward()
    torch.testing.assert_close(module.w.grad, x if sign > 0 else -torch.ones(3))


@pytest.mark.compiled
def test_a_loop_of_known_length_trains():
    body = helper.make_graph(
        [helper.make_node("Mul", ["state", "w"], ["next"]), helper.make_node("Identity", ["go"], ["again"])],
        "body",
        [tensor("i", element=TensorProto.INT64), tensor("go", element=TensorProto.BOOL), tensor("state", 2)],
        [tensor("again", element=TensorProto.BOOL), tensor("next", 2)],
    )
    nodes = [helper.make_node("Loop", ["trips", "", "x"], ["y"], body=body)]
    result = model(nodes, [tensor("x", 2)], [tensor("y", 2)], trips=np.array(3), w=np.array([2, 3], np.float32))
    module = dt.optimize(result)
    x = torch.tensor([1.0, 1.0])
    torch.testing.assert_close(module(x), torch.tensor([8.0, 27.0]))
    module(x).sum().backward()
    torch.testing.assert_close(module.w.grad, 3 * torch.tensor([4.0, 9.0]))


def normalized() -> onnx.ModelProto:
    nodes = [
        helper.make_node("BatchNormalization", ["x", "scale", "shift", "mean", "variance"], ["h"], momentum=0.9),
        helper.make_node("Dropout", ["h", "ratio"], ["y"]),
    ]
    weights = {
        "scale": np.ones(2),
        "shift": np.zeros(2),
        "mean": np.zeros(2),
        "variance": np.ones(2),
        "ratio": np.array(0.5),
    }
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    return model(nodes, [tensor("x", "n", 2)], [tensor("y", "n", 2)], **weights)


def test_inference_graphs_stay_so_unless_asked():
    x = torch.randn(64, 2)
    plain = load(normalized()).train()
    torch.testing.assert_close(plain(x), x / np.sqrt(1 + 1e-5))
    assert "train_mode=True makes them train" in plain.notes[0]
    trained = load(normalized(), train_mode=True).train()
    y = trained(x)
    assert (y == 0).any()
    torch.testing.assert_close(trained.mean, 0.1 * x.mean(0))
    torch.testing.assert_close(trained.eval()(x).shape, x.shape)


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (torch.zeros(5, 3), "input 'x' has shape (5, 3), the model takes (None, 4)"),
        (torch.zeros(5), "the model takes rank 2"),
        (
            torch.zeros(5, 4, dtype=torch.float64),
            "input 'x' has elements of torch.float64, the model takes torch.float32",
        ),
        (np.zeros((5, 4), np.float32), "input 'x' is a ndarray"),
    ],
)
def test_inputs_are_held_to_their_declaration(x, sentence):
    with pytest.raises(dt.Invalid) as caught:
        load(perceptron())(x)
    assert sentence in str(caught.value)


def test_local_functions_are_inlined():
    result = perceptron()
    function = helper.make_function(
        "own", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 21)]
    )
    result.functions.append(function)
    result.opset_import.append(helper.make_opsetid("own", 1))
    result.graph.node[1].CopyFrom(helper.make_node("Twice", ["h"], ["r"], domain="own"))
    eager = load(result)
    hidden = X @ eager.layers._modules["0"].weight.T + eager.layers._modules["0"].bias
    torch.testing.assert_close(eager(X), (2 * hidden) @ eager.head)


def test_operators_and_names_cannot_write_code():
    result = perceptron()
    evil = 'x"\n    import os; os.abort()  #'
    result.graph.node[1].name = evil
    result.graph.initializer[2].name = result.graph.node[2].input[1] = "head'); import os; os.abort() #"
    torch.testing.assert_close(load(result)(X), reference(X))
