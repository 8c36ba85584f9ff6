"""Steps and modules as SDFGs: unchanged they give the same numbers, changed those of the changed formula."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dace
import pytest
import torch
from dace.transformation import transformation
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.sdfg.convert import OperatorNode, note_source, source_of
from tests.driver.networks import Block
from tests.driver.pairs import batch

pytestmark = pytest.mark.compiled


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8)
        self.act = nn.ReLU()
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.conv1(x)))
        return self.fc(self.act(self.bn2(self.conv2(y))).mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.blocks = nn.Sequential(*(Block(16, 2, before=True, fused=True, gelu="none") for _ in range(2)))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(16, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.blocks(self.embedding(x)))).transpose(1, 2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 11, (3, 7)), torch.randint(0, 11, (3, 7))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], Any]] = {
    "mlp": (mlp, batch, F.mse_loss),
    "convnet": (ConvNet, lambda: (torch.randn(4, 3, 9, 9), torch.randint(0, 5, (4,))), F.cross_entropy),
    "transformer": (Transformer, tokens, F.cross_entropy),
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


def sgd(parameters: Any, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=weight_decay)


def steps(name: str, count: int = 2, optimizer: Any = adamw, **options: Any) -> list[Any]:
    """Equal training steps of equal models."""
    torch.manual_seed(3)
    make, _, loss = NETWORKS[name]
    models = [make()]
    models += [copy.deepcopy(models[0]) for _ in range(count - 1)]
    return [dt.training_step(m, loss, optimizer(m.parameters()), **options) for m in models]


def operators(sdfg: dace.SDFG, label: str = "") -> list[tuple[dace.SDFGState, Any]]:
    """The operators of an SDFG with their states, those called `label`."""
    found = [(s, n) for s in sdfg.states() for n in s.nodes() if isinstance(n, OperatorNode)]
    return [(s, n) for s, n in found if label in ("", n.op.label)]


def state(step: Any) -> Iterator[Tensor]:
    yield from step.model.state_dict().values()
    for entry in step.optimizer.state.values():
        yield from (v for v in entry.values() if isinstance(v, Tensor))


def assert_equal_training(ours: Any, theirs: Any, name: str, count: int = 3) -> None:
    """Both take the same steps, bit for bit."""
    for _ in range(count):
        data = NETWORKS[name][1]()
        seed = torch.get_rng_state()
        loss = theirs(*data)
        torch.set_rng_state(seed)  # of dropout
        assert torch.equal(ours(*data), loss)
    pairs = list(zip(state(ours), state(theirs), strict=True))
    assert len(pairs) > 4 and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("extent", ["step", "loss"])
@pytest.mark.parametrize("name", NETWORKS)
def test_an_unchanged_step_gives_the_same_numbers(name: str, extent: str) -> None:
    step, other = steps(name)
    changed = dt.from_sdfg(step.sdfg(*NETWORKS[name][1](), extent=extent))
    assert_equal_training(changed, other, name)
    assert changed.breaks == []


@pytest.mark.parametrize("name", NETWORKS)
def test_simplified_saved_and_read(name: str, tmp_path: Path) -> None:
    step, other = steps(name)
    sdfg = step.sdfg(*NETWORKS[name][1]())
    sdfg.simplify()
    sdfg.save(str(tmp_path / "step.sdfgz"), compress=True)
    read = dace.SDFG.from_file(str(tmp_path / "step.sdfgz"))
    assert_equal_training(dt.from_sdfg(read, step), other, name)


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_kept_and_clipped(name: str) -> None:
    step, other = steps(name, keep_gradients=True, clip_norm=0.1)
    changed = dt.from_sdfg(step.sdfg(*NETWORKS[name][1]()))
    assert_equal_training(changed, other, name)
    assert torch.equal(changed.gradient_norm, other.gradient_norm)
    grads = zip(step.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in grads)


# ---- changed --------------------------------------------------------------------------------------------------------
def eager(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Tensor:
    optimizer.zero_grad()
    value = loss()
    value.backward()
    optimizer.step()
    return value.detach()


def assert_trains_as(step: Any, model: nn.Module, name: str, **options: Any) -> None:
    """By SGD: Adam makes steps of noise where a gradient is zero, as that of a bias before a normalization."""
    optimizer = sgd(model.parameters(), **options)
    for _ in range(4):
        x, y = NETWORKS[name][1]()
        expected = eager(model, optimizer, lambda x=x, y=y: NETWORKS[name][2](model(x), y))  # type: ignore[misc]
        torch.testing.assert_close(step(x, y), expected, rtol=1e-5, atol=1e-6)
    for (key, ours), theirs in zip(step.model.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5, msg=lambda m, key=key: f"{key}: {m}")


def test_a_swapped_activation_is_differentiated() -> None:
    for name, activation, text in (("mlp", nn.Tanh(), "tanh()"), ("convnet", nn.Sigmoid(), "sigmoid()")):
        (step,) = steps(name, 1, sgd)
        model = copy.deepcopy(step.model)
        if name == "mlp":
            model[1] = activation  # type: ignore[operator]
        else:
            model.act = activation
        sdfg = step.sdfg(*NETWORKS[name][1](), extent="loss")
        found = operators(sdfg, "relu")
        assert len(found) == (1 if name == "mlp" else 2)
        for _, node in found:
            node.operator = text
        assert_trains_as(dt.from_sdfg(sdfg), model, name)


class ReluToSilu(transformation.SingleStateTransformation):
    """A transformation as DaCe's users write them."""

    operator = transformation.PatternNode(OperatorNode)

    @classmethod
    def expressions(cls) -> list[Any]:
        return [dace.sdfg.utils.node_path_graph(cls.operator)]

    def can_be_applied(self, graph: Any, expr_index: int, sdfg: Any, permissive: bool = False) -> bool:
        return self.operator.operator == "relu()"

    def apply(self, graph: Any, sdfg: Any) -> None:
        self.operator.operator = "silu()"


