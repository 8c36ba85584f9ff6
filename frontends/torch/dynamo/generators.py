"""Generators to which values are sent break no graph into pieces: their function runs in Python.

At a graph break, TorchDynamo runs a generator that is not exhausted to its end and leaves an iterator over its values,
which has no `send`.
"""

from __future__ import annotations

import dis
import functools
import itertools
from types import CodeType
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable

from daceml_train.frontends.torch.traces import Traces


def receives(code: CodeType) -> bool:
    """Whether a generator's code reads what is sent to it."""
    names = [instruction.opname for instruction in dis.get_instructions(code)]
    names = [name for name in names if name not in ("RESUME", "CACHE", "EXTENDED_ARG")]
    pairs = itertools.pairwise(names)
    return any(name == "YIELD_VALUE" and following != "POP_TOP" for name, following in pairs)


@functools.cache
def _install() -> None:
    generators: Any = LocalGeneratorObjectVariable
    original = generators.reconstruct

    @functools.wraps(original)
    def reconstruct(self: Any, codegen: Any) -> None:
        if traces.depth and receives(self.get_code()):
            unimplemented(
                gb_type="a generator to which values are sent",
                context=str(self),
                explanation=f"The generator {self.get_name()} outlives a graph break.",
                hints=[],
            )
        original(self, codegen)

    generators.reconstruct = reconstruct


traces = Traces(_install)
"""Traces in which they do."""
