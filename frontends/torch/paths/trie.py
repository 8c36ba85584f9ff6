"""The trie of paths: each node is one call of a PyTorch function, with its operands by where they come from.

A model that runs twice in the same way takes the same path. Two calls are the same if function, gradient mode, and all
arguments are: intermediate results by the node that produced them, other tensors by the place of their first use, and
numbers that were seen to change by their type alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from daceml_train.errors import Unsupported

CONSTANTS = (bool, int, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""The types of arguments that are parts of a path."""

_ARITHMETIC = "add sub rsub mul div true_divide __radd__ __rsub__ __rmul__ __rtruediv__"
ARITHMETIC = frozenset(_ARITHMETIC.split())
"""Functions whose integers may be inputs of a program."""


class Result:
    """An intermediate result, and the tensor without data that stands for it while programs run.

    Nothing else refers to that tensor, so that its count of references tells whether user code keeps it.
    """

    __slots__ = ("device", "grown", "requires_grad", "tensor")

    def __init__(self, real: Tensor) -> None:
        if type(real) is not Tensor or real.layout is not torch.strided or real.is_inference():
            raise Unsupported(f"a result of type {type(real).__name__} and layout {real.layout}")
        self.device, self.requires_grad = real.device, real.requires_grad
        self.grown = False
        """Whether it has required a gradient only since it was changed in place."""
        self.tensor = torch.empty_strided(
            real.shape, real.stride(), dtype=real.dtype, device="meta", requires_grad=real.requires_grad
        )

    def renew(self) -> Tensor:
        """The tensor that stood for the result; another one does so from now on."""
        before = self.tensor
        self.tensor = torch.empty_strided(
            before.shape, before.stride(), dtype=before.dtype, device="meta", requires_grad=self.requires_grad
        )
        return before


class Operand:
    """A tensor that a path reads and did not compute: an argument, data, or one that the model or the user holds."""

    __slots__ = ("dtype", "held", "index", "requires_grad", "shape", "stride", "tensor")

    def __init__(self, index: int, tensor: Tensor, held: bool) -> None:
        self.index, self.shape, self.stride, self.dtype = index, tensor.shape, tensor.stride(), tensor.dtype
        self.tensor, self.requires_grad = tensor if held else None, tensor.requires_grad
        self.held = held
        """Whether it has to be the same object at each call: parameters, buffers, and what is written."""

    def fits(self, tensor: Any) -> bool:
        """Whether a tensor may be this operand of a call."""
        if self.held:
            same = tensor is self.tensor
            return same and tensor.requires_grad is self.requires_grad and tensor.shape == self.shape
        return (
            type(tensor) is Tensor
            and tensor.requires_grad is self.requires_grad
            and tensor.is_leaf
            and tensor.is_cpu
            and tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and tensor.stride() == self.stride
        )


class Number:
    """A Python number of a call; once it was seen to change, an input of programs."""

    __slots__ = ("value", "varies")

    def __init__(self, value: float) -> None:
        self.value, self.varies = value, False


@dataclass(eq=False)
class Call:
    """What is particular to one run of a model along a path."""

    arguments: set[int] = field(default_factory=set)
    """The identities of the step's arguments."""
    operands: list[Tensor] = field(default_factory=list)
    copies: dict[int, Tensor] = field(default_factory=dict)
    """Operands as they were when they were used, of those that user code may change where PyTorch does not see it."""
    index: dict[int, int] = field(default_factory=dict)
    """Position of each operand by its identity."""
    numbers: dict[Number, float] = field(default_factory=dict)
    path: list[Step] = field(default_factory=list)
    generalized: bool = False
    """Whether a number of this call differs from those before and has become an input."""

    def bind(self, tensor: Tensor) -> int:
        """The position of an operand, which is added if it is new."""
        position = self.index.setdefault(id(tensor), len(self.operands))
        if position == len(self.operands):
            self.operands.append(tensor)
        return position


@dataclass(eq=False)
class Step:
    """A node of the trie: one call of a function of PyTorch."""

    function: Any = None
    enabled: bool = True
    """Whether gradients were enabled."""
    arguments: Any = ()
    keywords: Any = field(default_factory=dict)
    result: Any = None
    """Results and operands in the structure that the function returns."""
    rebuild: Callable[[Any], Any] | None = None
    """The type of a named tuple of results."""
    written: list[Operand] = field(default_factory=list)
    """Operands that it changes in place."""
    mutates: bool = False
    """Whether it changes a result in place."""
    operands: list[Operand] = field(default_factory=list)
    """Those that are first used here."""
    numbers: list[Number] = field(default_factory=list)
    following: list[Step] = field(default_factory=list)
    results: tuple[Result, ...] = ()
    """Its own results."""
    leaves: dict[Any, Any] = field(default_factory=dict)
    """What is known of calls that end here, by the result that is the loss."""
    fetches: dict[Any, Any] = field(default_factory=dict)
    """What computes results that user code looks at here."""
    where: str = ""
    checkpointed: bool = False
    """Whether the backward pass calls it once more, or does something else with what it saves."""

    def matches(self, function: Any, enabled: bool, arguments: Any, keywords: Any, call: Call) -> bool:
        """Whether a call is this one; its new operands and its numbers are then noted."""
        if (self.function is not function and self.function != function) or self.enabled is not enabled:
            return False
        if len(arguments) != len(self.arguments) or len(keywords) != len(self.keywords):
            return False
        before, found = len(call.operands), dict[Number, float]()
        if self._takes(arguments, keywords, call, found):
            for number, value in found.items():
                if not number.varies and value != number.value:
                    number.varies = call.generalized = True
                call.numbers[number] = value
            return True
        for tensor in call.operands[before:]:
            del call.index[id(tensor)]
        del call.operands[before:]
        return False

    def _takes(self, arguments: Any, keywords: Any, call: Call, found: dict[Number, float]) -> bool:
        for template, value in zip(self.arguments, arguments, strict=True):
            if type(template) is Result:  # most arguments are
                if template.tensor is not value:
                    return False
            elif not _match(template, value, call, found):
                return False
        return not keywords or _match(self.keywords, keywords, call, found)


