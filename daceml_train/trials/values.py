"""Plain values, which states consist of: dictionaries, lists, tuples, numbers, texts, tensors; compared to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from daceml_train.errors import Invalid

PLAIN = (bool, int, float, str, type(None))
"""The types of values that are kept as they are."""


def same(first: Any, second: Any) -> bool:
    """Whether two states are equal to the bit: NaN equals itself, and zeros differ by their sign."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if not alike(first, second):
            return False
        return bool(torch.equal(raw(first), raw(second).to(first.device)))
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(value, second[name]) for name, value in first.items())
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, float):
        return bool(first.hex() == second.hex())
    return bool(first == second)


def alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether one tensor can take the elements of the other one as they are."""
    return first.dtype is second.dtype and first.shape == second.shape


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in its order of elements."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return dense.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def digest_of(state: Any) -> str:
    """A hash of a state."""
    found = hashlib.sha256()
    for part in _texts(state):
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()[:32]


def size_of(state: Any) -> int:
    """The bytes of a state's tensors."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    parts: Sequence[Any] = list(state.values()) if isinstance(state, dict) else state
    return sum(map(size_of, parts)) if isinstance(state, dict | list | tuple) else 0


def copied(value: Any) -> Any:
    """A copy that shares no tensor and no container. Raises `Invalid` for what no file could hold."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {name: copied(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value)) if type(value) in (list, tuple) else tuple(map(copied, value))
    if value is None or isinstance(value, PLAIN):
        return value
    advice = "keep numbers, texts, tensors, or containers of them"
    raise Invalid(f"a state that is saved contains {type(value).__name__}", advice=advice)


def _texts(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield raw(value).cpu().numpy().tobytes()
    elif isinstance(value, dict):
        yield f"dict {len(value)}".encode()
        for name, entry in value.items():
            yield str(name).encode()
            yield from _texts(entry)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} {len(value)}".encode()
        for entry in value:
            yield from _texts(entry)
    else:
        yield (value.hex() if isinstance(value, float) else f"{type(value).__name__}:{value!r}").encode()


__all__ = ["PLAIN", "alike", "copied", "digest_of", "raw", "same", "size_of"]
