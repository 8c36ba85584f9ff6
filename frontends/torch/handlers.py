"""Errors by data that the user's code catches: which operators raise them, and which code handles them.

PyTorch raises an error where an operator is called: an index out of range, a matrix without a factorization, a failed
assertion. A program raises it when it runs, which is too late for an `except` around the call.
"""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx

_LIBRARIES = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/"
"""The folders of PyTorch and of this package."""
_ERRORS = (IndexError, RuntimeError, AssertionError, ValueError)
"""What such operators raise."""
_INDEXING = ("getitem", "__getitem__", "setitem", "__setitem__")
_CHECKED = """
embedding embedding_bag index_select gather take take_along_dim scatter scatter_ scatter_add scatter_add_
scatter_reduce scatter_reduce_ index_add index_add_ index_copy index_copy_ index_fill index_fill_ index_put index_put_
put put_ bincount one_hot cross_entropy nll_loss nll_loss_nd multi_margin_loss multilabel_margin_loss ctc_loss
binary_cross_entropy cholesky cholesky_inverse cholesky_solve inverse inv inv_ex pinverse pinv solve solve_ex lu
lu_factor lu_solve qr svd svdvals eig eigh eigvals eigvalsh lstsq lobpcg matrix_power tensorinv tensorsolve
multinomial bernoulli _assert_async _assert repeat_interleave unflatten masked_scatter masked_scatter_ max_unpool1d
max_unpool2d max_unpool3d
"""
_RAISING = frozenset(_CHECKED.split())


def may_fail(name: str, arguments: Any) -> bool:
    """Whether an operator checks the values of its operands; an index does if it has a tensor."""
    name = name.removeprefix("linalg_")
    if name not in _INDEXING:
        return name in _RAISING
    index = arguments[1]
    return any(isinstance(i, Tensor | fx.Proxy) for i in (index if isinstance(index, tuple | list) else (index,)))


def is_caught(outermost: CodeType) -> bool:
    """Whether the user's code that runs now, within a function of code `outermost`, handles such errors."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        if catches_at(frame.f_code, frame.f_lasti):
            return True
        frame = frame.f_back
    return False


def is_caught_outside() -> bool:
    """Whether a function that TorchDynamo compiles now was called, within a module of ours, where that holds."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_qualname != "_Callback.__call__":
        frame = frame.f_back
    frame = None if frame is None else frame.f_back
    while frame is not None and not frame.f_code.co_filename.startswith(_LIBRARIES[1]):
        if catches_at(frame.f_code, frame.f_lasti):
            return True
        frame = frame.f_back
    return False


_found: dict[tuple[int, int], tuple[CodeType, bool]] = {}
"""By identity of a code object, which stays alive here, and an instruction of it. Code that TorchDynamo generates has
constants without a hash, and so none itself."""


def catches_at(code: CodeType, offset: int) -> bool:
    """Whether an exception at this instruction meets a handler of such errors within its function."""
    if (found := _found.get((id(code), offset))) is not None:
        return found[1]
    if len(_found) >= 4096:
        _found.clear()
    result = _meets_handler(code, offset)
    _found[id(code), offset] = code, result
    return result


def _meets_handler(code: CodeType, offset: int) -> bool:
    if is_library(code):
        return False
    # private, but nothing else in Python reads the table; 3.11 and 3.12 have it
    blocks, seen = dis._parse_exception_table(code), set[int]()  # type: ignore[attr-defined]
    instructions = [(i.offset, i.opname, i.argval) for i in dis.get_instructions(code)]
    while block := next((b for b in blocks if b.start <= offset < b.end), None):
        if block.target in seen:
            break
        seen.add(offset := block.target)
        if catches(code, [(name, value) for at, name, value in instructions if at >= offset]):
            return True
    return False


def handles(code: CodeType) -> bool:
    """Whether a function has a handler of such errors anywhere."""
    if is_library(code):
        return False
    instructions = [(i.offset, i.opname, i.argval) for i in dis.get_instructions(code)]
    targets = {block.target for block in dis._parse_exception_table(code)}  # type: ignore[attr-defined]
    return any(catches(code, [(name, value) for at, name, value in instructions if at >= each]) for each in targets)


def is_library(code: CodeType) -> bool:
    """Whether this is code of PyTorch or of this package, which raises what it has caught."""
    return code.co_filename.startswith(_LIBRARIES)


def catches(code: CodeType, handler: Iterable[tuple[str, Any]]) -> bool:
    """Whether instructions of this code, by name and argument, begin with a handler of such errors."""
    names = list[str]()
    for number, (name, value) in enumerate(handler):
        if number == 0 and name != "PUSH_EXC_INFO":
            return False  # generated for a named exception or a generator
        if number == 1 and name == "WITH_EXCEPT_START":
            return "suppress" in code.co_names
        if (number == 1 and name == "POP_TOP") or (name == "CHECK_EXC_MATCH" and any(map(_is_error, names))):
            return True
        if name == "COPY" and value == 3:
            return False  # the end of the handlers
        if name.startswith("LOAD_"):
            names.append(str(value))
        elif name not in ("BUILD_TUPLE", "CACHE", "EXTENDED_ARG"):
            names.clear()
    return False


def _is_error(name: str) -> bool:
    """Whether a name is that of a class that such errors belong to; constants hold any classes."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type):
        return any(issubclass(error, kind) for error in _ERRORS)
    return "LinAlgError" in name or name.isupper()