def test_a_transformation_of_dace() -> None:
    (step,) = steps("convnet", 1, sgd)
    model = copy.deepcopy(step.model)
    model.act = nn.SiLU()
    sdfg = step.sdfg(*NETWORKS["convnet"][1](), extent="loss")
    assert sdfg.apply_transformations_repeated(ReluToSilu) == 2
    assert_trains_as(dt.from_sdfg(sdfg), model, "convnet")


def test_a_pass_of_ours_as_dace_s_transformation() -> None:
    from daceml_train.sdfg.transformations import TRANSFORMATIONS

    step, other = steps("mlp")
    sdfg = step.sdfg(*batch())
    before = len(operators(sdfg))
    assert sdfg.apply_transformations(TRANSFORMATIONS["fuse_elementwise"]) == 1
    assert len(operators(sdfg)) < before
    changed = dt.from_sdfg(sdfg)
    data = batch()
    torch.testing.assert_close(changed(*data), other(*data))


def test_the_update_is_changed_in_the_whole_step() -> None:
    (step,) = steps("transformer", 1, sgd)
    model = copy.deepcopy(step.model).eval()
    step.model.eval()
    sdfg = step.sdfg(*tokens())
    updates = [n for _, n in operators(sdfg) if n.op.label.startswith("sgd")]
    assert len(updates) == len(list(model.parameters()))
    for node in updates:
        assert "weight_decay=" not in node.operator
        node.operator = node.operator.replace("(", "(weight_decay=0.25, ", 1)
    assert_trains_as(dt.from_sdfg(sdfg), model, "transformer", weight_decay=0.25)


def test_a_node_is_removed_and_one_duplicated_by_hand() -> None:
    """Without the ReLU, and with the bias added twice."""
    (step,) = steps("mlp", 1, sgd)
    model = copy.deepcopy(step.model)
    sdfg = step.sdfg(*batch(), extent="loss")
    ((state, relu),) = operators(sdfg, "relu")
    (read,), (result,) = state.in_edges(relu), state.out_edges(relu)
    state.remove_node(relu)
    state.add_nedge(read.src, result.dst, dace.Memlet.from_array(read.data.data, sdfg.arrays[read.data.data]))
    state, add = operators(sdfg, "add")[0]
    (result,) = state.out_edges(add)
    twice, name = OperatorNode.new("add()", 2), result.data.data
    sdfg.add_datadesc("once", copy.deepcopy(sdfg.arrays[name]))
    sdfg.arrays["once"].transient = True
    once = state.add_access("once")
    state.add_node(twice)
    whole = dace.Memlet.from_array("once", sdfg.arrays["once"])
    bias = next(e for e in state.in_edges(add) if e.dst_conn == "_in1")
    state.remove_edge(result)
    state.add_edge(add, "_out0", once, None, copy.deepcopy(whole))
    state.add_edge(once, None, twice, "_in0", whole)
    state.add_edge(bias.src, None, twice, "_in1", copy.deepcopy(bias.data))
    state.add_edge(twice, "_out0", result.dst, None, result.data)
    changed = dt.from_sdfg(sdfg)
    optimizer = sgd(model.parameters())
    first, last = model[0], model[2]  # type: ignore[index]
    for _ in range(3):
        x, y = batch()
        expected = eager(model, optimizer, lambda x=x, y=y: F.mse_loss(last(first(x) + first.bias), y))  # type: ignore[misc]
        torch.testing.assert_close(changed(x, y), expected)
    for ours, theirs in zip(step.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)


