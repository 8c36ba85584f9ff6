"""Where in the user's data an error arose: the path of the node that the innermost call of the recursion was given."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

SHOWN = 12
"""How many steps of a long path are shown, half of them at its end."""
SEARCHED = 100_000
"""In how many objects a number is looked for."""
_PLAIN = (int, float, complex, bool, str, bytes, type(None))


def located(
    error: Exception,
    codes: Collection[types.CodeType],
    source: Callable[..., Any],
    given: Sequence[Any],
    named: Mapping[str, Any],
) -> str:
    """A sentence that says at which node an error arose; empty if it did not arise below these arguments.

    `codes` are those of the functions that call themselves, `source` the method that was called with `given` and
    `named` arguments.
    """
    arguments = _named(source, given, named)
    calls = list(_calls(error, codes))
    if not calls:
        empty = [name for name, value in arguments.items() if isinstance(value, list | tuple | dict) and not value]
        return f"in a recursion over no data: {', '.join(empty)} is empty" if empty else ""
    nodes: list[Any] = []
    steps: list[str] = []
    seen: dict[int, int] = {}
    for call in calls:
        node, step = _next(nodes[-1] if nodes else None, call, arguments)
        if isinstance(error, RecursionError) and not isinstance(node, _PLAIN):
            first = seen.setdefault(id(node), len(steps))
            if first != len(steps):
                return f"in a recursion over a cycle: {shown([*steps, step])} is {shown(steps[: first + 1])} again"
        nodes.append(node)
        steps.append(step)
    return f"in a recursion, at {shown(steps)}"


def holding(
    given: Sequence[Any], said: str, source: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
) -> str:
    """A sentence that says where in the data is what a call was given, whose computation failed after the recursion.

    Tensors are found as the objects that they are, integers by their values, of which those that the error has `said`
    count if there are any. Empty if the call was given neither.
    """
    tensors = [a for a in given if isinstance(a, torch.Tensor)]
    small = [t.flatten().tolist() for t in tensors if not t.is_floating_point() and t.numel() <= SHOWN]
    numbers = {n for a in (*given, *small) if isinstance(a, list) for n in a if type(n) is int}
    numbers = numbers.intersection(map(int, re.findall(r"-?\d+", said))) or numbers
    if not numbers and not tensors:
        return ""
    found: list[str] = []
    seen: set[int] = set()
    waiting: list[tuple[Any, list[str]]] = [(v, [name]) for name, v in reversed(_named(source, args, named).items())]
    while waiting and len(seen) < SEARCHED:
        value, steps = waiting.pop()
        if (type(value) is int and value in numbers) or any(value is t for t in tensors):
            found.append(shown(steps))
        elif not isinstance(value, (*_PLAIN, torch.Tensor, torch.nn.Module)) and id(value) not in seen:
            seen.add(id(value))
            waiting += [(part, [*steps, step]) for step, part in reversed(list(_attributes(value)))]
    what = ", ".join(map(str, sorted(numbers))) if numbers else "a tensor"
    if not found:
        return f"in a call of a recursion that computes with {what}"
    others = f", and {len(found) - 1} times more" if len(found) > 1 else ""
    return f"in a call of a recursion that computes with {what}, which is at {found[0]}{others}"


def shown(steps: Sequence[str]) -> str:
    """A path as text, without the middle of a long one."""
    if len(steps) <= SHOWN:
        return "".join(steps)
    half = SHOWN // 2
    return f"{''.join(steps[:half])} ... {''.join(steps[-half:])} (depth {len(steps)})"


def _named(source: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    try:
        arguments = inspect.signature(source).bind(None, *given, **named).arguments
    except TypeError:
        return dict(named)
    return dict(list(arguments.items())[1:])


def _calls(error: Exception, codes: Collection[types.CodeType]) -> Iterator[list[Any]]:
    """The arguments of each call of the recursion on the way to the error."""
    trace = error.__traceback__
    known = set(codes)
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code in known:
            code, values = frame.f_code, frame.f_locals
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            own = names[:1] if names and _of_method(code, values.get(names[0])) else ()
            yield [values[n] for n in names if n in values and n not in own]
        trace = trace.tb_next


def _of_method(code: types.CodeType, first: Any) -> bool:
    """Whether code is that of a method of its first argument."""
    _, _, scope = code.co_qualname.removesuffix(f".{code.co_name}").rpartition(".")
    return scope not in ("<locals>", code.co_name) and hasattr(type(first), code.co_name)


def _next(before: Any, call: Sequence[Any], arguments: Mapping[str, Any]) -> tuple[Any, str]:
    """The node that a call was given, and the step from the one before to it."""
    for value in call:
        if before is None:
            for name, argument in arguments.items():
                if value is argument:
                    return value, name
                if (step := _step(argument, value)) is not None:
                    return value, name + step
        elif (step := _step(before, value)) is not None:
            return value, step
    node = call[0] if call else None
    return node, f"({node!r})" if isinstance(node, int | str) else f" -> {type(node).__name__}"


def _step(whole: Any, part: Any) -> str | None:
    """How `part` is reached from `whole`: an attribute, an element, or an element of an attribute."""
    for name, value in _attributes(whole):
        if value is part:
            return name
    for name, value in _attributes(whole):
        if isinstance(value, list | tuple | dict):
            for inner, element in _attributes(value):
                if element is part:
                    return name + inner
    return None


def _attributes(whole: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(whole, dict):
        yield from ((f"[{key!r}]", value) for key, value in whole.items())
    elif isinstance(whole, list | tuple) and not hasattr(whole, "_fields"):
        yield from ((f"[{k}]", value) for k, value in enumerate(whole))
    elif not isinstance(whole, _PLAIN):
        names = [*getattr(whole, "__dict__", ()), *getattr(whole, "_fields", ())]
        names += [n for c in type(whole).__mro__ for n in _slots(c)]
        yield from ((f".{name}", getattr(whole, name)) for name in names if hasattr(whole, name))


def _slots(owner: type) -> Sequence[str]:
    slots = vars(owner).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else [s for s in slots if not s.startswith("__")]
