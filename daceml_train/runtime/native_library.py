"""The native executor's library: its functions, its pool in front of PyTorch's allocator, and facts about tensors."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from ctypes import c_char_p, c_double, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch

from daceml_train.runtime.native_build import executor

_HANDLE, _POINTER = c_void_p, c_void_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "executor_error_message": (c_char_p, []),
    "executor_error_number": (c_int, []),
    "executor_dtype_name": (c_char_p, [c_int]),
    "tensors_fingerprint": (c_int, [_POINTER, c_int64, _POINTER]),
    "tensor_shares_version": (None, [_POINTER, _POINTER]),
    "tensors_attached": (c_int, [_POINTER, c_int64]),
    "tensors_shared": (c_int, [_POINTER, _POINTER, c_int64, _POINTER, c_int64]),
    "identities_create": (_HANDLE, [_POINTER, _POINTER, _POINTER, c_int64, _POINTER, _POINTER, c_int64]),
    "identities_destroy": (None, [_HANDLE]),
    "compiled_calls_end": (None, []),
    "backward_needs": (c_int64, [c_int64]),
    "compiled_calls_epoch": (c_int64, []),
    "pool_install": (None, []),
    "pool_gate": (c_int, [c_int]),
    "pool_trim": (c_int64, []),
    "pool_statistics": (None, [_POINTER]),
    "arena_create": (_HANDLE, []),
    "arena_destroy": (None, [_HANDLE]),
    "arena_capacity": (c_int64, [_HANDLE]),
    "arena_grow": (c_int, [_HANDLE, c_int64]),
    "plan_create": (_HANDLE, [c_int, _HANDLE]),
    "plan_destroy": (None, [_HANDLE]),
    "plan_arena_slot": (c_int, [_HANDLE, c_int, c_int64]),
    "plan_input_slot": (c_int, [_HANDLE, c_int, c_int, c_int, _POINTER, _POINTER, c_int, c_int]),
    "plan_opaque_slot": (c_int, [_HANDLE, c_int, c_int, c_int, _POINTER, _POINTER, c_int]),
    "plan_offer": (c_int, [_HANDLE, c_int, c_int64]),
    "plan_owned_slot": (c_int, [_HANDLE, c_int, c_int, c_int, _POINTER, _POINTER, c_int]),
    "plan_view": (c_int, [_HANDLE, c_int, c_int64, c_int, _POINTER, _POINTER, c_int]),
    "plan_kernel": (c_int, [_HANDLE, c_void_p, _POINTER, _POINTER, c_int, _POINTER, c_int, c_int]),
    "plan_product": (c_int, [_HANDLE, c_int, c_int, c_int, c_int, c_int, c_double, c_double, c_int]),
    "plan_release": (c_int, [_HANDLE, c_int, c_int]),
    "plan_copies": (c_int, [_HANDLE, _POINTER, _POINTER, c_int, c_int]),
    "call_begin": (c_int, [_HANDLE, c_char_p, c_char_p]),
    "call_none": (c_int, [_HANDLE]),
    "call_tensor": (c_int, [_HANDLE, c_int]),
    "call_tensors": (c_int, [_HANDLE, _POINTER, c_int]),
    "call_integer": (c_int, [_HANDLE, c_int64]),
    "call_double": (c_int, [_HANDLE, c_double]),
    "call_complex": (c_int, [_HANDLE, c_double, c_double]),
    "call_boolean": (c_int, [_HANDLE, c_int]),
    "call_string": (c_int, [_HANDLE, c_char_p]),
    "call_device": (c_int, [_HANDLE, c_char_p]),
    "call_integers": (c_int, [_HANDLE, _POINTER, c_int]),
    "call_doubles": (c_int, [_HANDLE, _POINTER, c_int]),
    "call_booleans": (c_int, [_HANDLE, _POINTER, c_int]),
    "call_result": (c_int, [_HANDLE, c_int, c_int]),
    "call_end": (c_int, [_HANDLE, c_int]),
    "plan_control": (
        c_int,
        [
            *(_HANDLE, c_int, _POINTER, c_int, c_int, _POINTER, c_int),
            *(_POINTER, _POINTER, c_int, _POINTER, c_int, _POINTER, c_int, c_int64, c_int, c_int),
        ],
    ),
    "plan_vary": (c_int, [_HANDLE, _POINTER, _POINTER, c_int]),
    "plan_levels": (c_int, [_HANDLE, _POINTER, c_int, _POINTER, c_int]),
    "levels_seconds": (c_int, [_POINTER, c_int]),
    "stack_create": (_HANDLE, [c_int64]),
    "stack_destroy": (None, [_HANDLE]),
    "plan_finalize": (c_int, [_HANDLE, c_int64, _POINTER, c_int]),
    "plan_threads": (c_int, [_HANDLE, _POINTER, c_int]),
    "plan_lanes": (c_int, [_HANDLE, _POINTER, c_int]),
    "plan_run": (c_int, [_HANDLE, _POINTER, c_int64, _POINTER, c_int]),
    "plan_seconds": (c_int, [_HANDLE, _POINTER, _POINTER, c_int]),
}
_HOLDING: dict[str, tuple[Any, list[Any]]] = {
    "identities_hold": (c_int, [_HANDLE]),
    "records_create": (ctypes.py_object, [ctypes.py_object]),
    "executor_error_raised": (ctypes.py_object, []),
    "compiled_call_create": (ctypes.py_object, [ctypes.py_object]),
    "compiled_call_programs": (c_int, [ctypes.py_object, _HANDLE, _HANDLE, ctypes.py_object]),
    "compiled_call_runs": (c_int64, [ctypes.py_object]),
    "plan_call": (ctypes.py_object, [_HANDLE, _POINTER, c_int64, c_int]),
}
"""Functions that run under the interpreter's lock: they read or create Python objects."""