def _match(template: Any, value: Any, call: Call, numbers: dict[Number, float]) -> bool:
    kind = type(template)
    if kind is Result:
        return bool(template.tensor is value)
    if kind is Operand:
        if template.index < len(call.operands):
            return call.operands[template.index] is value
        return bool(template.fits(value) and call.bind(value) == template.index)
    if kind is Number:
        value = value.item() if isinstance(value, np.generic) else value
        if type(value) is not type(template.value):
            if not (isinstance(value, float) and type(template.value) is float):
                return False
            value = float(value)
        numbers[template] = value
        return True
    if kind is tuple or kind is list:
        if not isinstance(value, kind) or len(value) != len(template):
            return False
        return all(_match(part, given, call, numbers) for part, given in zip(template, value, strict=True))
    if kind is dict:
        if type(value) is not dict or value.keys() != template.keys():
            return False
        return all(_match(t, value[key], call, numbers) for key, t in template.items())
    if kind is slice:
        if type(value) is not slice:
            return False
        ends = ((template.start, value.start), (template.stop, value.stop), (template.step, value.step))
        return all(_match(t, v, call, numbers) for t, v in ends)
    value = value.item() if isinstance(value, np.generic) else value
    return type(value) is kind and bool(value == template)


def template_of(value: Any, tensor: Callable[[Tensor], Any], number: Callable[[float], Any], integers: bool) -> Any:
    """An argument with its tensors and numbers replaced. Raises `Unsupported` for what is no part of a path."""
    if isinstance(value, Tensor):
        return tensor(value)
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return number(float(value))
    if integers and type(value) is int:
        return number(value)
    if isinstance(value, CONSTANTS):
        return value
    if isinstance(value, tuple):  # also torch.Size
        return tuple(template_of(v, tensor, number, False) for v in value)
    if type(value) is list:
        return [template_of(v, tensor, number, False) for v in value]
    if type(value) is dict:
        return {key: template_of(v, tensor, number, integers) for key, v in value.items()}
    if type(value) is slice:
        return slice(*(template_of(v, tensor, number, False) for v in (value.start, value.stop, value.step)))
    raise Unsupported(f"an argument of type {type(value).__name__}")


def filled(template: Any, leaf: Callable[[Any], Any]) -> Any:
    """A template with `leaf` of its results, operands and numbers in their places."""
    kind = type(template)
    if kind in (Result, Operand, Number):
        return leaf(template)
    if kind is tuple or kind is list:
        return kind(filled(t, leaf) for t in template)
    if kind is dict:
        return {key: filled(t, leaf) for key, t in template.items()}
    if kind is slice:
        return slice(filled(template.start, leaf), filled(template.stop, leaf), filled(template.step, leaf))
    return template


def leaves_of(template: Any) -> Iterator[Any]:
    """The results, operands, numbers and constants of a template."""
    if type(template) in (tuple, list):
        for entry in template:
            yield from leaves_of(entry)
    elif type(template) is dict:
        yield from leaves_of(list(template.values()))
    elif type(template) is slice:
        yield from leaves_of((template.start, template.stop, template.step))
    else:
        yield template


def outline(template: Any) -> Any:
    """A template without the sizes of data and without integers, for comparisons."""
    kind = type(template)
    if kind is Operand:
        return template.tensor if template.held else template.index
    if kind is Number or kind is int:
        return "number"
    if kind in (tuple, list):
        return tuple(outline(entry) for entry in template)
    if kind is dict:
        return tuple((key, outline(value)) for key, value in template.items())
    if kind is slice:
        return "slice", outline(template.start), outline(template.stop), outline(template.step)
    return template


def alike(step: Step, others: Sequence[Step]) -> int:
    """How many of these steps differ from a step in sizes and integers alone."""
    calls = ((s.function, outline(s.arguments), outline(s.keywords)) for s in others)
    own = step.function, outline(step.arguments), outline(step.keywords)
    return sum(_identical(own, call) for call in calls)


def _identical(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_identical, one, other))
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other))


def operands_of(path: Sequence[Step]) -> list[Operand]:
    """All operands of a path, by position."""
    return [operand for step in path for operand in step.operands]


def numbers_of(path: Sequence[Step]) -> list[Number]:
    """The numbers of a path that are inputs of its programs."""
    return [number for step in path for number in step.numbers if number.varies]


def note_writes(path: Sequence[Step], call: Call, written: Sequence[Any]) -> None:
    """Note with the steps of a path what they change, as normalizations do, where PyTorch has not said so.

    Raises `Unsupported` where PyTorch changes it once more in the backward pass.
    """
    known = {id(call.operands[operand.index]) for step in path for operand in step.written}
    missing = {id(t) for t in written if isinstance(t, Tensor)} - known
    for step in path if missing else ():
        for leaf in leaves_of([step.arguments, step.keywords]):
            if type(leaf) is Operand and id(call.operands[leaf.index]) in missing:
                step.written.append(leaf)
    repeated = next((step for step in path if step.checkpointed and step.written), None)
    if repeated is not None:
        raise Unsupported(f"a checkpointed region that changes a buffer{repeated.where}")
