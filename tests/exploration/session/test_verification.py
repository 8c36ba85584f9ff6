"""verify and measure run the compiled program; what is wrong is found, by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.errors import Invalid
from daceml_train.exploration import Session
from daceml_train.exploration.session.eager_copy import EagerCopy, Named
from daceml_train.exploration.session.measurement import Measurement, Timed, in_turn
from daceml_train.exploration.session.program import Inputs, cotangents
from daceml_train.exploration.session.verification import SAMPLE, Check, Verification, _compared, sampled
from daceml_train.graph.graph import Graph
from daceml_train.ops.elementwise import Full
from daceml_train.passes.base import Pass
from tests.exploration.models import perceptron, session


def wrong(kind: str, pipeline: dt.Pipeline | None = dt.TRAINING) -> Session:
    return session(kind, model=perceptron(), optimizer="sgd", pipeline=pipeline)


@dataclass(frozen=True)
class _Scales(Pass):
    """A pass that is wrong: one gradient is a hundredth too large."""

    level = "intra_operator"

    def run(self, graph: Graph) -> Graph:
        other = graph.copy()
        last = next(n for n in reversed(other.nodes) if n.op.label == "reduce.sum" and "0" in n.origin.module)
        at = other.nodes.index(last)
        rest, other.nodes = other.nodes[at + 1 :], other.nodes[: at + 1]
        (factor,) = other.emit(Full(1.01, (), other.tensors[last.outputs[0]].dtype))
        scaled = other.value(last.outputs[0]) * factor
        swap = {last.outputs[0]: scaled.name}
        other.nodes += [type(n)(n.op, tuple(swap.get(i, i) for i in n.inputs), n.outputs, n.origin) for n in rest]
        other.outputs = [swap.get(name, name) for name in other.outputs]
        return other


@pytest.mark.compiled
@pytest.mark.parametrize("kind", ["module", "loss", "step"])
def test_a_program_is_right(kind: str) -> None:
    result = wrong(kind)
    before = {name: p.clone() for name, p in result.subject.model.named_parameters()}
    told = result.verify()
    assert told, told
    assert told.reference == "PyTorch in float64"
    gradients = {check.name for check in told.checks if check.kind == "gradient"}
    assert gradients == set(before)
    assert ({"update"} <= {c.kind for c in told.checks}) == (kind == "step")
    assert all(check.eager is not None for check in told.checks)
    assert all(torch.equal(p, before[name]) for name, p in result.subject.model.named_parameters())
    assert all(p.grad is None for p in result.subject.model.parameters())


@pytest.mark.compiled
@pytest.mark.parametrize("kind", ["loss", "step"])
def test_a_wrong_pass_is_found_by_tensor(kind: str) -> None:
    pipeline = dt.TRAINING.before("fusion", _Scales())
    told = wrong(kind, pipeline).verify()
    assert not told
    off = {(check.kind, check.name) for check in told.checks if not check.ok}
    assert ("gradient", "0.bias") in off
    assert off <= {("gradient", "0.bias"), ("update", "0.bias")}
    assert "are wrong" in str(told)


class _Returns(nn.Module):
    """Returns its input and a tensor with a view, or parts of a tensor that it does not return itself."""

    def __init__(self, parts: bool) -> None:
        super().__init__()
        self.fc, self.parts = nn.Linear(4, 4), parts

    def forward(self, x: torch.Tensor) -> Any:
        h = self.fc(x)
        return (h[0], h[1]) if self.parts else (x, h, h.view(-1), h.exp(), h)


@pytest.mark.compiled
@pytest.mark.parametrize("parts", [False, True])
def test_results_that_share_memory(parts: bool) -> None:
    result = Session(_Returns(parts), torch.randn(3, 4))
    told = result.verify()
    assert told, told
    assert sum(check.kind == "result" for check in told.checks) == (1 if parts else 2)
    assert ("returns parts of a tensor" in str(told)) == (told.reference != "PyTorch in float64") == parts
    copy = EagerCopy(result.subject)
    copy.step(cotangents(result.subject, result.graph, Inputs.of(result.subject)))()
    assert copy.model.fc.weight.grad is not None  # PyTorch's time has the backward pass, too


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(F.relu(self.norm(self.conv(x)))).mean((2, 3))


@pytest.mark.compiled
@pytest.mark.parametrize("random", ["seeded", "eager"])
def test_random_numbers_and_buffers(random: str) -> None:
    model = Net()
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = torch.randn(4, 3, 6, 6), torch.randint(0, 4, (4,))
    result = Session(model, *data, loss=F.cross_entropy, optimizer=adam, pipeline=dt.TRAINING, random=random)  # type: ignore[arg-type]
    told = result.verify()
    assert told, told
    assert ("random='eager' draws the same" in str(told)) == (random == "seeded")
    assert {"norm.running_mean", "norm.num_batches_tracked"} <= {c.name for c in told.checks if c.kind == "buffer"}
    assert not adam.state


TREATMENTS: dict[str, dict[str, Any]] = {
    "clip_norm": {"clip_norm": 0.05},
    "clip_value": {"clip_value": 0.01},
    "scaler": {"scaler": lambda: torch.amp.GradScaler("cpu", init_scale=1024.0)},
    "clipped_and_scaled": {"scaler": lambda: torch.amp.GradScaler("cpu", init_scale=256.0), "clip_norm": 0.05},
    "micro_batches": {"micro_batches": 2},
    "summed_and_clipped": {"micro_batches": 4, "reduction": "sum", "clip_norm": 0.1},
}


@pytest.mark.compiled
@pytest.mark.parametrize("kind", TREATMENTS)
def test_what_a_step_does_to_gradients(kind: str) -> None:
    given = {name: value() if callable(value) else value for name, value in TREATMENTS[kind].items()}
    result = session(model=perceptron(), optimizer="adamw", pipeline=dt.TRAINING, **given)
    told = result.verify()
    assert told, told
    assert told.reference == "PyTorch in float64"
    kinds = {check.kind for check in told.checks}
    assert {"gradient", "update", "state"} <= kinds
    names = {check.name for check in told.checks}
    assert ("gradient norm" in names) == ("clip_norm" in given)
    assert ("_scale of the scaler" in names) == ("scaler" in given)
    if "scaler" in given:
        assert given["scaler"]._scale is None, "the user's scaler must stay as it is"
    plain = session(model=perceptron(), optimizer="adamw", pipeline=dt.TRAINING)
    assert len(result.start.graph.nodes) > len(plain.start.graph.nodes)


def test_gradients_are_treated_in_a_step_only() -> None:
    with pytest.raises(Invalid, match="belong to a step with an optimizer"):
        session("loss", model=perceptron(), clip_norm=1.0)


class Attention(nn.Module):
    """A third of the input projection's bias, that of the keys, has a gradient of zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.drop, self.out = (
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Dropout(0.3),
            nn.Linear(8, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.attend(x, x, x, need_weights=False)[0]).mean(1))