class PoolStatistics(NamedTuple):
    """Bytes: blocks handed out, resident blocks kept for reuse, and the most that was ever handed out."""

    in_use: int
    free: int
    high_water: int


@functools.cache
def library(directory: Path | None = None) -> ctypes.CDLL:
    """The executor, built if necessary and loaded, with its pool in front of PyTorch's CPU allocator.

    Raises CompilerError. A process that wants its own directory asks for it before it creates a plan.
    """
    if directory is None and _loaded:
        return _loaded[0]
    path = str(executor(directory))
    native, holding = ctypes.CDLL(path), ctypes.PyDLL(path)
    for name, (result, arguments) in {**_SIGNATURES, **_HOLDING}.items():
        function = getattr(holding if name in _HOLDING else native, name)
        function.restype, function.argtypes = result, arguments
        setattr(native, name, function)
    native.pool_install()
    _loaded.append(native)
    return native


_loaded: list[ctypes.CDLL] = []


def pool_statistics() -> PoolStatistics:
    """The present state of the process-wide pool."""
    three = (c_int64 * 3)()
    library().pool_statistics(three)
    return PoolStatistics(*three)


def pool_trim() -> int:
    """Returns the pool's free blocks to the system, and their size in bytes to the caller."""
    return int(library().pool_trim())


@contextlib.contextmanager
def pooled() -> Iterator[None]:
    """Within this context, CPU tensors of 4 KiB and more that this thread allocates come from the pool."""
    before = library().pool_gate(1)
    try:
        yield
    finally:
        library().pool_gate(before)


def fingerprint(tensors: Sequence[torch.Tensor]) -> int | None:
    """A number that changes when a tensor's address, version or contents change.

    Small tensors are hashed entirely, large ones at a few places: a write that increments no version
    (`tensor.data.mul_(2)`) is noticed if it changes one of them. None if a tensor has no version, as tensors created in
    inference mode.
    """
    state = c_uint64(len(tensors))
    addresses = (c_void_p * len(tensors))(*[t._cdata for t in tensors])
    return state.value if library().tensors_fingerprint(addresses, len(tensors), ctypes.byref(state)) else None


def share_version(owner: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
    """From here on, changes of `owner` in place count as changes of the others, which have its memory."""
    for tensor in others if not owner.is_inference() else ():
        library().tensor_shares_version(tensor._cdata, owner._cdata)
