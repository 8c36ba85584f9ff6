"""Source: the C++ text of a kernel, from its SDFG by DaCe's code generator.

DaCe runs with its lean parts only: no validation (tests do that), no simplification, no files. Its frame for state,
initialisation and shutdown is dropped: a kernel has no state.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

os.environ.setdefault("DACE_compiler_lineinfo", "none")

import dace
from dace.codegen import codegen
from dace.codegen.targets import cpu, framecode
from dace.sdfg import infer_types

from daceml_train.codegen.plan import Plan
from daceml_train.codegen.schedule import BlockGenerator, LaneGenerator
from daceml_train.codegen.sdfg import build


def source(plan: Plan, key: str) -> str:
    """The C++ text with the entry point `kernel_<key>`."""
    name = f"body_{key}"
    sdfg = build(plan, name)
    return f'#include "kernel.h"\n\n{code(sdfg)}\n{entry(plan, sdfg, key)}'


def code(sdfg: Any) -> str:
    """The functions that DaCe generates for an SDFG, without its frame."""
    infer_types.infer_connector_types(sdfg)
    infer_types.set_default_schedule_and_storage_types(sdfg, None)
    frame = framecode.DaCeCodeGenerator(sdfg)
    cpu.CPUCodeGen(frame, sdfg)
    BlockGenerator(frame, sdfg)
    LaneGenerator(frame, sdfg)
    codegen._get_codegen_targets(sdfg, frame)
    frame.dispatcher.instrumentation = dict.fromkeys(frame.dispatcher.instrumentation)
    functions, body, *_ = frame.generate_code(sdfg, None)
    return str(functions) + str(body)


def entry(plan: Plan, sdfg: Any, key: str) -> str:
    """The function that unpacks pointers and integers."""
    return ""
