"""Sequences, which are Python lists, and optionals, which are the value or None."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from daceml_train.frontends.onnx.host import Host, integer, integers
from daceml_train.frontends.onnx.rules import rule


@rule("SequenceConstruct", since=11)
def sequence(*xs: Tensor) -> list[Tensor]:
    return list(xs)


@rule("SequenceEmpty", since=11)
def empty_sequence(*, dtype: int = 1) -> list[Tensor]:
    return []


@rule("SequenceAt", since=11, host="position")
def sequence_at(xs: list[Tensor], position: Host) -> Tensor:
    found: Tensor = xs[integer(position)]
    return found


@rule("SequenceLength", since=11)
def sequence_length(xs: list[Tensor]) -> Tensor:
    return torch.tensor(len(xs))


@rule("SequenceInsert", since=11, host="position")
def sequence_insert(xs: list[Tensor], x: Tensor, position: Host = None) -> list[Tensor]:
    at = len(xs) if position is None else integer(position)
    return [*xs[:at], x, *xs[at:]] if at >= 0 else [*xs[: at + len(xs)], x, *xs[at + len(xs) :]]


@rule("SequenceErase", since=11, host="position")
def sequence_erase(xs: list[Tensor], position: Host = None) -> list[Tensor]:
    at = len(xs) - 1 if position is None else integer(position) % len(xs)
    return [*xs[:at], *xs[at + 1 :]]


@rule("ConcatFromSequence", since=11)
def concat_from_sequence(xs: list[Tensor], *, axis: int, new_axis: int = 0) -> Tensor:
    return torch.stack(xs, axis) if new_axis else torch.cat(xs, axis)


@rule("SplitToSequence", since=11, host="parts")
def split_to_sequence(x: Tensor, parts: Host = None, *, axis: int = 0, keepdims: int = 1) -> list[Tensor]:
    if parts is None:
        pieces = x.split(1, axis)
        return list(pieces) if keepdims else [piece.squeeze(axis) for piece in pieces]
    return list(x.split(integers(parts) if isinstance(parts, list) else integer(parts), axis))


@rule("Optional", since=15)
def optional(x: Any = None, *, type: Any = None) -> Any:
    return x


@rule("OptionalHasElement", since=15)
def optional_has_element(x: Any = None) -> Tensor:
    return torch.tensor(x is not None)


@rule("OptionalGetElement", since=15)
def optional_get_element(x: Any) -> Any:
    return x
