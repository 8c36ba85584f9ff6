"""Recording of recursions, natively: what is done at each node; see `frontends.torch.recursion.columns`."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from daceml_train.errors import CompilerError
from daceml_train.runtime.native_library import library


def functions(lazy: type, run: type, variable: Any, miss: object) -> dict[str, Callable[..., Any]]:
    """The native functions of these classes of lazy values and of runs, by name.

    `variable` is the context variable of the recorder, and `miss` what a record returns that was not made for its
    operands. Empty without a compiler, and where an interpreter keeps slots elsewhere.
    """
    try:
        native = library()
    except CompilerError:
        return {}
    found: dict[str, Callable[..., Any]] | None = native.records_create(
        (lazy, run, variable, miss, list, tuple, types.MethodType, int, float)
    )
    return found or {}
