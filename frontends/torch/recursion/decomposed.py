"""Functions of PyTorch that are recorded as the operators that they consist of, as no batch of them is one operator.

Cells of recurrent networks have no batching rule in PyTorch, or one whose operators depend on the number of rows. That
of a batch norm makes channels of rows, which leaves rows no dimension of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Records a call of a function."""
_ADD, _MUL, _SUB = torch.Tensor.add, torch.Tensor.mul, torch.Tensor.sub


def _gates(call: Call, x: Any, h: Any, ih: Any, hh: Any, bias_ih: Any, bias_hh: Any) -> tuple[Any, Any]:
    return call(F.linear, (x, ih, bias_ih), {}), call(F.linear, (h, hh, bias_hh), {})


def _parts(call: Call, gates: Any, count: int) -> Any:
    return call(torch.chunk, (gates, count, -1), {})


def _lstm(call: Call, x: Any, hx: Any, ih: Any, hh: Any, bias_ih: Any = None, bias_hh: Any = None) -> tuple[Any, Any]:
    h, c = hx
    gates = _parts(call, call(_ADD, _gates(call, x, h, ih, hh, bias_ih, bias_hh), {}), 4)
    i, f, o = (call(torch.sigmoid, (gates[k],), {}) for k in (0, 1, 3))
    new = call(_MUL, (i, call(torch.tanh, (gates[2],), {})), {})
    c = call(_ADD, (call(_MUL, (f, c), {}), new), {})
    return call(_MUL, (o, call(torch.tanh, (c,), {})), {}), c


def _gru(call: Call, x: Any, h: Any, ih: Any, hh: Any, bias_ih: Any = None, bias_hh: Any = None) -> Any:
    of_x, of_h = (_parts(call, g, 3) for g in _gates(call, x, h, ih, hh, bias_ih, bias_hh))
    r, z = (call(torch.sigmoid, (call(_ADD, (of_x[k], of_h[k]), {}),), {}) for k in (0, 1))
    new = call(torch.tanh, (call(_ADD, (of_x[2], call(_MUL, (r, of_h[2]), {})), {}),), {})
    return call(_ADD, (call(_MUL, (call(_SUB, (h, new), {}), z), {}), new), {})


def _plain(activation: Any) -> Callable[..., Any]:
    def cell(call: Call, x: Any, h: Any, ih: Any, hh: Any, bias_ih: Any = None, bias_hh: Any = None) -> Any:
        return call(activation, (call(_ADD, _gates(call, x, h, ih, hh, bias_ih, bias_hh), {}),), {})

    return cell


def _batch_norm(
    call: Call,
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if training or running_mean is None or running_var is None or x.ndim < 2 or x.dtype is not running_mean.dtype:
        return NotImplemented
    shape = (-1, *[1] * (x.ndim - 2))
    mean, deviation = call(torch.Tensor.view, (running_mean, shape), {}), call(_ADD, (running_var, eps), {})
    scale = call(torch.Tensor.view, (call(torch.rsqrt, (deviation,), {}), shape), {})
    x = call(_MUL, (call(_SUB, (x, mean), {}), scale), {})
    for function, parameter in ((_MUL, weight), (_ADD, bias)):
        if parameter is not None:
            x = call(function, (x, call(torch.Tensor.view, (parameter, shape), {})), {})
    return x


_DECOMPOSED: dict[Any, Callable[..., Any]] = {
    torch.lstm_cell: _lstm,
    torch.gru_cell: _gru,
    torch.rnn_tanh_cell: _plain(torch.tanh),
    torch.rnn_relu_cell: _plain(torch.relu),
    F.batch_norm: _batch_norm,
}


def decomposed(function: Any) -> Callable[..., Any] | None:
    """What records a function's operators, given `Call` and its arguments; it may return `NotImplemented`."""
    try:
        return _DECOMPOSED.get(function)
    except TypeError:  # a method of native code
        return None