@pytest.mark.compiled
def test_noise_beside_random_numbers_is_measured() -> None:
    model = Attention()
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = torch.randn(3, 5, 8), torch.randint(0, 3, (3,))
    result = Session(model, *data, loss=F.cross_entropy, optimizer=adam)
    told = result.verify()
    assert told, told
    found = {(check.kind, check.name): check for check in told.checks}
    update = found["update", "attend.in_proj_bias"]
    assert update.eager is not None and update.eager > 1e-3, "Adam divides rounding noise by its own size"
    assert found["gradient", "attend.in_proj_bias"].allowed < 1e-4
    assert found["update", "out.weight"].allowed < 1e-3


@pytest.mark.compiled
def test_a_wrong_pass_is_found_beside_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(16, 10), nn.Dropout(0.3), nn.ReLU(), nn.Linear(10, 10))
    result = session("loss", model=model, pipeline=dt.Pipeline(intra_operator=(_Scales(),)))
    told = result.verify()
    assert {(check.kind, check.name) for check in told.checks if not check.ok} == {("gradient", "0.bias")}, told


@pytest.mark.compiled
def test_times_are_taken_in_turn() -> None:
    result = wrong("loss")
    told = result.measure(repeats=3)
    assert list(told.timed) == ["now", "start", "default", "eager"]
    assert all(len(entry.seconds) == 3 for entry in told.timed.values())
    assert told["now"].bytes == told["default"].bytes == result.state.bytes
    assert told["eager"].bytes is None
    assert told["now"].kernels + told["now"].calls > 0
    assert "quartiles" in str(told)
    with pytest.raises(Invalid, match="repeats is a number of runs"):
        result.measure(repeats=0)
    other = wrong("loss", None)
    with pytest.raises(Invalid, match="different models"):
        dt.compare(result, other, measure=True)
    compared = dt.compare(result, dt.TRAINING, measure=True, repeats=2)
    assert compared.times is not None
    assert compared.same
    assert "time" in str(compared)


def test_runs_alternate() -> None:
    order: list[str] = []
    in_turn({name: lambda name=name: order.append(name) for name in "ab"}, 3)  # type: ignore[misc]
    assert "".join(order) == "aabb" + "ababab"


def test_what_the_spread_hides_is_not_told() -> None:
    def timed(name: str, seconds: Sequence[float]) -> Timed:
        return Timed(name, tuple(seconds), 1, 1, 0)

    told = Measurement({"now": timed("now", [1, 2, 3, 4]), "start": timed("start", [2, 3, 4, 5])}, 1)
    assert told.faster("now", "start") is None
    assert "within the spread" in str(told)
    clear = Measurement({"now": timed("now", [1, 1, 1]), "start": timed("start", [3, 3, 3])}, 1)
    assert clear.faster("now", "start") == 3


