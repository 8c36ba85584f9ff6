"""Packed sequences in a whole training step: padded ones, whose recurrent layers stop at each sequence's length.

`pack_padded_sequence` makes tensors whose sizes depend on the lengths, and a recurrent layer a loop over them. While
a step is traced, a `Packed` takes their place: it holds the padded sequences and the lengths, a recurrent layer is a
`scan` that keeps the states of sequences that have ended, and `pad_packed_sequence` replaces what follows their ends.
All sizes are those of the padded batch, so one program serves all lengths. What PyTorch's functions require or decide
by lengths is compared before each call (`assumption`): that the longest sequence fills the batch, unless
`total_length` is given, and that lengths are sorted where they have to be. PyTorch runs the other calls.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import graph_break_hints
from torch._dynamo.exc import unimplemented
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import UserFunctionVariable
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import SkipFunctionVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.nn.utils import rnn

from daceml_train.frontends.torch.capture.rng_draws import Randomness
from daceml_train.frontends.torch.dynamo.recurrent import BY_MODE
from daceml_train.frontends.torch.traces import Traces

_library = torch.library.Library("daceml_train", "FRAGMENT")
_library.define("assumption(Tensor holds, str message) -> ()")
ASSUMPTION = torch.ops.daceml_train.assumption
"""What `capture.selections` computes before the program; where it is false, PyTorch runs the call."""


def _assumption(holds: Tensor, message: str) -> None:
    if not holds:
        raise ValueError(message)


_library.impl("assumption", _assumption, "CompositeExplicitAutograd")
torch.library.register_fake("daceml_train::assumption", lambda holds, message: None, lib=_library)
torch.fx.node.has_side_effect(ASSUMPTION)


def _one_by_one(self: Packed) -> Any:
    torch._dynamo.graph_break("the elements of a packed sequence")
    raise AttributeError("the elements of a packed sequence")


class Packed:
    """What takes the place of a `PackedSequence` in a trace."""

    def __init__(self, padded: Tensor, lengths: Tensor) -> None:
        self.padded = padded
        """T x B x ...; elements after the end of a sequence have no meaning, and are finite."""
        self.lengths = lengths
        """B, int64."""

    data = batch_sizes = sorted_indices = unsorted_indices = property(_one_by_one)


def _live(lengths: Tensor, steps: int, like: Tensor) -> Tensor:
    """T x B x 1...: whether a step is part of a sequence, as a factor for `torch.where`."""
    mask = torch.arange(steps).unsqueeze(1) < lengths
    return mask.view(*mask.shape, *[1] * (like.dim() - 2))


def pack_padded_sequence(
    input: Tensor, lengths: Tensor, batch_first: bool = False, enforce_sorted: bool = True
) -> Packed:
    """`torch.nn.utils.rnn.pack_padded_sequence`."""
    x = input.transpose(0, 1) if batch_first else input
    lengths = lengths.to(dtype=torch.int64)
    if lengths.dim() != 1 or lengths.shape[0] != x.shape[1]:
        torch._dynamo.graph_break("lengths that are not one per sequence")
    ASSUMPTION(lengths.min() >= 1, "an empty sequence is packed")
    ASSUMPTION(lengths.max() <= x.shape[0], "a sequence is longer than the padded batch")
    if enforce_sorted:
        in_order = (lengths[:-1] >= lengths[1:]).all()
        ASSUMPTION(in_order, "sequences that are packed are not sorted by length")
    return Packed(torch.where(_live(lengths, x.shape[0], x), x, 0), lengths)


def pad_packed_sequence(
    sequence: Packed, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """`torch.nn.utils.rnn.pad_packed_sequence`."""
    x, lengths = sequence.padded, sequence.lengths
    if total_length is None:
        full = lengths.max() == x.shape[0]
        ASSUMPTION(full, "the longest sequence that is packed does not fill the padded batch")
    elif total_length >= x.shape[0]:
        x = F.pad(x, (*[0, 0] * (x.dim() - 1), 0, total_length - x.shape[0]))
    else:
        fits = lengths.max() <= total_length
        ASSUMPTION(fits, "a packed sequence is longer than total_length")
        x = x[:total_length]
    x = torch.where(_live(lengths, x.shape[0], x), x, padding_value)
    return (x.transpose(0, 1) if batch_first else x), lengths


def forward(self: Any, input: Packed, hx: Any = None) -> Any:
    """`forward` of a recurrent module of PyTorch, of packed sequences."""
    x, several = input.padded, self.mode == "LSTM"
    count = self.num_layers * (2 if self.bidirectional else 1)
    if hx is None:
        own = torch.zeros(count, x.shape[1], self.hidden_size, dtype=x.dtype)
        hx = (torch.zeros(count, x.shape[1], self.proj_size or self.hidden_size, dtype=x.dtype), own)
        hx = hx if several else own
    dropout = self.dropout if self.training and self.num_layers > 1 else 0.0
    if dropout and traces.eager_draws:
        torch._dynamo.graph_break("dropout of packed sequences, drawn as in eager execution")
    options = self.bias, self.num_layers, dropout, self.training, self.bidirectional, False
    live = _live(input.lengths, x.shape[0], x)
    x, *last = BY_MODE[self.mode](x, hx, self._flat_weights, *options, live)
    return Packed(x, input.lengths), (tuple(last) if several else last[0])


_FORWARDS = frozenset([nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward])


def _is_packed(variable: Any) -> bool:
    return getattr(variable, "value_type", None) is Packed


def _can_be_padded(x: Any, lengths: Any = None, *more: Any) -> bool:
    """Whether the arguments of `pack_padded_sequence` are sequences and a tensor of lengths, on a CPU."""
    tensors = [v for v in (x, lengths) if isinstance(v, TensorVariable)]
    examples: list[Any] = [v.as_proxy().node.meta.get("example_value") for v in tensors]
    on_cpu = all(isinstance(e, Tensor) and e.device.type == "cpu" for e in examples)
    return len(examples) == 2 and on_cpu and examples[0].dim() > 1 and not torch.is_autocast_enabled("cpu")


def _replacement(function: Any, args: Any, kwargs: Any) -> Callable[..., Any] | None:
    """What TorchDynamo traces in place of a function of PyTorch."""
    if function is rnn.pack_padded_sequence:
        given = [*args[:2], *(kwargs[name] for name in ("input", "lengths")[len(args) :] if name in kwargs)]
        return pack_padded_sequence if _can_be_padded(*given) else None
    if function is rnn.pad_packed_sequence:
        return pad_packed_sequence if _is_packed(args[0] if args else kwargs.get("sequence")) else None
    if function in _FORWARDS:
        return forward if _is_packed(args[1] if len(args) > 1 else kwargs.get("input")) else None
    return None


def _replaced(kind: Any, function_of: str) -> None:
    original = kind.call_function

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        ours = _replacement(getattr(self, function_of), args, kwargs) if traces.depth else None
        if ours is not None:
            return UserFunctionVariable(cast(Any, ours)).call_function(tx, args, kwargs)
        return original(self, tx, args, kwargs)

    kind.call_function = call_function


def _refuse(what: str) -> None:
    unimplemented(
        gb_type=what,
        context="torch.nn.utils.rnn",
        explanation="A step holds padded sequences in its place.",
        hints=[*graph_break_hints.SUPPORTABLE],
    )


@functools.cache
def _install() -> None:
    _replaced(UserFunctionVariable, "fn")
    _replaced(SkipFunctionVariable, "value")
    effects: Any = SideEffects
    kept = effects.codegen_save_tempvars

    @functools.wraps(kept)
    def codegen_save_tempvars(self: Any, cg: Any) -> None:
        if traces.depth and any(_is_packed(variable) for variable in self._get_modified_vars()):
            _refuse("a packed sequence that Python keeps")
        kept(self, cg)

    effects.codegen_save_tempvars = codegen_save_tempvars
    builtin: Any = BuiltinVariable
    isinstance_of = builtin.call_isinstance

    @functools.wraps(isinstance_of)
    def call_isinstance(self: Any, tx: Any, arg: Any, kind: Any) -> Any:
        if traces.depth and _is_packed(arg):
            kinds = kind.as_python_constant()
            kinds = kinds if isinstance(kinds, tuple) else (kinds,)
            return ConstantVariable.create(any(issubclass(rnn.PackedSequence, k) for k in kinds))
        return isinstance_of(self, tx, arg, kind)

    builtin.call_isinstance = call_isinstance


class _Traces(Traces):
    eager_draws: bool = False
    """Whether random numbers are those of eager execution, which draws as many as there are elements."""


traces = _Traces(_install)


@contextlib.contextmanager
def admitted(admit: bool, randomness: Randomness) -> Iterator[None]:
    """Trace packed sequences as padded ones, if `admit`."""
    if not admit:
        yield
        return
    traces.eager_draws = randomness == "eager"
    with traces:
        yield
