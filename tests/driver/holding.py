"""Holds a module to eager execution: results and what they share memory with, gradients, inputs, state, twice over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import daceml_train as dt
from daceml_train.driver.module import state_of


class Function(nn.Module):
    """A function of `x` and a weight as a module."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1, max(1, int(torch.tensor(shape).prod()))).view(shape))

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self.function(self.weight, *inputs, **keywords)


def leaves(value: Any) -> list[Any]:
    """The leaves of a result; dataclasses count as their fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not isinstance(value, dict):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return [leaf for entry in value for leaf in leaves(entry)]
    found = pytree.tree_leaves(value)
    return [x for leaf in found for x in (leaves(leaf) if dataclasses.is_dataclass(leaf) else [leaf])]


def total(result: Any) -> Tensor:
    """A loss to which every differentiable leaf contributes in its own way."""
    parts = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    results = [
        (i + 1) * (p * p.detach().cos() + p * torch.arange(p.numel()).view(p.shape)).sum() for i, p in enumerate(parts)
    ]
    return torch.stack([m.float() for m in results]).sum() / 10


def aliasing(result: Any, inputs: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """What each leaf is: an input itself, what it shares memory with, its strides, whether it needs a gradient."""
    tensors = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
    held = [*inputs, *tensors]
    described = []
    for leaf in tensors:
        same = [i for i, other in enumerate(inputs) if leaf is other]
        sharing = [i for i, other in enumerate(held) if _storage(other) == _storage(leaf)]
        offset = leaf.storage_offset() if any(i < len(inputs) for i in sharing) else 0
        described.append((same, sharing, offset, leaf.dtype, leaf.shape, leaf.requires_grad))
    return described


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def close(found: Any, expected: Any, what: str, tolerance: float) -> None:
    if not isinstance(expected, Tensor):
        assert found == expected or found is expected, what
        return
    assert isinstance(found, Tensor), f"{what}: {found} for {expected}"
    scale = (
        expected.abs().nan_to_num(0, 0, 0).max().item()
        if expected.is_floating_point() and expected.layout is torch.strided and expected.numel()
        else 1
    )
    scale = max(float(scale), 1.0)
    torch.testing.assert_close(
        found, expected, rtol=0, atol=tolerance * scale, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def hold_module(
    make: Callable[[], nn.Module],
    arguments: Callable[[], tuple[Any, ...]],
    *,
    calls: int = 2,
    breaks: str | None = None,
    tolerance: float = 2e-5,
    **keywords: Any,
) -> nn.Module:
    """`optimize(make())` against `make()`; `breaks` is part of the reason why something runs as PyTorch, if it does."""
    theirs, ours = _made(make), _made(make)
    optimized = dt.optimize(ours)
    runs = []
    for called, owner in ((theirs, theirs), (optimized, ours)):
        record: list[tuple[str, Any]] = []
        for call in range(calls):
            torch.manual_seed(call)
            given = arguments()
            tensors = [t for t in pytree.tree_leaves((given, keywords)) if isinstance(t, Tensor)]
            result = called(*given, **keywords)
            record.append((f"call {call} aliasing", aliasing(result, tensors)))
            record += [(f"call {call} result {i}", _copied(r)) for i, r in enumerate(leaves(result))]
            differentiable = [r for r in leaves(result) if isinstance(r, Tensor) and r.requires_grad]
            if differentiable:
                total(result).backward()
            record += [(f"call {call} input {i}", _copied(t)) for i, t in enumerate(tensors)]
            record += [(f"call {call} gradient of input {i}", _copied(_grad(t))) for i, t in enumerate(tensors)]
            record += [(f"call {call} gradient of {n}", _copied(p.grad)) for n, p in owner.named_parameters()]
            record += [(f"call {call} state {n}", _copied(b)) for n, b in owner.state_dict().items()]
        runs.append(record)
    assert [n for n, _ in runs[0]] == [n for n, _ in runs[1]]
    for (name, expected), (_, found) in zip(*runs, strict=True):
        close(found, expected, name, tolerance)
    state = state_of(optimized)
    assert state is not None
    _check_breaks(state.backend.breaks, breaks)
    return optimized


def hold_step(
    make: Callable[[], nn.Module],
    arguments: Callable[[], tuple[Any, ...]],
    *,
    calls: int = 3,
    breaks: str | None = None,
    tolerance: float = 2e-5,
) -> Any:
    """`training_step` on `make()` against PyTorch's loop, with SGD with momentum."""
    theirs, ours = _made(make), _made(make)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (theirs, ours)]
    step = dt.training_step(ours, total, optimizers[1], keep_gradients=True)
    for call in range(calls):
        torch.manual_seed(call)
        given = arguments()
        optimizers[0].zero_grad()
        loss = total(theirs(*given))
        loss.backward()
        optimizers[0].step()
        torch.manual_seed(call)
        again = arguments()
        found = step(again)
        close(found, loss.detach(), f"loss {call}", 10 * tolerance)
        for i, (a, b) in enumerate(zip(pytree.tree_leaves(again), pytree.tree_leaves(given), strict=True)):
            close(_copied(a), _copied(b), f"call {call} input {i}", tolerance)
            close(_grad(a), _grad(b), f"call {call} gradient of input {i}", 10 * tolerance)
        for (n, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            close(p.grad, q.grad, f"call {call} gradient of {n}", 10 * tolerance)
        for (n, b), c in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
            close(b, c, f"call {call} state {n}", 10 * tolerance)
    _check_breaks(step.breaks, breaks)
    return step


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(1)
    return make()


def _check_breaks(found: Sequence[str], expected: str | None) -> None:
    if expected is None:
        assert not found, f"ran as PyTorch: {list(found)}"
    elif expected:
        assert any(expected in reason for reason in found), f"expected {expected!r} among {list(found)}"


def _grad(leaf: Any) -> Any:
    return leaf.grad if isinstance(leaf, Tensor) and leaf.is_leaf else None


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