def test_partial_times_are_not_compared() -> None:
    now, eager = Timed("now", (1.0,), 1, 1, 0), Timed("eager", (3.0, 3.0), None, 0, 0)
    assert "times as fast" not in str(Measurement({"now": now, "eager": eager}, 1))
    assert "3000000.0 us" in str(Measurement({"eager": eager}, 1))


def test_a_first_comparison_has_results_and_a_spread_of_others() -> None:
    ones = torch.ones(3)
    found = {("result", "loss"): ones} | {("gradient", str(i)): ones for i in range(10 * SAMPLE)}
    found |= {("update", "w"): ones, ("state", "step of w"): ones}
    told = sampled(found, dict(found))
    kinds = [check.kind for check in told.checks]
    assert told and kinds.count("result") == 1 and SAMPLE / 2 < len(kinds) - 1 <= SAMPLE and "update" not in kinds
    assert f"{len(kinds)} of {len(found)} tensors so far" in str(told)
    wrong = sampled(found, {**found, ("gradient", "0"): 2 * ones})
    assert not wrong and "WRONG gradient 0" in str(wrong)
    assert not sampled({("result", "loss"): ones}, {("result", "loss"): 1.1 * ones})
    stateless = sampled({("update", "w"): ones}, {("update", "w"): ones})
    assert [check.kind for check in stateless.checks] == ["update"]


def test_noise_is_said_to_be_noise() -> None:
    noisy, right = Check("update", "bias", 1.2, 9.0, 0.9), Check("result", "loss", 1e-8, 2e-5, 1e-8)
    told = Verification((noisy, right), "PyTorch in float64")
    assert told
    assert told.worst is right
    assert "noise update   bias" in str(told)
    nothing = Verification((), "PyTorch in float64")
    assert not nothing
    assert "nothing to compare" in str(nothing)


def test_sessions_and_pipelines_side_by_side() -> None:
    result = session(pipeline=dt.TRAINING)
    told = dt.compare(result, dt.TRAINING.without("fusion"))
    assert told.totals[0] == result.state.totals
    assert told.totals[0].bytes < told.totals[1].bytes
    assert told.totals[0].kernels < told.totals[1].kernels
    assert all(step.startswith("-") for step in told.steps)
    assert "-fuse_siblings()" in told.steps
    differences = [abs(a - b) for a, b in told.modules.values()]
    assert differences == sorted(differences, reverse=True)
    assert sum(b - a for a, b in told.modules.values()) == told.totals[1].bytes - told.totals[0].bytes
    assert dt.compare(result, result).same
    assert told.as_dict()["bytes"] == [told.totals[0].bytes, told.totals[1].bytes]
    with pytest.raises(Invalid, match="compared on a session's model"):
        dt.compare(dt.TRAINING, dt.INFERENCE)
    assert dt.compare(dt.TRAINING, dt.TRAINING, result).same
    with pytest.raises(Invalid, match="session is a Session, given int"):
        dt.compare(result, dt.TRAINING, 3)  # type: ignore[arg-type]
    for other in (session("module", model=result.subject.model), session(optimizer="sgd", model=result.subject.model)):
        with pytest.raises(Invalid, match="different inputs, losses or optimizers"):
            dt.compare(result, other, measure=True)


def test_a_reference_is_in_the_mode_of_the_capture() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0))
    result = Session(model, torch.ones(2, 4), random="eager")
    model.eval()
    assert not EagerCopy(result.subject).forward()[0].any() and not model.training


def test_progress_is_called() -> None:
    result = wrong("loss", None)
    for check in (result.verify, result.measure):
        with pytest.raises(Invalid, match="progress is called during a check, given 3"):
            check(progress=3)  # type: ignore[operator]


@pytest.mark.parametrize(("element", "right"), [(0, True), (1, False)])
def test_an_update_by_a_gradient_of_rounding_is_compared_in_the_state(element: int, right: bool) -> None:
    """The first update by Adam is the sign of the gradient: one that is noise may turn round, no other."""
    torch.manual_seed(0)
    moment = torch.randn(400, dtype=torch.float64)
    moment[0] = 1e-9
    rounded = moment + 1e-8 * torch.randn(400, dtype=torch.float64).clamp(-1, 1)
    update, ours = -1e-3 * moment.sign(), -1e-3 * moment.sign()
    ours[element] *= -1
    exact: Named = {("update", "w"): update, ("state", "exp_avg of w"): moment}
    eager: Named = {("update", "w"): update.float(), ("state", "exp_avg of w"): rounded.float()}
    found: Named = {("update", "w"): ours.float(), ("state", "exp_avg of w"): rounded.float()}
    checks = {check.kind: check.ok for check in _compared(found, [eager], exact)}
    assert checks == {"update": right, "state": True}
