"""Functions under `functools.lru_cache` that draw random numbers or have effects break the graph: Python calls them.

TorchDynamo traces what they wrap, as if nothing were cached. That is right for functions that return the same at each
call; a random projection that is drawn once would be another one in each step.
"""

from __future__ import annotations

import dis
import functools
from types import CodeType, FunctionType
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import WrapperUserFunctionVariable

from daceml_train.frontends.torch.traces import Traces

_NAMES = """
rand randn randint randperm rand_like randn_like randint_like random random_ normal normal_ uniform uniform_ bernoulli
bernoulli_ multinomial exponential_ dropout choice choices sample shuffle gauss permutation default_rng Generator seed
manual_seed print write open input time perf_counter monotonic now urandom info debug warning warn
"""
_ACTING = frozenset(_NAMES.split())
"""Names of functions that draw random numbers, read clocks, or have effects."""
_DEPTH = 4
"""Calls into which it is looked for them."""


def acts(function: Any, depth: int = _DEPTH) -> bool:
    """Whether a function draws random numbers or has effects, by the names in its code and in that of what it calls."""
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType):
        return False
    names = set[str]()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        if any(i.opname in ("STORE_GLOBAL", "STORE_ATTR", "DELETE_GLOBAL") for i in dis.get_instructions(code)):
            return True
    if names & _ACTING:
        return True
    called = (function.__globals__.get(name) for name in names)
    return depth > 0 and any(acts(other, depth - 1) for other in called if isinstance(other, FunctionType))


@functools.cache
def _install() -> None:
    wrappers: Any = WrapperUserFunctionVariable
    original = wrappers.call_function

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        wrapper = self.wrapper_obj
        if traces.depth and hasattr(wrapper, "cache_info") and not _is_library(wrapper) and acts(wrapper):
            if (known := _cached(wrapper, args, kwargs)) is not None:
                return known
            unimplemented(
                gb_type="a cached function",
                context=str(wrapper),
                explanation=f"{wrapper.__name__} has effects or draws random numbers, once for its cache.",
                hints=[],
            )
        return original(self, tx, args, kwargs)

    wrappers.call_function = call_function


def _cached(wrapper: Any, args: Any, kwargs: Any) -> VariableTracker | None:
    """The constant that a function without arguments has returned before; None if there is none.

    Its effects, such as a line in a log about a package that was looked for, are in the past.
    """
    if args or kwargs or wrapper.cache_info().currsize != 1:
        return None
    result = wrapper()
    return ConstantVariable.create(result) if isinstance(result, bool | int | float | str | None) else None


def _is_library(wrapper: Any) -> bool:
    return str(getattr(wrapper, "__module__", "")).partition(".")[0] == "torch"


traces = Traces(_install)
"""Traces in which they do."""
