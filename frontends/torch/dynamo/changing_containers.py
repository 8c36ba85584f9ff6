"""Containers that grow from call to call and are read break the graph where they are used: Python uses them.

TorchDynamo captures a dictionary with its keys, and a list that is read with its length, so that a model that counts
classes in a `Counter`, or notes values under the number of the step, would be captured at each call. What is known of a
container is its length at each trace that changed it: after two other lengths, no trace looks into it any more.
"""

from __future__ import annotations

import collections
import functools
import weakref
from dataclasses import dataclass
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lists import CommonListMethodsVariable

from daceml_train.frontends.torch.traces import Traces

LENGTHS = 2
"""How many changes of its length a container is captured with."""


@dataclass
class _Seen:
    """A container as the traces of one function have seen it."""

    length: int
    """At the last trace."""
    changes: int = 0
    """How often a trace found another length than the one before."""


_seen: weakref.WeakKeyDictionary[Any, dict[tuple[str, int], _Seen]] = weakref.WeakKeyDictionary()
"""Code of a function -> by TorchDynamo's names and addresses, the containers that its traces looked into."""
_changed: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""Code of a function -> TorchDynamo's names of the lists that it changes."""
_OF_MODULES = ("_modules", "_parameters", "_buffers", "_hooks", "_hooks_with_kwargs", "_hooks_always_called")
"""How names of dictionaries end in which modules hold what they consist of."""


def look_into(builder: Any, value: Any) -> None:
    """Note that a trace depends on the content of a container; break the graph if that changes from call to call."""
    root, name = builder.tx.output.root_tx, builder.source.name
    if not traces.depth or root is None or root.one_graph or name.endswith(_OF_MODULES):
        return
    seen = _seen.setdefault(root.f_code, {}).setdefault((name, id(value)), _Seen(len(value)))
    before, seen.length = seen.length, len(value)
    if isinstance(value, (list, collections.deque)) and name not in _changed.get(root.f_code, ()):
        return  # a list that the user's program changes between calls, of layers for instance
    seen.changes += before != seen.length
    if seen.changes >= LENGTHS:
        unimplemented(
            gb_type="a container that grows",
            context=name,
            explanation=f"The forward pass reads a {type(value).__name__} to which it adds from call to call.",
            hints=[],
        )


@functools.cache
def _install() -> None:
    builders: Any = VariableBuilder
    effects: Any = SideEffects
    wrap, mutation = builders._wrap, effects.mutation

    @functools.wraps(wrap)
    def wrap_value(self: Any, value: Any) -> Any:
        if traces.depth and self.source is not None and isinstance(value, (dict, set)):
            look_into(self, value)
        return wrap(self, value)

    @functools.wraps(mutation)
    def note_mutation(self: Any, variable: Any) -> None:
        mutation(self, variable)
        source, output = variable.source, self.output_graph_weakref()
        if traces.depth and source is not None and isinstance(variable, CommonListMethodsVariable):
            _changed.setdefault(output.root_tx.f_code, set()).add(source.name)

    builders._wrap, effects.mutation = wrap_value, note_mutation


traces = Traces(_install)
"""Traces in which they do."""
