"""A tensor that is known by its type, and computed later: what user code holds while a recursion is recorded."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch


class Meta:
    """The type of a value: one object per type, so that types compare by identity."""

    __slots__ = ("device", "dtype", "known", "requires_grad", "shape")

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    known: tuple[Any, ...]

    def __repr__(self) -> str:
        gradient = ", with a gradient" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{gradient}"


_METAS: dict[Any, Meta] = {}


def meta(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool) -> Meta:
    """The type with these properties."""
    key = (torch.Size(shape), dtype, device, requires_grad)
    found = _METAS.get(key)
    if found is None:
        found = Meta()
        found.shape, found.dtype, found.device, found.requires_grad = key
        found.known = key
        found = _METAS.setdefault(key, found)  # another thread may have been faster
    return found


def meta_of(tensor: torch.Tensor) -> Meta:
    """The type of a tensor, or of what a fake tensor stands for."""
    with torch._C.DisableTorchFunction():
        return meta(tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)


class Lazy:
    """Result `index` of `source`, of type `meta`; a tensor to `isinstance`, and to every function of PyTorch.

    `value` is the tensor once it is known. What only the value can tell asks `source` for it.
    """

    __slots__ = ("__weakref__", "index", "meta", "source", "value")

    source: Any
    index: int
    meta: Meta
    value: torch.Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A call outside of the recording that created the value."""
        return func(*known(args), **known(kwargs or {}))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """The sizes."""
        return self.meta.shape

    @property
    def dtype(self) -> torch.dtype:
        """The element type."""
        return self.meta.dtype

    @property
    def device(self) -> torch.device:
        """Where the value is."""
        return self.meta.device

    @property
    def requires_grad(self) -> bool:
        """Whether it has a gradient."""
        return self.meta.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        recorder, function = recording(), torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
        if recorder is None:
            function(self.tensor(), value)
        else:
            recorder.call(function, (self, value), {})

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.meta.shape)

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.meta.shape)

    def size(self, dim: int | None = None) -> Any:
        """The sizes, or one of them."""
        return self.meta.shape if dim is None else self.meta.shape[dim]

    def __len__(self) -> int:
        if not self.meta.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.meta.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if not self.meta.shape:
            raise TypeError("iteration over a 0-d tensor")
        return iter(torch.unbind(self))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return id(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with outside(torch.is_grad_enabled()):
            return self.tensor().__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        with outside(torch.is_grad_enabled()):
            return copy.copy(self.tensor())

    def __setattr__(self, name: str, value: Any) -> None:
        """An attribute that user code gives to a value is one of its tensor."""
        if name in _OF_LAZY:
            object.__setattr__(self, name, value)
            return
        if name in _TENSORS_OWN and (recorder := recording()) is not None and not recorder.eager:
            recorder.abandon(f"{name} of a value that is set")
        setattr(self.tensor(), name, value)
        if name not in Lazy.__dict__ and not name.startswith("__"):
            setattr(Lazy, name, _attribute(name))

    def tensor(self) -> torch.Tensor:
        """The value, computed if it is not known."""
        if self.value is None:
            set_value(self, self.source.demanded(self))
        return self.value  # type: ignore[return-value]


_TENSORS_OWN = frozenset(("data", "grad", "names", "real", "imag"))
_OF_LAZY = frozenset({*Lazy.__slots__, "requires_grad"})
_set_source, _set_index, _set_meta, set_value = (
    Lazy.__dict__[name].__set__ for name in ("source", "index", "meta", "value")
)
"""Sets a slot, in a tenth of the time that `__setattr__` takes."""


def lazy_of(source: Any, index: int, meta: Meta) -> Lazy:
    """A lazy value. The class has no `__init__`: blocks create as many values as trees have nodes."""
    value = Lazy()
    _set_source(value, source)
    _set_index(value, index)
    _set_meta(value, meta)
    set_value(value, None)
    return value


def known(found: Any) -> Any:
    """The same with tensors in place of lazy ones, in lists, tuples, and dicts."""
    kind = type(found)
    if kind is Lazy:
        return found.tensor()
    if kind in (list, tuple):
        return kind([known(f) for f in found])
    if kind is dict:
        return {name: known(f) for name, f in found.items()}
    if isinstance(found, tuple) and hasattr(found, "_fields"):
        return kind(*map(known, found))
    return found


_TENSOR: dict[str, Any] = gc.get_referents(vars(torch.Tensor))[0]
"""What user code changes where it gives all tensors another method."""


def _method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    handler, own = torch.overrides.handle_torch_function, _TENSOR.get(name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _TENSOR.get(name) is not own:
            return getattr(self.tensor(), name)(*args, **kwargs)
        recorder = recording()
        if recorder is None:
            return handler(function, (self,), self, *args, **kwargs)
        return recorder.call(function, (self, *args), kwargs)

    return method


def _property(name: str, function: Callable[..., Any]) -> Any:
    return property(_method(name, function))


def _attribute(name: str) -> Any:
    """An attribute of tensors that only the value has. A `__getattr__` instead would make reads of all slots slow."""
    if name == "grad_fn":
        return property(_grad_fn)
    return property(lambda self: getattr(self.tensor(), name))


def _grad_fn(self: Lazy) -> Any:
    """The operator that made a value, which a batch of many values has not."""
    if self.meta.requires_grad and (recorder := recording()) is not None and not recorder.eager:
        recorder.abandon("grad_fn of a value", lasting=False)
    return self.tensor().grad_fn


RECORDER: ContextVar[Any] = ContextVar("recorder", default=None)
recording = RECORDER.get
"""The recorder of this thread, or None. A context variable is read in a tenth of the time of a thread's own data."""
record_by = RECORDER.set
"""Sets the recorder of this thread, or None."""


@contextmanager
def outside(grad: bool) -> Iterator[None]:
    """PyTorch as without a recorder, with gradients or none, whatever user code has around what it looks at."""
    before = recording()
    record_by(None)
    try:
        with torch._C.DisableTorchFunction(), torch.set_grad_enabled(grad):
            yield
    finally:
        record_by(before)


_OWN = {
    *("__init__", "__new__", "__class__", "__torch_function__", "__getattribute__", "__getattr__", "__setattr__"),
    *(
        "__delattr__",
        "__hash__",
        "__copy__",
        "__len__",
        "__iter__",
        "__dict__",
        "__dir__",
        "__doc__",
        "__module__",
        "__weakref__",
    ),
    *("__init_subclass__", "__subclasshook__", "__sizeof__", "__reduce__", "__reduce_ex__", "__torch_dispatch__"),
    *(
        "__new__",
        "__slots__",
        "__repr__",
        "__str__",
        "__format__",
        "__setstate__",
        "__getstate__",
        "__cuda_array_interface__",
    ),
    *("shape", "dtype", "device", "requires_grad", "ndim", "dim", "size"),
}

for _name in dir(torch.Tensor):
    _found = getattr(torch.Tensor, _name)
    if _name in _OWN or _name in Lazy.__dict__:
        continue
    if _name in ("T", "mT", "H", "mH"):
        setattr(Lazy, _name, _property(_name, _found.__get__))
    elif callable(_found) and not isinstance(_found, type):
        setattr(Lazy, _name, _method(_name, _found))
    elif not _name.startswith("__"):
        setattr(Lazy, _name, _attribute(_name))

Lazy.__array_priority__ = torch.Tensor.__array_priority__  # type: ignore[attr-defined]
"""NumPy's numbers leave arithmetic with a value to it, as they do with tensors."""

for _name in ("__repr__", "__str__", "__format__"):
    _shown = getattr(torch.Tensor, _name)
    setattr(Lazy, _name, lambda self, *a, _shown=_shown: _shown(self.tensor(), *a))

_TAKEN = {"names": len(vars(torch.Tensor))}


def take_added() -> None:
    """Give lazy values what user code has added to `torch.Tensor` since: attributes and methods of their tensors."""
    added = vars(torch.Tensor)
    if len(added) != _TAKEN["names"]:
        _TAKEN["names"] = len(added)
        for name in added.keys() - vars(Lazy).keys() - _OWN:
            if not name.startswith("__"):
                setattr(Lazy, name, _attribute(name))
