"""Effects: functions of PyTorch that do more than compute a result, and therefore cannot wait."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from daceml_train.frontends.torch.recursion.lazy import Lazy
from daceml_train.frontends.torch.recursion.runs import Pick, Run

_TENSOR: Any = torch.Tensor
GRAPH = frozenset(
    {
        *(_TENSOR.register_hook, _TENSOR.retain_grad, _TENSOR.backward, _TENSOR.requires_grad_),
        *(_TENSOR.register_post_accumulate_grad_hook, _TENSOR.requires_grad.__set__),
        *(torch.autograd.backward, torch.autograd.grad),
    }
)
"""Functions that read or change PyTorch's own graph of a value, which a batch of many values has not."""

_OPERATORS = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_IN_PLACE = frozenset(f"__i{name}__" for name in _OPERATORS) | {"__setitem__", "__set__", "__delete__"}
_EXPOSING = ("numpy", "__array__", "__dlpack__")
_ALWAYS, _PERHAPS, _NEVER = range(3)
_KINDS: dict[Any, int] = {}


DECIDES = frozenset({_TENSOR.requires_grad_, _TENSOR.requires_grad.__set__})
"""Functions that decide whether a parameter has a gradient."""


def decides(function: Callable[..., Any], args: Any, shared: Collection[int]) -> bool:
    """Whether a function decides whether a parameter has a gradient; `shared` has the identities of parameters."""
    return needs_graph(function) and function in DECIDES and id(args[0]) in shared


def needs_graph(function: Callable[..., Any]) -> bool:
    """Whether a function is one of `GRAPH`."""
    try:
        return function in GRAPH
    except TypeError:  # a method of native code
        return False


def may_change(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a function may change a tensor that it is given."""
    try:
        kind = _KINDS.get(function)
    except TypeError:  # a method of native code
        return True
    if kind is None:
        kind = _KINDS[function] = _kind(function)
    if kind == _NEVER:
        return bool(kwargs) and kwargs.get("out") is not None
    return kind == _ALWAYS or any(a is True for a in args) or any(a is True for a in kwargs.values())


def _kind(function: Callable[..., Any]) -> int:
    name = getattr(function, "__name__", "")
    if name in _IN_PLACE or name in _EXPOSING or (name.endswith("_") and not name.endswith("__")):
        return _ALWAYS
    # functions of Python take `inplace=True`, or `training=True` for statistics that run along
    return _PERHAPS if getattr(function, "__module__", "") == torch.nn.functional.__name__ else _NEVER


def exposes(function: Callable[..., Any]) -> bool:
    """Whether a function gives memory to those who write to it unseen, as NumPy does."""
    return getattr(function, "__name__", "") in _EXPOSING


def initializes(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a function changes tensors unseen by gradients, as where a new module gets its first weights."""
    unseen = not torch.is_grad_enabled() or getattr(function, "__module__", "") == torch.nn.init.__name__
    return unseen and may_change(function, args, kwargs)


def in_range(function: Callable[..., Any], args: Any) -> bool:
    """Whether an operator cannot fail, since it looks up indices that are known and in range."""
    if function is not torch.nn.functional.embedding or len(args) < 2 or type(args[0]) is Lazy:
        return False
    with torch._C.DisableTorchFunction():
        return all(0 <= k < len(args[1]) for k in args[0].flatten().tolist())


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """What a recorded operator reads of a tensor: a copy if others than PyTorch can write to its memory until then.

    PyTorch lets nobody change the size of memory that it shares with others.
    """
    with torch._C.DisableTorchFunction():
        try:
            own = tensor.untyped_storage().resizable()
        except (NotImplementedError, RuntimeError):  # a sparse tensor
            own = True
        return tensor if own else tensor.clone()


def all_settled(args: Any) -> Any:
    """The same for all tensors in arguments."""
    kind = type(args)
    if kind in (list, tuple):
        return kind(map(all_settled, args))
    if kind is dict:
        return {name: all_settled(a) for name, a in args.items()}
    return settled(args) if kind is not Lazy and isinstance(args, torch.Tensor) else args


MOST = 1 << 16
"""How many elements a parameter or buffer may have that is compared with a copy."""


class Exposed:
    """Parameters and buffers that NumPy's arrays have the memory of, with copies of them."""

    def __init__(self, shared: Iterable[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunction():
            small = [t.detach() for t in shared if t.layout is torch.strided and t.numel() <= MOST]
            self.found = [(t, t._version, t.clone()) for t in small if not t.untyped_storage().resizable()]

    def written(self) -> bool:
        """Whether NumPy has changed one of them since."""
        with torch._C.DisableTorchFunction():
            return any(
                t._version == version and not torch.equal(t.nan_to_num(), before.nan_to_num())
                for t, version, before in self.found
            )


class Held:
    """The memory that recorded operators will read: what changes it has to wait for them."""

    def __init__(self, shared: Iterable[torch.Tensor]) -> None:
        self.shared = shared
        self.fixed: set[int] | None = None
        """The memory of parameters and buffers; None if nothing has asked for it."""
        self.read: set[int] = set()
        self.looked = 0
        """Of how many runs `read` has everything."""

    def of_shared(self, args: Any, kwargs: Any) -> bool:
        """Whether one of these arguments has the memory of a parameter or a buffer."""
        with torch._C.DisableTorchFunction():
            fixed = {memory(t) for t in self.shared}
            return not fixed.isdisjoint(_memories((*args, *kwargs.values())))

    def cleared(self) -> None:
        """Note that nothing is recorded any more; what follows may give a parameter other memory."""
        self.fixed, self.read, self.looked = None, set(), 0

    def by(self, runs: list[Run], solos: list[Any], args: Any, kwargs: Any) -> bool:
        """Whether recorded operators read the memory of one of these arguments."""
        with torch._C.DisableTorchFunction():
            given = set(_memories((*args, *kwargs.values())))
            if not given:
                return False
            if self.fixed is None:
                self.fixed = {memory(t) for t in self.shared}
            whole = True
            for run in runs[self.looked :]:
                self.read.update(_memories(run.inputs))
                whole = whole and run.sealed
                self.looked += whole
            waiting = {m for solo in solos for m in _memories((*solo.args, *solo.kwargs.values()))}
        return not all(map(given.isdisjoint, (self.fixed, self.read, waiting)))


def _memories(found: Iterable[Any]) -> Iterator[int]:
    """What stands for the memory of tensors; a lazy value stands for that which it has, or will have."""
    for a in found:
        kind = type(a)
        if kind is Lazy:
            yield id(a)
            if a.value is not None:
                yield memory(a.value)
            if type(a.source) is Pick:
                yield memory(a.source.tensor)
        elif kind in (list, tuple):
            yield from _memories(a)
        elif isinstance(a, torch.Tensor):
            yield memory(a)


def memory(tensor: torch.Tensor) -> int:
    """What stands for the memory of a tensor."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse tensor
        return id(tensor)
