"""Three optimizer steps of a model, eagerly, through `optimize` and through `training_step`, and how they compare.

After the steps of a loop the model is evaluated once, without gradients.

Eager execution in float32 is compared with a float64 run of the same model. A compiled result may be as far from
float64 as ten times eager is, or as 2e-5 of the tensor's largest element, whichever is more; elements of gradients that
are small beside those of other parameters are measured by a thousandth of the typical largest element, since there
float32 holds rounding alone. Networks of images have two eager runs, one of them channels-last: where an activation is
at a kink, the last bit decides, and which one it is depends on how PyTorch happens to sum. Where that is not enough,
eager execution runs with noise in the last bit (`benchmarks.noise`), and a result may be three times as far off as the
farthest of those runs; the outcome says so. Where that is not enough either, trajectories have parted: a step may take
an activation across a kink, and all that follows is another training run. Then every step is compared with eager runs
from the very parameters that it began with, and its update with that of its own gradients. A model that hard-codes
float32 has no float64 run: it is compared with eager, at 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from benchmarks.models.model import Batch, Model
from benchmarks.models.sizes import batches
from benchmarks.noise import Rounding

STEPS, CALLS = 3, 12
MOMENTUM = 0.9
FACTOR, FLOOR, FLOOR_WITHOUT_REFERENCE = 10.0, 2e-5, 1e-4
NOISY_RUNS, NOISE_FACTOR = 6, 3.0
"""Runs of eager execution with noise, and how much farther than they a result may be: few do not find the farthest."""


@dataclass
class Step:
    """What one step computed: the loss, and each gradient; None for a parameter that got none."""

    loss: Tensor
    gradients: dict[str, Tensor | None]


@dataclass
class Run:
    """Three steps, and the state after them."""

    steps: list[Step] = field(default_factory=list)
    starts: list[dict[str, Tensor]] = field(default_factory=list)
    """The model's state before each step and after the last one, if requested."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    evaluated: dict[str, Tensor] = field(default_factory=dict)
    """The model's results after the steps, in evaluation mode without gradients; none for a step as one program."""


