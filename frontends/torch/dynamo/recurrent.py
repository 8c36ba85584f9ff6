"""Recurrent layers over sequences of any length: a loop in the graph, where PyTorch's decomposition is one per length.

TorchDynamo traces these functions in place of `torch.lstm`, `gru`, `rnn_tanh`, and `rnn_relu` once a length is a
symbol, so that one program serves sequences of all lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.variables import UserFunctionVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._higher_order_ops.scan import scan

from daceml_train.frontends.torch.traces import Traces

States = tuple[Tensor, ...]


def _lstm_step(states: States, given: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> States:
    h, c = states
    i, f, g, o = (given + F.linear(h, weights[0], bias)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (F.linear(h, weights[1]) if len(weights) > 1 else h), c


def _gru_step(states: States, given: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> States:
    (h,) = states
    given_r, given_z, given_n = given.chunk(3, -1)
    own_r, own_z, own_n = F.linear(h, weights[0], bias).chunk(3, -1)
    r, z = (given_r + own_r).sigmoid(), (given_z + own_z).sigmoid()
    n = (given_n + r * own_n).tanh()
    return ((h - n) * z + n,)


def _tanh_step(states: States, given: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> States:
    return ((given + F.linear(states[0], weights[0], bias)).tanh(),)


def _relu_step(states: States, given: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> States:
    return ((given + F.linear(states[0], weights[0], bias)).relu(),)


def _layer(
    step: Callable[..., States],
    x: Tensor,
    states: States,
    weights: Sequence[Tensor],
    biases: bool,
    reverse: bool,
    live: Tensor | None,
) -> tuple[Tensor, States]:
    """One direction of one layer: the results of all positions, of T x B x H, and the last states."""
    given = F.linear(x, weights[0], weights[2] if biases else None)
    bias, own = (weights[3], [weights[1], *weights[4:]]) if biases else (None, [weights[1], *weights[2:]])

    def body(states: States, given: Tensor) -> tuple[States, Tensor]:
        states = step(states, given, own, bias)
        return states, states[0].clone()

    def masked(states: States, given: tuple[Tensor, Tensor]) -> tuple[States, Tensor]:
        after = step(states, given[0], own, bias)
        states = tuple(torch.where(given[1], new, old) for new, old in zip(after, states, strict=True))
        return states, states[0].clone()

    if live is None:
        last, results = scan(body, states, given, reverse=reverse)
    else:
        last, results = scan(masked, states, (given, live), reverse=reverse)
    return results, last


def _network(step: Callable[..., States], several: bool) -> Callable[..., Any]:
    """A function as `torch.lstm` (`several`: it has several states) or `torch.gru`.

    With `live`, a mask of T x B x 1, a sequence keeps its states in steps that are no part of it.
    """

    def run(
        x: Tensor,
        hidden: Any,
        weights: Sequence[Tensor],
        biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        both: bool,
        batch_first: bool,
        live: Tensor | None = None,
    ) -> Any:
        x = x.transpose(0, 1) if batch_first else x
        states = tuple(hidden) if several else (hidden,)
        directions = 2 if both else 1
        held, lasts = len(weights) // (layers * directions), []
        for layer in range(layers):
            parts = []
            for direction in range(directions):
                k = layer * directions + direction
                first = tuple(state[k] for state in states)
                own = weights[held * k : held * (k + 1)]
                part, last = _layer(step, x, first, own, biases, direction == 1, live)
                parts.append(part)
                lasts.append(last)
            x = torch.cat(parts, -1) if both else parts[0]
            if dropout and train and layer < layers - 1:
                x = F.dropout(x, dropout)
        x = x.transpose(0, 1) if batch_first else x
        return (x, *(torch.stack(found) for found in zip(*lasts, strict=True)))

    return run


NETWORKS: dict[Any, Callable[..., Any]] = {
    torch.lstm: _network(_lstm_step, True),
    torch.gru: _network(_gru_step, False),
    torch.rnn_tanh: _network(_tanh_step, False),
    torch.rnn_relu: _network(_relu_step, False),
}
"""Function of PyTorch -> the loop."""
BY_MODE = {
    "LSTM": NETWORKS[torch.lstm],
    "GRU": NETWORKS[torch.gru],
    "RNN_TANH": NETWORKS[torch.rnn_tanh],
    "RNN_RELU": NETWORKS[torch.rnn_relu],
}
"""`mode` of a recurrent module -> the loop."""


def _any_length(x: Any, hidden: Any, weights: Any, *options: Any) -> bool:
    """Whether a call's sequences are padded ones on a CPU, whose length is a symbol."""
    example = x.as_proxy().node.meta.get("example_value")
    if len(options) != 6 or not isinstance(example, Tensor) or example.device.type != "cpu":
        return False
    if not options[0].is_python_constant():  # the weights, of packed sequences
        return False
    if torch.is_autocast_enabled("cpu") or not options[5].is_python_constant():
        return False
    length = example.shape[1 if options[5].as_python_constant() else 0]
    return isinstance(length, torch.SymInt) and length.node.maybe_as_int() is None


@functools.cache
def _install() -> None:
    functions: Any = TorchInGraphFunctionVariable
    original = functions.call_function

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        ours = NETWORKS.get(self.value) if traces.depth else None
        if ours is not None and not kwargs and _any_length(*args):
            return UserFunctionVariable(cast(Any, ours)).call_function(tx, args, kwargs)
        return original(self, tx, args, kwargs)

    functions.call_function = call_function


traces = Traces(_install)
"""Traces in which they are used."""
