"""Recurrent layers, after ONNX's equations: gates of LSTM in the order i o f c, of GRU in the order z r h."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from daceml_train.errors import Unsupported
from daceml_train.frontends.onnx.rules import rule

Step = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]
Activation = Callable[[Tensor], Tensor]


def _activations(
    names: Sequence[str] | None, alpha: Sequence[float], beta: Sequence[float], usual: Sequence[str], directions: int
) -> list[Activation]:
    """One function per gate and direction; alpha and beta are taken, in order, by those that have any."""
    chosen = list(names) if names else list(usual) * directions
    alphas, betas = iter(alpha), iter(beta)
    return [_activation(name.lower(), alphas, betas) for name in chosen]


def _activation(name: str, alphas: Any, betas: Any) -> Activation:
    simple: dict[str, Activation] = {
        "relu": torch.relu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "softsign": F.softsign,
        "softplus": F.softplus,
    }
    if name in simple:
        return simple[name]
    if name == "affine":
        a, b = next(alphas, 1.0), next(betas, 0.0)
        return lambda x: a * x + b
    if name == "scaledtanh":
        a, b = next(alphas, 1.0), next(betas, 1.0)
        return lambda x: a * torch.tanh(b * x)
    if name == "hardsigmoid":
        a, b = next(alphas, 0.2), next(betas, 0.5)
        return lambda x: torch.clamp(a * x + b, 0, 1)
    if name == "leakyrelu":
        a = next(alphas, 0.01)
        return lambda x: F.leaky_relu(x, a)
    if name == "thresholdedrelu":
        a = next(alphas, 1.0)
        return lambda x: torch.where(x > a, x, torch.zeros_like(x))
    if name == "elu":
        a = next(alphas, 1.0)
        return lambda x: F.elu(x, a)
    raise Unsupported(f"there is no activation {name!r}")


def _run(
    x: Tensor, lengths: Tensor | None, backwards: bool, state: tuple[Tensor, ...], step: Step
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One direction over x [time, batch, gates]; beyond an entry's length its state stays and its output is 0."""
    time = x.shape[0]
    results: list[Tensor] = []
    for t in reversed(range(time)) if backwards else range(time):
        new = step(x[t], state)
        if lengths is None:
            state = new
            results.append(state[0])
        else:
            within = (t < lengths)[:, None]
            state = tuple(torch.where(within, a, b) for a, b in zip(new, state, strict=True))
            results.append(torch.where(within, new[0], torch.zeros_like(new[0])))
    return torch.stack(results[::-1] if backwards else results), state


def _layer(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    states: Sequence[Tensor | None],
    direction: str,
    layout: int,
    hidden: int,
    outputs: int,
    steps: Callable[[int, Tensor, Tensor], Step],
) -> tuple[Tensor, ...]:
    """All directions: input matmuls of all steps at once, then the recurrence."""
    if layout:
        x = x.transpose(0, 1)
        states = [None if state is None else state.transpose(0, 1) for state in states]
    batch = x.shape[1]
    sequences, finals = [], []
    for d in range(weight.shape[0]):
        backwards = direction == "reverse" or d == 1
        first, second = bias[d].chunk(2) if bias is not None else (None, x.new_zeros(recurrence.shape[1]))
        state = tuple(x.new_zeros(batch, hidden) if s is None else s[d] for s in states)
        sequence, final = _run(
            F.linear(x, weight[d], first), lengths, backwards, state, steps(d, recurrence[d], second)
        )
        sequences.append(sequence)
        finals.append(final)
    y = torch.stack(sequences, 1)
    last = [torch.stack([final[i] for final in finals]) for i in range(len(states))]
    if layout:
        y, last = y.permute(2, 0, 1, 3), [state.transpose(0, 1) for state in last]
    return (y, *last)[:outputs]


def _clipped(x: Tensor, clip: float | None) -> Tensor:
    return x if clip is None else x.clamp(-clip, clip)


@rule("LSTM", since=7)
def lstm(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    hidden: Tensor | None = None,
    cell: Tensor | None = None,
    peephole: Tensor | None = None,
    *,
    activation_alpha: tuple[float, ...] = (),
    activation_beta: tuple[float, ...] = (),
    activations: tuple[str, ...] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
    outputs: int,
) -> tuple[Tensor, ...]:
    usual = ("Sigmoid", "Tanh", "Tanh")
    functions = _activations(activations, activation_alpha, activation_beta, usual, weight.shape[0])

    def steps(d: int, matrix: Tensor, added: Tensor) -> Step:
        f, g, h = functions[3 * d : 3 * d + 3]
        pi, po, pf = peephole[d].chunk(3) if peephole is not None else (None, None, None)

        def step(now: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            before, c = state
            i, o, forget, candidate = (now + F.linear(before, matrix, added)).chunk(4, 1)
            i = f(_clipped(i if pi is None else i + pi * c, clip))
            forget = 1 - i if input_forget else f(_clipped(forget if pf is None else forget + pf * c, clip))
            c = forget * c + i * g(_clipped(candidate, clip))
            o = f(_clipped(o if po is None else o + po * c, clip))
            return o * h(c), c

        return step

    size = hidden_size or recurrence.shape[-1]
    return _layer(x, weight, recurrence, bias, lengths, (hidden, cell), direction, layout, size, outputs, steps)


@rule("GRU", since=7)
def gru(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    hidden: Tensor | None = None,
    *,
    activation_alpha: tuple[float, ...] = (),
    activation_beta: tuple[float, ...] = (),
    activations: tuple[str, ...] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
    outputs: int,
) -> tuple[Tensor, ...]:
    functions = _activations(activations, activation_alpha, activation_beta, ("Sigmoid", "Tanh"), weight.shape[0])
    size = hidden_size or recurrence.shape[-1]

    def steps(d: int, matrix: Tensor, added: Tensor) -> Step:
        f, g = functions[2 * d : 2 * d + 2]

        def step(now: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            (before,) = state
            gates = now[:, : 2 * size] + F.linear(before, matrix[: 2 * size], added[: 2 * size])
            z, r = f(_clipped(gates, clip)).chunk(2, 1)
            if linear_before_reset:
                inner = r * F.linear(before, matrix[2 * size :], added[2 * size :])
            else:
                inner = F.linear(r * before, matrix[2 * size :], added[2 * size :])
            candidate = g(_clipped(now[:, 2 * size :] + inner, clip))
            return ((1 - z) * candidate + z * before,)

        return step

    return _layer(x, weight, recurrence, bias, lengths, (hidden,), direction, layout, size, outputs, steps)


@rule("RNN", since=7)
def rnn(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    hidden: Tensor | None = None,
    *,
    activation_alpha: tuple[float, ...] = (),
    activation_beta: tuple[float, ...] = (),
    activations: tuple[str, ...] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    outputs: int,
) -> tuple[Tensor, ...]:
    functions = _activations(activations, activation_alpha, activation_beta, ("Tanh",), weight.shape[0])

    def steps(d: int, matrix: Tensor, added: Tensor) -> Step:
        def step(now: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (functions[d](_clipped(now + F.linear(state[0], matrix, added), clip)),)

        return step

    size = hidden_size or recurrence.shape[-1]
    return _layer(x, weight, recurrence, bias, lengths, (hidden,), direction, layout, size, outputs, steps)
