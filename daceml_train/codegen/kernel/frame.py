"""What DaCe's code generator makes of a kernel's SDFG.

DaCe runs with only its essential parts: no validation (tests do that), no simplification, no inference of types, which
the SDFG has, no files. Its frame for state, initialization and shutdown is dropped: a kernel has no state.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dace import dtypes
from dace.codegen.targets import cpu, framecode
from dace.config import set_temporary
from dace.sdfg import infer_types

from daceml_train.codegen.kernel.objects import unchecked
from daceml_train.codegen.kernel.queries import computed_once


@contextmanager
def generating() -> Iterator[None]:
    """The context in which a kernel's SDFG is built and its code is generated."""
    with unchecked(), warnings.catch_warnings(), set_temporary("compiler", "lineinfo", value="none"):
        warnings.simplefilter("ignore")
        yield


def generate(sdfg: Any, targets: Callable[[Any, Any], None]) -> tuple[str, list[str]]:
    """The functions that DaCe generates for an SDFG, without frame and markers, and their arguments.

    `targets(frame, sdfg)` adds code generators to the one for the CPU.
    """
    infer_types.set_default_schedule_and_storage_types(sdfg, None)
    with computed_once(), set_temporary("compiler", "unique_functions", value="none"):  # every function occurs once
        frame = framecode.DaCeCodeGenerator(sdfg)
        cpu.CPUCodeGen(frame, sdfg)
        targets(frame, sdfg)
        kinds = [*dtypes.InstrumentationType, *dtypes.DataInstrumentationType]
        frame.dispatcher.instrumentation = dict.fromkeys(kinds)  # nothing is instrumented
        functions, body, *_ = frame.generate_code(sdfg, None)
    text = re.sub(r"[ \t]*////__DACE:[^\n]*", "", str(functions) + str(body))
    text = re.sub(r"\n\s*/{5,}(?=\n)", "", text)
    text = text[text.index("};", text.index(f"struct {sdfg.name}_state_t")) + 2 : text.index("DACE_EXPORTED")]
    text = re.sub(rf"{sdfg.name}_state_t ?\*__state(, )?|__state, ", "", text)
    return re.sub(r"\n\s*(?=\n)", "", text).strip() + "\n", list(frame.arglist)
