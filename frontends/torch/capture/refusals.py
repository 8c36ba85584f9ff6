"""Element types that eager execution refuses: a graph would compute with them what PyTorch has no kernel for.

Decompositions and rules are written for any element type. PyTorch's kernels are not: `F.gelu` of integers, a layer norm
of float64 with parameters of float32, or a difference of truth values raise. Where the operands of a call are not all
of one floating-point type, the call is tried on small tensors, once for all calls of these types. If PyTorch refuses
the types, it also runs the graph, and raises its own error.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher
from torch.utils import _pytree as pytree

_OF_TYPES = re.compile(
    r"not implemented for|dtype|datatype|data type|scalar.?type|result type|bool|negative integer powers"
    r"|floating.point|tensor for argument",
    re.IGNORECASE,
)
"""What PyTorch says of element types; other errors are those of the operands tried."""

_NORMALIZATIONS = re.compile(r"(layer|group|batch|instance)_?norm")
"""Calls whose attributes do not suit one element."""

_UNCHECKED = re.compile(r"(gru|lstm|rnn_tanh|rnn_relu|rnn)(_cell)?$")
"""Calls that read memory outside of operands whose shapes do not suit one another."""

_SMALL = 1 << 14
"""Elements of a tensor that is tried in its own shape."""

_NAMES = """
_operator torch torch.functional torch.nn.functional torch._tensor torch._C._nn torch._C._linalg torch._C._special
torch._C._fft torch.special torch.linalg torch.fft torch.masked torch.masked._ops
"""
_MODULES = frozenset(_NAMES.split())
"""Where functions are defined that compute and do nothing else."""


def refusal(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What PyTorch says where it refuses a call because of its operands' element types; otherwise nothing.

    `target` is a function or the name of a method; the arguments hold tensors, of which elements are not read.
    """
    leaves, structure = pytree.tree_flatten((args, tuple(kwargs.values())), is_leaf=lambda leaf: leaf is None)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    found = {t.dtype for t in tensors}
    if len(found) == 1 and next(iter(found)).is_floating_point and not any(isinstance(leaf, bool) for leaf in leaves):
        return ""
    if not tensors or any(t.device.type not in ("cpu", "meta") or t.layout is not torch.strided for t in tensors):
        return ""
    function = getattr(Tensor, target, None) if isinstance(target, str) else target
    if not _computes(function):
        return ""
    if _UNCHECKED.match(str(getattr(function, "__name__", ""))):
        return ""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    if _NORMALIZATIONS.search(str(getattr(function, "__name__", ""))):
        return _mixed([t.dtype for t in tensors]) if autocast is None else ""
    try:
        return _tried(function, tuple(map(_key, leaves)), structure, tuple(kwargs), autocast)
    except TypeError:  # an argument that has no hash
        return ""


def _computes(function: Any) -> bool:
    """Whether a function is one of PyTorch's, or of `operator`, which only compute."""
    if str(function).startswith(("aten.", "prims.")):
        return True
    if isinstance(function, types.MethodDescriptorType | types.WrapperDescriptorType):
        return True
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and owner.__name__ == "_VariableFunctionsClass":
        return True
    return (getattr(function, "__module__", None) or getattr(owner, "__name__", "")) in _MODULES


def _mixed(dtypes: list[torch.dtype]) -> str:
    """Why a normalization is refused, or nothing: 16-bit inputs may have float32 parameters."""
    given, *others = dtypes
    if not given.is_floating_point:
        return "a normalization of integers"
    admitted = {given, torch.float32} if given in (torch.float16, torch.bfloat16) else {given}
    return "" if admitted.issuperset(others) else "mixed dtype"


def _key(leaf: Any) -> Any:
    """An argument as far as it decides: element type and number of dimensions of a tensor, any other as it is."""
    match leaf:
        case Tensor():
            small = all(isinstance(size, int) for size in leaf.shape) and leaf.numel() <= _SMALL
            return _Operand(leaf.dtype, leaf.dim(), tuple(leaf.shape) if small else None)
        case torch.SymInt():
            return 1
        case torch.SymFloat():
            return 1.0
        case torch.SymBool():
            return True
    return leaf


@dataclass(frozen=True)
class _Operand:
    """Element type of a tensor, its number of dimensions, and its shape if it is small."""

    dtype: torch.dtype
    rank: int
    shape: tuple[int, ...] | None

    def filled(self, number: int, own_shape: bool) -> Tensor:
        """A tensor of the shape, or with one element."""
        shape = self.shape if own_shape and self.shape is not None else (1,) * self.rank
        return torch.full(shape, number, dtype=self.dtype)


@functools.lru_cache(maxsize=4096, typed=True)
def _tried(
    function: Callable[..., Any],
    keys: tuple[Any, ...],
    structure: pytree.TreeSpec,
    names: tuple[str, ...],
    autocast: torch.dtype | None,
) -> str:
    """What PyTorch says of the element types, or nothing; `autocast` is the state in which the call is tried."""
    # Some calls take no tensors of one element, others are slow; divisors are not zero, indices are within bounds.
    for own_shape, number in itertools.product((True, False), (1, 0)):
        try:
            with _eager(), torch.no_grad(), torch.random.fork_rng(devices=()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                leaves = [key.filled(number, own_shape) if isinstance(key, _Operand) else key for key in keys]
                args, named = pytree.tree_unflatten(leaves, structure)
                function(*args, **dict(zip(names, named, strict=True)))
            return ""
        except RuntimeError as error:  # NotImplementedError is one
            said = str(error).partition("\n")[0]
            if _OF_TYPES.search(said):
                return said
        except Exception:  # of values or shapes: an index, an option
            continue
    return ""


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Outside a trace, with its modes and its kernels in Python: tensors are real."""
    with torch.utils._python_dispatch._disable_current_modes(), no_python_dispatcher():
        yield