def test_a_changed_step_is_changed_further() -> None:
    (step,) = steps("mlp", 1, sgd)
    model = copy.deepcopy(step.model)
    model[1] = nn.Tanh()  # type: ignore[operator]
    sdfg = step.sdfg(*batch(), extent="loss")
    operators(sdfg, "relu")[0][1].operator = "sigmoid()"
    again = dt.from_sdfg(sdfg).sdfg(*batch())
    operators(again, "sigmoid")[0][1].operator = "tanh()"
    assert_trains_as(dt.from_sdfg(again, step), model, "mlp")


# ---- modules --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NETWORKS)
def test_an_unchanged_module(name: str) -> None:
    torch.manual_seed(3)
    model = NETWORKS[name][0]()
    x, y = NETWORKS[name][1]()
    ours, theirs = dt.optimize(model), dt.optimize(copy.deepcopy(model))
    changed = dt.from_sdfg(ours.sdfg(x))
    for _ in range(2):
        results = []
        for m in (changed, theirs):
            torch.manual_seed(5)
            out = m(x)
            NETWORKS[name][2](out, y).backward()
            results.append([out, *(p.grad for p in m.parameters()), *m.buffers()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_changed_module_with_and_without_gradients() -> None:
    model = mlp()
    theirs = copy.deepcopy(model)
    theirs[1] = nn.Tanh()  # type: ignore[operator]
    x, _ = batch()
    sdfg = dt.to_sdfg(model, x)
    operators(sdfg, "relu")[0][1].operator = "tanh()"
    changed = dt.from_sdfg(sdfg)
    with torch.no_grad():
        torch.testing.assert_close(changed(x), theirs(x))
    for m in (changed, theirs):
        m(x).square().sum().backward()
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad)


def test_sizes_that_vary() -> None:
    step, other = steps("mlp", dynamic=True)
    changed = dt.from_sdfg(step.sdfg(*batch()))
    for size in (6, 5, 9):
        data = batch(size)
        assert torch.equal(changed(*data), other(*data))


# ---- what cannot be -------------------------------------------------------------------------------------------------
def test_other_arguments_are_an_error() -> None:
    (step,) = steps("mlp", 1)
    changed = dt.from_sdfg(step.sdfg(*batch(6)))
    before = [p.clone() for p in step.model.parameters()]
    with pytest.raises(dt.Invalid, match=r"was made from another graph than this call captures: .*f32\[6, 8\]"):
        changed(*batch(5))
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    assert changed(*batch(6)) > 0
    module = dt.from_sdfg(dt.to_sdfg(step.model, batch(6)[0]))
    with pytest.raises(dt.Invalid, match="was made from another graph"):
        module(batch(5)[0])


def test_a_changed_model_is_an_error() -> None:
    step = steps("convnet", 1)[0]
    data = NETWORKS["convnet"][1]()
    changed = dt.from_sdfg(step.sdfg(*data))
    step.model.act = nn.Tanh()
    with pytest.raises(dt.Invalid, match="the model, its mode or its arguments are others"):
        changed(*data)


def test_changes_that_do_not_fit_are_errors() -> None:
    (step,) = steps("mlp", 1)

    def changed(change: Callable[[dace.SDFG, dace.SDFGState, Any], None]) -> Any:
        sdfg = step.sdfg(*batch(), extent="loss")
        change(sdfg, *operators(sdfg, "relu")[0])
        return dt.from_sdfg(sdfg)

    def loses_its_operand(sdfg: dace.SDFG, state: dace.SDFGState, node: Any) -> None:
        state.remove_edge(state.in_edges(node)[0])

    def part_of_an_array(sdfg: dace.SDFG, state: dace.SDFGState, node: Any) -> None:
        state.in_edges(node)[0].data.subset = dace.subsets.Range.from_string("0:3, 0:16")

    def another_type(sdfg: dace.SDFG, state: dace.SDFGState, node: Any) -> None:
        sdfg.arrays[state.out_edges(node)[0].data.data].dtype = dace.float64

    def another_shape(sdfg: dace.SDFG, state: dace.SDFGState, node: Any) -> None:
        node.operator = "permute(dims=(1, 0))"

    def a_tasklet(sdfg: dace.SDFG, state: dace.SDFGState, node: Any) -> None:
        state.add_tasklet("own", {}, {}, "pass")

    def unknown(sdfg: dace.SDFG, state: dace.SDFGState, node: Any) -> None:
        node.operator = "relux()"

    for change, message in (
        (loses_its_operand, "nothing is connected to _in0 of relu"),
        (part_of_an_array, "operators read and write whole arrays"),
        (another_type, r"describes relu as double\[6, 16\] .*, its operator makes f32\[6, 16\]"),
        (another_shape, r"SDFG '.*': matmul expects .* \(at 2"),
        (a_tasklet, "which is no operator"),
        (unknown, "relux"),
    ):
        with pytest.raises(dt.Invalid, match=message):
            changed(change)


def test_results_that_do_not_fit_are_an_error() -> None:
    (step,) = steps("mlp", 1)
    sdfg = step.sdfg(*batch(), extent="loss")
    ((state, loss),) = operators(sdfg, "mse_loss")
    loss.operator = 'mse_loss(reduction="none")'
    name = state.out_edges(loss)[0].data.data
    sdfg.arrays[name].set_shape((6, 4), (4, 1))
    state.out_edges(loss)[0].data.subset = dace.subsets.Range.from_array(sdfg.arrays[name])
    with pytest.raises(dt.Invalid, match=r"has other results than the step: .* is f32\[6, 4\], expected f32\[\]"):
        dt.from_sdfg(sdfg)(*batch())


def test_owners() -> None:
    (step,) = steps("mlp", 1)
    sdfg = step.sdfg(*batch())
    with pytest.raises(dt.Invalid, match="is one of a training step, given Sequential"):
        dt.from_sdfg(sdfg, step.model)
    with pytest.raises(dt.Invalid, match="is one of a module, given TrainingStep"):
        dt.from_sdfg(dt.to_sdfg(step.model, batch()[0]), step)
    own = dace.SDFG("own")
    with pytest.raises(dt.Invalid, match="'own' is not one of a training step or a module"):
        dt.from_sdfg(own)
    with pytest.raises(dt.Invalid, match="from_sdfg takes an SDFG, given str"):
        dt.from_sdfg("step.sdfg")
    note_source(sdfg, source_of(sdfg).replace('"token": "', '"token": "of another process '))
    with pytest.raises(dt.Invalid, match="what .* was made from is not in this process"):
        dt.from_sdfg(sdfg)


def test_nothing_runs_in_its_place() -> None:
    (step,) = steps("mlp", 1)
    changed = dt.from_sdfg(step.sdfg(*batch()))
    step.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(dt.Unsupported, match="the optimizer has a hook"):
        changed(*batch())
    module = dt.from_sdfg(dt.to_sdfg(mlp(), batch()[0]))
    out = module(batch()[0])
    with pytest.raises(dt.Unsupported, match="no gradient of a gradient"):
        torch.autograd.grad(out.sum(), list(module.parameters()), create_graph=True)
    with pytest.raises(dt.Unsupported, match="torch.func"):
        torch.func.vmap(module)(torch.randn(6, 6, 8))
    with pytest.raises(dt.Invalid, match="neither copied nor pickled"):
        copy.deepcopy(module)


def test_micro_batches_and_a_first_step_of_its_own_are_refused() -> None:
    model = mlp()
    parts = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.1), micro_batches=2)
    with pytest.raises(dt.Invalid, match="micro-batches, which are several programs"):
        parts.sdfg(*batch())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.5)
    step = dt.training_step(model, F.mse_loss, optimizer)
    changed = dt.from_sdfg(step.sdfg(*batch()))
    with pytest.raises(dt.Invalid, match="run the unchanged step once before"):
        changed(*batch())
    step(*batch())
    assert changed(*batch()) > 0
