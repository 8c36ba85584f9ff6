"""What "trains to the same numbers" means, as checks that all tests of the driver share.

Eager float32 execution is compared with a float64 run of the same model: a compiled result may be as far from float64
as three times eager is, or within 1e-5 of eager (gradients, in the maximum norm), whichever allows more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.module import state_of
from tests.driver.networks import Problem

Optimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Run:
    """What a training run leaves."""

    losses: list[float] = field(default_factory=list)
    first_gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    state: dict[Any, Any] = field(default_factory=dict)


def eager(problem: Problem, optimizer: Optimizer, steps: int, dtype: torch.dtype = torch.float32) -> Run:
    model, batch = problem.build(dtype)
    return _loop(model, model, problem, batch, optimizer(model.parameters()), steps)


def through_optimize(problem: Problem, optimizer: Optimizer, steps: int) -> Run:
    """The compiled module in a loop of PyTorch's own. Nothing may have been left to eager execution."""
    model, batch = problem.build()
    compiled = dt.optimize(model)
    run = _loop(model, compiled, problem, batch, optimizer(compiled.parameters()), steps)
    assert_compiled(compiled)
    return run


def through_step(problem: Problem, optimizer: Optimizer, steps: int) -> Run:
    """The whole step as one program."""
    model, (inputs, *targets) = problem.build()
    result = optimizer(model.parameters())
    step = dt.training_step(model, problem.loss, result, keep_gradients=True)
    run = Run()
    for _ in range(steps):
        run.losses.append(float(step(inputs, *targets)))
        if not run.first_gradients:
            run.first_gradients = gradients(model)
    assert step.breaks == []
    _finish(run, model, result)
    return run


def _loop(
    model: nn.Module, called: nn.Module, problem: Problem, batch: Any, optimizer: torch.optim.Optimizer, steps: int
) -> Run:
    run = Run()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = problem.loss(called(batch[0]), *batch[1:])
        loss.backward()
        if not run.first_gradients:
            run.first_gradients = gradients(model)
        optimizer.step()
        run.losses.append(float(loss.detach()))
    _finish(run, model, optimizer)
    return run


def _finish(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    run.buffers = {n: b.clone() for n, b in model.named_buffers()}
    run.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    run.state = optimizer.state_dict()["state"]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_compiled(module: nn.Module, graphs: int | None = None) -> None:
    """Nothing of `module` ran as PyTorch runs it; optionally in this many compilations."""
    state = state_of(module)
    assert state is not None and state.backend.breaks == []
    assert state.backend.graphs > 0
    assert graphs is None or state.backend.graphs == graphs


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest element of `b`."""
    a, b = a.detach().double(), b.detach().double()
    scale = float(b.abs().max()) if b.numel() else 0.0
    return float((a - b).abs().max()) / (scale or 1.0) if b.numel() else 0.0


def assert_tensors_conform(
    found: Mapping[str, Tensor], eager: Mapping[str, Tensor], exact: Mapping[str, Tensor], allowed: float = 1e-5
) -> None:
    """Each tensor is within `allowed` of eager's, or no further from float64 than three times eager."""
    assert found.keys() == eager.keys()
    for name, tensor in found.items():
        assert tensor.dtype is eager[name].dtype and tensor.shape == eager[name].shape, name
        if not tensor.is_floating_point():
            assert torch.equal(tensor, eager[name]), name
            continue
        of_eager, of_exact = distance(tensor, eager[name]), distance(tensor, exact[name])
        limit = 3 * distance(eager[name], exact[name])
        assert of_eager <= allowed or of_exact <= limit, f"{name}: {of_eager:.1e} from eager, {of_exact:.1e} from exact"


def assert_losses_conform(found: Run, eager: Run, exact: Run) -> None:
    """Within 1e-3 of eager over the first ten steps; after that as near to float64 as eager, up to a factor of 3."""
    pairs = list(zip(found.losses, eager.losses, exact.losses, strict=True))
    for number, (a, b, _) in enumerate(pairs[:10]):
        assert abs(a - b) <= 1e-3 * abs(b), f"step {number}: {a} instead of {b}"
    floor = 1e-4 * abs(exact.losses[0])
    ours, theirs = (max(abs(p[k] - p[2]) for p in pairs) for k in (0, 1))
    assert ours <= max(3 * theirs, floor), f"{ours:.1e} from float64, eager {theirs:.1e}"


def assert_conforms(
    problem: Problem, optimizer: Optimizer, run: Callable[[Problem, Optimizer, int], Run], steps: int = 10
) -> None:
    """Gradients, losses and buffers of `run` are as near to float64 as eager execution's."""
    theirs, exact = eager(problem, optimizer, steps), eager(problem, optimizer, steps, torch.float64)
    ours = run(problem, optimizer, steps)
    assert_tensors_conform(ours.first_gradients, theirs.first_gradients, exact.first_gradients)
    assert_losses_conform(ours, theirs, exact)
    assert_tensors_conform(ours.buffers, theirs.buffers, exact.buffers, 1e-4)
    assert ours.state.keys() == theirs.state.keys()
    for key, entry in theirs.state.items():
        assert ours.state[key].keys() == entry.keys()
        tensors = {n: t for n, t in entry.items() if isinstance(t, Tensor)}
        found = {n: ours.state[key][n] for n in tensors}
        assert_tensors_conform(found, tensors, exact.state[key], 1e-3)


def losses_beside(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    step: Callable[[Tensor], Tensor],
    x: Tensor,
    seed: int = 0,
) -> list[Tensor]:
    """The losses of one step of each model by PyTorch's optimizer, and of a compiled step; mean squares of results.

    Each begins with the same random stream.
    """
    losses = []
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.manual_seed(seed)
    return [*losses, step(x)]
