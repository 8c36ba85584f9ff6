"""What the functions of PyTorch mean for paths: which ask about a tensor, which look at values, which have rules."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.dlpack
from torch import Tensor

from daceml_train.errors import Unsupported

GETTER = type(vars(Tensor.__mro__[1])["shape"].__get__)
"""The type of what reads an attribute of a tensor."""

VALUED = frozenset({"T", "H", "mT", "mH", "real", "imag", "data"})
"""Attributes that are tensors computed from the tensor."""

_METADATA = """shape dtype ndim requires_grad layout is_sparse is_quantized is_nested is_mkldnn is_xla is_mps is_cuda
names itemsize nbytes"""
METADATA = frozenset(_METADATA.split())
"""Attributes that a tensor without data has as the tensor that it stands for."""

ON_DEVICE = frozenset({"is_cpu", "device", "is_meta"})
"""Attributes that depend on the device."""

_QUESTIONS = """size dim numel nelement stride is_floating_point is_complex is_contiguous element_size __len__
storage_offset ndimension is_signed is_same_size is_conj is_neg"""
QUESTIONS = frozenset(
    [getattr(Tensor, n) for n in _QUESTIONS.split() if hasattr(Tensor, n)]
    + [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_conj, torch.is_neg]
)
"""Functions whose results depend on sizes and types alone."""

_LOOKS = """item tolist numpy __array__ __bool__ __float__ __int__ __index__ __complex__ __repr__ __format__
__contains__ equal allclose nonzero argwhere unique unique_consecutive masked_select bincount multinomial bernoulli"""
LOOKS = frozenset(
    f for n in _LOOKS.split() for f in (getattr(Tensor, n, None), getattr(torch, n, None)) if f is not None
) | frozenset([torch.normal, torch.poisson, torch.is_nonzero])
"""Functions that look at values: what they return is Python's, of a size that depends on data, or random."""

_LIKE = "empty_like zeros_like ones_like full_like rand_like randn_like randint_like"
_NEW = "new_empty new_zeros new_ones new_full new_tensor new_empty_strided"
LIKE = frozenset(
    [getattr(torch, n) for n in _LIKE.split()] + [getattr(Tensor, n) for n in _NEW.split() if hasattr(Tensor, n)]
)
"""Functions whose results have no values of their operand."""

SHARING = frozenset(
    [torch.from_numpy, torch.as_tensor, torch.asarray, torch.frombuffer, torch.utils.dlpack.from_dlpack]
)
"""Functions whose results may lie in memory that is not PyTorch's."""

_REFUSED = """backward register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad resize_ resize_as_
set_ share_memory_ __deepcopy__ __reduce_ex__ data_ptr untyped_storage storage _typed_storage __dlpack__ __set__"""
REFUSED = frozenset(_REFUSED.split())
"""Names of functions that no program repeats."""

DROPOUTS = {F.dropout: 0, F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3, torch.dropout: 0}
"""Functions that drop elements, or channels before so many dimensions."""


def name_of(function: Any) -> str:
    """The name of a function of PyTorch."""
    return str(getattr(function, "__name__", function))


def reads_attribute(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a function returns an attribute that is no tensor; with a second argument it assigns one."""
    return type(function) is GETTER and len(args) == 1 and function.__self__.__name__ not in VALUED


def on_device(name: str, device: torch.device) -> Any:
    """An attribute of a tensor that depends on its device."""
    return {"is_cpu": device.type == "cpu", "device": device, "is_meta": False}[name]


@functools.cache
def in_place(name: str) -> bool:
    """Whether a function of this name changes its first operand."""
    if name.startswith("__"):
        reads = ("__index__", "__int__", "__invert__", "__iter__")
        return name == "__setitem__" or (name.startswith("__i") and name not in reads)
    return name.endswith("_")


def dropped(
    function: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool, bool, int]:
    """The arguments of a function that drops: the input, the probability, whether it drops, whether it changes the
    input in place, and the dimensions. Raises `Unsupported` for inputs without a batch.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    dimensions = DROPOUTS[function]
    if dimensions and input.ndim != dimensions + 2:
        raise Unsupported("dropout of channels without a batch")
    return input, p, training and p > 0, inplace, dimensions


def noise(x: Tensor, p: float, dimensions: int) -> Tensor:
    """What eager execution draws for a dropout, by which the input is multiplied; `x` is like the input."""
    if dimensions:
        shape = [*x.shape[:2], *[1] * (x.ndim - 2)]
        drawn = torch.empty(shape, dtype=x.dtype)
    else:
        drawn = torch.empty_like(x)
    if p == 1:  # PyTorch draws nothing
        return drawn.zero_()
    return drawn.bernoulli_(1 - p).div_(1 - p)


def size_of_new(*sizes: Any, **options: Any) -> tuple[int, ...] | None:
    """The size that a call of `Tensor.new` asks for; None if it is given data."""
    if options or not sizes:
        return None
    given = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], torch.Size) else sizes
    return tuple(given) if all(type(size) is int for size in given) else None
