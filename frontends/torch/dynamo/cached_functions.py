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
_METHODS = "append appendleft extend insert add update pop popitem setdefault clear remove discard"
_CHANGING = frozenset(_METHODS.split())
"""Methods that change an object."""
_MODULES = frozenset({"torch", "np", "numpy", "F", "math"})
"""Names of modules, whose functions of these names change nothing."""
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
        if _changes(code):
            return True
    if names & _ACTING:
        return True
    called = (function.__globals__.get(name) for name in names)
    return depth > 0 and any(acts(other, depth - 1) for other in called if isinstance(other, FunctionType))


def _changes(code: CodeType) -> bool:
    """Whether code changes a global variable, an attribute, or an object that it has not made itself.

    An element that is assigned counts where its container is a variable of another function or of the module.
    """

    def is_outside(variable: dis.Instruction) -> bool:
        return variable.opname == "LOAD_GLOBAL" or variable.argval in code.co_freevars

    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "PRECALL", "NOP")]
    for k, (name, value) in enumerate((i.opname, i.argval) for i in instructions):
        assigns = name in ("STORE_GLOBAL", "STORE_ATTR", "DELETE_GLOBAL", "DELETE_ATTR")
        if assigns or (name == "STORE_DEREF" and value in code.co_freevars):
            return True
        if name in ("STORE_SUBSCR", "DELETE_SUBSCR") and k > 1 and is_outside(instructions[k - 2]):
            return True
        if name in ("LOAD_METHOD", "LOAD_ATTR") and value in _CHANGING and k:
            owner = instructions[k - 1]
            own = owner.opname in ("LOAD_FAST", "BUILD_LIST", "BUILD_MAP", "BUILD_SET")
            if not own and owner.argval not in _MODULES:
                return True
    return False


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
