"""Numbers that are inputs of a program and operands of a user's `autograd.Function`: 0-d tensors to the operator."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from daceml_train.frontends.torch.results import example_of


def as_tensors(
    forward: fx.GraphModule, backward: fx.GraphModule, operands: Sequence[Any]
) -> tuple[fx.GraphModule, fx.GraphModule, list[Any]]:
    """The bodies and operands of a function with 0-d float64 tensors in place of floats, also of those it saves."""
    given = {i for i, operand in enumerate(operands) if isinstance(operand, torch.SymFloat)}
    if not given:
        return forward, backward, list(operands)
    forward, backward = (fx.GraphModule(body, copy.deepcopy(body.graph)) for body in (forward, backward))
    tensors = {number: node for node, number in _read(forward, given).items()}
    (output,) = forward.graph.find_nodes(op="output")
    results, saved = output.args[0][0], list(output.args[0][1])
    numbers = {i for i, node in enumerate(saved) if node in tensors or _is_float(node)}
    with forward.graph.inserting_before(output):
        for i in numbers:
            number = saved[i]
            saved[i] = tensors[number] if number in tensors else forward.graph.call_function(_scalar, (number,))
    output.args = ((results, tuple(saved), *output.args[0][2:]),)
    count = len(results) if isinstance(results, tuple | list) else 1
    _read(backward, {count + i for i in numbers})
    for body in (forward, backward):
        body.recompile()
    return forward, backward, [_scalar(x) if isinstance(x, torch.SymFloat) else x for x in operands]


def _read(body: fx.GraphModule, places: Iterable[int]) -> dict[fx.Node, fx.Node]:
    """Let the arguments at these places be tensors: argument -> the number that is read from it."""
    arguments = body.graph.find_nodes(op="placeholder")
    numbers: dict[fx.Node, fx.Node] = {}
    for place in sorted(places):
        with body.graph.inserting_after(arguments[-1]):
            number = body.graph.call_method("item", (arguments[place],))
        arguments[place].replace_all_uses_with(number, delete_user_cb=lambda user, own=number: user is not own)
        numbers[arguments[place]] = number
    return numbers


def _is_float(saved: Any) -> bool:
    return isinstance(saved, fx.Node) and isinstance(example_of(saved), torch.SymFloat)


def _scalar(number: Any) -> torch.Tensor:
    return torch.scalar_tensor(number, dtype=torch.float64, device="cpu")