def optimizer_of(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Momentum, so that each step shows in the next ones; no Adam, whose first steps are signs of rounding errors."""
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)


def train(
    row: Model,
    model: nn.Module,
    called: nn.Module,
    batch: Batch,
    steps: int = STEPS,
    keep: bool = False,
    objective: Callable[[Any], Tensor] | None = None,
) -> Run:
    """Steps in a loop of PyTorch's own, of `model` called through `called`; the last one on another batch size."""
    optimizer, objective = optimizer_of(model, row.rate), objective or row.objective
    run = Run()
    for given in batches(row, batch, steps):
        if keep:
            run.starts.append(_state(model))
        optimizer.zero_grad()
        loss = objective(called(**given))
        loss.backward()
        run.steps.append(_step(model, loss))
        optimizer.step()
    if keep:
        run.starts.append(_state(model))
    _finished(run, model)
    if called is model:
        run.evaluated = evaluated(model, model, batch)
    return run


def evaluated(model: nn.Module, called: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that `model`, called through `called`, returns in evaluation mode without gradients, by position.

    It is training before and after. What is compiled is called until it runs without Python, and Python itself runs
    instructions that it has specialized.
    """
    model.eval()
    with torch.no_grad():
        for _ in range(1 if called is model else CALLS):
            results = pytree.tree_leaves(called(**batch))
    model.train()
    return {str(i): result.clone() for i, result in enumerate(results) if isinstance(result, Tensor)}


def retrace(row: Model, model: nn.Module, batch: Batch, starts: Sequence[Mapping[str, Tensor]]) -> Run:
    """Loss and gradients of eager execution from the state before each step of another run."""
    run = Run()
    for state, given in zip(starts[:-1], batches(row, batch, len(starts) - 1), strict=True):
        model.load_state_dict(state)
        model.zero_grad()
        loss = row.objective(model(**given))
        loss.backward()
        run.steps.append(_step(model, loss))
    return run


def updates(row: Model, run: Run) -> str:
    """What of a run's parameters is not its own gradients' update; an empty text if there is nothing."""
    momentum: dict[str, Tensor] = {}
    for number, step in enumerate(run.steps):
        for name, gradient in step.gradients.items():
            before, after = run.starts[number][name].double(), run.starts[number + 1][name].double()
            moved = torch.zeros_like(before)
            if gradient is not None:
                momentum[name] = MOMENTUM * momentum.get(name, moved) + gradient.to_dense().double()
                moved = row.rate * momentum[name]
            error, size = float((before - moved - after).abs().max()), float(before.abs().max() + moved.abs().max())
            if not error <= 1e-6 * size:
                return f"the update of {name} in step {number} is off by {error:.1e}"
    return ""


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_with_noise(row: Model, seed: int) -> Run:
    """The same in eager execution with noise in the last bit of every result, and of the operands of every matmul."""
    model, batch = row.build()
    with Rounding(seed, terms=True):
        return train(row, model, model, batch)


def train_whole(row: Model, step: Any, model: nn.Module, batch: Any, steps: int = STEPS, keep: bool = False) -> Run:
    """The same by a `training_step` that keeps gradients."""
    run = Run()
    for given in batches(row, batch, steps):
        if keep:
            run.starts.append(_state(model))
        loss = step(given)
        run.steps.append(_step(model, loss))
    if keep:
        run.starts.append(_state(model))
    return _finished(run, model)


def _step(model: nn.Module, loss: Tensor) -> Step:
    gradients = {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}
    return Step(loss.detach().clone(), gradients)


def _finished(run: Run, model: nn.Module) -> Run:
    run.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    run.buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
    return run


def difference(ours: Run, eager: Run, exact: Run | None, others: Sequence[Run] = (), noisy: Sequence[Run] = ()) -> str:
    """The first thing that differs, or an empty text; `others` are further eager runs, `noisy` those with noise."""
    reference = eager if exact is None else exact
    for number, (a, b, c) in enumerate(zip(ours.steps, eager.steps, reference.steps, strict=True)):
        beside, shaken = [run.steps[number] for run in others], [run.steps[number] for run in noisy]
        runs, noises = [b.loss, *(step.loss for step in beside)], [step.loss for step in shaken]
        if message := _differs(a.loss, runs, noises, c.loss, 0.0, exact is not None):
            return f"loss of step {number}: {message}"
        typical = _typical([g for g in c.gradients.values() if g is not None])
        for name, gradient in b.gradients.items():
            found = a.gradients[name]
            if (found is None) != (gradient is None):
                return f"gradient of {name} in step {number}: there is {'none' if found is None else 'one'}"
            if gradient is None or found is None:
                continue
            other = c.gradients[name]
            assert other is not None
            runs = [gradient, *(g for step in beside if (g := step.gradients[name]) is not None)]
            noises = [g for step in shaken if (g := step.gradients[name]) is not None]
            if message := _differs(found, runs, noises, other, typical, exact is not None):
                return f"gradient of {name} in step {number}: {message}"
    for kind in ("parameters", "buffers", "evaluated"):
        found, expected, other = getattr(ours, kind), getattr(eager, kind), getattr(reference, kind)
        if kind == "evaluated" and not found:
            continue
        if found.keys() != expected.keys():
            return f"{kind} are {sorted(found)} instead of {sorted(expected)}"
        for name, value in expected.items():
            runs = [value, *(getattr(run, kind)[name] for run in others)]
            noises = [getattr(run, kind)[name] for run in noisy]
            if message := _differs(found[name], runs, noises, other[name], 0.0, exact is not None):
                return f"{kind}, {name} after {len(eager.steps)} steps: {message}"
    return ""


def _typical(tensors: Sequence[Tensor]) -> float:
    largest = [float(t.to_dense().abs().max()) for t in tensors if t.numel()]
    return sorted(largest)[len(largest) // 2] if largest else 0.0


def _differs(
    ours: Tensor, runs: Sequence[Tensor], noises: Sequence[Tensor], exact: Tensor, typical: float, referenced: bool
) -> str:
    eager = runs[0]
    if ours.layout is not eager.layout:
        return f"{ours.layout} instead of {eager.layout}"
    ours, eager, exact, runs = ours.to_dense(), eager.to_dense(), exact.to_dense(), [run.to_dense() for run in runs]
    if ours.dtype is not eager.dtype or ours.shape != eager.shape:
        return f"{ours.dtype}{list(ours.shape)} instead of {eager.dtype}{list(eager.shape)}"
    if not eager.numel():
        return ""
    if not eager.is_floating_point():
        return "" if torch.equal(ours, eager) else f"{int((ours != eager).sum())} of {eager.numel()} elements"
    a, c = ours.double(), exact.double()
    if not bool(eager.isfinite().all()):
        return "" if torch.equal(a.isfinite(), eager.isfinite()) else "infinite in other places"
    scale = max(float(c.abs().max()), 1e-3 * typical)
    floor = FLOOR if referenced else FLOOR_WITHOUT_REFERENCE
    allowed = FACTOR * max(_farthest(b, c) for b in runs) + floor * scale
    allowed = max(allowed, NOISE_FACTOR * max((_farthest(b, c) for b in noises), default=0.0))
    error = float((a - c).abs().max())
    if error <= allowed:
        return ""
    at = int((a - c).abs().nan_to_num(torch.inf).argmax())
    return f"off by {error:.1e} where {allowed:.1e} is allowed: {a.flatten()[at]:.6g} instead of {c.flatten()[at]:.6g}"


def _farthest(x: Tensor, exact: Tensor) -> float:
    return float((x.to_dense().double() - exact).abs().nan_to_num().max())
